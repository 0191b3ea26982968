"""Strategies as text and as a pool: parsing, checks, and which of them a batch size uses; knows no tuner."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, check, parse

PAPER_ARMS = ("8_4_48", "8_4_32", "8_4_16", "7_4_8")  # the reference system's arms (its 8_4_8 drafts a level it cannot verify)
THRESHOLDS = (1, 2, 5, 21)  # and the smallest batch of each, the widest tree first
EXAMPLE_ARMS = ("2_2_4", "4_2_8", "6_4_16", "8_4_32", "8_4_48")


def parse_arms(strategies: Sequence[Strategy | str]) -> tuple[Strategy, ...]:
    """The strategies parsed and checked, each once, in the given order; plain decoding is left out (it is always there)."""
    if not strategies:
        raise ValueError(f"no strategies: give at least one, as in {EXAMPLE_ARMS[0]}")
    parsed = [parse(one) if isinstance(one, str) else one for one in strategies]
    for one in parsed:
        if one != PLAIN:
            check(one)
    return tuple(dict.fromkeys(one for one in parsed if one != PLAIN))


def bucketed(strategies: Sequence[Strategy], thresholds: Sequence[int] | None = None) -> dict[int, tuple[Strategy, ...]]:
    """Smallest batch -> strategies of that bucket: grouped by nodes, the widest trees for the smallest batches.

    The paper's bucketing, with its thresholds when none are given (doubling ones for more than four groups): a program
    is compiled only for its bucket's batches.
    """
    groups = sorted({one.nodes for one in strategies}, reverse=True)
    usual = THRESHOLDS if len(groups) <= len(THRESHOLDS) else [2**i for i in range(len(groups))]
    starts = list(usual[: len(groups)] if thresholds is None else thresholds)
    if len(starts) != len(groups):
        raise ValueError(
            f"{len(starts)} thresholds {starts} for {len(groups)} different node counts {groups}: give one for each"
        )
    if starts != sorted(set(starts)) or starts[:1] < [1]:
        raise ValueError(f"thresholds {starts} do not rise from at least 1: list the smallest batch of each bucket")
    return {
        start: tuple(one for one in strategies if one.nodes == nodes)
        for start, nodes in zip(starts, groups, strict=True)
    }


def strategies_for(buckets: dict[int, tuple[Strategy, ...]], batch: int) -> tuple[Strategy, ...]:
    """The strategies that a batch of this many rows may use; below the first bucket, those of the first."""
    return buckets[max((start for start in buckets if start <= batch), default=min(buckets))]


def affordable(strategies: Sequence[Strategy], batch: int, most: int) -> tuple[Strategy, ...]:
    """The strategies whose verification has at most `most` nodes in all rows together."""
    return tuple(one for one in strategies if one.nodes * batch <= most)
