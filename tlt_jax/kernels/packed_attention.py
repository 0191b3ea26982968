"""Causal attention within the segments of packed rows, for training and prefill."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tlt_jax.distributed.mesh import cuda_capability, is_tpu, partition
from tlt_jax.kernels import cudnn_attention
from tlt_jax.kernels.numerics import KEPT, contract, masked
from tlt_jax.shapes import shaped

CUDNN, SPLASH, BLOCKS = "cudnn", "splash", "blocks"


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
) -> Float[Array, "B T K G E"]:
    """Causal attention within segments (0 is padding, where the result is any finite number).

    Memory grows linearly with T. No segment has more than `longest` tokens (None: T), so keys further back are not read.
    `own`: J more keys and values of every token, visible to that token only. `mesh`: where it runs, rows over `data` and
    heads over `model`; None: the default device, in blocks. A key of NaN reaches the queries that see it, a value that is not
    finite perhaps all of its row. `form` chooses the implementation; `block`: number of queries
    in a block of BLOCKS. CUDNN needs segments numbered from 1 in order, at most shapes.most_segments(T) a row, and
    padding last.
    """
    chosen = form(mesh, q.dtype, q.shape[-1], own is not None)
    if chosen == BLOCKS:
        return attend_in_blocks(q, k, v, segments, block, longest, own)
    if chosen == CUDNN:
        library = cudnn_attention.attend
    else:
        from tlt_jax.kernels import splash_attention  # Pallas takes time to import

        library = partial(splash_attention.attend, longest=longest, kept=KEPT[2])
    rows, heads = partition(("batch",), "train"), partition(("batch", None, "kv_heads"), "train")
    specs = {"in_specs": (heads, heads, heads, rows), "out_specs": heads}
    return jax.shard_map(library, mesh=mesh, **specs, check_vma=False)(q, k, v, segments)


def form(mesh: Mesh | None, dtype: DTypeLike, head_dim: int, has_own: bool) -> str:
    """The implementation of attention: the first rule that holds.

    BLOCKS without a mesh, with own keys, or in another dtype than bfloat16; SPLASH on TPUs; CUDNN on NVIDIA GPUs from
    Hopper on, for head dims that cuDNN takes; BLOCKS elsewhere.
    """
    if mesh is None or has_own or dtype != jnp.bfloat16:
        return BLOCKS
    if is_tpu(mesh):
        return SPLASH
    fits = head_dim <= cudnn_attention.WIDEST and head_dim % cudnn_attention.EVEN_WIDTH == 0
    return CUDNN if fits and cuda_capability(mesh) >= cudnn_attention.HOPPER else BLOCKS


@shaped
def attend_in_blocks(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    block: int,
    longest: int | None,
    own: tuple[Float[Array, "B T J K E"], Float[Array, "B T J K E"]] | None,
) -> Float[Array, "B T K G E"]:
    """`attend` in plain JAX operations; only the scores of `block` queries exist at once."""
    T = segments.shape[1]
    block = min(block, T)
    count = -(-T // block)
    window = min(T, (1 - (1 - (longest or T)) // block) * block)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    def split(array: Array) -> Array:
        padded = jnp.pad(
            array, [(0, count * block - T if axis == 1 else 0) for axis in range(array.ndim)]
        )
        return jnp.moveaxis(padded.reshape(-1, count, block, *array.shape[2:]), 1, 0)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*KEPT))
    def one(index: Array, q: Array, segment: Array, own: tuple[Array, Array] | None) -> Array:
        start = jnp.clip((index + 1) * block - window, 0, T - window)
        keys, values, others = (
            jax.lax.dynamic_slice_in_dim(array, start, window, axis)
            for array, axis in ((k, 2), (v, 2), (segments, 1))
        )
        places = index * block + jnp.arange(block)
        earlier = start + jnp.arange(window)[None, :] <= places[:, None]
        same = (segment[:, :, None] == others[:, None, :]) & (segment[:, :, None] > 0)
        return attend_block(q, keys, values, (earlier & same)[:, None, None], own)

    blocks = (jnp.arange(count), *jax.tree.map(split, (q, segments, own)))
    if count == 1:
        return one(*jax.tree.map(lambda array: array[0], blocks))[:, :T]
    out = jnp.moveaxis(jax.lax.map(lambda block: one(*block), blocks), 0, 1)
    return out.reshape(-1, count * block, *q.shape[2:])[:, :T]


def attend_block(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    visible: Bool[Array, "B 1 1 T S"],
    own: tuple[Float[Array, "B T J K E"], Float[Array, "B T J K E"]] | None,
) -> Float[Array, "B T K G E"]:
    """Attention of T queries to the visible ones of S keys, and to their own keys.

    The product of weights and values is divided by the sum of the weights, so that the backward pass needs no sum over
    keys. The saved residuals KEPT are no larger than q.
    """
    B, T, K, G, E = q.shape
    scale, S = math.sqrt(E), k.shape[2]
    flat = jnp.moveaxis(q, 1, 3).reshape(B, K, G * T, E)
    scores = contract("bkqe,bkse->bkqs", flat, k).reshape(B, K, G, T, S)
    scores = masked(scores / scale, visible)
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
