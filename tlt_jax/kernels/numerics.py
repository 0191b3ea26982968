"""Products and masks in at least float32, names of what backward passes keep, chunks, and powers of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

# Checkpoint names of the results that attention needs in its backward pass; the rest is recomputed.
KEPT = "top of scores", "sum of weights", "weighted values"
MLP = "gate, up"  # of the products of gate and up


def widen(dtype: DTypeLike) -> jnp.dtype:
    """At least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def contract(subscripts: str, a: Float[Array, ...], b: Float[Array, ...]) -> Float[Array, ...]:
    """einsum that accumulates and returns in at least float32."""
    wide = widen(a.dtype)
    if a.dtype == wide:
        return jnp.einsum(subscripts, a, b)

    def widened(a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a.astype(wide), b.astype(wide))

    def native(a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=wide)

    # XLA's CPU back end fails at run time on some products of bfloat16 that return float32.
    return jax.lax.platform_dependent(a, b, cpu=widened, default=native)


def masked(scores: Float[Array, "*A"], visible: Bool[Array, ...]) -> Float[Array, "*A"]:
    """Scores where visible, the lowest number elsewhere."""
    return jnp.where(visible, scores, jnp.finfo(scores.dtype).min)


def capped(scores: Float[Array, "*A"], cap: float) -> Float[Array, "*A"]:
    """Scores within -cap and cap, by a tangent; as they are with cap 0."""
    return cap * jnp.tanh(scores / cap) if cap else scores


def finite(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
    """x, with 0 for NaN and infinities: a value that no query sees enters its mix with weight 0, and 0 * NaN is NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def sound(v: Float[Array, "*A E"]) -> Bool[Array, "*A"]:
    """Whether a token's values are finite; if not, the scores of its keys are NaN, so that all who see it are too."""
    return jnp.all(jnp.isfinite(v), axis=-1)


def in_chunks(function: Callable[..., Array], size: int, arrays: Any, *numbers: Array) -> Array:
    """function(number of a chunk each, *chunks) of `size` elements of the arrays' second axis, one chunk after the other.

    `numbers`: of every chunk one. The last chunk is padded with zeros, and its result is cut.
    """
    total = jax.tree.leaves(arrays)[0].shape[1]
    count = -(-total // size)

    def split(array: Array) -> Array:
        padding = [(0, count * size - total if axis == 1 else 0) for axis in range(array.ndim)]
        padded = jnp.pad(array, padding)
        return jnp.moveaxis(padded.reshape(-1, count, size, *array.shape[2:]), 1, 0)

    chunks = (*numbers, *jax.tree.map(split, arrays))
    if count == 1:
        return function(*jax.tree.map(lambda array: array[0], chunks))[:, :total]
    out = jnp.moveaxis(jax.lax.map(lambda chunk: function(*chunk), chunks), 0, 1)
    return out.reshape(-1, count * size, *out.shape[3:])[:, :total]


def power(number: int) -> int:
    """The smallest power of two >= number; 0 of 0."""
    return 1 << (number - 1).bit_length() if number else 0
