"""The network of a block drafter: cache extension and drafting for rollout, blocks at many anchors for training.

Let c_s be one linear map of the policy's features of token s, normed. A block at token t, its anchor, has B queries at
positions t, ..., t + B - 1: the embeddings of the anchor, then of the mask token. In every layer, with that layer's own
matrices, keys and values are those of c_s for all s < t and of the block's own hidden states; so slot s of the cache holds
the keys and values of c_s. Output j predicts token t + 1 + j, for j = 0, ..., P - 1 (DFlash, arXiv 2602.06036, section 3;
DSpark, arXiv 2607.05147). In a layer with a window of w tokens, the query at position p sees c_s for s > p - w only.

DFlash 2 (inco.ai/blog/dflash2) convolves the block's hidden states with a few taps along the block, before and after every
sublayer; the c_s are not convolved. Hidden states, also with windows, and the greedy path were those of z-lab's package dflash
0.1.0 for a directory that is written here; no published file was tried.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tlt_jax.kernels import cache_rows, tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.numerics import contract, in_chunks, masked
from tlt_jax.models import drafter as drafters, kv_cache, layers as ops
from tlt_jax.models.architecture import Layer
from tlt_jax.models.decoder_layer import (
    attention_heads,
    finish_nodes,
    gated,
    heads,
    keys_values,
    node_angles,
    node_heads,
    packed_angles,
    rotated,
    tree_layer,
)
from tlt_jax.models.drafter import (
    Convolution,
    DrafterConfig,
    DrafterParams,
    Shared,
    cast,
    gathered,
)
from tlt_jax.models.kv_cache import KVCache, Scratch
from tlt_jax.shapes import shaped

logits = drafters.logits  # which every network has


def context(
    params: DrafterParams, config: DrafterConfig, features: Float[Array, "*A F"], axis: int
) -> Float[Array, "*A Z"]:
    """c, which every layer reads, from the policy's features."""
    fused = ops.project(features, params.fuse, None, axis)
    return ops.rms_norm(fused, params.hidden_norm, config.layers.rms_eps, axis)


@shaped
def slots_of(
    params: DrafterParams,
    config: DrafterConfig,
    features: Float[Array, "B W F"],
    starts: Int[Array, " B"],
) -> Scratch:
    """Keys and values of W tokens of each row, from position starts[b] on, in every layer. `params`: "rollout" layout."""
    B, W, _ = features.shape
    positions = starts[:, None] + jnp.arange(W)
    angles = node_angles(config.layers, positions, features.dtype)
    c = context(params, config, features.reshape(B * W, -1).T, 0)
    kv = ops.project(c, params.context_kv, None, 0)
    keys, values = [], []
    for layer, (k, v) in zip(params.layers, kv, strict=True):
        k = rotated(k, layer.k_norm, config.layers, *angles, 0)
        k, v = ops.kv_by_node(k, v, B)
        keys.append(k)
        values.append(v)
    return Scratch(tuple(keys), tuple(values), features[..., :0])


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
) -> tuple[KVCache, Float[Array, "B 0"]]:
    """The cache with W more slots of every row, from starts[b] on, for which it must have space, and no hidden state.

    The arguments are those of eagle.extend: `shared`, `tokens` and `last` are not read. Computed in the dtype of `features`;
    `params`: "rollout" layout.
    """
    features = gathered(features, fused)
    rows = slots_of(params, config, features, starts)
    if cache_rows.runs(fused, cache.slots_last):
        rows = rows.replace(after=features[:, 0])  # nothing has read the cache
    return kv_cache.commit(cache, rows, None, starts, fused), features[:, 0, :0]


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
    """The cache with W more slots of sequences rows[r], from starts[r] on; arguments as for `extend`."""
    features = gathered(features, fused)
    return kv_cache.write(cache, slots_of(params, config, features, starts), rows, starts)


@jax.named_scope("drafter/block")
@shaped
def draft_block(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    cache: KVCache,
    roots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    levels: int,
    fused: Fused | None = None,
) -> Float[Array, "B P Z"]:
    """Normed hidden states of the first P = `levels` outputs of a block for each row, whose anchor is token roots[b].

    The anchor's position is lengths[b]; the block sees the first lengths[b] slots of the cache. The last layer has the
    queries of these outputs only (with those before them if it convolves); a causal block, nothing after them. `params`:
    "rollout" layout.
    """
    B, outputs = roots.shape[0], slice(config.skipped, config.skipped + levels)
    N = outputs.stop if config.causal else config.block_size
    tokens = jnp.full((B, N), config.mask_token_id, roots.dtype).at[:, 0].set(roots)
    x = shared.embed[tokens.reshape(-1)].T
    angles = node_angles(config.layers, lengths[:, None] + jnp.arange(N), x.dtype)
    seen = jnp.ones((N, N), bool)
    seen = jnp.broadcast_to(jnp.tril(seen) if config.causal else seen, (B, N, N))
    if config.conv_kernel_size:
        x = convolved_layers(params, config, x, angles, seen, outputs.stop, cache, lengths, fused)
        x = ops.rms_norm(x, params.final_norm, config.layers.rms_eps, 0)
        return jax.lax.optimization_barrier(x.T).reshape(B, outputs.stop, -1)[:, outputs]
    last, *kept = params.layers[-1], cache.keys[-1], cache.values[-1]
    first = first_seen(config, lengths, N)
    normed = arrivals = None
    for layer, following, keys, values, begin in zip(
        params.layers, params.layers[1:], cache.keys, cache.values, first, strict=False
    ):
        past = keys, values, lengths, cache.slots_last
        (x, normed), _, _, arrivals, _ = tree_layer(
            layer, config.layers, (x, normed), following.attention_norm, angles, seen, past, fused, arrivals, begin
        )  # fmt: skip
    with jax.named_scope("layer"):
        q, k, v = attention_heads(last, config.layers, (x, normed), angles, B, fused)
        q, seen = q[:, :, :, outputs], seen[:, outputs]
        begin = None if first[-1] is None else first[-1][:, outputs]
        past = *kept, lengths, cache.slots_last
        attended, _ = tree_attention.attend(q, k, v, seen, *past, fused, first=begin)
        x = x.reshape(-1, B, N)[:, :, outputs].reshape(len(x), -1)
        attended = ops.by_feature(attended)
        x, normed, _ = finish_nodes(last, config.layers, x, attended, params.final_norm, fused)
    x = ops.rms_norm(x, params.final_norm, config.layers.rms_eps, 0) if normed is None else normed
    # A CPU is slow at a product that reads its tokens along columns, into which XLA would turn the head's.
    return jax.lax.optimization_barrier(x.T).reshape(B, levels, -1)


def first_seen(
    config: DrafterConfig, lengths: Int[Array, " B"], N: int
) -> list[Int[Array, "B N"] | None]:
    """The first position that each query of a block sees, for every layer; None: all."""
    windows = config.layers.windows or (0,) * config.layers.num_layers
    places = lengths[:, None] + jnp.arange(N)
    found = {window: places - window + 1 if window else None for window in dict.fromkeys(windows)}
    return [found[window] for window in windows]


def convolved_layers(
    params: DrafterParams,
    config: DrafterConfig,
    x: Float[Array, "Z BN"],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    seen: Bool[Array, "B N N"],
    stop: int,
    cache: KVCache,
    lengths: Int[Array, " B"],
    fused: Fused | None,
) -> Float[Array, "Z Bstop"]:
    """The output of all layers of DFlash 2 for the first `stop` queries of each block of `draft_block`."""
    (B, N), inner, arrivals = seen.shape[:2], config.layers, None

    def first(array: Float[Array, "... BN"]) -> Float[Array, "... Bstop"]:
        parts = array.reshape(*array.shape[:-1], B, N)[..., :stop]
        return parts.reshape(*array.shape[:-1], -1)

    convs = zip(params.attention_conv, params.mlp_conv, strict=True)
    windows = first_seen(config, lengths, N)
    columns = zip(params.layers, convs, cache.keys, cache.values, windows, strict=True)
    for layer, (conv, mlp_conv), keys, values, begin in columns:
        with jax.named_scope("layer/attention"):
            y, change = before(conv, config, x, layer.attention_norm, N, 0)
            q, k, v = node_heads(layer, inner, (), (), y, angles, B, fused)
            if layer is params.layers[-1]:
                q, seen, arrivals = q[:, :, :, :stop], seen[:, :stop], None
                x, change, N = first(x), first(change), stop
                begin = None if begin is None else begin[:, :stop]
            attended, arrivals = tree_attention.attend(
                q, k, v, seen, keys, values, lengths, cache.slots_last, fused, arrivals, begin
            )
            y = ops.project(ops.by_feature(attended), layer.o, layer.o_bias, 0)
            x = x + after(conv, y, change, N, 0)
        with jax.named_scope("layer/mlp"):
            y, change = before(mlp_conv, config, x, layer.mlp_norm, N, 0)
            y = ops.project(gated(layer, y, 0), layer.down, layer.down_bias, 0)
            x = x + after(mlp_conv, y, change, N, 0)
    return x


def before(
    conv: Convolution | None,
    config: DrafterConfig,
    x: Float[Array, "*A N Z"],
    norm: Float[Array, " Z"],
    N: int,
    axis: int,
) -> tuple[Float[Array, "*A N Z"], Float[Array, "k ..."] | None]:
    """What a sublayer reads, normed and then convolved along the N positions, and the changes of the taps after it.

    For axis 0, x is [Z, B N]. None: no convolution.
    """
    y = ops.rms_norm(x, norm, config.layers.rms_eps, axis)
    if conv is None:
        return y, None
    change = conv.change.reshape(2, config.conv_kernel_size, -1, conv.change.shape[-1])
    change = ops.project(y, change, None, axis)
    change = change if axis == 0 else jnp.moveaxis(change, (-3, -2), (0, 1))
    return convolve(y, conv.taps[0], change[0], N, axis), change[1]


def after(
    conv: Convolution | None,
    y: Float[Array, "*A N Z"],
    change: Float[Array, "k ..."] | None,
    N: int,
    axis: int,
) -> Float[Array, "*A N Z"]:
    """A sublayer's result y, convolved as `before` says."""
    return y if conv is None else convolve(y, conv.taps[1], change, N, axis)


@jax.named_scope("convolution")
def convolve(
    x: Float[Array, "*A N Z"],
    taps: Float[Array, "k Z"],
    change: Float[Array, "k *A N g"],
    N: int,
    axis: int,
) -> Float[Array, "*A N Z"]:
    """Sum over o of (taps[o] + change[o]) x_{n - o} for each position n of a block, whose x is 0 before its first position.

    Z / g neighbouring features share a change. For axis 0, x is [Z, B N] and change [k, g, B N].
    """
    flat, total = x, 0.0
    if axis == 0:
        x = x.reshape(len(x), -1, N)
        taps, change = taps[..., None, None], change.reshape(*change.shape[:2], -1, N)
    at, size = (-1 if axis == 0 else -2) % x.ndim, x.shape[axis] // change.shape[1:][axis]
    for o, (tap, more) in enumerate(zip(taps, change, strict=True)):
        moved = jnp.pad(x, [(o * (i == at), 0) for i in range(x.ndim)])
        moved = jax.lax.slice_in_dim(moved, 0, N, axis=at)
        total += (tap + jnp.repeat(more, size, axis)) * moved
    return total.reshape(flat.shape)


@shaped
def markov_embedding(
    params: DrafterParams, tokens: Int[Array, "*batch"], dtype: DTypeLike
) -> Float[Array, "*batch r"]:
    """The Markov head's embedding of the tokens before the predicted ones; of width 0 without that head."""
    if params.markov_in is None:
        return jnp.zeros((*tokens.shape, 0), dtype)
    return params.markov_in[tokens].astype(dtype)


@jax.named_scope("drafter/markov")
@shaped
def markov_bias(
    params: DrafterParams,
    embedding: Float[Array, "*batch r"],
    hidden: Float[Array, "... Z"],
    places: Int[Array, "B 1 c"] | None = None,
) -> Float[Array, "*batch U"]:
    """What the Markov head adds to `logits`, in at least float32; 0 at padding. For drafters with that head only.

    Of a selector, the hidden state gates the embedding. `places`: of logits, for every row; the result is of these [B, w, c].
    """
    if params.markov_gate is not None:
        embedding = embedding * ops.project(
            hidden, params.markov_gate.astype(hidden.dtype), None, -1
        )
    rows = params.markov_out.astype(embedding.dtype)
    if places is None:
        return contract("...r,vr->...v", embedding, rows)
    return contract("bwr,bcr->bwc", embedding, rows[places[:, 0]])


@shaped
def selected(logits: Float[Array, "... c"], bias: Float[Array, "... c"]) -> Float[Array, "... c"]:
    """Log-weights of the candidates of a path selector: they share what they had together by the softmax of both sums.

    So the probability of all other tokens stays as it was. -inf where it is undefined.
    """
    both = logits + bias
    mass = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    found = both - jax.nn.logsumexp(both, axis=-1, keepdims=True) + mass
    return jnp.where(jnp.isnan(found), -jnp.inf, found)


@shaped
def confidence(
    params: DrafterParams, hidden: Float[Array, "*batch Z"], embedding: Float[Array, "*batch r"]
) -> Float[Array, "*batch"]:
    """The confidence head's log-odds that the policy accepts the token here, given those before, in at least float32.

    `embedding`: that of the Markov head of the tokens before. For drafters with a confidence head only.
    """
    both = jnp.concatenate([hidden, embedding], axis=-1)
    scores = contract("...d,d->...", both, params.confidence.astype(both.dtype))
    return scores + params.confidence_bias.astype(scores.dtype)


@jax.named_scope("drafter/blocks")
@shaped
def forward_blocks(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    tokens: Int[Array, "R T"],
    features: Float[Array, "R T F"],
    positions: Int[Array, "R T"],
    segments: Int[Array, "R T"],
    anchors: Int[Array, "R A"],
    block: int = 512,
    mesh: Mesh | None = None,
) -> Float[Array, "R A P Z"]:
    """Normed hidden states of the P outputs of the blocks at A tokens of packed rows; what `extend` and `draft_block` compute.

    anchors[r, a]: a token of row r; -1: none, and the result is any finite number. Output j predicts token
    anchors[r, a] + 1 + j. Computed in the dtype of `features`; `params`: "train" layout. The backward pass recomputes every
    layer, and attention in chunks of `block` queries: memory grows linearly with T and with A. With a mesh, rows stay
    sharded over `data`.
    """

    rows = partial(ops.by_row, mesh=mesh)
    params, N = cast(params, features.dtype), config.block_size
    at = jnp.maximum(anchors, 0)
    queries = jnp.full((*anchors.shape, N), config.mask_token_id, tokens.dtype)
    queries = queries.at[..., 0].set(jnp.take_along_axis(tokens, at, axis=1))
    places = jnp.take_along_axis(positions, at, axis=1)[..., None] + jnp.arange(N)
    angles = packed_angles(config.layers, places.reshape(places.shape[0], -1), features.dtype)
    angles = tuple(one.reshape(*places.shape, 1, -1) for one in angles)
    past_angles = packed_angles(config.layers, positions, features.dtype)
    c = rows(context(params, config, rows(features), -1))

    @jax.checkpoint
    def advance(
        x: Array, given: tuple[Layer, Convolution | None, Convolution | None, Array | None]
    ) -> tuple[Array, None]:
        layer, conv, mlp_conv, reach = given
        y, change = before(conv, config, x, layer.attention_norm, N, -1)
        q, k, v = heads(layer, config.layers, y, *angles, -1)
        q = q.reshape(*k.shape[:4], -1, config.layers.head_dim)
        past = keys_values(layer, config.layers, c, *past_angles, -1)
        attended = attend_blocks(q, k, v, anchors, *past, segments, reach, config.causal, block)
        with jax.named_scope("attention"):
            y = ops.project(attended.reshape(*x.shape[:3], -1), layer.o, layer.o_bias, -1)
            x = x + after(conv, y, change, N, -1)
        with jax.named_scope("mlp"):
            y, change = before(mlp_conv, config, x, layer.mlp_norm, N, -1)
            y = ops.project(gated(layer, y, -1), layer.down, layer.down_bias, -1)
            return rows(x + after(mlp_conv, y, change, N, -1)), None

    x = rows(shared.embed[queries].astype(features.dtype))
    windows = config.layers.windows
    reaches = jnp.array([one or tokens.shape[1] + N for one in windows]) if windows else None
    convs = params.attention_conv, params.mlp_conv
    x, _ = jax.lax.scan(advance, x, (params.layers, *convs, reaches))
    x = ops.rms_norm(x, params.final_norm, config.layers.rms_eps)
    return x[:, :, config.skipped :]


@jax.named_scope("attention")
@shaped
def attend_blocks(
    q: Float[Array, "R A N K G E"],
    k: Float[Array, "R A N K E"],
    v: Float[Array, "R A N K E"],
    anchors: Int[Array, "R A"],
    keys: Float[Array, "R T K E"],
    values: Float[Array, "R T K E"],
    segments: Int[Array, "R T"],
    reach: Int[Array, ""] | None,
    causal: bool,
    block: int,
) -> Float[Array, "R A N K G E"]:
    """Attention of blocks of N queries to the tokens of their anchor's segment before the anchor, and to their own block.

    anchors[r, a]: the token of row r at which the block begins; -1: no block, and the result is any finite number. `reach`:
    the window in tokens, longer than a block; None: none. `causal`: a query does not see the later ones of its block. At most
    `block` queries are computed at once (of one block at least), and computed again in the backward pass: no scores of all
    queries exist.
    """
    A, N = q.shape[1:3]
    count = -(-A // max(1, block // N))  # chunks
    keys, values = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
    one = jax.checkpoint(partial(attend_chunk, keys, values, segments, reach, causal=causal))
    return in_chunks(one, -(-A // count), (q, k, v, anchors))


def attend_chunk(
    keys: Float[Array, "R K T E"],
    values: Float[Array, "R K T E"],
    segments: Int[Array, "R T"],
    reach: Int[Array, ""] | None,
    q: Float[Array, "R A N K G E"],
    k: Float[Array, "R A N K E"],
    v: Float[Array, "R A N K E"],
    anchors: Int[Array, "R A"],
    causal: bool,
) -> Float[Array, "R A N K G E"]:
    """`attend_blocks` for all queries at once."""
    R, A, N, K, G, E = q.shape
    T, scale = keys.shape[2], 1 / math.sqrt(E)
    own = jnp.take_along_axis(segments, jnp.maximum(anchors, 0), axis=1)
    before = jnp.arange(T) < anchors[:, :, None]
    seen = before & (segments[:, None] == own[:, :, None]) & (own[:, :, None] > 0)
    seen = seen[:, :, None]
    if reach is not None:
        places = anchors[:, :, None] + jnp.arange(N)
        seen &= jnp.arange(T) > places[..., None] - reach
    within = jnp.tril(jnp.ones((N, N), bool)) if causal else jnp.ones((N, N), bool)

    flat = jnp.moveaxis(q, 3, 1).reshape(R, K, A * N * G, E)
    old = contract("rkqe,rkte->rkqt", flat, keys).reshape(R, K, A, N, G, T)
    new = contract("rankge,ramke->rkangm", q, k)
    old = masked(scale * old, seen[:, None, :, :, None])
    new = masked(scale * new, within[:, None])
    top = jax.lax.stop_gradient(jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True)))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)
    mixed = contract(
        "rkqt,rkte->rkqe", old.reshape(R, K, A * N * G, T).astype(values.dtype), values
    ).reshape(R, K, A, N, G, E)
    mixed += contract("rkangm,ramke->rkange", new.astype(v.dtype), v)
    return jnp.moveaxis((mixed / total).astype(q.dtype), 1, 3)
