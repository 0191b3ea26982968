"""Which sizes of a Triton kernel are fastest on this device? Prints them beside those that the kernel's rule gives.

A Case is a kernel at one shape. Every candidate is compared with XLA's result before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import setup
from benchmarks.device.setup import Device, Row
from tlt_jax.kernels import tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.tree_attention import SLOTS_PER_QUERY, TreeTiles

SECONDS = 180.0  # of the cases of a kernel
TIMES = 16  # calls of a program that is timed, for each batch
BATCHES = (1, 8)  # sizes do not depend on the batch: they are chosen for these together
NODES, WIDTHS = (1, 8, 48), (128, 64)
MOST = 2e-2  # by which a bfloat16 result may differ from XLA's
# Queries and slots of a tile, warps, stages: those that spill no registers and fit a multiprocessor at both widths.
TILES = {
    "few": (
        (16, 64, 2, 3), (16, 64, 4, 3), (16, 64, 4, 4), (16, 64, 8, 3), (16, 128, 4, 3), (16, 128, 4, 4), (16, 128, 8, 3),
    ),
    "some": (
        (16, 64, 4, 3), (32, 64, 4, 3), (32, 64, 4, 4), (32, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 64, 4, 4), (64, 128, 8, 2), (64, 128, 8, 3),
    ),
    "many": (
        (32, 64, 4, 3), (32, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 2), (64, 128, 8, 3),
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel at one shape; the first candidate is what runs without a measurement.

    `error(candidate)`: the largest difference from XLA's result, at most `most`. `seconds(candidate)`: of one call, or of one
    for each of several batches, which read `read` bytes at least.
    """

    name: str
    candidates: tuple[Any, ...]
    error: Callable[[Any], float]
    most: float
    seconds: Callable[[Any], float]
    read: float


def tune(device: Device) -> Iterator[Row]:
    """A row for every candidate of the attention kernel; prints the fastest as code. Nothing without Triton kernels."""
    if not Fused.of(device.mesh).on:
        print("tune: no Triton kernel runs on this device, so there is nothing to tune")
        return
    yield from measured(attention_cases(device), device)


def measured(cases: list[Case], device: Device) -> Iterator[Row]:
    """As `tune`, for these cases: each has an equal part of SECONDS, in which at least one candidate is timed."""
    (_, rate), lines, begin = setup.copy_rate(device), [], time.time()
    for number, case in enumerate(cases, 1):
        found: dict[Any, float] = {}
        for tried, candidate in enumerate(case.candidates):
            device.check()
            if found and time.time() - begin > SECONDS * number / len(cases):
                print(f"tune: {case.name}: {tried} of {len(case.candidates)} were tried in time")
                break
            error = case.error(candidate)
            if not error <= case.most:  # NaN too
                print(
                    f"tune: {case.name}, {candidate}: differs by {error:.3g}, at most {case.most}"
                )
                continue
            spent = found[candidate] = case.seconds(candidate)
            speed, named = case.read / spent, f"{case.name}, {candidate}"
            yield named, 1e3 * spent, speed / 1e12, "TB/s", speed / rate, "copy", ""
        if found:
            fastest = min(found, key=found.__getitem__)
            lines.append(f"{case.name}: {fastest}; the rule's: {case.candidates[0]}")
    print("\n".join(["", *lines]))


def candidates(queries: int, width: int, slots: int) -> tuple[TreeTiles, ...]:
    """The rule's sizes and others, all within its bound on partial results."""
    made = [tree_attention.rule(queries, width, 2)]
    for tile, columns, warps, stages in TILES[
        "few" if queries <= 16 else "some" if queries <= 64 else "many"
    ]:
        least = max(SLOTS_PER_QUERY * queries, columns)
        splits = (least, 2 * least) if slots >= least else (least,)
        made += [TreeTiles(tile, columns, split, warps, stages) for split in splits]
    return tuple(dict.fromkeys(made))


def attention_cases(device: Device) -> list[Case]:
    """Attention of trees, with the shape's heads, of every width."""
    return [attention_case(device, nodes, width) for width in WIDTHS for nodes in NODES]


def attention_case(device: Device, nodes: int, width: int) -> Case:
    """Attention of trees of this many nodes, of rows half full; results are compared for rows of all lengths."""
    slots = device.shape.slots
    timed = [setup.attention_operands(device, batch, nodes, width) for batch in BATCHES]
    q, *rest = timed[-1]
    lengths = jnp.linspace(0, slots, len(q)).astype(jnp.int32)
    expected = jax.jit(partial(tree_attention.attend, slots_last=False))(q, *rest[:-1], lengths)[0]
    queries, fused = q.shape[2] * nodes, Fused.of(device.mesh)

    def step(sizes: TreeTiles, state: tuple, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, arrivals = state
        return tree_attention.attend_in_kernel(q, *rest, arrivals, fused=fused, sizes=sizes)

    def state(q: jax.Array, sizes: TreeTiles) -> tuple[jax.Array, jax.Array]:
        return q, jnp.zeros((*q.shape[:2], sizes.tiles(queries)), jnp.int32)

    def error(sizes: TreeTiles) -> float:
        found, _ = jax.jit(partial(step, sizes))(state(q, sizes), *rest[:-1], lengths)
        return float(np.abs(np.asarray(found, np.float32) - np.asarray(expected, np.float32)).max())

    def seconds(sizes: TreeTiles) -> float:
        def calls(given: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
            return [
                jax.lax.fori_loop(
                    0, TIMES, lambda _, one, rest=rest: step(sizes, one, *rest), state(q, sizes)
                )
                for q, *rest in given
            ]

        program = jax.jit(calls)
        return setup.seconds(lambda: program(timed)) / TIMES

    heads, itemsize = q.shape[1], q.dtype.itemsize
    read = sum(BATCHES) * heads * width * slots * itemsize  # keys and values, half full
    return Case(
        f"tree attention, {queries} queries, width {width}, {slots} slots",
        candidates(queries, width, slots),
        error,
        MOST,
        seconds,
        read,
    )
