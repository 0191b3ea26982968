"""How long a rollout will still take: from what is live, how fast it goes, and how long answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.state import GroupState, Running
from tlt_jax.tuner.interface import Measurement


def seconds(
    request: RolloutRequest,
    states: Mapping[int, GroupState],
    measurements: Sequence[Measurement],
    lengths: Sequence[int],
) -> float:
    """Expected seconds until the last live row ends; 0 before anything was measured.

    `lengths`: tokens of answers like these. Of several rows it is the one that is expected to take
    longest: a little less than the expected longest.
    """
    speeds = latest(measurements)
    found = [
        expected_tokens(answered(request, row), row.limit - row.tokens, lengths) / speeds[group]
        for group, state in states.items()
        if group in speeds
        for row in state.rows
        if row
    ]
    return max(found, default=0.0)


def latest(measurements: Sequence[Measurement]) -> dict[int, float]:
    """Tokens per second of one live row in each group, in its latest chunk."""
    return {
        one.group: one.tokens / one.row_rounds * one.rounds / one.seconds
        for one in measurements
        if min(one.tokens, one.row_rounds, one.seconds) > 0
    }


def answered(request: RolloutRequest, row: Running) -> int:
    """Tokens of the row's answer so far."""
    return row.tokens - len(request.prompts[row.uid // request.samples])


def expected_tokens(so_far: int, most: int, lengths: Sequence[int]) -> float:
    """Expected tokens that an answer of `so_far` tokens still gets, at most `most`.

    The mean of what the longer answers had left there; where none was longer, as many as it has.
    """
    longer = np.asarray([length for length in lengths if length > so_far])
    left = float(longer.mean() - so_far) if len(longer) else float(max(so_far, 1))
    return min(left, most)
