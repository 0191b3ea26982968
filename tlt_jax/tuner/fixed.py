"""Tuners that learn nothing: always one strategy, or the paper's switch by the number of live sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner.arms import bucketed, parse_arms, strategies_for
from tlt_jax.tuner.interface import Choice, State, Tuner, unchanged

LIMIT = 32  # of the reference system


def fixed(strategy: Strategy | str) -> Tuner:
    """Always the one strategy (plain decoding too)."""
    arm = (parse_arms([strategy]) or (PLAIN,))[0]
    return Tuner(dict, lambda state, live, batch, slots: (state, Choice(arm, math.nan, "fixed")), unchanged, unchanged)


def threshold(
    strategies: Sequence[Strategy | str], limit: int = LIMIT, thresholds: Sequence[int] | None = None
) -> Tuner:
    """The paper's switch [b10]: speculation when at most `limit` sequences are live, the first strategy of the bucket."""
    buckets = bucketed(parse_arms(strategies), thresholds)

    def choose(state: State, live: int, batch: int, slots: int) -> tuple[State, Choice]:
        if live > limit:
            return state, Choice(PLAIN, math.nan, f"more than {limit} live")
        return state, Choice(strategies_for(buckets, batch)[0], math.nan, f"at most {limit} live")

    return Tuner(dict, choose, unchanged, unchanged)
