"""Attention of the nodes of token trees to a KV cache and to their ancestors, for verification and drafting."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from tlt_jax.kernels.numerics import contract, masked
from tlt_jax.shapes import shaped


@jax.named_scope("attention")
@shaped
def attend(
    q: Float[Array, "B K G N E"],
    k: Float[Array, "B K E M"],
    v: Float[Array, "B K M E"],
    ancestors: Bool[Array, "B N M"],
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K _ _"],
    lengths: Int[Array, " B"],
    slots_last: bool,
    mesh: Mesh | None = None,
) -> Float[Array, "B K G N E"]:
    """Attention of N tree nodes to the first `lengths` slots, which are committed, and to their ancestors among M nodes.

    `values` are [B, K, E, S] when their slots are last, [B, K, S, E] otherwise. `mesh`: where it runs; None: the
    default device.
    """
    B, K, G, N, E = q.shape
    S, M = keys.shape[3], v.shape[2]
    scale = 1 / math.sqrt(E)
    committed = (jnp.arange(S) < lengths[:, None])[:, None, None, None]
    flat = q.reshape(B, K, G * N, E)
    old = contract("bkqe,bkes->bkqs", flat, keys).reshape(B, K, G, N, S)
    # Without the barrier XLA makes one product of both, for which it copies all keys to join the nodes' to them.
    apart = jax.lax.optimization_barrier(flat)
    new = contract("bkqe,bkem->bkqm", apart, k).reshape(B, K, G, N, M)
    old, new = masked(scale * old, committed), masked(scale * new, ancestors[:, None, None])
    top = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)

    def mix(weights: Array, values: Array, subscripts: str) -> Array:
        weights = weights.reshape(B, K, G * N, -1).astype(values.dtype)
        return contract(f"bkqs,{subscripts}->bkqe", weights, values).reshape(q.shape)

    mixed = mix(old, values, "bkes" if slots_last else "bkse") + mix(new, v, "bkse")
    return (mixed / total).astype(q.dtype)
