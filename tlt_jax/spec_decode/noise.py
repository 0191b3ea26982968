"""Gumbel noise as a function of (sequence key, absolute position, token id).

It knows no network or batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from tlt_jax.shapes import shaped

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011).

    Written out, so that XLA fuses it with its consumers.
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x0, x1 = counter[0] + words[0], counter[1] + words[1]
    for block in range(5):
        for rotation in ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + words[(block + 1) % 3]
        x1 = x1 + words[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


@jax.named_scope("noise")
@shaped
def gumbel(
    keys: UInt32[Array, "B 2"], positions: Int32[Array, "B D"], vocab: int, dtype=jnp.float32
) -> Float[Array, "B D V"]:
    """Standard Gumbel noise of every token id at these absolute positions of each sequence.

    A value depends only on (key, position, token id): not on `vocab`, the batch, or the sharding of
    the result.
    """
    ids = jax.lax.broadcasted_iota(jnp.uint32, (1, 1, vocab), 2)
    key = (keys[:, 0, None, None], keys[:, 1, None, None])
    return from_words(*threefry(key, (positions.astype(jnp.uint32)[:, :, None], ids)), dtype)


@shaped
def from_words(
    high: UInt32[Array, "*A"], low: UInt32[Array, "*A"], dtype=jnp.float32
) -> Float[Array, "*A"]:
    """Standard Gumbel noise from 64 random bits.

    The bits are v, uniform on (0, 1) in steps of 2**-64, so that the exponential variate E = -log(1
    - v) has full relative precision where it is small: the upper tail of the noise, which lets
    unlikely tokens win, is exact.
    """
    v = high.astype(dtype) * 2.0**-32 + (low.astype(dtype) + 0.5) * 2.0**-64
    v = jnp.minimum(v, 1 - jnp.finfo(dtype).epsneg)  # rounding up to 1 would make E infinite
    return -jnp.log(-jnp.log1p(-v))
