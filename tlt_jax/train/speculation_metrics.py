"""Metrics of speculative decoding in a step, and the lines of its speculation file; knows no device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tlt_jax.config import schema
from tlt_jax.metrics import ChunkRecord
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.tuner.interface import Measurement


def metrics(drafter_kind: str, rollout: RolloutResult) -> dict[str, float]:
    """The metrics speculation/* of a rollout; empty when no chunk drafted.

    `drafter_kind`: drafter of strategies that name none.
    """
    drafted = [one for one in rollout.measurements if one.strategy != PLAIN]
    if not drafted:
        return {}

    whole = {f"accept_length/{drafter_kind}": rollout.stats["accept_length"]}
    found = {
        "accept_length": rollout.stats["accept_length"],
        **(accept_lengths(drafted) or whole),
        "share": rollout.stats["speculated_tokens"] / rollout.stats["tokens"],
        "declined": rollout.stats["declined"] / sum(one.row_rounds for one in drafted),
        "pool_programs": rollout.stats["pool_programs"],
        "pool_mib": rollout.stats["pool_bytes"] / 2**20,
        **rates(drafted),
        **by_batch(rollout.measurements),
    }

    errors = [
        abs(math.log(one.promised * one.seconds / one.tokens))
        for one in rollout.measurements
        if one.promised > 0 and one.is_timed
    ]
    if errors:
        found["prediction_error"] = float(np.median(errors))
    return {f"speculation/{name}": value for name, value in found.items()}


def accept_lengths(drafted: Sequence[Measurement]) -> dict[str, float]:
    """accept_length/DRAFTER of each drafter that strategies name: tokens per sequence and drafting round."""
    tokens, row_rounds = Counter(), Counter()
    for one in drafted:
        if drafter := one.strategy.drafter:
            tokens[drafter] += one.tokens
            row_rounds[drafter] += one.row_rounds
    return {f"accept_length/{drafter}": tokens[drafter] / row_rounds[drafter] for drafter in tokens}


def rates(drafted: Sequence[Measurement]) -> dict[str, float]:
    """accept_rate@d: share of the rounds with a tree at least d deep that accept a node of depth d."""
    found = {}
    for depth in range(1, max(one.strategy.depth for one in drafted) + 1):
        deep = [one for one in drafted if one.strategy.depth >= depth]
        hits = sum(int(one.hits[depth - 1].sum()) for one in deep)
        found[f"accept_rate@{depth}"] = hits / sum(one.row_rounds for one in deep)
    return found


def by_batch(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Mean tree nodes, and median milliseconds of a round, by batch bucket."""
    found = {}
    for batch in sorted({one.batch for one in measurements}):
        same = [one for one in measurements if one.batch == batch]
        found[f"nodes@{batch}"] = sum(one.strategy.nodes * one.rounds for one in same) / sum(
            one.rounds for one in same
        )

        plain = [1e3 * one.seconds / one.rounds for one in same if one.strategy == PLAIN]
        drafting = [1e3 * one.seconds / one.rounds for one in same if one.strategy != PLAIN]
        for name, times in (("plain_round_ms", plain), ("round_ms", drafting)):
            if times:
                found[f"{name}@{batch}"] = float(np.median(times))
    return found


def chunks(drafter_kind: str, rollout: RolloutResult) -> list[ChunkRecord]:
    """The lines of the speculation file, one per chunk, in the order in which results arrived.

    Empty when speculation.drafter is none.
    """
    return [line(one) for one in rollout.measurements] if drafter_kind != schema.NONE else []


def line(one: Measurement) -> ChunkRecord:
    """A measurement as a line of the file."""
    return ChunkRecord(
        one.group,
        one.number,
        one.batch,
        one.live,
        one.slots,
        strategies.name(one.strategy),
        one.reason,
        None if math.isnan(one.promised) else one.promised,
        one.tokens / one.seconds,
        one.tokens,
        one.rounds,
        one.seconds,
        accepted(one),
        one.is_timed,
    )


def accepted(one: Measurement) -> list[int]:
    """Number of row rounds that accepted 0, 1, ... drafted tokens; empty for plain decoding."""
    if one.strategy == PLAIN:
        return []
    held = [int(one.row_rounds), *one.hits.sum((1, 2)).astype(int).tolist(), 0]
    return [more - less for more, less in zip(held, held[1:], strict=False)]
