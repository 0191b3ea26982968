"""Sums and means over the answers of packed rows, on devices; for losses of whole answers, also of one's own.

Shapes: R packed rows of T tokens, S segments that a row may have. A token belongs to an answer where `mask` is true; tokens
of one answer have one number in `segments`, from 1. An answer lies in one row.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from tlt_jax.data.segments import most_segments
from tlt_jax.shapes import shaped


@shaped
def segment_sums(
    values: Shaped[Array, "R T"], segments: Int[Array, "R T"], mask: Bool[Array, "R T"]
) -> Shaped[Array, "R S"]:
    """The sum of each segment's answer tokens, of segment s at s - 1; of bool values the number."""
    is_here = of_segments(segments, mask)
    return jnp.sum(jnp.where(is_here, values[..., None], 0), axis=1)


@shaped
def answer_sum(
    values: Shaped[Array, "R T"], segments: Int[Array, "R T"], mask: Bool[Array, "R T"]
) -> Shaped[Array, "R T"]:
    """At each token of an answer the sum over its tokens, of bool values the number; 0 at other tokens.

    All tokens of an answer have the same bits. It has a gradient. Its sums have a fixed order, on every device.
    """
    sums = segment_sums(values, segments, mask)
    return jnp.sum(jnp.where(of_segments(segments, mask), sums[:, None], 0), axis=-1)


@shaped
def answer_mean(
    values: Float[Array, "R T"], segments: Int[Array, "R T"], mask: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """At each token of an answer the mean over its tokens; 0 at other tokens."""
    count = answer_sum(mask, segments, mask)
    return answer_sum(values, segments, mask) / jnp.maximum(count, 1)


def of_segments(segments: Int[Array, "R T"], mask: Bool[Array, "R T"]) -> Bool[Array, "R T S"]:
    """Whether a token is one of an answer, and of the segment. XLA fuses it: no array of this size is made."""
    numbers = jnp.arange(1, most_segments(segments.shape[1]) + 1)
    return (segments[..., None] == numbers) & mask[..., None]
