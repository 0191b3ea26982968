"""Results of a rollout as bytes, and one result of those of several processes; knows no transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import serialization

from tlt_jax.rollout.events import Decision
from tlt_jax.rollout.recorder import Completion, RolloutResult, Span
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.tuner.interface import Measurement

# Of the numbers in RolloutResult.stats: those of the whole, when every process tells its own.
LARGEST = ("seconds", "programs", "pool_programs", "pool_bytes", "compile_seconds", "idle_delay")


def packed(result: RolloutResult) -> bytes:
    """The result as msgpack: data alone, no code."""
    return serialization.msgpack_serialize(
        {
            "completions": [vars(one) for one in result.completions],
            "spans": [vars(one) for one in result.spans],
            "decisions": [
                vars(one)
                | {"strategy": strategies.name(one.strategy), "joining": list(one.joining)}
                for one in result.decisions
            ],
            "measurements": [
                one._asdict() | {"strategy": strategies.name(one.strategy)}
                for one in result.measurements
            ],
            "reliability": result.reliability,
            "stats": result.stats,
            "partial": {str(uid): tokens for uid, tokens in result.partial.items()},
            "compile_waits": {
                str(group): [list(wait) for wait in waits]
                for group, waits in result.compile_waits.items()
            },
        }
    )


def unpacked(data: bytes) -> RolloutResult:
    """The result that was packed."""
    found = serialization.msgpack_restore(data)
    return RolloutResult(
        [Completion(**one) for one in found["completions"]],
        [Span(**one) for one in found["spans"]],
        [
            Decision(**(named(one) | {"joining": tuple(one["joining"])}))
            for one in found["decisions"]
        ],
        [Measurement(**named(one)) for one in found["measurements"]],
        found["reliability"],
        found["stats"],
        {int(uid): tokens for uid, tokens in found["partial"].items()},
        {
            int(group): [(start, end) for start, end in waits]
            for group, waits in found["compile_waits"].items()
        },
    )


def named(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the strategy of which they have the name."""
    return fields | {"strategy": strategies.parse(fields["strategy"])}


def merged(results: Sequence[RolloutResult]) -> RolloutResult:
    """One result of those of all processes: everything in order of uid, or of data group."""
    if len(results) == 1:
        return results[0]

    def every(name: str, key: str) -> list[Any]:
        found = [one for result in results for one in getattr(result, name)]
        return sorted(found, key=lambda one: getattr(one, key))

    return RolloutResult(
        every("completions", "uid"),
        every("spans", "group"),
        every("decisions", "group"),
        every("measurements", "group"),
        np.sum([result.reliability for result in results], axis=0),
        merged_stats(results),
        {uid: tokens for result in results for uid, tokens in sorted(result.partial.items())},
        {group: waits for result in results for group, waits in result.compile_waits.items()},
    )


def merged_stats(results: Sequence[RolloutResult]) -> dict[str, float]:
    """The sums, but for the largest of what is no sum, and the quotients of these."""
    found = {}
    for name in results[0].stats:
        values = [result.stats[name] for result in results]
        found[name] = max(values) if name in LARGEST else sum(values)
    rounds = sum(
        one.row_rounds
        for result in results
        for one in result.measurements
        if one.strategy != strategies.PLAIN
    )
    found["accept_length"] = found["speculated_tokens"] / max(rounds, 1)
    found["tokens_per_second"] = found["tokens"] / found["seconds"]
    return found
