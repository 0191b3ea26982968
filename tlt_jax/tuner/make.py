"""The arms and the tuner of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_jax.config.schema import NONE, Speculation
from tlt_jax.errors import ConfigError
from tlt_jax.spec_decode.strategy import OFF, Strategy
from tlt_jax.tuner import beg_mab, fixed, goodput
from tlt_jax.tuner.arms import parse_arms
from tlt_jax.tuner.interface import Tuner


def arms(speculation: Speculation) -> tuple[Strategy, ...]:
    """The strategies of speculation.strategies, without plain decoding; none without a drafter.

    Raises ConfigError.
    """
    try:
        parsed = parse_arms(speculation.strategies)
    except ValueError as error:
        raise ConfigError(f"speculation.strategies: {error}") from error
    return () if speculation.drafter == NONE else parsed


def make_tuner(speculation: Speculation, arms: Sequence[Strategy], is_cpu: bool) -> Tuner:
    """The tuner named by speculation.tuner; without arms, one that always decodes plainly.

    The initial node cost of `goodput`, as a share of a plain round: 1/8 on CPUs (`is_cpu`), which
    are compute-bound from small batches on, 1/200 on accelerators, which are memory-bound.
    """
    if not arms:
        return fixed.fixed(OFF)

    makers = {
        "fixed": lambda: fixed.fixed(arms[0]),
        "threshold": lambda: fixed.threshold(arms, speculation.threshold),
        "beg_mab": lambda: beg_mab.beg_mab(arms),
        "goodput": lambda: goodput.goodput(arms, node_cost=1 / 8 if is_cpu else 1 / 200),
    }
    return makers[speculation.tuner]()


def largest_batches(tuner: Tuner, batches: Sequence[int]) -> dict[Strategy, int]:
    """For each strategy that the tuner may use, the largest batch bucket it may use it for.

    `batches`: the batch buckets, ascending.
    """
    fewest = (1, *(size + 1 for size in batches))
    return {
        arm: batch
        for batch, least in zip(batches, fewest, strict=False)
        for arm in tuner.usable(batch, least)
    }
