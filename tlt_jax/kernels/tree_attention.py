"""Attention of the nodes of token trees to a KV cache and to their ancestors, for verification and drafting."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax.distributed.mesh import device_kind, partition
from tlt_jax.kernels import attention_sizes
from tlt_jax.kernels.fused import ATTENTION, Fused
from tlt_jax.kernels.numerics import contract, finite, masked, sound
from tlt_jax.shapes import shaped

DTYPES = (jnp.bfloat16, jnp.float32)  # that the kernel takes


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
    fused: Fused | None = None,
    arrivals: Int32[Array, "B K tiles"] | None = None,
) -> tuple[Float[Array, "B K G N E"], Int32[Array, "B K tiles"] | None]:
    """Attention of N tree nodes to the first `lengths` slots, which are committed, and to their ancestors among M nodes.

    `ancestors`: a node sees itself. `values` are [B, K, E, S] with `slots_last`, [B, K, S, E] otherwise. With the kernel
    of that name in `fused`, in bfloat16 and float32, it is one kernel, whose counters are the
    second result: `arrivals` of the next call with the same shapes, which else fills its own. None elsewhere.

    `values` are finite in all slots. Keys, and values of nodes, need not be: they make the queries that see them NaN, and no
    other.
    """
    runs = fused is not None and ATTENTION in fused.on and not slots_last and q.dtype in DTYPES
    if not runs:
        return attend_in_xla(q, k, v, ancestors, keys, values, lengths, slots_last), None
    from tlt_jax.kernels import tree_attention_triton

    B, K, G, N, E = q.shape
    sizes = attention_sizes.sizes(
        device_kind(fused.mesh), G * N, E, keys.shape[3], q.dtype.itemsize
    )
    if arrivals is None:
        arrivals = jnp.zeros((B, K, sizes.tiles(G * N)), jnp.int32)
    heads, rows = partition(("batch", "kv_heads"), "rollout"), partition(("batch",), "rollout")
    # Every device holds its own heads; XLA would gather the cache for a kernel that it cannot partition.
    return jax.shard_map(
        partial(tree_attention_triton.attend, fused=fused, sizes=sizes),
        mesh=fused.mesh,
        in_specs=(heads, heads, heads, rows, heads, heads, rows, heads),
        out_specs=(heads, heads),
        check_vma=False,
    )(q, k, v, ancestors, keys, values, lengths, arrivals)


def attend_in_xla(
    q: Float[Array, "B K G N E"],
    k: Float[Array, "B K E M"],
    v: Float[Array, "B K M E"],
    ancestors: Bool[Array, "B N M"],
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K _ _"],
    lengths: Int[Array, " B"],
    slots_last: bool,
) -> Float[Array, "B K G N E"]:
    """The attention of `attend` on any device: scores of all slots, softmax, and the product with the values."""
    B, K, G, N, E = q.shape
    S, M = keys.shape[3], v.shape[2]
    scale = 1 / math.sqrt(E)
    committed = (jnp.arange(S) < lengths[:, None])[:, None, None, None]
    flat = q.reshape(B, K, G * N, E)
    old = contract("bkqe,bkes->bkqs", flat, keys).reshape(B, K, G, N, S)
    # Without the barrier XLA fuses both products into one, and copies all keys to concatenate the nodes' keys to them.
    apart = jax.lax.optimization_barrier(flat)
    new = contract("bkqe,bkem->bkqm", apart, k).reshape(B, K, G, N, M)
    new = jnp.where(sound(v)[:, :, None, None], scale * new, jnp.nan)
    old, new = masked(scale * old, committed), masked(new, ancestors[:, None, None])
    top = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)

    def mix(weights: Array, values: Array, subscripts: str) -> Array:
        weights = weights.reshape(B, K, G * N, -1).astype(values.dtype)
        return contract(f"bkqs,{subscripts}->bkqe", weights, values).reshape(q.shape)

    mixed = mix(old, values, "bkes" if slots_last else "bkse")
    # Nodes last, as the projections of nodes make them: XLA takes them without a transpose.
    mixed += mix(new, finite(jnp.swapaxes(v, 2, 3)), "bkes")
    return (mixed / total).astype(q.dtype)
