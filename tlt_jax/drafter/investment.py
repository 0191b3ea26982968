"""How much drafter training pays: in the policy update, under drafter_training.share auto, and on idle data groups.

Training is an investment: it takes seconds of RL steps, and saves seconds of later rollouts once drafting pays off. A
step trains when the rest of the run is expected to repay it, or within a small share of the run. All amounts are seconds.
Idle training costs nothing; it pauses while acceptance stalls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

EARLY = 0.2  # share of a step, while the rest of the run is expected to repay it
LONG = 0.03  # share of all steps together, otherwise
# Of LONG, while acceptance stalls or is not predicted to pay off; while drafting, the rest goes to the reserve.
STALLED = 1 / 3
# Acceptance of the first draft token: the smallest change that counts as a rise, the number of measurements that are
# compared, and the drop below the best that counts as a fall.
RISE, RECENT, FALL = 0.005, 8, 0.03
# Acceptance of a good drafter, and the assumed probability that training reaches it. Nothing is tried when the payback of
# such a drafter times this probability is below the compile cost.
HOPED, CHANCE = (0.8,), 1 / 3
# Acceptance is binned by the tokens trained on before, PER_DOUBLING bins a doubling. A line in the logarithm of the tokens is
# fitted to the means of the last BINS bins; it needs at least LEAST.
PER_DOUBLING, BINS, LEAST = 2, 6, 3
MOST = 0.9  # highest acceptance that is predicted
# Training pauses after this many micro-steps of a data group without improvement. Idle micro-steps cost nothing: a drafter
# of a 2-layer policy stalled for 150 of them, then rose from 0.55 to 0.63 in 300 more.
PATIENCE = 512
NEWEST = 0.3  # weight of the newest step in the running mean of step_seconds

# worth(acceptance by depth): seconds that drafting with such a drafter saves in the rest of the run, and the compile cost of
# drafting with it.
Worth = Callable[[Sequence[float]], tuple[float, float]]


@dataclass(frozen=True)
class Investment:
    """Drafter training in policy updates so far: its amount, cost and acceptance; part of the state of a run.

    `pieces`: accumulation steps trained on, of `tokens` answer tokens in all. `piece_seconds`, `step_seconds`: of one
    piece, and of an RL step without training and compiling; 0: unknown. `spent`: seconds of training, compiling included.
    `credit`: seconds that may be spent now; `reserve`: seconds withheld while acceptance did not rise. `bins`: by tokens
    trained on before, see PER_DOUBLING: [tokens measured on, acceptance by depth ...]. `recent`: the last RECENT
    acceptances of the first draft token; `best`: the best mean of RECENT.
    """

    pieces: int = 0
    tokens: float = 0.0
    piece_seconds: float = 0.0
    step_seconds: float = 0.0
    spent: float = 0.0
    credit: float = 0.0
    reserve: float = 0.0
    bins: Mapping[str, Sequence[float]] | None = None
    recent: Sequence[float] = ()
    best: float = 0.0

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None) -> Investment:
        """The investment of a checkpoint; a new one when the checkpoint holds none, or one of another version."""
        is_known = saved is not None and saved.keys() == cls.__dataclass_fields__.keys()
        return cls(**saved) if is_known else cls()

    def saved(self) -> dict[str, Any]:
        """The JSON form for a checkpoint."""
        return asdict(self)

    @property
    def depths(self) -> list[float]:
        """The drafter's acceptance by depth, as measured last: the mean of the newest bin; [] before the first measurement."""
        known = self.bins or {}
        return list(known[max(known, key=int)][1:]) if known else []

    def after_step(self, seconds: float) -> Investment:
        """After an RL step that took `seconds` without training and compiling."""
        known = self.step_seconds
        return replace(self, step_seconds=known + NEWEST * (seconds - known) if known else seconds)

    def measured(self, depths: Sequence[float], tokens: float = 1.0) -> Investment:
        """With the current drafter's acceptance by depth, measured on `tokens` tokens."""
        if not depths:
            return self
        place = str(math.floor(PER_DOUBLING * math.log2(1 + self.tokens)))
        weight, *means = (self.bins or {}).get(place, (0.0, *depths))
        means = [
            mean + (depth - mean) * tokens / (weight + tokens)
            for mean, depth in zip(means, depths, strict=True)
        ]
        recent = [*self.recent, float(depths[0])][-RECENT:]
        best = max(self.best, float(np.mean(recent))) if len(recent) == RECENT else self.best
        bins = {**(self.bins or {}), place: [weight + tokens, *means]}
        return replace(self, bins=bins, recent=recent, best=best)

    def learned(self, tokens: float, pieces: int, seconds: float, compiles: bool) -> Investment:
        """After training on `pieces` pieces; seconds of a call that `compiles` change neither piece_seconds nor the credit."""
        each = self.piece_seconds if compiles or not pieces else seconds / pieces
        return replace(
            self,
            pieces=self.pieces + pieces,
            tokens=self.tokens + tokens,
            piece_seconds=each,
            spent=self.spent + seconds,
            credit=max(self.credit - (0.0 if compiles else seconds), 0.0),
        )

    def expected(self, tokens: float) -> list[float] | None:
        """Predicted acceptance by depth after `tokens` more tokens; None with fewer than LEAST bins."""
        known = sorted((int(place), values) for place, values in (self.bins or {}).items())[-BINS:]
        if len(known) < LEAST:
            return None
        at = np.array([place for place, _ in known], float)
        weights, *depths = np.array([values for _, values in known]).T
        target = PER_DOUBLING * math.log2(1 + self.tokens + tokens)
        found = []
        for depth in depths:
            slope, offset = np.polyfit(at, depth, 1, w=np.sqrt(weights))
            last = float(depth[-1])
            found.append(min(max(slope * target + offset, last), max(MOST, last)))
        return found

    def repays(self, worth: Worth, left: int) -> bool:
        """Whether training at EARLY for some steps, then drafting in the rest of the `left` steps, saves more than it costs."""
        if not self.piece_seconds:
            return False
        cost = EARLY * self.step_seconds
        rate, steps = cost * self.tokens / self.pieces / self.piece_seconds, 1
        while steps < left and (depths := self.expected(rate * steps)) is not None:
            saved, compile_cost = worth(depths)
            if saved * (left - steps) / left > compile_cost + cost * steps:
                return True
            steps *= 2
        return False

    def earned(
        self, worth: Worth, done: int, left: int, compile_cost: float, drafts: bool
    ) -> Investment:
        """With the credit of this step, after `done` steps and with `left` to come.

        `compile_cost`: seconds of compiling the training program first. `drafts`: the rollout drafts with the drafter.
        """
        step = self.step_seconds
        if (
            not drafts and CHANCE * step * left <= compile_cost
        ):  # drafting cannot save more than all seconds left
            return replace(self, credit=0.0)
        if not step or not left:
            return replace(self, credit=0.0)
        if (
            drafts and compile_cost > LONG * step * left
        ):  # the run begins with a drafter, and is short
            return replace(self, credit=0.0)
        if drafts:
            return self.kept_up(step)
        saved, start = worth(HOPED)
        most = max(EARLY * step, self.piece_seconds)  # a piece may take longer than EARLY of a step
        budget = LONG * step * (done + 1 + left) * (STALLED if self.expected(0) else 1.0)
        is_tried = self.spent + compile_cost + most <= budget
        is_tried &= CHANCE * saved > start + compile_cost
        if not (is_tried or self.repays(worth, left)):
            return replace(self, credit=0.0)
        return replace(self, credit=min(self.credit + EARLY * step, most))

    def kept_up(self, step: float) -> Investment:
        """With the credit of LONG of a step: less while acceptance does not rise, more from the reserve once it falls."""
        half, rate, reserve = RECENT // 2, LONG * step, self.reserve
        if len(self.recent) < RECENT:
            return replace(self, credit=self.credit + rate)
        before, newest = (float(np.mean(part)) for part in (self.recent[:half], self.recent[half:]))
        if newest < self.best - FALL:
            taken = min(reserve, EARLY * step)
            return replace(self, credit=self.credit + rate + taken, reserve=reserve - taken)
        if newest <= before + RISE:
            kept = (1 - STALLED) * rate
            return replace(self, credit=self.credit + rate - kept, reserve=reserve + kept)
        return replace(self, credit=self.credit + rate)

    def affords(self, is_first: bool) -> int:
        """Pieces that the credit pays for; 1 when `is_first`, to measure the seconds of a piece."""
        if not self.credit:
            return 0
        return 1 if is_first or not self.piece_seconds else int(self.credit / self.piece_seconds)


@dataclass(frozen=True)
class Budget:
    """Pauses training when acceptance stays as it is, and resumes it when acceptance falls.

    `best`: acceptance when it last moved. `stalled`: micro-steps of a group since then. A fall is no stall: where the policy
    moves away, training holds acceptance up.
    """

    best: float = 0.0
    stalled: int = 0
    is_paused: bool = False

    def after(self, acceptance: float, steps: int) -> Budget:
        """The budget after an RL step of `steps` micro-steps; `acceptance`: of the first draft token, at its end."""
        if self.is_paused:
            return self if acceptance > self.best - FALL else Budget(best=acceptance)
        if abs(acceptance - self.best) > RISE:
            return Budget(best=acceptance)
        stalled = self.stalled + steps
        return replace(self, stalled=stalled, is_paused=stalled >= PATIENCE)
