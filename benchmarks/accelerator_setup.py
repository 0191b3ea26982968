"""Knows what accelerator.py measures with: device, shapes, engines of random weights, and how calls are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.models import eagle, hf, transformer
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Decode, Start, StateShape
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

# Published bytes and bfloat16 FLOP a second, dense, by a part of the device's name.
PUBLISHED = {
    "H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12), "TPU v5 lite": (0.82e12, 197e12),
    "TPU v5e": (0.82e12, 197e12), "TPU v5": (2.77e12, 459e12), "TPU v6": (1.64e12, 918e12),
}  # fmt: skip
SAMPLED = Sampling()
REPEATS = 5, 3  # calls that are timed, after those that load a program and build its graph


@dataclass(frozen=True)
class Shape:
    """What is measured: the policy, the slots of a row, batches, trees, and (rows, tokens of a row) of updates."""

    init: dict[str, Any]
    slots: int
    rounds: int
    batches: tuple[int, ...]
    trees: tuple[str, ...]
    updates: tuple[tuple[int, int], ...]
    draft_vocab: int
    square: int  # of the matrices that are multiplied
    copied: int  # bytes


def qwen2(width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> dict:
    """Sizes of a Qwen2 with an LM head of its own."""
    return {
        "model_type": "qwen2", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "vocab_size": vocab,
    }  # fmt: skip


TREES, UPDATES = ("4_2_8", "6_4_16", "8_4_48"), ((4, 4096), (1, 16384))
SHAPES = {
    "7b": Shape(qwen2(3584, 28, 28, 4, 18944, 152064), 4096, 32, (1, 4, 8, 32, 128), TREES, UPDATES, 32000, 8192, 2**31),
    "0.5b": Shape(qwen2(896, 24, 14, 2, 4864, 151936), 4096, 32, (1, 4, 8, 32, 128), TREES, UPDATES, 32000, 8192, 2**31),
    "tiny": Shape(qwen2(64, 2, 4, 2, 128, 256), 128, 4, (1, 4), ("2_2_4",), ((2, 128),), 64, 256, 2**22),
}  # fmt: skip


class TimeIsOver(Exception):
    """The next row would begin too late."""


@dataclass(frozen=True)
class Device:
    """The device, the policy that it measures, and until when."""

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
        init = self.shape.init | ({"num_hidden_layers": layers} if layers else {})
        return hf.new_config(init, init["vocab_size"], ())

    def check(self) -> None:
        if time.time() >= self.until:
            raise TimeIsOver


def seconds(call: Callable[[], Any]) -> float:
    """The median of the seconds of a call."""
    found, (repeats, unmeasured) = [], REPEATS
    for _ in range(unmeasured + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begin)
    return statistics.median(found[unmeasured:])


def copy_rate(device: Device) -> tuple[float, float]:
    """Seconds of a copy, and bytes a second, those that are read and those that are written."""
    count, times = device.shape.copied // 4, 8
    array = jnp.ones(count, jnp.float32)

    def copies(array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda i, array: array + 1, array)

    program = jax.jit(copies)
    spent = seconds(lambda: program(array)) / times
    return spent, 2 * array.nbytes / spent


def product_rate(device: Device) -> tuple[float, float]:
    """Seconds of a product of two square matrices, and FLOP a second."""
    size, times = device.shape.square, 8
    array = jnp.full((size, size), 1 / size, device.dtype)

    def products(array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda i, other: array @ other, array)

    program = jax.jit(products)
    spent = seconds(lambda: program(array)) / times
    return spent, 2 * size**3 / spent


def engine_of(device: Device, drafts: bool) -> tuple[Engine, Weights]:
    """An engine of the random policy, with a random EAGLE-3 drafter or without a drafter, and its weights."""
    model, config = device.model(), Config()
    config = replace(
        config,
        model=replace(config.model, compute_dtype=device.dtype),
        rollout=replace(config.rollout, prompts=max(device.shape.batches), samples=1, compile_cache="off"),
        speculation=replace(
            config.speculation,
            drafter="a directory" if drafts else "none",
            strategies=list(device.shape.trees),
        ),
    )  # fmt: skip
    drafter, state = None, ()
    if drafts:
        vocab = device.shape.draft_vocab
        drafter = eagle.for_policy(model, "eagle3", draft_vocab_size=vocab)
        state = (eagle.init(drafter, device.mesh, jax.random.key(1), device.dtype, np.arange(vocab)),)  # fmt: skip
    engine = Engine(config, model, device.mesh, drafter=drafter)
    policy = transformer.init(model, device.mesh, jax.random.key(0), device.dtype)
    weights = jax.block_until_ready(engine.publish(policy, *state)[0])
    return engine, weights


def round_seconds(
    engine: Engine,
    weights: Weights,
    device: Device,
    batch: int,
    strategy: Strategy = PLAIN,
    sampling: Sampling = SAMPLED,
) -> float:
    """Seconds of a round of this many rows, each half full."""
    shape, rounds = StateShape(0, batch, device.shape.slots), device.shape.rounds
    program = engine.programs.get(Decode(shape, rounds, strategy, DecodingParams(sampling)))
    state = Start(shape)(engine.programs)

    def begun(state: Any) -> Any:
        small = {"lengths": np.full(batch, device.shape.slots // 2, np.int32),
                 "limits": np.full(batch, 1 << 30, np.int32), "live": np.ones(batch, bool),
                 "keys": np.asarray(sequence_keys(0, 0, 0, np.arange(batch)))}  # fmt: skip
        return state.replace(**meshes.put(small, engine.programs.shapes[0].replicated))

    def call() -> jax.Array:
        nonlocal state
        state, report = program(begun(state), weights, (), np.array([1, rounds], np.int32))
        if int(report.rounds) != rounds:
            raise RuntimeError(f"{report.rounds} rounds instead of {rounds}")
        return report.tokens

    return seconds(call) / rounds
