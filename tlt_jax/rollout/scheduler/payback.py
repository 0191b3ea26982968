"""What programs that are not there would save over the rest of a run; knows no program and no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tlt_jax.tuner.exploration import expected_saving
from tlt_jax.tuner.interface import Cell

MEMORY = 0.8  # weight of a rollout in the means over rollouts, relative to the next one
LEAST = 0.5  # of the first rollout, before a mean over it is extrapolated
# By which an expected saving must exceed the price: it is the largest of several estimates.
MARGIN = 1.5
CAUTION = 0.5  # standard errors of log speed subtracted from what a cell is faster
# A standard error of log speed above which a saving is a guess, and the share of the run that may be
# spent on guesses: no run gets much slower for programs that disappoint.
GUESS, RISK = 0.3, 0.03

Speeds = Callable[[Sequence[Cell]], tuple[np.ndarray, np.ndarray]]  # as Tuner.outlook
Situation = tuple[int, int]  # the smallest batch and cache buckets that hold the live rows


class Payback:
    """How much the rollouts of a run decode in which situation, and how many are still to come.

    Decoding is counted in tokens of one live row, so that it does not depend on the programs that
    were used.
    """

    def __init__(self) -> None:
        self.tokens: dict[Situation, float] = {}
        self.rollouts = 0.0  # of which they are
        self.left, self.sequences, self.finished = 0.0, 1, {}
        self.seconds = self.guessed = 0.0  # measured, and spent on guesses
        self.weighed: dict[
            Situation, float
        ] = {}  # measured seconds when programs for it were weighed last

    def begin(self, left: float, sequences: int) -> None:
        """A rollout of so many sequences begins, and so many like it come after it."""
        self.tokens = {where: MEMORY * count for where, count in self.tokens.items()}
        self.rollouts = MEMORY * (self.rollouts + self.share) if self.finished else self.rollouts
        self.left, self.sequences, self.finished = left, sequences, {}

    def progress(self, group: int, finished: int) -> None:
        """So many sequences of this rollout have ended in a data group."""
        self.finished[group] = finished

    def add(self, where: Situation, tokens: float, seconds: float = 0.0) -> None:
        """So many tokens of one live row were decoded in this situation, in these seconds."""
        self.tokens[where] = self.tokens.get(where, 0.0) + tokens
        self.seconds += seconds

    @property
    def share(self) -> float:
        """Of this rollout's sequences, those that have ended."""
        return min(sum(self.finished.values()) / self.sequences, 1.0)

    @property
    def horizon(self) -> float:
        """What is still to be decoded, over what was."""
        return (self.left + 1 - self.share) / max(self.rollouts + self.share, LEAST)

    def best(
        self,
        cells: Sequence[Cell],
        compiled: Sequence[Cell],
        compile_costs: np.ndarray,
        speeds: Speeds,
    ) -> Cell | None:
        """The cell that is expected to save most beyond its price (seconds [C]), if one does by MARGIN.

        None before any seconds were measured: there is nothing to compare a price with. All that is
        compiled on guesses may cost a small share of the run.
        """
        if not np.isfinite(speeds([*cells, *compiled])[1]).all():
            return None
        saved, rest, error = self.expected(cells, compiled, speeds)
        is_guess = error > GUESS
        is_sound = ~is_guess | (self.guessed + compile_costs <= RISK * (self.seconds + rest))
        worth = np.where(is_sound, saved - MARGIN * compile_costs, -np.inf)
        best = int(np.argmax(worth))
        if worth[best] <= 0:
            return None
        self.guessed += compile_costs[best] if is_guess[best] else 0.0
        return cells[best]

    def expected(
        self, cells: Sequence[Cell], compiled: Sequence[Cell], speeds: Speeds
    ) -> tuple[np.ndarray, float, np.ndarray]:
        """Seconds [C] that each of the cells is expected to save over the best of those that are there.

        Also the seconds that the rest of the run takes without, and standard errors [C] of the cells' log speeds.
        """
        seconds_S, share_SC, error_C = self.shares(cells, compiled, speeds)
        return seconds_S @ share_SC, float(seconds_S.sum()), error_C

    def shares(
        self, cells: Sequence[Cell], compiled: Sequence[Cell], speeds: Speeds
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds [S] that the situations still take, the share of them [S, C] that each cell saves, and its error [C].

        What is not known of a cell and of the best one there counts against it: of many cells some always look better than
        they are. But of a guess it is the expectation: where the cell turns out to be slower it is not used, and saves
        nothing; else drafting would never be tried.
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
