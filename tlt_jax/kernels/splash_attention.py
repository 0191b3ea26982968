"""JAX's splash attention over packed rows, on TPUs; knows no mesh."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from tlt_jax.kernels.numerics import widen
from tlt_jax.shapes import shaped

LANES = 128  # the tokens of a block are a multiple of this
BLOCK = 512  # tokens of a block of queries, and of keys, unless a row is shorter


@shaped
def attend(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    longest: int | None = None,
    interpret: bool = False,
    kept: str | None = None,
) -> Float[Array, "B T K G E"]:
    """As packed_attention.attend; padding attends to padding. `interpret`: as JAX operations, on any device.

    `kept`: the checkpoint name of what the backward pass needs.

    Blocks of keys that no query of the block may see (later ones, or more than `longest` tokens back) are skipped.
    """
    B, T, K, G, E = q.shape
    block = min(BLOCK, -(-T // LANES) * LANES)
    rows = -(-T // block) * block

    def by_head(x: Array) -> Array:
        heads = jnp.moveaxis(x.reshape(B, T, -1, E), 1, 2)
        return jnp.pad(heads, [(0, 0), (0, 0), (0, rows - T), (0, 0)])

    # Splash takes scaled queries. A factor rounded to bfloat16 would bias all scores alike.
    scaled = (q.astype(widen(q.dtype)) / math.sqrt(E)).astype(q.dtype)
    padded = jnp.pad(segments, [(0, 0), (0, rows - T)])
    attention = kernel(K * G, rows, block, longest, interpret, kept)
    mixed = jax.vmap(attention)(
        *map(by_head, (scaled, k, v)), splash.SegmentIds(q=padded, kv=padded)
    )
    return jnp.moveaxis(mixed, 1, 2)[:, :T].reshape(q.shape)


def kernel(
    heads: int, rows: int, block: int, longest: int | None, interpret: bool, kept: str | None
) -> Callable[..., Array]:
    """Causal attention of q [H, T, E] to k, v [K, T, E] with segments [T], T = rows, H = heads."""
    if longest is None or longest >= rows:
        mask = splash.CausalMask((rows, rows))
    else:
        mask = splash.LocalMask((rows, rows), (longest - 1, 0), 0)
    places = "block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(places, block)),
        interpret=interpret,
        residual_checkpoint_name=kept,
    )
