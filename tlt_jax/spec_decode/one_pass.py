"""Reductions that read a vocabulary once, for devices on which a kernel costs more than its arithmetic.

Of a reduction with several results XLA makes one kernel on a GPU. A vocabulary is reduced in PARTS parts, which may lie on
several devices, and then over the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from tlt_jax.shapes import shaped

PARTS = 256
MOST = 8  # largest k of `top_k`
Arrays = Sequence[Array]


@jax.named_scope("sample")
@shaped
def choose(
    scaled: Float[Array, "*A V"], perturbed: Float[Array, "*A V"], is_sharded: bool
) -> tuple[Int32[Array, "*A"], Float[Array, "*A"], Float[Array, "*A"]]:
    """Id of the largest perturbed value, its scaled logit, and the logsumexp of the scaled logits.

    Of equal values the lowest id. Where a scaled logit is NaN, the logsumexp is NaN and the id is any. `is_sharded`: the
    vocabulary lies on several devices. Then a reduction with several results would gather those of the parts.
    """
    vocab, dtype = scaled.shape[-1], scaled.dtype
    scaled, perturbed, ids = map(in_parts, (scaled, perturbed, indices(scaled)))

    def add(xs: Arrays, ys: Arrays) -> Arrays:
        is_y = is_before(ys, xs)
        best = (lax.select(is_y, y, x) for x, y in zip(xs[:3], ys[:3], strict=True))
        return *best, *add_exps(xs[3:], ys[3:])

    least, zero = jnp.array(-jnp.inf, dtype), jnp.zeros((), dtype)
    values = perturbed, ids, scaled, scaled, jnp.ones_like(scaled)
    nothing = least, jnp.int32(vocab), zero, least, zero
    best, ids, chosen, largest, sums = found = lax.reduce(values, nothing, add, (scaled.ndim - 1,))
    if not is_sharded:
        _, ids, chosen, largest, sums = lax.reduce(found, nothing, add, (scaled.ndim - 2,))
        return jnp.minimum(ids, vocab - 1), chosen, largest + jnp.log(sums)

    top = jnp.max(largest, axis=-1, keepdims=True)
    total = top[..., 0] + jnp.log(jnp.sum(sums * exp_of_difference(largest, top), axis=-1))
    is_best = best == jnp.max(best, axis=-1, keepdims=True)
    token = jnp.min(jnp.where(is_best, ids, vocab), axis=-1, keepdims=True)
    chosen = jnp.sum(jnp.where(ids == token, chosen, 0), axis=-1)
    return jnp.minimum(token[..., 0], vocab - 1), chosen, total


@shaped
def top_k(
    values: Float[Array, "*A V"], k: int, whole: Callable[[Arrays], Arrays] = tuple
) -> tuple[Float[Array, "*A k"], Int32[Array, "*A k"], Float[Array, "*A"]]:
    """The k <= MOST largest values and their indices, as lax.top_k, and the logsumexp of all values.

    Where a value is NaN, the logsumexp is NaN and the others are any. `whole` puts the results of the parts on every device.
    """
    width, vocab, dtype = 1 << (k - 1).bit_length(), values.shape[-1], values.dtype
    axis, is_long = values.ndim - 1, vocab > PARTS
    ids = indices(values)
    values, ids = map(in_parts, (values, ids)) if is_long else (values, ids)

    def add(xs: Arrays, ys: Arrays) -> Arrays:
        pairs = (list(zip(zs[:width], zs[width : 2 * width], strict=True)) for zs in (xs, ys))
        best, ids = zip(*merge(*pairs), strict=True)
        return *best, *ids, *add_exps(xs[2 * width :], ys[2 * width :])

    least, zero, end = jnp.array(-jnp.inf, dtype), jnp.zeros((), dtype), jnp.int32(vocab)
    nothing = *[least] * width, *[end] * width, least, zero
    pads, ends = (jnp.full(values.shape, one) for one in (least, end))
    found = [values, *[pads] * (width - 1), ids, *[ends] * (width - 1)]
    found += [values, jnp.ones_like(values)]
    if is_long:
        found = whole(lax.reduce(tuple(found), nothing, add, (axis + 1,)))
    found = lax.reduce(tuple(found), nothing, add, (axis,))
    best, places = jnp.stack(found[:k], axis=-1), jnp.stack(found[width : width + k], axis=-1)
    return best, jnp.minimum(places, vocab - 1), found[-2] + jnp.log(found[-1])


@shaped
def in_parts(array: Shaped[Array, "*A V"]) -> Shaped[Array, "*A C U"]:
    """The array with its last axis in C parts."""
    return array.reshape(*array.shape[:-1], math.gcd(array.shape[-1], PARTS), -1)


def indices(array: Array) -> Array:
    """The index of each element along the last axis, as int32."""
    return lax.broadcasted_iota(jnp.int32, array.shape, array.ndim - 1)


def is_before(xs: Arrays, ys: Arrays) -> Array:
    """Whether a value and its index (x, i) come before (y, j): a larger value, or an equal one of lower index."""
    return (xs[0] > ys[0]) | ((xs[0] == ys[0]) & (xs[1] < ys[1]))


def merge(xs: Sequence[Arrays], ys: Sequence[Arrays]) -> Sequence[Arrays]:
    """The first 2**n of two ordered lists of 2**n values and indices, in order: a bitonic merge (Batcher 1968)."""

    def ordered(x: Arrays, y: Arrays) -> tuple[Arrays, Arrays]:
        is_y = is_before(y, x)
        first = tuple(lax.select(is_y, b, a) for a, b in zip(x, y, strict=True))
        return first, tuple(lax.select(is_y, a, b) for a, b in zip(x, y, strict=True))

    found = [ordered(x, y)[0] for x, y in zip(xs, reversed(ys), strict=True)]
    step = len(found) // 2
    while step:
        for n in (n for n in range(len(found)) if not n & step):
            found[n], found[n + step] = ordered(found[n], found[n + step])
        step //= 2
    return found


def add_exps(xs: Arrays, ys: Arrays) -> Arrays:
    """The sum of two sums s * exp(m), given and returned as (m, s) with the larger m."""
    (m, s), (n, t) = xs, ys
    factor = exp_of_difference(lax.min(m, n), lax.max(m, n))
    return lax.max(m, n), lax.select(m >= n, s + t * factor, s * factor + t)


def exp_of_difference(low: Array, high: Array) -> Array:
    """exp(low - high), 1 for equal infinities."""
    return jnp.exp(lax.select(low == high, *jnp.broadcast_arrays(jnp.zeros_like(low), low - high)))
