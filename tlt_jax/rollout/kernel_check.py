"""Runs each fused kernel of a run once beside XLA's operations, before the first rollout, and turns off those that differ."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from tlt_jax.distributed.job import Job
from tlt_jax.distributed.mesh import is_gpu
from tlt_jax.kernels import cache_rows, experts, fused as kernels, token_filter, tree_attention
from tlt_jax.kernels.fused import COSTS, Fused
from tlt_jax.models import (
    architecture,
    decoder_layer,
    drafter as drafters,
    eagle,
    kv_cache,
)
from tlt_jax.models.architecture import EXPERTS, ModelConfig
from tlt_jax.models.drafter import DrafterConfig, DrafterParams
from tlt_jax.models.kv_cache import KVCache, Scratch
from tlt_jax.models.low_rank import Lora
from tlt_jax.spec_decode import sampling
from tlt_jax.spec_decode.interface import Sampling

BATCH, SLOTS = 2, 512  # rows, and slots of the cache of a layer
MOST_NODES = 8  # of a row: more float32 tokens than 16 run in XLA
# By which a result may differ, as a share of its largest number: bfloat16 has 8 bits, and XLA rounds after every operation.
TOLERANCE, EXACT = {"bfloat16": 3e-2}, 3e-3
MISPLACED = 1e-4  # probability of the tokens that only one of the two filters keeps
SEEDS = 1000  # more than a kernel's case draws
FILTERED = Sampling(1.0, 20, 0.95)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shapes:
    """The networks of a run: sizes of policy and drafter, nodes of the widest tree, dtype, and adapters that are not merged."""

    policy: ModelConfig
    drafter: DrafterConfig | None
    nodes: int
    dtype: str
    lora: Lora | None = None

    @property
    def dense(self) -> ModelConfig:
        """The policy without experts, which rounding might choose otherwise."""
        return replace(self.policy, **dict.fromkeys(EXPERTS, 0), dense_layers=())

    @property
    def layers(self) -> list[ModelConfig]:
        """The sizes of a layer of the policy, and of the drafter."""
        own = [kind for kind in self.dense.groups if kind.has_kv]
        return own if self.drafter is None else [*own, self.drafter.layers]


@dataclass
class Numbers:
    """Numbers to compute with, the same for each copy of this; nodes of a tree; and layers of the networks."""

    seed: Array
    nodes: int
    layers: list[Any]
    drawn: int = 0

    def normal(self, dtype: DTypeLike, *shape: int) -> Array:
        """New numbers of mean 0 and variance 1."""
        self.drawn += 1
        return spread(self.seed + self.drawn, shape).astype(dtype)


def spread(seed: Array, shape: Sequence[int]) -> Array:
    """Uniform numbers of mean 0 and variance 1, as hashes of their places (MurmurHash3): XLA compiles them at once."""
    n = jax.lax.iota(jnp.uint32, math.prod(shape)) + seed * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        n = (n ^ (n >> shift)) * jnp.uint32(factor)
    uniform = (n ^ (n >> 16)).astype(jnp.float32) * 2**-31 - 1
    return math.sqrt(3) * uniform.reshape(shape)


def checked(fused: Fused, shapes: Shapes, job: Job) -> Fused:
    """The kernels without those that do not compile, do not run or differ from XLA's operations in any process of the job.

    One line says which are off, why and what that costs. Devices of an ahead-of-time compilation run nothing: all stay on.
    """
    if not is_gpu(fused.mesh) or fused.mesh.devices.flat[0] not in jax.local_devices():
        return fused
    begin, off = time.monotonic(), dict.fromkeys(COSTS.keys() - fused.on, "it cannot run there")
    if fused.on:
        off |= problems(shapes, fused=fused)
        log.info("the fused kernels were checked in %.1f s", time.monotonic() - begin)
    found = {}
    for index, text in job.meeting().heard(json.dumps(off) if off else "").items():
        for name, why in json.loads(text).items():
            found.setdefault(name, f"in process {index}: {why}" if job.count > 1 else why)
    for name in sorted(fused.on & found.keys()) if job.is_first else ():
        log.warning("%s", line(name, found[name]))
    return replace(fused, on=fused.on - found.keys())


def line(name: str, why: str) -> str:
    """What is said of a kernel that is off."""
    return f"the kernel {name} is off: {why}; XLA's operations run in its place, which costs {COSTS[name]}"


def problems(shapes: Shapes, *, fused: Fused) -> dict[str, str]:
    """Why each kernel that is not right is not, of those that are on, on random numbers in layers of these shapes."""
    names = fused.on if shapes.policy.num_experts else fused.on - kernels.OF_EXPERTS
    names = sorted(names)
    try:
        found = errors(shapes, fused, names)
    except Exception:  # a compiler may raise anything; each kernel alone tells which one it is
        found = {}
        for name in names:
            try:
                found |= errors(shapes, fused, [name])
            except Exception as error:
                text = str(error).strip().splitlines() or [""]
                found[name] = f"it does not run: {type(error).__name__}: {text[0]}"
    wrong = {}
    for name, error in found.items():
        if isinstance(error, str):
            wrong[name] = error
        elif name == kernels.FILTER and not error <= MISPLACED:  # NaN too
            wrong[name] = (
                f"it misplaces tokens of probability {error:.2g}, rounding {MISPLACED:g} at most"
            )
        elif name != kernels.FILTER and not error <= (most := TOLERANCE.get(shapes.dtype, EXACT)):
            wrong[name] = (
                f"it differs by {error:.2g} of the largest number, rounding by {most:g} at most"
            )
    return wrong


def errors(shapes: Shapes, fused: Fused, names: Sequence[str]) -> dict[str, float]:
    """By how much each of these kernels alone differs from XLA's operations, by one program."""

    def all_of_them(seed: Array) -> dict[str, Array]:
        layers, found = drawn_layers(shapes, fused, seed), {}
        for name in names:
            part, measure = PARTS[name]
            # The counters of `added` come from `gated`.
            base = fused.on & {kernels.GATED} if name == kernels.ADDED else frozenset()
            each = []
            for nodes in sorted({1, min(shapes.nodes, MOST_NODES)}):
                ours, xla = (
                    part(shapes, Numbers(seed, nodes, layers), replace(fused, on=on))
                    for on in (base | {name}, base)
                )
                each += map(measure, ours, xla)
            found[name] = jnp.max(jnp.stack(each))
        return found

    everywhere = NamedSharding(fused.mesh, PartitionSpec())
    with jax.default_matmul_precision("highest"):
        # The seed is an argument: XLA would compute the numbers of a constant one while it compiles.
        found = jax.jit(all_of_them, out_shardings=everywhere)(jnp.uint32(0))
    return {name: float(error) for name, error in found.items()}


def difference(ours: Array, xla: Array) -> Array:
    """The largest difference as a share of the largest number; NaN where a number is NaN."""
    ours, xla = ours.astype(jnp.float32), xla.astype(jnp.float32)
    return jnp.max(jnp.abs(ours - xla)) / jnp.max(jnp.abs(xla))


def misplaced(ours: Array, xla: Array) -> Array:
    """The largest probability in a row of the tokens that only one of two filters keeps."""
    one, other = ours > -jnp.inf, xla > -jnp.inf
    probability = jax.nn.softmax(jnp.where(one, ours, xla))
    return jnp.max(jnp.sum(jnp.where(one != other, probability, 0), axis=-1))


def heads(shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """Queries, keys and values of nodes, in a layer of the policy and of the drafter."""
    found, tokens = [], BATCH * given.nodes
    for sizes, params in zip(shapes.layers, given.layers, strict=True):
        x, other = (3 * given.normal(shapes.dtype, sizes.hidden_size, tokens) for _ in range(2))
        turns = 3 * given.normal("float32", sizes.head_dim // 2, tokens)
        angles = jnp.cos(turns).astype(shapes.dtype), jnp.sin(turns).astype(shapes.dtype)
        if isinstance(params, DrafterParams):
            found += eagle.node_heads(params, shapes.drafter, other, x, angles, BATCH, fused)
        else:
            found += decoder_layer.attention_heads(params, sizes, (x, None), angles, BATCH, fused)
    return found


def ends(shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """The output from attention's result on, and that normed, of a layer of the policy and of the drafter."""
    found, tokens = [], BATCH * given.nodes
    for sizes, params in zip(shapes.layers, given.layers, strict=True):
        layer = params.layers if isinstance(params, DrafterParams) else params
        x = given.normal(shapes.dtype, sizes.hidden_size, tokens)
        attended = given.normal(shapes.dtype, sizes.num_heads * sizes.head_dim, tokens)
        x, normed, _ = decoder_layer.finish_nodes(layer, sizes, x, attended, layer.mlp_norm, fused)
        found += [
            x,
            decoder_layer.norm(x, layer.mlp_norm, sizes, 0) if normed is None else normed,
        ]
    return found


def attention(shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """Attention of a tree, in a row of few committed slots and in a full one; and in a ring, if a layer has a window."""
    found, nodes = [], given.nodes
    i, j = jnp.mgrid[:nodes, :nodes]
    seen = (i == j) | (j == 0) | ((j < i) & (i % 2 == j % 2))
    seen, lengths = (
        jnp.broadcast_to(seen, (BATCH, nodes, nodes)),
        jnp.array([5, SLOTS - nodes], jnp.int32),
    )
    for sizes in shapes.layers:
        q, keys, values, k, v = cached(sizes, shapes, given, fused)
        found += tree_attention.attend(q, k, v, seen, keys, values, lengths, False, fused)[:1]
        if sizes.windows:
            counts = jnp.array([SLOTS + 7, SLOTS - nodes], jnp.int32)
            first = jnp.broadcast_to(counts[:, None] - SLOTS // 2, (BATCH, nodes))
            ring = keys, values, counts, False, fused
            found += tree_attention.attend(q, k, v, seen, *ring, first=first, wraps=True)[:1]
    return found


def committed(shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """Keys and values of a cache into which a path was written."""
    found, starts = [], jnp.array([0, SLOTS - 2], jnp.int32)
    path = jnp.array([[0, given.nodes - 1]] * BATCH, jnp.int32)[:, : given.nodes]
    for sizes in shapes.layers:
        _, keys, values, k, v = cached(sizes, shapes, given, fused)
        after = jnp.zeros((1, 1), shapes.dtype) if cache_rows.runs(fused, False) else None
        features = jnp.zeros((BATCH, SLOTS, 0), shapes.dtype)
        scratch = Scratch((k,), (v,), features[:, : given.nodes], after=after)
        cache = kv_cache.commit(KVCache((keys,), (values,), features), scratch, path, starts, fused)
        found += [*cache.keys, *cache.values]
    return found


def filtered(shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """Logits of which top-k and top-p keep some, as bindings.filtered."""
    vocab = architecture.padded_vocab(shapes.policy, fused.mesh.shape["model"])
    scaled = 3 * given.normal("float32", BATCH, given.nodes, vocab)
    border = token_filter.border(scaled, FILTERED.top_k, FILTERED.top_p, fused)
    if border is None:
        return [sampling.filter(scaled, FILTERED, unrolls=True)]
    return [jnp.where(sampling.ordered_bits(scaled) >= border, scaled, -jnp.inf)]


def mixed(shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """A mix of experts as decoding has it."""
    x, ids, gates, gate, up, down = drawn_experts(shapes, given)
    joined = (jnp.stack([gate, up], axis=1),)
    return [experts.mix(x, ids, gates, joined, down, jax.nn.silu, None, fused, "rollout")]


def mixed_rows(shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """A mix of experts and its gradients, as training has it."""
    x, ids, gates, *matrices = drawn_experts(shapes, given)

    def mix(x: Array, gates: Array, gate: Array, up: Array, down: Array) -> Array:
        return experts.mix(x, ids, gates, (gate, up), down, jax.nn.silu, None, fused)

    y, backward = jax.vjp(mix, x, gates, *matrices)
    return [y, *backward(given.normal(shapes.dtype, *y.shape))]


def drawn_experts(shapes: Shapes, given: Numbers) -> list[Array]:
    """Tokens, two of eight experts of each, and their gates; gate, up and down."""
    N, k, D, F, T = 8, 2, 256, 128, BATCH * given.nodes
    ids = jax.lax.top_k(given.normal("float32", T, N), k)[1]
    wide = [
        given.normal(shapes.dtype, *one) / one[-1] ** 0.5 for one in [(N, F, D)] * 2 + [(N, D, F)]
    ]
    return [given.normal(shapes.dtype, T, D), ids, given.normal("float32", T, k), *wide]


def cached(sizes: ModelConfig, shapes: Shapes, given: Numbers, fused: Fused) -> list[Array]:
    """Queries, keys and values of a cache, and of nodes, in a layer of these sizes."""
    K, E = architecture.rollout_kv_heads(sizes, fused.mesh.shape["model"]), sizes.head_dim
    queries = K, sizes.num_heads // K, given.nodes, E
    nodes = (K, E, given.nodes), (K, given.nodes, E)
    each = queries, (K, E, SLOTS), (K, SLOTS, E), *nodes
    return [given.normal(shapes.dtype, BATCH, *shape) for shape in each]


def drawn_layers(shapes: Shapes, fused: Fused, seed: Array) -> list[Any]:
    """Random parameters of a layer of the policy, and of one of a block drafter, or of all of EAGLE; results are about 1."""

    def of(leaf: jax.ShapeDtypeStruct, place: int) -> Array:
        array = spread(seed + SEEDS + place, leaf.shape)
        array = 1 + 0.2 * array if leaf.ndim == 1 else array * leaf.shape[-1] ** -0.5
        return jax.lax.with_sharding_constraint(array.astype(leaf.dtype), leaf.sharding)

    given = shapes.dtype, shapes.lora
    policy = architecture.abstract(shapes.dense, fused.mesh, "rollout", *given)
    first = dict(zip(shapes.dense.kinds[::-1], policy.layers[::-1], strict=True))
    layers: list[Any] = [first[kind] for kind in shapes.dense.groups if kind.has_kv]
    if shapes.drafter is not None:
        params = drafters.abstract(shapes.drafter, fused.mesh, "rollout", shapes.dtype)
        layers.append(params.layers[0] if shapes.drafter.is_block else params)
    leaves, structure = jax.tree.flatten(layers)
    return jax.tree.unflatten(structure, map(of, leaves, range(len(leaves))))


# What each kernel computes, and how that is compared.
PARTS: dict[str, tuple[Callable[[Shapes, Numbers, Fused], list[Array]], Callable[..., Array]]] = {
    kernels.HEADS: (heads, difference),
    kernels.PART_HEADS: (heads, difference),
    kernels.ADDED: (ends, difference),
    kernels.GATED: (ends, difference),
    kernels.PART_ADDED: (ends, difference),
    kernels.ATTENTION: (attention, difference),
    kernels.CACHE_ROWS: (committed, difference),
    kernels.FILTER: (filtered, misplaced),
    kernels.EXPERTS: (mixed_rows, difference),
    kernels.FEW_EXPERTS: (mixed, difference),
}
