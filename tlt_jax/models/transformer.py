"""The policy network: packed forward for training, prefill and tree forward for rollout; arrays in, arrays out.

Features lie on `axis`, as in layers.py; shapes are written for axis -1 in functions that take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax.distributed.mesh import is_gpu, sharding
from tlt_jax.kernels import cache_rows, packed_attention, projections, tree_attention
from tlt_jax.kernels.numerics import contract, masked
from tlt_jax.models import layers as ops, remat as remats
from tlt_jax.models.architecture import (
    NORMED,
    Captures,
    JoinedLayer,
    Layer,
    ModelConfig,
    Params,
    Rope,
    abstract,
    check_mesh,
    head,
    init,
    padded_vocab,
    shardings,
    to_rollout,
    weights,
)
from tlt_jax.models.kv_cache import KVCache, Scratch
from tlt_jax.shapes import shaped

__all__ = [
    "NORMED", "Captures", "Layer", "ModelConfig", "Params", "Rope", "abstract", "check_mesh", "hidden", "init",
    "logits", "padded_vocab", "prefill", "shardings", "to_rollout", "tree_forward", "weights",
]  # fmt: skip


def qkv(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "*A D"],
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> tuple[Float[Array, "*A H E"], Float[Array, "*A K E"], Float[Array, "*A K E"]]:
    """Rotated queries and keys, and values, of x before the layer's first norm."""
    return heads(
        layer, config, ops.rms_norm(x, layer.attention_norm, config.rms_eps, axis), cos, sin, axis
    )


def heads(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "*A In"],
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> tuple[Float[Array, "*A H E"], Float[Array, "*A K E"], Float[Array, "*A K E"]]:
    """Rotated queries and keys, and values, as heads: [H, E, *A] for axis 0, with angles [E/2, *A]."""
    if isinstance(layer, Layer):
        q = queries(layer, config, x, cos, sin, axis)
        return q, *keys_values(layer, config, x, cos, sin, axis)

    with jax.named_scope("attention"):
        y = ops.project(x, layer.qkv, layer.qkv_bias, axis)
        at, G = 0 if axis == 0 else -3, layer.qkv.shape[1] - 2  # where K lies in y
        parts = jnp.split(y, (G, G + 1), axis=at + 1)
        q, k, v = (jax.lax.collapse(part, at, at + 2) for part in parts)
        q = rotated(q, layer.q_norm, config, cos, sin, axis)
        return q, rotated(k, layer.k_norm, config, cos, sin, axis), v


@jax.named_scope("attention")
def queries(
    layer: Layer,
    config: ModelConfig,
    x: Float[Array, "*A In"],
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> Float[Array, "*A H E"]:
    """Rotated queries, as of `heads`."""
    q = by_head(ops.project(x, layer.q, layer.q_bias, axis), config, axis)
    return rotated(q, layer.q_norm, config, cos, sin, axis)


@jax.named_scope("attention")
def keys_values(
    layer: Layer,
    config: ModelConfig,
    x: Float[Array, "*A In"],
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> tuple[Float[Array, "*A K E"], Float[Array, "*A K E"]]:
    """Rotated keys, and values, as of `heads`."""
    k = by_head(ops.project(x, layer.k, layer.k_bias, axis), config, axis)
    v = by_head(ops.project(x, layer.v, layer.v_bias, axis), config, axis)
    v = remats.named(v, remats.HEADS)
    return rotated(k, layer.k_norm, config, cos, sin, axis), v


def by_head(x: Float[Array, "*A HE"], config: ModelConfig, axis: int) -> Float[Array, "*A H E"]:
    """A projection split into heads."""
    shape = (
        (-1, config.head_dim, *x.shape[1:]) if axis == 0 else (*x.shape[:-1], -1, config.head_dim)
    )
    return x.reshape(shape)


def rotated(
    x: Float[Array, "*A H E"],
    norm: Float[Array, " E"] | None,
    config: ModelConfig,
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> Float[Array, "*A H E"]:
    """Queries or keys, normed if the policy has that norm, then rotated."""
    width = 1 if axis == 0 else -1
    x = remats.named(x, remats.HEADS)  # before the norm, whose backward pass needs it
    x = x if norm is None else ops.rms_norm(x, norm, config.rms_eps, width)
    return ops.rotate(x, cos, sin, width)


def finish(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "*A D"],
    attended: Float[Array, "*A HE"],
    axis: int,
) -> Float[Array, "*A D"]:
    """The layer's output: the projection of attention's result is added, then the MLP."""
    with jax.named_scope("attention"):
        x = remats.named(x + ops.project(attended, layer.o, layer.o_bias, axis), remats.ATTENDED)

    with jax.named_scope("mlp"):
        return x + ops.project(mlp_inner(layer, config, x, axis), layer.down, layer.down_bias, axis)


def finish_nodes(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "D BN"],
    attended: Float[Array, "HE BN"],
    mesh: Mesh | None,
) -> Float[Array, "D BN"]:
    """`finish` of tree nodes, by kernels where `projections` has them."""

    def add(x: Array, y: Array, weight: Array, bias: Array | None, arrivals: Array | None) -> Array:
        found = projections.added(x, y, weight, bias, arrivals, mesh)
        return x + ops.project(y, weight, bias, 0) if found is None else found

    with jax.named_scope("attention"):
        x = add(x, attended, layer.o, layer.o_bias, None)

    with jax.named_scope("mlp"):
        joined = isinstance(layer, JoinedLayer)
        matrices = (layer.gate_up,) if joined else (layer.gate, layer.up)
        biases = (layer.gate_up_bias,) if joined else (layer.gate_bias, layer.up_bias)
        found = projections.gated(x, layer.mlp_norm, matrices, biases, config.rms_eps, mesh)
        y, arrivals = (mlp_inner(layer, config, x, 0), None) if found is None else found
        return add(x, y, layer.down, layer.down_bias, arrivals)


def mlp_inner(
    layer: Layer | JoinedLayer, config: ModelConfig, x: Float[Array, "*A D"], axis: int
) -> Float[Array, "*A F"]:
    """What the MLP's last projection reads."""
    y = ops.rms_norm(x, layer.mlp_norm, config.rms_eps, axis)
    gate, up = gate_up(layer, y, axis)
    return jax.nn.silu(gate) * up


def gate_up(
    layer: Layer | JoinedLayer, y: Float[Array, "*A D"], axis: int
) -> tuple[Float[Array, "*A F"], Float[Array, "*A F"]]:
    """The gate and up projections of the MLP's input.

    For tree nodes (axis 0), joined matrices are one product. For all tokens of prompts that product's result would be one
    more large array, and it saves no time.
    """
    if isinstance(layer, Layer):
        gate = ops.project(y, layer.gate, layer.gate_bias, axis)
        up = ops.project(y, layer.up, layer.up_bias, axis)
        return remats.named(gate, remats.MLP), remats.named(up, remats.MLP)
    if axis == 0:
        gate, up = ops.project(y, layer.gate_up, layer.gate_up_bias, axis)
        return gate, up
    biases = (None, None) if layer.gate_up_bias is None else layer.gate_up_bias
    gate, up = map(partial(ops.project, y, axis=axis), layer.gate_up, biases)
    return gate, up


@jax.named_scope("layer")
@shaped
def packed_layer(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    angles: tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]],
    segments: Int[Array, "B T"],
    block: int,
    longest: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T K E"], Float[Array, "B T K E"]]:
    """The layer's output, and its keys and values."""
    q, k, v = qkv(layer, config, x, *angles, axis=-1)
    q = q.reshape(*k.shape[:3], -1, config.head_dim)
    attended = packed_attention.attend(q, k, v, segments, block, longest, mesh=mesh)
    return finish(layer, config, x, attended.reshape(*x.shape[:2], -1), axis=-1), k, v


@shaped
def packed_angles(
    config: ModelConfig, positions: Int[Array, "B T"], dtype: DTypeLike
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Cosine and sine of the rotary embedding, the same for every head."""
    cos, sin = ops.rope_angles(config.rope, config.head_dim, positions, dtype)
    return cos[:, :, None], sin[:, :, None]


@shaped
def hidden(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    compute_dtype: DTypeLike,
    remat: remats.Remat = (),
    block: int = 512,
    longest: int | None = None,
    mesh: Mesh | None = None,
    captures: Captures = (),
) -> tuple[Float[Array, "B T D"], Float[Array, "B T F"]]:
    """Normed last hidden states of packed rows, and the captured features.

    A token attends to itself and to the earlier tokens of its segment; segment 0 is padding. No segment has more than
    `longest` tokens. `params`: "train" layout. With a mesh, rows stay sharded over `data`, and weights are gathered layer
    by layer. `remat`: what each layer keeps for the backward pass.
    """

    def rows(x: Array) -> Array:
        if mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, sharding(mesh, ("batch",), "train"))

    def body(
        carry: tuple[Array, list[Array]], step: tuple[Array, Layer]
    ) -> tuple[tuple[Array, list[Array]], None]:
        (x, kept), (depth, layer) = carry, step
        layer = jax.tree.map(lambda leaf: leaf.astype(compute_dtype), layer)
        x = rows(packed_layer(layer, config, x, angles, segments, block, longest, mesh)[0])
        return (
            x,
            [
                jnp.where(depth == capture, x, old)
                for capture, old in zip(captures, kept, strict=True)
            ],
        ), None

    def at_depth(carry: tuple[Array, list[Array]], depth: Array):
        """`body` on the layer at this depth, read in its place: a slice of some layers would be a copy of their weights."""
        return body(carry, (depth, jax.tree.map(lambda leaf: leaf[depth - 1], params.layers)))

    angles = packed_angles(config, positions, compute_dtype)
    with jax.named_scope("embed"):
        x = rows(params.embed[tokens].astype(compute_dtype))
    depths, carry = jnp.arange(1, config.num_layers + 1), (x, [x] * len(captures))
    for level, first, count in remats.spans(remat, config.num_layers):
        if count == config.num_layers:
            carry, _ = jax.lax.scan(remats.keeping(level, body), carry, (depths, params.layers))
        else:
            part = depths[first : first + count]
            carry, _ = jax.lax.scan(remats.keeping(level, at_depth), carry, part)
    x, kept = carry
    x = ops.rms_norm(x, params.final_norm.astype(compute_dtype), config.rms_eps)
    return x, gathered(captures, kept, x, axis=-1)


def gathered(
    captures: Captures,
    kept: Sequence[Float[Array, "*A D"]],
    normed: Float[Array, "*A D"],
    axis: int,
) -> Float[Array, "*A F"]:
    """The captured hidden states, concatenated on `axis`; of width 0 without captures."""
    if not captures:
        return jax.lax.slice_in_dim(normed, 0, 0, axis=axis % normed.ndim)
    chosen = [normed if capture == NORMED else x for capture, x in zip(captures, kept, strict=True)]
    return jnp.concatenate(chosen, axis=axis)


@jax.named_scope("head")
@shaped
def logits(
    params: Params, config: ModelConfig, x: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """Logits over the padded vocabulary, in at least float32; those of padding are the lowest number."""
    scores = contract("...d,vd->...v", x, head(params).astype(x.dtype))
    return masked(scores, jnp.arange(scores.shape[-1]) < config.vocab_size)


@jax.named_scope("prefill")
@shaped
def prefill(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "Q P"],
    lengths: Int[Array, " Q"],
    captures: Captures = (),
    block: int = 512,
    captures_states: bool = False,
    mesh: Mesh | None = None,
) -> Scratch:
    """Keys, values, features and states of whole prompts; those past a prompt's length are undefined.

    `params`: "rollout" layout.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    with jax.named_scope("embed"):
        x = params.embed[tokens]
    angles = packed_angles(config, positions, x.dtype)
    keys, values, states = [], [], [x]
    for layer in params.layers:
        x, k, v = packed_layer(layer, config, x, angles, segments, block, mesh=mesh)
        keys.append(jnp.moveaxis(k, 1, 3))
        values.append(jnp.moveaxis(v, 1, 2))
        states.append(x)

    normed = ops.rms_norm(x, params.final_norm, config.rms_eps)  # XLA removes it unless captured
    features = gathered(captures, [states[capture] for capture in captures], normed, axis=-1)
    return Scratch(tuple(keys), tuple(values), features, normed if captures_states else None)


def node_heads(
    layer: JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "D BN"],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    batch: int,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]]:
    """`qkv` of the nodes of B trees as tree_attention.attend takes it, by a kernel where `projections` has one."""
    K, J, E, _ = layer.qkv.shape
    with jax.named_scope("attention"):
        found = projections.heads(
            (x,), (layer.attention_norm,), (layer.qkv,), (layer.qkv_bias,), (layer.q_norm, layer.k_norm), angles,
            (K, J - 2, E), batch, config.rms_eps, mesh,
        )  # fmt: skip
    return ops.by_node(*qkv(layer, config, x, *angles, axis=0), batch) if found is None else found


@jax.named_scope("layer")
@shaped
def tree_layer(
    layer: JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "D BN"],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    ancestors: Bool[Array, "B N N"],
    past: tuple[Float[Array, "B K E S"], Float[Array, "B K _ _"], Int[Array, " B"], bool],
    mesh: Mesh | None = None,
    arrivals: Int32[Array, "B K tiles"] | None = None,
) -> tuple[
    Float[Array, "D BN"],
    Float[Array, "B K E N"],
    Float[Array, "B K N E"],
    Int32[Array, "B K tiles"] | None,
]:
    """The layer's output, the keys and values of tree nodes, and `arrivals` of the next layer's tree_attention.attend.

    `past`: the cached keys and values, the number of committed slots of each sequence, and whether the values have slots
    on their last axis.
    """
    q, k, v = node_heads(layer, config, x, angles, ancestors.shape[0], mesh)
    attended, arrivals = tree_attention.attend(q, k, v, ancestors, *past, mesh, arrivals)
    return finish_nodes(layer, config, x, ops.by_feature(attended), mesh), k, v, arrivals


@shaped
def tree_forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    ancestors: Bool[Array, "B N N"],
    cache: KVCache,
    lengths: Int[Array, " B"],
    captures: Captures = (),
    captures_states: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B N V"], Scratch]:
    """Logits of tree nodes, and the Scratch from which `commit` takes a path.

    A node attends to the committed slots, its ancestors and itself. `params`: "rollout" layout.
    """
    B, N = tokens.shape
    with jax.named_scope("embed"):
        x = params.embed[tokens.reshape(-1)].T
    cos, sin = ops.rope_angles(config.rope, config.head_dim, positions.reshape(-1), x.dtype)
    kept, states, arrivals = [], [x], None
    for layer, keys, values in zip(params.layers, cache.keys, cache.values, strict=True):
        past = keys, values, lengths, cache.slots_last
        x, k, v, arrivals = tree_layer(
            layer, config, x, (cos.T, sin.T), ancestors, past, mesh, arrivals
        )
        kept.append((k, v))
        states.append(x)

    x = ops.rms_norm(x, params.final_norm, config.rms_eps, axis=0)
    with jax.named_scope("head"):
        # On GPUs XLA fuses more into reductions of the last axis.
        if mesh is not None and is_gpu(mesh):
            scores = contract("dt,vd->tv", x, head(params))
            if config.vocab_size < scores.shape[1]:
                scores = masked(scores, jnp.arange(scores.shape[1]) < config.vocab_size)
        else:
            scores = contract("vd,dt->vt", head(params), x)
            scores = masked(scores, jnp.arange(scores.shape[0])[:, None] < config.vocab_size).T
    features = gathered(captures, [states[capture] for capture in captures], x, axis=0).T.reshape(
        B, N, -1
    )

    # Make the scratch depend on the end of the pass: XLA would copy a cache that may be written before it is read.
    after = x.T if cache_rows.runs(mesh, cache.slots_last) else None
    if after is None:
        sound = (x[0] == x[0]).reshape(B, 1, 1, N)
        still = jnp.swapaxes(sound, 2, 3)
        kept = [(jnp.where(sound, k, 0), jnp.where(still, v, 0)) for k, v in kept]
    keys, values = zip(*kept, strict=True)
    states = x.T.reshape(B, N, -1) if captures_states else None
    scratch = Scratch(keys, values, features, states, after)
    return scores.reshape(B, N, -1), scratch
