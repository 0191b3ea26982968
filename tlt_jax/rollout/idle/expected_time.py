"""The expected time that a rollout still takes, from its live rows, their speed, and the lengths of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.state import GroupState, Running
from tlt_jax.tuner.interface import Measurement


class Lengths:
    """A histogram of answer lengths; `expected_tokens` costs no pass over the answers."""

    def __init__(self, lengths: Sequence[int] = ()):
        self.counts = np.zeros(1, np.int64)
        self.add(lengths)

    def add(self, lengths: Sequence[int]) -> None:
        """Adds the lengths of more answers."""
        new = np.bincount(np.asarray(lengths, np.int64), minlength=len(self.counts))
        new[: len(self.counts)] += self.counts
        self.counts = new
        tokens = new * np.arange(len(new))
        # The number of answers that are longer than the index, and the sum of their tokens.
        self.longer = np.append(np.cumsum(new[:0:-1])[::-1], 0)
        self.tokens = np.append(np.cumsum(tokens[:0:-1])[::-1], 0)

    def expected_tokens(self, so_far: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Expected further tokens of answers that have `so_far` tokens, at most `most`.

        The mean of the tokens that longer answers had left at that length; `so_far` where none was longer.
        """
        at = np.minimum(so_far, len(self.counts) - 1)
        longer = self.longer[at]
        left = self.tokens[at] / np.maximum(longer, 1) - so_far
        return np.minimum(np.where(longer, left, np.maximum(so_far, 1)), most)


class ExpectedTime:
    """The expected time that one rollout still takes. `earlier`: lengths of similar answers, in tokens.

    `seconds` is called again and again while groups decode: each call reads only new answers and
    measurements, and only changed rows.
    """

    def __init__(self, request: RolloutRequest, earlier: Sequence[int] = ()):
        self.request, self.lengths = request, Lengths(earlier)
        self.ended = self.measured = 0  # numbers of answers and measurements that were read
        self.speeds: dict[int, float] = {}  # tokens per second of one live row, by group
        self.rows: dict[int, tuple[tuple[Running | None, ...], np.ndarray]] = {}

    def seconds(
        self,
        states: Mapping[int, GroupState],
        measurements: Sequence[Measurement],
        ended: Sequence[int],
    ) -> float:
        """Expected seconds until the last live row ends; 0 before the first measurement.

        `measurements` and the lengths of `ended` answers grow from call to call. The result is the
        largest expectation of a row, a little less than the expectation of the largest.
        """
        self.learn(measurements, ended)
        groups = [group for group in states if group in self.speeds]
        if not groups:
            return 0.0
        found = [self.live(group, states[group].rows) for group in groups]
        speeds = np.repeat([self.speeds[group] for group in groups], [len(one) for one in found])
        so_far, most = np.concatenate(found).T
        return float(np.max(self.lengths.expected_tokens(so_far, most) / speeds, initial=0.0))

    def learn(self, measurements: Sequence[Measurement], ended: Sequence[int]) -> None:
        """Reads new answer lengths, and each group's speed in its latest chunk."""
        if len(ended) > self.ended:
            self.lengths.add(ended[self.ended :])
            self.ended = len(ended)
        for one in measurements[self.measured :]:
            if min(one.tokens, one.row_rounds, one.seconds) > 0:
                self.speeds[one.group] = one.tokens / one.row_rounds * one.rounds / one.seconds
        self.measured = len(measurements)

    def live(self, group: int, rows: tuple[Running | None, ...]) -> np.ndarray:
        """int64[live rows, 2]: tokens of each answer so far, and how many more it may get."""
        cached = self.rows.get(group)
        if cached is None or cached[0] is not rows:
            found = [(self.answered(row), row.limit - row.tokens) for row in rows if row]
            cached = self.rows[group] = rows, np.array(found, np.int64).reshape(-1, 2)
        return cached[1]

    def answered(self, row: Running) -> int:
        """Tokens of the row's answer so far."""
        return row.tokens - len(self.request.prompts[row.uid // self.request.samples])
