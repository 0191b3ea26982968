"""Knows what the sections of accelerator.py share: the device, the shapes, and the rates of copies and products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.common.engines import FullRows, model_of, random_engine, sizes
from benchmarks.common.timing import clocked
from tlt_jax.config.schema import NONE
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

# Published bytes and dense bfloat16 FLOP a second, by a part of the device's name.
PUBLISHED = {
    "H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12), "TPU v5 lite": (0.82e12, 197e12),
    "TPU v5e": (0.82e12, 197e12), "TPU v5": (2.77e12, 459e12), "TPU v6": (1.64e12, 918e12),
}  # fmt: skip
SAMPLED = Sampling()
Row = tuple[str, float, float, str, float, str, str]  # a section's, without its name
REPEATS = 5, 3  # timed calls, after those that load a program and build its graph


@dataclass(frozen=True)
class Shape:
    """What is measured: the policy, slots of a row, rounds, batches, trees, (rows, tokens of a row) of updates."""

    init: dict[str, Any]
    slots: int
    rounds: int
    batches: tuple[int, ...]
    trees: tuple[str, ...]
    updates: tuple[tuple[int, int], ...]
    draft_vocab: int
    square: int  # of the matrices that are multiplied
    copied: int  # bytes


qwen2 = partial(sizes, is_tied=False, positions=131072)
LARGE = (
    4096, 32, (1, 4, 8, 32, 128), ("4_2_8", "6_4_16", "8_4_48"), ((4, 4096), (1, 16384)), 32000, 8192, 2**31,
)  # fmt: skip
SMALL = sizes(576, 30, 9, 3, 1536, 49152, kind="llama", positions=8192)
SHAPES = {
    "7b": Shape(qwen2(3584, 28, 28, 4, 18944, 152064), *LARGE),
    "smollm2": Shape(SMALL, 1280, *LARGE[1:]),
    "0.5b": Shape(qwen2(896, 24, 14, 2, 4864, 151936), *LARGE),
    "tiny": Shape(qwen2(64, 2, 4, 2, 128, 256), 128, 4, (1, 4), ("2_2_4",), ((2, 128),), 64, 256, 2**22),
}  # fmt: skip


class TimeIsOver(Exception):
    """The next row would start too late."""


@dataclass(frozen=True)
class Device:
    """The device, the policy that is measured on it, and the time limit."""

    shape: Shape
    mesh: Mesh
    until: float
    update_layers: int

    @property
    def dtype(self) -> str:
        return "float32" if meshes.is_cpu(self.mesh) else "bfloat16"

    @property
    def published(self) -> tuple[float, float] | None:
        kind = meshes.device_kind(self.mesh)
        return next((rates for part, rates in PUBLISHED.items() if part in kind), None)

    def model(self, layers: int = 0) -> ModelConfig:
        return model_of(self.shape.init | ({"num_hidden_layers": layers} if layers else {}))

    def check(self) -> None:
        if time.time() >= self.until:
            raise TimeIsOver


def seconds(call: Callable[[], Any]) -> float:
    """The median of the seconds of a call."""
    repeats, unmeasured = REPEATS
    found = [clocked(call)[0] for _ in range(unmeasured + repeats)]
    return statistics.median(found[unmeasured:])


def seconds_each(
    step: Callable[..., jax.Array], first: jax.Array, *rest: jax.Array, times: int
) -> float:
    """Seconds of one of the `times` steps of a program, each on the result of the step before and the rest."""

    def steps(first: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, one: step(one, *rest), first)

    program = jax.jit(steps)
    return seconds(lambda: program(first, *rest)) / times


def copy_rate(device: Device) -> tuple[float, float]:
    """Seconds of a copy, and bytes a second, read and written ones."""
    array = jnp.ones(device.shape.copied // 4, jnp.float32)
    spent = seconds_each(lambda array: array + 1, array, times=8)
    return spent, 2 * array.nbytes / spent


def read_rate(device: Device) -> tuple[float, float]:
    """Seconds of reading an array once, and bytes a second."""
    array = jnp.zeros(device.shape.copied // 4, jnp.float32)
    spent = seconds_each(
        lambda most, array: jnp.max(array + most), jnp.float32(0.0), array, times=8
    )
    return spent, array.nbytes / spent


def product_rate(device: Device) -> tuple[float, float]:
    """Seconds of a product of two square matrices, and FLOP a second."""
    size = device.shape.square
    array = jnp.full((size, size), 1 / size, device.dtype)
    spent = seconds_each(lambda other, array: array @ other, array, array, times=8)
    return spent, 2 * size**3 / spent


def attention_operands(device: Device, batch: int, nodes: int, width: int) -> tuple[jax.Array, ...]:
    """Random queries, nodes and caches of one layer, heads of this width; a node sees earlier nodes and half of the slots."""
    model, slots = device.model(), device.shape.slots
    heads = model.num_kv_heads
    drawn = iter(jax.random.split(jax.random.key(0), 5))

    def random(*shape: int) -> jax.Array:
        return jax.random.normal(next(drawn), shape, device.dtype)

    return (
        random(batch, heads, model.num_heads // heads, nodes, width),
        random(batch, heads, width, nodes),
        random(batch, heads, nodes, width),
        jnp.broadcast_to(jnp.tri(nodes, dtype=bool), (batch, nodes, nodes)),
        random(batch, heads, width, slots),
        random(batch, heads, slots, width),
        jnp.full(batch, slots // 2, jnp.int32),
    )


def engine_of(device: Device, drafts: bool) -> tuple[Engine, Weights]:
    """An engine of the random policy, with a random EAGLE-3 drafter if it drafts, and its weights."""
    shape = device.shape
    return random_engine(
        device.model(), device.mesh, max(shape.batches), kind="eagle3" if drafts else NONE, dtype=device.dtype,
        strategies=shape.trees, draft_vocab=shape.draft_vocab,
    )  # fmt: skip


def round_seconds(
    engine: Engine, weights: Weights, device: Device, batch: int, strategy: Strategy = PLAIN,
    sampling: Sampling = SAMPLED,
) -> float:  # fmt: skip
    """Seconds of a round of this many rows, each half full."""
    slots, rounds = device.shape.slots, device.shape.rounds
    return seconds(FullRows(engine, weights, batch, slots, rounds, strategy, sampling)) / rounds
