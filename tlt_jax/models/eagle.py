"""The drafter network: cache extension and tree steps for rollout, unrolled for training.

Let f_t be the policy's features of token x_t. Slot t of the drafter's cache comes from (f_t, x_{t+1}), at rotary position
t, and the hidden state there predicts x_{t+2}. Deeper in a draft tree, the drafter's own hidden state of the parent
replaces the features (Li et al. 2024, arXiv 2401.15077, section 3; EAGLE-3: arXiv 2503.01840, section 3).

Features lie on `axis`, as in layers.py; shapes are written for axis -1 in functions that take it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from tlt_jax.kernels import cache_rows, packed_attention, tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import decoder_layer, drafter as drafters, kv_cache, layers as ops
from tlt_jax.models.architecture import rollout_kv_heads
from tlt_jax.models.decoder_layer import (
    finish,
    finish_nodes,
    heads,
    keys_values,
    packed_angles,
    queries,
)
from tlt_jax.models.drafter import DrafterConfig, DrafterParams, Shared, cast, gathered
from tlt_jax.models.kv_cache import KVCache, Scratch
from tlt_jax.shapes import shaped

logits = drafters.logits  # which every network has


def scratch(
    config: DrafterConfig, batch: int, rows: int, dtype: DTypeLike, model_axis: int = 1
) -> KVCache:
    """Zeros for the keys and values of `rows` tree nodes, on a mesh with this `model` axis."""
    K, E = rollout_kv_heads(config.layers, model_axis), config.layers.head_dim
    return KVCache(
        keys=(jnp.zeros((batch, K, E, rows), dtype),),
        values=(jnp.zeros((batch, K, rows, E), dtype),),
        features=jnp.zeros((batch, rows, 0), dtype),
    )


def fuse(
    params: DrafterParams,
    config: DrafterConfig,
    embedded: Float[Array, "*A Z"],
    state: Float[Array, "*A F"],
    axis: int,
    given: bool,
) -> Float[Array, "*A Z"]:
    """The layer's input, from token embeddings and the state: the policy's features if `given`, else a hidden state.

    It enters the residual stream, normed with norm_before_residual.
    """
    if config.kind == "eagle":
        return ops.project(
            jnp.concatenate([embedded, state], axis=axis), params.fuse, params.fuse_bias, axis
        )
    if given and config.fc_norm:
        parts = jnp.split(state, len(config.captures), axis=axis)
        pairs = zip(parts, params.feature_norms, strict=True)
        state = jnp.concatenate(
            [ops.rms_norm(x, weight, config.layers.rms_eps, axis) for x, weight in pairs], axis=axis
        )
    x = ops.project(state, params.fuse, None, axis) if given else state
    if config.norm_before_residual:
        x = ops.rms_norm(x, params.hidden_norm, config.layers.rms_eps, axis)
    return x


def attention_input(
    params: DrafterParams,
    config: DrafterConfig,
    embedded: Float[Array, "*A Z"],
    x: Float[Array, "*A Z"],
    axis: int,
) -> Float[Array, "*A Y"]:
    """The input of the query, key and value projections, from the layer's input."""
    if config.kind == "eagle":
        return x
    e = ops.rms_norm(embedded, params.layers.attention_norm, config.layers.rms_eps, axis)
    if not config.norm_before_residual:
        x = ops.rms_norm(x, params.hidden_norm, config.layers.rms_eps, axis)
    return jnp.concatenate([e, x], axis=axis)


@shaped
def nodes_in(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    tokens: Int[Array, "B N"],
    state: Float[Array, "B N F"],
    positions: Int[Array, "B N"],
    given: bool,
) -> tuple[Float[Array, "Z BN"], Float[Array, "Z BN"], tuple[Float[Array, "half BN"], ...]]:
    """The layer's input, the tokens' embeddings, and cosine and sine of the rotary embedding."""
    state = state.reshape(-1, state.shape[-1]).T
    embedded = shared.embed[tokens.reshape(-1)].astype(state.dtype).T
    angles = decoder_layer.node_angles(config.layers, positions, state.dtype)
    return fuse(params, config, embedded, state, 0, given), embedded, angles


def node_heads(
    params: DrafterParams,
    config: DrafterConfig,
    embedded: Float[Array, "Z BN"],
    x: Float[Array, "Z BN"],
    angles: tuple[Float[Array, "half BN"], ...],
    batch: int,
    fused: Fused | None,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]]:
    """Queries, keys and values as tree_attention.attend takes them."""
    inputs, norms, y = (embedded, x), (params.layers.attention_norm, params.hidden_norm), None
    if config.kind == "eagle" or config.norm_before_residual:
        inputs, norms, y = (), (), attention_input(params, config, embedded, x, 0)
    rest = y, angles, batch, fused
    return decoder_layer.node_heads(params.layers, config.layers, inputs, norms, *rest)


@shaped
def nodes_out(
    params: DrafterParams,
    config: DrafterConfig,
    x: Float[Array, "Z BN"],
    attended: Float[Array, "B K G N E"],
    fused: Fused | None,
) -> Float[Array, "B N Z"]:
    """Hidden states of nodes after attention: the next level of the tree and the head read them."""
    norm = params.final_norm if config.norm_output else None
    x, normed, _ = finish_nodes(
        params.layers, config.layers, x, ops.by_feature(attended), norm, fused
    )
    if norm is not None:
        x = ops.rms_norm(x, norm, config.layers.rms_eps, 0) if normed is None else normed
    return x.T.reshape(attended.shape[0], attended.shape[3], -1)


@jax.named_scope("drafter/extend")
@shaped
def extend(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    cache: KVCache,
    tokens: Int[Array, "B W"],
    features: Float[Array, "B W F"],
    starts: Int[Array, " B"],
    last: Int[Array, " B"],
    fused: Fused | None = None,
) -> tuple[KVCache, Float[Array, "B Z"]]:
    """The cache with W more slots from starts[b] on, and the hidden state of row last[b].

    Row w holds the features of position starts + w and the token after it; it attends to the slots before `starts` and to
    the rows up to itself. The keys and values of the only layer do not depend on attention, so attention is computed for
    row `last` only. The cache must have slots for all W rows; those after `last` are undefined, and a later call
    overwrites them. Computed in the dtype of `features`; `params`: "rollout" layout.
    """
    B, W = tokens.shape
    features, positions = gathered(features, fused), starts[:, None] + jnp.arange(W)
    x, embedded, (cos, sin) = nodes_in(
        params, config, shared, tokens, features, positions, given=True
    )
    y = attention_input(params, config, embedded, x, 0)
    chosen = jnp.arange(B) * W + last
    x, cos_last, sin_last = (array[:, chosen] for array in (x, cos, sin))
    q = queries(params.layers, config.layers, y[:, chosen], cos_last, sin_last, 0)
    q, k, v = ops.by_node(q, *keys_values(params.layers, config.layers, y, cos, sin, 0), B)
    seen = (jnp.arange(W) <= last[:, None])[:, None]
    past = cache.keys[0], cache.values[0], starts, cache.slots_last
    attended, _ = tree_attention.attend(q, k, v, seen, *past, fused)
    hidden = nodes_out(params, config, x, attended, fused)[:, 0]
    after = hidden if cache_rows.runs(fused, cache.slots_last) else None
    if after is None:  # XLA copies a cache that may be written before it is read
        sound = (hidden[:, 0] == hidden[:, 0])[:, None, None, None]
        k, v = jnp.where(sound, k, 0), jnp.where(sound, v, 0)
    rows = Scratch((k,), (v,), jnp.zeros((B, W, 0), cache.features.dtype), after=after)
    return kv_cache.commit(cache, rows, None, starts, fused), hidden


@jax.named_scope("drafter/fill")
@shaped
def fill(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    cache: KVCache,
    tokens: Int[Array, "R W"],
    features: Float[Array, "R W F"],
    rows: Int[Array, " R"],
    starts: Int[Array, " R"],
    fused: Fused | None = None,
) -> KVCache:
    """`extend` without hidden states: W more slots of sequences rows[r], from starts[r] on."""
    features = gathered(features, fused)
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    x, embedded, angles = nodes_in(params, config, shared, tokens, features, positions, given=True)
    y = attention_input(params, config, embedded, x, 0)
    k, v = ops.kv_by_node(
        *keys_values(params.layers, config.layers, y, *angles, 0), tokens.shape[0]
    )
    return kv_cache.write(
        cache, Scratch((k,), (v,), features[..., :0].astype(cache.features.dtype)), rows, starts
    )


@jax.named_scope("drafter/step")
@shaped
def draft_level(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    cache: KVCache,
    scratch: KVCache,
    tokens: Int[Array, "B k"],
    hidden: Float[Array, "B k Z"],
    positions: Int[Array, "B k"],
    starts: Int[Array, " B"],
    ancestors: Bool[Array, "B k R"],
    level: int | Int[Array, ""],
    fused: Fused | None = None,
) -> tuple[KVCache, Float[Array, "B k Z"]]:
    """The scratch with a level's k nodes from row level * k on, and the nodes' hidden states.

    `hidden`: those of the nodes' parents. The nodes attend to the first starts[b] slots of the cache, and to those of the
    first R >= (level + 1) * k scratch rows that `ancestors` marks, which are of this level or above. `params`: "rollout"
    layout.
    """
    first, rows = level * tokens.shape[1], ancestors.shape[2]
    x, embedded, angles = nodes_in(params, config, shared, tokens, hidden, positions, given=False)
    q, k, v = node_heads(params, config, embedded, x, angles, tokens.shape[0], fused)
    (keys,), (values,) = scratch.keys, scratch.values
    if cache_rows.runs(fused, scratch.slots_last):
        # Whoever read these rows before has contributed to `hidden`, and so to k.
        start = jnp.asarray(first, jnp.int32)
        keys, values = cache_rows.write(keys, values, k, v, None, start, start, fused)
    else:
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k, first, axis=3)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, first, axis=2)
    seen = keys[..., :rows], values[:, :, :rows]
    past = cache.keys[0], cache.values[0], starts, cache.slots_last
    attended, _ = tree_attention.attend(q, *seen, ancestors, *past, fused)
    return scratch.replace(keys=(keys,), values=(values,)), nodes_out(
        params, config, x, attended, fused
    )


@shaped
def shift(
    array: Shaped[Array, "B T *A"], segments: Int[Array, "B T"], by: int
) -> tuple[Shaped[Array, "B T *A"], Bool[Array, "B T"]]:
    """array[b, t + by] of packed rows at every t, and whether that token is in t's (nonzero) segment.

    Elsewhere the values are those of another segment, or zero beyond the row.
    """

    def moved(array: Array) -> Array:
        kept = array[:, by:]
        return jnp.pad(
            kept,
            [(0, array.shape[1] - kept.shape[1] if axis == 1 else 0) for axis in range(array.ndim)],
        )

    return moved(array), (moved(segments) == segments) & (segments > 0)


@jax.named_scope("drafter/unroll")
@shaped
def unroll(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T F"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    steps: int,
    block: int = 512,
    mesh: Mesh | None = None,
) -> Float[Array, "J B T Z"]:
    """Hidden states of `steps` levels of drafting along given tokens: EAGLE-3's training-time test.

    Step j at slot t reads token t + 1 + j, and the features (j = 0) or the hidden state of step j - 1 at slot t. It has
    rotary position t + j, and attends to step 0 of its segment's slots up to t and to its own slot of steps 1..j.
    `extend` and then j times `draft_level` compute the same (section 3.2). Step j predicts token t + 2 + j; it is undefined
    where token t + 1 + j is beyond t's segment.

    Computed in the dtype of `features`; `params`: "train" layout. The backward pass recomputes every step; memory grows
    linearly with T. With a mesh, rows stay sharded over `data`.
    """

    rows = partial(ops.by_row, mesh=mesh)

    @jax.checkpoint
    def advance(
        params: DrafterParams,
        embedded: Array,
        state: Array,
        angles: tuple[Array, Array],
        past: tuple,
    ) -> tuple:
        x = fuse(params, config, embedded, state, -1, given=not past)
        y = attention_input(params, config, embedded, x, -1)
        q, k, v = heads(params.layers, config.layers, y, *angles, -1)
        q = q.reshape(*k.shape[:3], -1, config.layers.head_dim)
        first, *later = *past, (k, v)
        own = tuple(jnp.stack(part, axis=2) for part in zip(*later, strict=True)) if later else None
        # No mesh, so in blocks: the libraries return no sums to merge own keys into, and the replay packs any number of
        # windows into a row.
        attended = packed_attention.attend(q, *first, segments, block, own=own)
        x, _ = finish(params.layers, config.layers, x, attended.reshape(*x.shape[:2], -1), -1)
        if config.norm_output:
            x = ops.rms_norm(x, params.final_norm, config.layers.rms_eps)
        return rows(x), (k, v)

    params = cast(params, features.dtype)
    state, past, hidden = rows(features), (), []
    for j in range(steps):
        embedded = rows(shared.embed[shift(tokens, segments, j + 1)[0]].astype(features.dtype))
        state, kv = advance(
            params,
            embedded,
            state,
            packed_angles(config.layers, positions + j, features.dtype),
            past,
        )
        past = (*past, kv)
        hidden.append(state)
    return jnp.stack(hidden)
