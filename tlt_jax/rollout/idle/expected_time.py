"""How long a rollout will still take: from what is live, how fast it goes, and how long answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.state import GroupState, Running
from tlt_jax.tuner.interface import Measurement


class Lengths:
    """How many answers have each number of tokens; an answer costs one addition, and a question none of the answers."""

    def __init__(self, lengths: Sequence[int] = ()):
        self.counts = np.zeros(1, np.int64)
        self.add(lengths)

    def add(self, lengths: Sequence[int]) -> None:
        """More answers."""
        new = np.bincount(np.asarray(lengths, np.int64), minlength=len(self.counts))
        new[: len(self.counts)] += self.counts
        self.counts = new
        tokens = new * np.arange(len(new))
        # Of the answers that are longer than the index: how many, and their tokens.
        self.longer = np.append(np.cumsum(new[:0:-1])[::-1], 0)
        self.tokens = np.append(np.cumsum(tokens[:0:-1])[::-1], 0)

    def expected_tokens(self, so_far: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Expected tokens that answers of `so_far` tokens still get, at most `most`.

        The mean of what the longer answers had left there; where none was longer, as many as it has.
        """
        at = np.minimum(so_far, len(self.counts) - 1)
        longer = self.longer[at]
        left = self.tokens[at] / np.maximum(longer, 1) - so_far
        return np.minimum(np.where(longer, left, np.maximum(so_far, 1)), most)


class ExpectedTime:
    """What one rollout still takes. `earlier`: tokens of answers like these.

    Asked again and again while groups decode: what came before is not read again, and the rows of a
    group are read when they have changed.
    """

    def __init__(self, request: RolloutRequest, earlier: Sequence[int] = ()):
        self.request, self.lengths = request, Lengths(earlier)
        self.ended = self.measured = 0  # answers and measurements that are known
        self.speeds: dict[int, float] = {}  # tokens per second of one live row, by group
        self.rows: dict[int, tuple[tuple[Running | None, ...], np.ndarray]] = {}

    def seconds(
        self,
        states: Mapping[int, GroupState],
        measurements: Sequence[Measurement],
        ended: Sequence[int],
    ) -> float:
        """Expected seconds until the last live row ends; 0 before anything was measured.

        `measurements` and the tokens of `ended` answers grow from call to call. Of several rows it
        is the one that is expected to take longest: a little less than the expected longest.
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
        """Reads what is new: how long answers are, and how fast each group was in its latest chunk."""
        if len(ended) > self.ended:
            self.lengths.add(ended[self.ended :])
            self.ended = len(ended)
        for one in measurements[self.measured :]:
            if min(one.tokens, one.row_rounds, one.seconds) > 0:
                self.speeds[one.group] = one.tokens / one.row_rounds * one.rounds / one.seconds
        self.measured = len(measurements)

    def live(self, group: int, rows: tuple[Running | None, ...]) -> np.ndarray:
        """int64[live rows, 2]: tokens of each answer so far, and how many more it may have."""
        known = self.rows.get(group)
        if known is None or known[0] is not rows:
            found = [(self.answered(row), row.limit - row.tokens) for row in rows if row]
            known = self.rows[group] = rows, np.array(found, np.int64).reshape(-1, 2)
        return known[1]

    def answered(self, row: Running) -> int:
        """Tokens of the row's answer so far."""
        return row.tokens - len(self.request.prompts[row.uid // self.request.samples])
