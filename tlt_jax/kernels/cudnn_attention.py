"""cuDNN's fused attention over packed rows, on NVIDIA GPUs; knows no mesh.

JAX has no public API for cuDNN's packed rows. This file binds the private primitives behind jax.nn's
`implementation="cudnn"`, without their checks, which query a device that is absent during ahead-of-time compilation.
"""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Int32

from tlt_jax.kernels.numerics import KEPT
from tlt_jax.shapes import most_segments, shaped

HOPPER = 9, 0  # the first CUDA capability for which cuDNN has packed rows
WIDEST = 128  # largest head dim; cuDNN takes multiples of EVEN_WIDTH up to it, forward and backward
EVEN_WIDTH = 8
# The primitives of JAX 0.12 take a function that changes scores: none here.
PARAMETERS = inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters
SCORES = {"score_mod_name": None, "score_mod_jaxpr": None} if "score_mod" in PARAMETERS else {}


@shaped
def attend(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T K G E"]:
    """As packed_attention.attend, in bfloat16; 0 at padding.

    The segments of a row are numbered from 1 in order, and padding is last. Tokens of segments beyond
    shapes.most_segments(T) are NaN; rows of `packing.pack` have none.
    """
    mixed = fused(q.reshape(*q.shape[:2], -1, q.shape[4]), k, v, segments)
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


@jax.custom_vjp
def fused(q: Array, k: Array, v: Array, segments: Array) -> Array:
    """Attention of q [B, T, H, E] to k and v [B, T, K, E], causal within each segment; 0 at padding."""
    given = operands(q, k, v, segments)
    (mixed,) = cudnn._dot_product_attention_fwd_p.bind(*given, **options(q), is_training=False)
    return at_tokens(mixed, segments)


def forward(q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, tuple]:
    given = operands(q, k, v, segments)
    mixed, sums = cudnn._dot_product_attention_fwd_p.bind(*given, **options(q), is_training=True)
    sums = checkpoint_name(sums, KEPT[1])
    mixed = checkpoint_name(at_tokens(mixed, segments), KEPT[2])
    return mixed, (q, k, v, segments, sums, mixed)


def backward(residuals: tuple, slope: Array) -> tuple:
    *given, segments, sums, mixed = residuals
    slopes = cudnn._dot_product_attention_bwd_p.bind(
        *operands(*given, segments), sums, mixed, slope, **options(mixed)
    )
    return *(at_tokens(slope, segments) for slope in slopes), None


fused.defvjp(forward, backward)


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


def options(q: Array) -> dict:
    """The primitives' parameters: no dropout, bias or window."""
    return {
        "scale": 1 / math.sqrt(q.shape[-1]),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.PADDING_CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
        **SCORES,
    }
