"""Causal attention within the segments of packed rows, for training and prefill: in blocks, by splash (TPUs), by cuDNN (GPUs).

JAX has no public API for cuDNN's packed rows. This file binds the private primitives behind jax.nn's
`implementation="cudnn"`, without their checks, which query a device that is absent during ahead-of-time compilation.
"""

from __future__ import annotations

import inspect
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax.distributed.mesh import cuda_capability, is_tpu, partition
from tlt_jax.kernels.numerics import KEPT, capped, contract, in_chunks, masked, widen
from tlt_jax.shapes import most_segments, shaped

CUDNN, SPLASH, BLOCKS = "cudnn", "splash", "blocks"
LANES = 128  # the tokens of a block of splash are a multiple of this
SPLASH_BLOCK = 512  # tokens of a block of queries, and of keys, unless a row is shorter
HOPPER = 9, 0  # the first CUDA capability for which cuDNN has packed rows
WIDEST = 128  # largest head dim; cuDNN takes multiples of EVEN_WIDTH up to it, forward and backward
EVEN_WIDTH = 8
# The primitives of JAX 0.12 take a function that changes scores: none here.
PARAMETERS = inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters
SCORES = {"score_mod_name": None, "score_mod_jaxpr": None} if "score_mod" in PARAMETERS else {}


@jax.named_scope("attention")
@shaped
def attend(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    block: int,
    longest: int | None = None,
    own: tuple[Float[Array, "B T J K E"], Float[Array, "B T J K E"]] | None = None,
    mesh: Mesh | None = None,
    window: int | None = None,
    cap: float = 0.0,
) -> Float[Array, "B T K G E"]:
    """Causal attention within segments (0 is padding, where the result is any finite number).

    Memory grows linearly with T. No segment has more than `longest` tokens (None: T), so keys further back are not read.
    With a `window` a token sees so many tokens, itself included. `cap`: of the scores, see numerics.capped.
    `own`: J more keys and values of every token, visible to that token only. `mesh`: where it runs, rows over `data` and
    heads over `model`; None: the default device, in blocks. A key of NaN reaches the queries that see it, a value that is not
    finite perhaps all of its row. `form` chooses the implementation; `block`: number of queries
    in a block of BLOCKS. CUDNN needs segments numbered from 1 in order, at most shapes.most_segments(T) a row, and
    padding last.
    """
    chosen = form(mesh, q.dtype, q.shape[-1], own is not None, bool(cap))
    if window is not None and window >= min(longest or math.inf, segments.shape[1]):
        window = None
    reach = longest if window is None else window
    if chosen == BLOCKS:
        return attend_in_blocks(q, k, v, segments, block, reach, own, window, cap)
    # Splash's mask of the longest segment is one of a window.
    library = (
        partial(attend_by_splash, longest=reach, cap=cap)
        if chosen == SPLASH
        else partial(attend_by_cudnn, window=window)
    )
    rows, heads = partition(("batch",), "train"), partition(("batch", None, "kv_heads"), "train")
    specs = {"in_specs": (heads, heads, heads, rows), "out_specs": heads}
    return jax.shard_map(library, mesh=mesh, **specs, check_vma=False)(q, k, v, segments)


def form(
    mesh: Mesh | None, dtype: DTypeLike, head_dim: int, has_own: bool, is_capped: bool = False
) -> str:
    """The implementation of attention: the first rule that holds.

    BLOCKS without a mesh, with own keys, or in another dtype than bfloat16; SPLASH on TPUs; CUDNN on NVIDIA GPUs from
    Hopper on, for head dims that cuDNN takes and scores without a cap; BLOCKS elsewhere.
    """
    if mesh is None or has_own or dtype != jnp.bfloat16:
        return BLOCKS
    if is_tpu(mesh):
        return SPLASH
    fits = head_dim <= WIDEST and head_dim % EVEN_WIDTH == 0
    fits &= not is_capped
    return CUDNN if fits and cuda_capability(mesh) >= HOPPER else BLOCKS


@shaped
def attend_in_blocks(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    block: int,
    longest: int | None,
    own: tuple[Float[Array, "B T J K E"], Float[Array, "B T J K E"]] | None,
    window: int | None = None,
    cap: float = 0.0,
) -> Float[Array, "B T K G E"]:
    """`attend` in plain JAX operations; only the scores of `block` queries exist at once."""
    T = segments.shape[1]
    block = min(block, T)
    read = min(T, (1 - (1 - (longest or T)) // block) * block)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*KEPT))
    def one(index: Array, q: Array, segment: Array, own: tuple[Array, Array] | None) -> Array:
        start = jnp.clip((index + 1) * block - read, 0, T - read)
        keys, values, others = (
            jax.lax.dynamic_slice_in_dim(array, start, read, axis)
            for array, axis in ((k, 2), (v, 2), (segments, 1))
        )
        places, others_at = index * block + jnp.arange(block), start + jnp.arange(read)
        earlier = others_at[None, :] <= places[:, None]
        if window is not None:
            earlier &= others_at[None, :] > places[:, None] - window
        same = (segment[:, :, None] == others[:, None, :]) & (segment[:, :, None] > 0)
        return attend_block(q, keys, values, (earlier & same)[:, None, None], own, cap)

    return in_chunks(one, block, (q, segments, own), jnp.arange(-(-T // block)))


def attend_block(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    visible: Bool[Array, "B 1 1 T S"],
    own: tuple[Float[Array, "B T J K E"], Float[Array, "B T J K E"]] | None,
    cap: float = 0.0,
) -> Float[Array, "B T K G E"]:
    """Attention of T queries to the visible ones of S keys, and to their own keys.

    The product of weights and values is divided by the sum of the weights, so that the backward pass needs no sum over
    keys. The saved residuals KEPT are no larger than q.
    """
    B, T, K, G, E = q.shape
    scale, S = math.sqrt(E), k.shape[2]
    flat = jnp.moveaxis(q, 1, 3).reshape(B, K, G * T, E)
    scores = contract("bkqe,bkse->bkqs", flat, k).reshape(B, K, G, T, S)
    scores = masked(capped(scores / scale, cap), visible)
    if own is not None:
        own_scores = contract("btkge,btjke->bkgtj", q, own[0]) / scale
        scores = jnp.concatenate([scores, own_scores], axis=-1)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - checkpoint_name(top, KEPT[0]))
    total = checkpoint_name(jnp.sum(weights, axis=-1, keepdims=True), KEPT[1])
    weights = weights.astype(v.dtype)
    mixed = contract("bkqs,bkse->bkqe", weights[..., :S].reshape(B, K, G * T, S), v)
    mixed = mixed.reshape(B, K, G, T, E)
    if own is not None:
        mixed += contract("bkgtj,btjke->bkgte", weights[..., S:], own[1])
    mixed = checkpoint_name(mixed.astype(v.dtype), KEPT[2]) / total
    return jnp.moveaxis(mixed, 3, 1).astype(v.dtype)


@shaped
def attend_by_splash(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    longest: int | None = None,
    interpret: bool = False,
    cap: float = 0.0,
) -> Float[Array, "B T K G E"]:
    """`attend` by JAX's splash attention; padding attends to padding. `interpret`: as JAX operations, on any device.

    Blocks of keys that no query of the block may see (later ones, or more than `longest` tokens back) are skipped.
    """
    # Pallas takes time to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, T, K, G, E = q.shape
    block = min(SPLASH_BLOCK, -(-T // LANES) * LANES)
    rows = -(-T // block) * block

    def by_head(x: Array) -> Array:
        heads = jnp.moveaxis(x.reshape(B, T, -1, E), 1, 2)
        return jnp.pad(heads, [(0, 0), (0, 0), (0, rows - T), (0, 0)])

    # Splash takes scaled queries. A factor rounded to bfloat16 would bias all scores alike.
    scaled = (q.astype(widen(q.dtype)) / math.sqrt(E)).astype(q.dtype)
    padded = jnp.pad(segments, [(0, 0), (0, rows - T)])
    if longest is None or longest >= rows:
        mask = splash.CausalMask((rows, rows))
    else:
        mask = splash.LocalMask((rows, rows), (longest - 1, 0), 0)
    places = "block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"
    attention = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * (K * G)),
        block_sizes=splash.BlockSizes(**dict.fromkeys(places, block)),
        interpret=interpret,
        attn_logits_soft_cap=cap or None,
        residual_checkpoint_name=KEPT[2],
    )
    named = splash.SegmentIds(q=padded, kv=padded)
    mixed = jax.vmap(attention)(*map(by_head, (scaled, k, v)), named)
    return jnp.moveaxis(mixed, 1, 2)[:, :T].reshape(q.shape)


@shaped
def attend_by_cudnn(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    window: int | None = None,
) -> Float[Array, "B T K G E"]:
    """`attend` in bfloat16; 0 at padding.

    The segments of a row are numbered from 1 in order, and padding is last. Tokens of segments beyond
    shapes.most_segments(T) are NaN; rows of `packing.pack` have none.
    """
    mixed = by_cudnn(q.reshape(*q.shape[:2], -1, q.shape[4]), k, v, segments, window)
    is_beyond = segments > most_segments(segments.shape[1])
    return jnp.where(is_beyond[:, :, None, None], jnp.nan, mixed).reshape(q.shape)


@shaped
def layout(
    segments: Int[Array, "B T"], most: int
) -> tuple[Int32[Array, "B {most}"], Int32[Array, "B {most}+1"]]:
    """Lengths of the segments of all rows, and their first tokens in the concatenated rows.

    Both are ordered and left-aligned, as cuDNN reads them; past the last segment they are 0 and B T.
    """
    B, T = segments.shape
    lengths = jnp.sum(segments[:, :, None] == 1 + jnp.arange(most), axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=1) - lengths + T * jnp.arange(B, dtype=jnp.int32)[:, None]
    (present,) = jnp.nonzero(lengths.reshape(-1) > 0, size=B * most, fill_value=B * most)
    lengths = jnp.take(lengths, present, fill_value=0).reshape(B, most)
    starts = jnp.take(starts, present, fill_value=B * T)
    return lengths, jnp.pad(starts, (0, B), constant_values=B * T).reshape(B, most + 1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def by_cudnn(q: Array, k: Array, v: Array, segments: Array, window: int | None) -> Array:
    """Attention of q [B, T, H, E] to k and v [B, T, K, E], causal within each segment; 0 at padding."""
    given, named = operands(q, k, v, segments), options(q, window)
    (mixed,) = cudnn._dot_product_attention_fwd_p.bind(*given, **named, is_training=False)
    return at_tokens(mixed, segments)


def forward(
    q: Array, k: Array, v: Array, segments: Array, window: int | None
) -> tuple[Array, tuple]:
    given, named = operands(q, k, v, segments), options(q, window)
    mixed, sums = cudnn._dot_product_attention_fwd_p.bind(*given, **named, is_training=True)
    sums = checkpoint_name(sums, KEPT[1])
    mixed = checkpoint_name(at_tokens(mixed, segments), KEPT[2])
    return mixed, (q, k, v, segments, sums, mixed)


def backward(window: int | None, residuals: tuple, slope: Array) -> tuple:
    *given, segments, sums, mixed = residuals
    slopes = cudnn._dot_product_attention_bwd_p.bind(
        *operands(*given, segments), sums, mixed, slope, **options(mixed, window)
    )
    return *(at_tokens(slope, segments) for slope in slopes), None


by_cudnn.defvjp(forward, backward)


def at_tokens(x: Array, segments: Array) -> Array:
    """cuDNN's output, with 0 at padding, which cuDNN does not write."""
    return jnp.where((segments > 0)[:, :, None, None], x, 0)


def operands(q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, ...]:
    """The primitives' operands: no bias, no pages, and first tokens as memory offsets.

    The offsets of keys are multiples of K E: JAX 0.10 multiplies them by H E, as those of queries.
    """
    (H, E), K = q.shape[2:], k.shape[2]
    lengths, starts = layout(segments, most_segments(segments.shape[1]))
    none = jnp.zeros(0, q.dtype)
    return q, k, v, none, lengths, lengths, starts * (H * E), starts * (K * E), none, none


def options(q: Array, window: int | None = None) -> dict:
    """The primitives' parameters: no dropout and no bias; cuDNN's window counts a token itself, as ours does."""
    return {
        "scale": 1 / math.sqrt(q.shape[-1]),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.PADDING_CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **SCORES,
    }
