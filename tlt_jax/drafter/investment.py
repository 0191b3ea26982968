"""What learning in the update may take under drafter_training.share auto: seconds that the rest of the run repays.

It knows no device and no clock. Learning is an investment: it takes seconds of RL steps, and saves seconds of later
rollouts once drafting with the drafter pays. All amounts are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

EARLY = 0.2  # of a step, while the rest of the run is expected to repay it
LONG = 0.03  # of all steps together, otherwise
STALLED = (
    1 / 3
)  # of that while acceptance does not rise, or not to where it would pay; while drafting the rest is kept
# Acceptance of the first draft token: a change that counts as a rise, the measurements that it is looked for in, and how
# far below the best it counts as fallen.
RISE, RECENT, FALL = 0.005, 8, 0.03
# Acceptance of a drafter as good as one may hope for, and the chance that it gets there: where what the run would gain
# from that, by this chance, is less than what it takes nothing is learned.
HOPED, CHANCE = (0.8,), 1 / 3
# Acceptance is kept by the tokens learned before, a mean for each half doubling; a line in the logarithm of the tokens is
# fitted to the last BINS means, of which there have to be LEAST.
PER_DOUBLING, BINS, LEAST = 2, 6, 3
MOST = 0.9  # that acceptance is expected to become
NEWEST = 0.3  # weight of the newest step in the seconds of one

# Of a drafter of this acceptance by depth: seconds that drafting with it saves in the rest of the run, and what it takes
# to compile that.
Worth = Callable[[Sequence[float]], tuple[float, float]]


@dataclass(frozen=True)
class Investment:
    """What was learned so far in updates, what it took, and how acceptance rose; part of the state of a run.

    `pieces`: accumulation steps that were learned from, of `tokens` answer tokens in all. `piece_seconds`, `step_seconds`:
    of one piece, and of an RL step without learning and compiling; 0: not known yet. `spent`: seconds of learning,
    compiling included. `credit`: what may be spent now; `reserve`: what was not spent while acceptance did not rise.
    `bins`: by tokens learned before, see PER_DOUBLING: [tokens measured on, acceptance by depth ...]. `recent`: acceptance
    of the first draft token, measured last; `best`: the best mean of RECENT.
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
        """From what a checkpoint holds; a new one where it holds none, or one of another version."""
        is_known = saved is not None and saved.keys() == cls.__dataclass_fields__.keys()
        return cls(**saved) if is_known else cls()

    def saved(self) -> dict[str, Any]:
        """As a checkpoint holds it: JSON-able."""
        return asdict(self)

    def after_step(self, seconds: float) -> Investment:
        """After an RL step of so many seconds, without learning and compiling."""
        known = self.step_seconds
        return replace(self, step_seconds=known + NEWEST * (seconds - known) if known else seconds)

    def measured(self, depths: Sequence[float], tokens: float = 1.0) -> Investment:
        """With the acceptance by depth of the drafter as it is now, measured on so many tokens."""
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
        """After learning from so many pieces; that which compiles says nothing of what others take, and is no credit's."""
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
        """Acceptance by depth after so many tokens more; None while too little is known to say."""
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
        """Whether drafting in the rest of `left` steps saves more than learning at EARLY takes until then, for some steps."""
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
        """With what may be spent in this step, after `done` ones and with `left` to come.

        `compile_cost`: seconds that compiling it takes first. `drafts`: the rollout drafts with the drafter.
        """
        step = self.step_seconds
        if (
            not drafts and CHANCE * step * left <= compile_cost
        ):  # nothing can save more than all that is left
            return replace(self, credit=0.0)
        if not step or not left:
            return replace(self, credit=0.0)
        if drafts:
            return self.kept_up(step)
        saved, start = worth(HOPED)
        most = max(
            EARLY * step, self.piece_seconds
        )  # a piece may take longer than its part of a step
        budget = LONG * step * (done + 1 + left) * (STALLED if self.expected(0) else 1.0)
        is_tried = self.spent + compile_cost + most <= budget
        is_tried &= CHANCE * saved > start + compile_cost
        if not (is_tried or self.repays(worth, left)):
            return replace(self, credit=0.0)
        return replace(self, credit=min(self.credit + EARLY * step, most))

    def kept_up(self, step: float) -> Investment:
        """With LONG of a step more: less while acceptance does not rise, and what that leaves once it falls."""
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
        """Pieces that may be learned from now; the first one is to show what one takes."""
        if not self.credit:
            return 0
        return 1 if is_first or not self.piece_seconds else int(self.credit / self.piece_seconds)
