"""Packs rollout results as bytes, and merges those of several processes into one.

Every process needs the length and the finish reason of every answer; only processes that train on an answer need its
tokens and log-probs. So lengths and reasons go to all processes, tokens and log-probs to those that want them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flax import serialization

from tlt_jax.distributed.job import Job
from tlt_jax.rollout.recorder import Completion, Decision, RolloutResult, Span
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.tuner.interface import Measurement

OPTIONAL = "record", "support"  # arrays of a Completion that may be None

# The RolloutResult.stats that merge to the largest of the processes' values; others are summed.
LARGEST = (
    "seconds", "programs", "pool_programs", "pool_bytes", "compile_seconds", "idle_delay", "score_wait",
)  # fmt: skip


def packed(result: RolloutResult) -> bytes:
    """The result as msgpack (data, no code), without tokens and log-probs."""
    return serialization.msgpack_serialize(
        {
            "completions": [
                vars(one)
                | {"tokens": len(one.tokens), "logprobs": one.logprobs.dtype.str}
                | {"replies": [list(reply) for reply in one.replies]}
                | {
                    name: None
                    if (array := getattr(one, name)) is None
                    else [*array.shape, array.dtype.str]
                    for name in OPTIONAL
                }
                for one in result.completions
            ],
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
    """The packed result; tokens and log-probs are zeros of the right length, which take no memory."""
    found = serialization.msgpack_restore(data)
    return RolloutResult(
        [absent(one) for one in found["completions"]],
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


def absent(fields: dict[str, Any]) -> Completion:
    """An answer whose content another process has: zeros of the right length."""
    length = (fields["tokens"],)
    tokens = np.broadcast_to(np.int32(0), length)
    logprobs = np.broadcast_to(np.zeros((), np.dtype(fields["logprobs"])), length)
    known = {
        "tokens": tokens,
        "logprobs": logprobs,
        "replies": tuple(map(tuple, fields["replies"])),
    }
    for name in OPTIONAL:
        if fields[name] is not None:
            *shape, dtype = fields[name]
            known[name] = np.broadcast_to(np.zeros((), np.dtype(dtype)), shape)
    return Completion(**(fields | known))


def everything(answers: Sequence[Completion]) -> set[int]:
    """Wants all answers: their uids."""
    return {one.uid for one in answers}


def nothing(answers: Sequence[Completion]) -> set[int]:
    """Wants no answer that another process has decoded."""
    return set()


def exchanged(
    job: Job,
    result: RolloutResult,
    wanted: Callable[[Sequence[Completion]], set[int]] = everything,
) -> RolloutResult:
    """Merges the results of all processes; of the answers that others have decoded, the `wanted` ones have their content.

    All processes call it together; `wanted` is `nothing` in all of them or in none.
    """
    parts = [unpacked(part) for part in job.gather(packed(result))]
    parts[job.index] = result
    if wanted is not nothing:
        uids = wanted(merged(parts).completions)
        places = [spans(part.completions, uids) for part in parts]
        places[job.index] = []
        content = b"".join(map(content_of, result.completions))
        for index, data in enumerate(job.gather(content, places)):
            if index != job.index:
                parts[index] = replace(
                    parts[index], completions=filled(parts[index].completions, uids, data)
                )
    return merged(parts)


def content_of(answer: Completion) -> bytes:
    """Tokens, log-probs and the OPTIONAL arrays of an answer, as bytes."""
    arrays = [np.asarray(answer.tokens, np.int32), answer.logprobs, *optional(answer).values()]
    return b"".join(array.tobytes() for array in arrays)


def size_of(answer: Completion) -> int:
    """Bytes of `content_of`."""
    others = sum(array.nbytes for array in optional(answer).values())
    return len(answer.tokens) * (np.dtype(np.int32).itemsize + answer.logprobs.itemsize) + others


def optional(answer: Completion) -> dict[str, np.ndarray]:
    """Those of the OPTIONAL arrays that an answer has."""
    found = {name: getattr(answer, name) for name in OPTIONAL}
    return {name: array for name, array in found.items() if array is not None}


def spans(answers: Sequence[Completion], uids: set[int]) -> list[tuple[int, int]]:
    """Start and end of each wanted answer in the concatenated contents of all."""
    ends = np.cumsum([size_of(one) for one in answers], dtype=np.int64).tolist()
    return [
        (end - size_of(one), end) for one, end in zip(answers, ends, strict=True) if one.uid in uids
    ]


def filled(answers: Sequence[Completion], uids: set[int], data: bytes) -> list[Completion]:
    """The answers, with the contents of the wanted ones read from the concatenated `data`."""
    found, start = [], 0
    for one in answers:
        if one.uid in uids:
            tokens = np.frombuffer(data, np.int32, len(one.tokens), start)
            logprobs = np.frombuffer(data, one.logprobs.dtype, len(tokens), start + tokens.nbytes)
            read, first = {}, start + tokens.nbytes + logprobs.nbytes
            for name, array in optional(one).items():
                read[name] = np.frombuffer(data, array.dtype, array.size, first).reshape(
                    array.shape
                )
                first += array.nbytes
            start += size_of(one)
            one = replace(one, tokens=tokens, logprobs=logprobs, **read)
        found.append(one)
    return found


def named(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the strategy parsed from its name."""
    return fields | {"strategy": strategies.parse(fields["strategy"])}


def merged(results: Sequence[RolloutResult]) -> RolloutResult:
    """Merges the results of all processes: everything in order of uid, or of data group."""
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
    """Merges the stats: the largest for LARGEST, sums for the others, and quotients of the merged values."""
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
