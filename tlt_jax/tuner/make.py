"""The arms and the tuner that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_jax.config.schema import NONE, Speculation
from tlt_jax.errors import ConfigError
from tlt_jax.spec_decode.strategy import OFF, Strategy
from tlt_jax.tuner import beg_mab, fixed, goodput
from tlt_jax.tuner.arms import parse_arms
from tlt_jax.tuner.interface import Tuner


def arms(settings: Speculation) -> tuple[Strategy, ...]:
    """The strategies that rounds may have besides plain decoding; none without a drafter. Raises ConfigError."""
    try:
        parsed = parse_arms(settings.strategies)
    except ValueError as error:
        raise ConfigError(f"speculation.strategies: {error}") from error
    return () if settings.drafter == NONE else parsed


def make_tuner(settings: Speculation, arms: Sequence[Strategy], platform: str) -> Tuner:
    """The tuner that speculation.tuner names; without strategies, plain decoding.

    Until rounds were measured, `goodput` takes a node more to cost this share of a plain round: much on a CPU, which is soon
    bound by arithmetic, little on an accelerator that waits for its memory.
    """
    if not arms:
        return fixed.fixed(OFF)
    makers = {
        "fixed": lambda: fixed.fixed(arms[0]),
        "threshold": lambda: fixed.threshold(arms, settings.threshold),
        "beg_mab": lambda: beg_mab.beg_mab(arms),
        "goodput": lambda: goodput.goodput(arms, node_cost=1 / 8 if platform == "cpu" else 1 / 200),
    }
    return makers[settings.tuner]()


def largest_batches(tuner: Tuner, batches: Sequence[int]) -> dict[Strategy, int]:
    """Of these rising batch buckets the largest that the tuner may use each strategy for; without those it never uses."""
    fewest = (1, *(size + 1 for size in batches))
    return {arm: batch for batch, least in zip(batches, fewest, strict=False) for arm in tuner.usable(batch, least)}
