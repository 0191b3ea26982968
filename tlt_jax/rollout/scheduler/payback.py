"""The payback of programs: the seconds that compiling one saves over the rest of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tlt_jax.tuner.interface import Cell, expected_saving

MEMORY = 0.8  # weight of a rollout in the means, relative to the next rollout
LEAST = 0.5  # least share of the first rollout that is extrapolated to a whole one
# Factor by which an expected payback must exceed the compile cost, since it is the largest of several estimates.
MARGIN = 1.5
CAUTION = 0.5  # standard errors subtracted from a cell's gain in log speed
# Above this standard error of log speed a payback is a guess; and the share of the run that may be spent
# on guesses, so that programs with less payback than expected slow no run down much.
GUESS, RISK = 0.3, 0.03
SOON = 10  # rollouts ahead that count for this share where compiling slows decoding: no ten rollouts are slower by more

Speeds = Callable[[Sequence[Cell]], tuple[np.ndarray, np.ndarray]]  # as Tuner.predict
Situation = tuple[int, int]  # the smallest batch and cache buckets that hold the live rows


class Payback:
    """How much the rollouts of a run decode in each situation, and how many rollouts are left.

    Decoding is counted in tokens of one live row, so that it does not depend on the programs that
    were used. `ahead`: so many rollouts ahead count for what guesses may cost.
    """

    def __init__(self, ahead: float = math.inf) -> None:
        self.ahead = ahead
        self.tokens: dict[Situation, float] = {}
        self.rollouts = 0.0  # the (weighted) number of rollouts that `tokens` are from
        self.rollouts_left, self.sequences, self.finished = 0.0, 1, {}
        self.seconds, self.guesses = 0.0, {}  # measured; and the compile costs of guesses
        # The measured seconds at which candidates for a situation were evaluated last.
        self.evaluated_at: dict[Situation, float] = {}

    def begin(self, rollouts_left: float, sequences: int) -> None:
        """Starts a rollout of `sequences` sequences, with `rollouts_left` similar ones after it."""
        self.tokens = {where: MEMORY * count for where, count in self.tokens.items()}
        self.rollouts = MEMORY * (self.rollouts + self.share) if self.finished else self.rollouts
        self.rollouts_left, self.sequences, self.finished = rollouts_left, sequences, {}

    def progress(self, group: int, finished: int) -> None:
        """Notes that `finished` sequences of this rollout have ended in a data group."""
        self.finished[group] = finished

    def add(self, where: Situation, tokens: float, seconds: float = 0.0) -> None:
        """Adds the tokens of one live row that were decoded in this situation, and their seconds."""
        self.tokens[where] = self.tokens.get(where, 0.0) + tokens
        self.seconds += seconds

    @property
    def share(self) -> float:
        """The share of this rollout's sequences that have ended."""
        return min(sum(self.finished.values()) / self.sequences, 1.0)

    @property
    def horizon(self) -> float:
        """Decoding left in the run, relative to the decoding in `tokens`."""
        return (self.rollouts_left + 1 - self.share) / max(self.rollouts + self.share, LEAST)

    def best(
        self,
        cells: Sequence[Cell],
        compiled: Sequence[Cell],
        compile_costs: np.ndarray,
        speeds: Speeds,
    ) -> Cell | None:
        """The cell whose expected payback exceeds its compile cost (seconds [C]) by most, with MARGIN; None without one.

        None before any seconds were measured: then nothing compares with a compile cost. All
        compilations on guesses together may cost a small share of the run.
        """
        if not np.isfinite(speeds([*cells, *compiled])[1]).all():
            return None
        seconds_S, share_SC, error = self.shares(cells, compiled, speeds)
        saved, seconds_left = seconds_S @ share_SC, float(seconds_S.sum())
        soon = min(1.0, self.ahead / max(self.rollouts_left + 1 - self.share, 1.0))
        spent = sum(self.guesses.values()) - np.array([self.guesses.get(one, 0) for one in cells])
        is_guess = error > GUESS
        is_sound = ~is_guess | (
            spent + compile_costs <= RISK * (self.seconds + soon * seconds_left)
        )
        worth = np.where(is_sound, saved - MARGIN * compile_costs, -np.inf)
        best = int(np.argmax(worth))
        if worth[best] <= 0:
            return None
        if is_guess[best]:  # once, however often it is found while another program is compiled
            before = self.guesses.get(cells[best], 0.0)
            self.guesses[cells[best]] = max(before, float(compile_costs[best]))
        return cells[best]

    def shares(
        self, cells: Sequence[Cell], compiled: Sequence[Cell], speeds: Speeds
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds [S] left in each situation, the share of them [S, C] that each cell saves, and the cell's error [C].

        The uncertainty of a cell and of the best compiled one lowers the share: of many cells, some are overestimated. For a
        guess the share is the expectation instead, where a cell that turns out slower is not used and saves nothing;
        otherwise drafting would never be tried.
        """
        speed, error = speeds([*cells, *compiled])
        speed_C, error_C = speed[: len(cells)], error[: len(cells)]
        batch_C, slots_C = (np.array([cell[i] for cell in cells]) for i in (0, 1))
        seconds, shares = [], []
        for (batch, slots), tokens in self.tokens.items():
            usable = [
                len(cells) + i
                for i, cell in enumerate(compiled)
                if cell.batch >= batch and cell.slots >= slots
            ]
            if not usable:
                continue
            best = max(usable, key=lambda i: speed[i])
            apart_C, uncertainty_C = speed_C - speed[best], np.hypot(error_C, error[best])
            sure_C = np.maximum(1 - np.exp(CAUTION * uncertainty_C - apart_C), 0)
            share_C = np.where(error_C > GUESS, expected_saving(apart_C, uncertainty_C), sure_C)
            is_held_C = (batch_C >= batch) & (slots_C >= slots)
            seconds.append(self.horizon * tokens / np.exp(speed[best]))
            shares.append(np.where(is_held_C, share_C, 0))
        return np.array(seconds), np.reshape(shares, (len(seconds), len(cells))), error_C


def smallest(sizes: Iterable[int], least: float) -> int:
    """The smallest of ascending sizes that is at least this; the last one when none is."""
    sizes = list(sizes)
    return next((size for size in sizes if size >= least), sizes[-1])
