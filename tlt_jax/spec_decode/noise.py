"""Gumbel noise as a function of (sequence key, absolute position, token id)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.interface import NoiseAhead

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

    A value depends only on (key, position, token id), and not on `vocab`, the batch, or the sharding of the result.
    """
    ids = jax.lax.broadcasted_iota(jnp.uint32, (1, 1, vocab), 2)
    key = (keys[:, 0, None, None], keys[:, 1, None, None])
    return from_words(*threefry(key, (positions.astype(jnp.uint32)[:, :, None], ids)), dtype)


@jax.named_scope("noise")
@shaped
def gumbel_at(
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, " B"],
    ids: Int32[Array, "B U"],
    dtype=jnp.float32,
) -> Float[Array, "B U"]:
    """The values of `gumbel` for these token ids at one position of each sequence."""
    counter = (positions.astype(jnp.uint32)[:, None], ids.astype(jnp.uint32))
    return from_words(*threefry((keys[:, :1], keys[:, 1:]), counter), dtype)


@shaped
def nothing_drawn(starts: Int32[Array, " B"], count: int, vocab: int, dtype) -> NoiseAhead:
    """Space for the noise of `count` positions of each row from `starts` on; nothing is drawn."""
    return NoiseAhead(jnp.zeros((starts.shape[0] * count, vocab), dtype), starts)


@shaped
def drawn_whole(
    keys: UInt32[Array, "B 2"], starts: Int32[Array, " B"], count: int, vocab: int, dtype
) -> NoiseAhead:
    """The noise of `count` positions of each row from `starts` on, drawn at once and without a loop."""
    slots = jnp.arange(count, dtype=jnp.int32)
    positions = starts[:, None] + (slots - starts[:, None]) % count
    # As rows of one axis: of what positions share, a rotated sum of keys and ids, XLA would make a kernel and an array.
    values = gumbel(jnp.repeat(keys, count, axis=0), positions.reshape(-1, 1), vocab, dtype)
    return NoiseAhead(values[:, 0], starts + count)


@shaped
def draw_ahead(
    ahead: NoiseAhead,
    keys: UInt32[Array, "B 2"],
    starts: Int32[Array, " B"],
    live: Bool[Array, " B"],
) -> NoiseAhead:
    """The noise of positions starts, ..., starts + M - 1 of the live rows.

    Only missing noise is drawn, a block of (row, position) pairs at a time.
    """
    batch, (places, vocab) = starts.shape[0], ahead.values.shape
    missing = jnp.where(live, starts + ahead.count - ahead.ends, 0)
    until = jnp.cumsum(missing)
    block = max(batch // 2, 1)

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        done, values = carry
        number = done + jnp.arange(block, dtype=jnp.int32)
        rows = jnp.searchsorted(until, number, side="right", method="scan_unrolled")
        known = jnp.minimum(rows, batch - 1)
        positions = (ahead.ends - until + missing)[known] + number
        place = known * ahead.count + positions % ahead.count
        # Writes past the last missing position are dropped.
        place = jnp.where(rows < batch, place, places + number)
        drawn = gumbel(keys[known], positions[:, None], vocab, values.dtype)[:, 0]
        return done + block, values.at[place].set(drawn, mode="drop", unique_indices=True)

    _, values = jax.lax.while_loop(
        lambda carry: carry[0] < until[-1], step, (jnp.int32(0), ahead.values)
    )
    return NoiseAhead(values, jnp.where(live, starts + ahead.count, ahead.ends))


@shaped
def from_words(
    high: UInt32[Array, "*A"], low: UInt32[Array, "*A"], dtype=jnp.float32
) -> Float[Array, "*A"]:
    """Standard Gumbel noise from 64 random bits.

    The bits are v, uniform on (0, 1) in steps of 2**-64. The exponential variate E = -log(1 - v) then has full relative
    precision where it is small: the upper tail of the noise, where unlikely tokens win, is exact.
    """
    v = high.astype(dtype) * 2.0**-32 + (low.astype(dtype) + 0.5) * 2.0**-64
    v = jnp.minimum(v, 1 - jnp.finfo(dtype).epsneg)  # rounding up to 1 would make E infinite
    return -jnp.log(-jnp.log1p(-v))
