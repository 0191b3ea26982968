"""Attention of drafted blocks to the tokens before their anchors, for training block drafters."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tlt_jax.kernels.numerics import contract, masked
from tlt_jax.shapes import shaped


@jax.named_scope("attention")
@shaped
def attend(
    q: Float[Array, "R A N K G E"],
    k: Float[Array, "R A N K E"],
    v: Float[Array, "R A N K E"],
    anchors: Int[Array, "R A"],
    keys: Float[Array, "R T K E"],
    values: Float[Array, "R T K E"],
    segments: Int[Array, "R T"],
    causal: bool,
    block: int,
) -> Float[Array, "R A N K G E"]:
    """Attention of blocks of N queries to the tokens of their anchor's segment before the anchor, and to their own block.

    anchors[r, a]: the token of row r at which the block begins; -1: no block, and the result is any finite number. `causal`:
    a query does not see the later ones of its block. At most `block` queries are computed at once (of one block at least),
    and computed again in the backward pass: no scores of all queries exist.
    """
    A, N = q.shape[1:3]
    count = -(-A // max(1, block // N))  # chunks
    size = -(-A // count)
    keys, values = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)

    def split(array: Array) -> Array:
        padding = [(0, count * size - A if axis == 1 else 0) for axis in range(array.ndim)]
        padded = jnp.pad(array, padding)
        return jnp.moveaxis(padded.reshape(-1, count, size, *array.shape[2:]), 1, 0)

    one = jax.checkpoint(partial(attend_chunk, keys, values, segments, causal=causal))
    chunks = jax.tree.map(split, (q, k, v, anchors))
    if count == 1:
        return one(*jax.tree.map(lambda array: array[0], chunks))
    out = jax.lax.map(lambda chunk: one(*chunk), chunks)
    return jnp.moveaxis(out, 0, 1).reshape(-1, count * size, *q.shape[2:])[:, :A]


def attend_chunk(
    keys: Float[Array, "R K T E"],
    values: Float[Array, "R K T E"],
    segments: Int[Array, "R T"],
    q: Float[Array, "R A N K G E"],
    k: Float[Array, "R A N K E"],
    v: Float[Array, "R A N K E"],
    anchors: Int[Array, "R A"],
    causal: bool,
) -> Float[Array, "R A N K G E"]:
    """`attend` for all queries at once."""
    R, A, N, K, G, E = q.shape
    T, scale = keys.shape[2], 1 / math.sqrt(E)
    own = jnp.take_along_axis(segments, jnp.maximum(anchors, 0), axis=1)
    before = jnp.arange(T) < anchors[:, :, None]
    seen = before & (segments[:, None] == own[:, :, None]) & (own[:, :, None] > 0)
    within = jnp.tril(jnp.ones((N, N), bool)) if causal else jnp.ones((N, N), bool)

    flat = jnp.moveaxis(q, 3, 1).reshape(R, K, A * N * G, E)
    old = contract("rkqe,rkte->rkqt", flat, keys).reshape(R, K, A, N, G, T)
    new = contract("rankge,ramke->rkangm", q, k)
    old = masked(scale * old, seen[:, None, :, None, None])
    new = masked(scale * new, within[:, None])
    top = jax.lax.stop_gradient(jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True)))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)
    mixed = contract(
        "rkqt,rkte->rkqe", old.reshape(R, K, A * N * G, T).astype(values.dtype), values
    ).reshape(R, K, A, N, G, E)
    mixed += contract("rkangm,ramke->rkange", new.astype(v.dtype), v)
    return jnp.moveaxis((mixed / total).astype(q.dtype), 1, 3)
