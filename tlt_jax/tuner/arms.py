"""The arms of a tuner: parsing, validation, and the arms of a batch size; knows no tuner."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, check, parse

# The arms of the reference implementation of arXiv 2511.16665 and the smallest batch of each. Its
# 8_4_8 is 7_4_8 here: 8 nodes, with the root, reach a depth of at most 7.
PAPER_ARMS = ("8_4_48", "8_4_32", "8_4_16", "7_4_8")
THRESHOLDS = (1, 2, 5, 21)
EXAMPLE_ARMS = ("2_2_4", "4_2_8", "6_4_16", "8_4_32", "8_4_48")


def parse_arms(strategies: Sequence[Strategy | str]) -> tuple[Strategy, ...]:
    """The strategies, parsed, without duplicates, in the given order, without plain decoding.

    Plain decoding is always an arm. Raises ValueError for an empty list or an impossible tree.
    """
    if not strategies:
        raise ValueError(f"no strategies: give at least one, as in {EXAMPLE_ARMS[0]}")

    parsed = [parse(one) if isinstance(one, str) else one for one in strategies]
    for one in parsed:
        if one != PLAIN:
            check(one)

    return tuple(dict.fromkeys(one for one in parsed if one != PLAIN))


def bucketed(strategies: Sequence[Strategy]) -> dict[int, tuple[Strategy, ...]]:
    """Smallest batch -> strategies of that bucket; more nodes for smaller batches.

    The bucketing of BEG-MAB (arXiv 2511.16665, section 5): one bucket per node count. The smallest
    batches are the paper's, or powers of two for more than four buckets.
    """
    groups = sorted({one.nodes for one in strategies}, reverse=True)
    starts = THRESHOLDS if len(groups) <= len(THRESHOLDS) else [2**i for i in range(len(groups))]
    return {
        start: tuple(one for one in strategies if one.nodes == nodes)
        for start, nodes in zip(starts, groups, strict=False)
    }


def strategies_for(buckets: dict[int, tuple[Strategy, ...]], batch: int) -> tuple[Strategy, ...]:
    """The strategies of the bucket that contains `batch`.

    Batches below the first bucket use the first bucket.
    """
    return buckets[max((start for start in buckets if start <= batch), default=min(buckets))]


def affordable(strategies: Sequence[Strategy], batch: int, most: int) -> tuple[Strategy, ...]:
    """The strategies that verify at most `most` nodes in total over `batch` rows."""
    return tuple(one for one in strategies if one.nodes * batch <= most)
