"""Sampling of one token from logits and noise, and its log-probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.interface import Sampling

LEAST = -1e30  # lower bound of the logits of tokens; padding has the lowest number
BLOCK, BLOCKS = 16, 256  # neighbouring tokens in a block; blocks that a filter reads first
# The unrolled search finds BITS bits of the threshold in a pass, by 15 sums. The vocabulary is summed in PARTS parts, which
# divide over devices. For an H200 and 32 x 152064 logits XLA compiles a choice to 35 kernels that move 0.54 GB; with 2 bits to
# 59 kernels and 0.85 GB.
BITS, PARTS = 4, 64
Noise = Callable[[Int32[Array, " R"], Int32[Array, "R U"] | None], Float[Array, "R U"]]


@shaped
def scale(logits: Float[Array, "*A V"], sampling: Sampling) -> Float[Array, "*A V"]:
    """Logits divided by the temperature, in at least float32; unchanged when greedy."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return logits if sampling.temperature in (0, 1) else logits / sampling.temperature


@jax.named_scope("sample")
@shaped
def draw(
    scaled: Float[Array, "B V"],
    wanted: Bool[Array, " B"],
    sampling: Sampling,
    noise: Noise,
    unrolls: bool = False,
) -> Int32[Array, " B"]:
    """argmax(filter(scaled) + noise) of the wanted rows; any token for the other rows.

    noise(rows, ids) [R, U]: noise of these token ids in these rows; of all ids when `ids` is None. A filter first reads
    the blocks of neighbouring tokens with the largest logits. Wanted rows that could keep a token outside of these blocks
    are filtered over the whole vocabulary, some rows at a time. With `unrolls` all rows are, without a loop. A row's
    token does not depend on the other rows.
    """
    batch, vocab = scaled.shape
    every = jnp.arange(batch, dtype=jnp.int32)
    if sampling.is_greedy:
        return choose(scaled)
    if not is_filtered(sampling):
        return choose(scaled + noise(every, None))
    is_narrow = vocab % BLOCK or vocab < 2 * BLOCK * BLOCKS
    if unrolls or is_narrow or sampling.top_k > BLOCK * BLOCKS:
        return choose(filter(scaled, sampling, unrolls=unrolls) + noise(every, None))

    ids, some, outside = largest_blocks(scaled)
    kept = filter(some, sampling, jax.nn.logsumexp(scaled, axis=-1, keepdims=True))
    is_sure = jnp.min(jnp.where(kept > -jnp.inf, some, jnp.inf), axis=1) > outside
    places = choose(kept + noise(every, ids))
    found = jnp.take_along_axis(ids, places[:, None], axis=1)[:, 0]

    def filter_whole_rows(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        left, found = carry
        rows = jax.lax.top_k(left.astype(jnp.int32), max(batch // 8, 1))[1]
        tokens = choose(filter(scaled[rows], sampling) + noise(rows, None))
        tokens = jnp.where(left[rows], tokens, found[rows])
        return left.at[rows].set(False), found.at[rows].set(tokens)

    return jax.lax.while_loop(
        lambda carry: carry[0].any(), filter_whole_rows, (wanted & ~is_sure, found)
    )[1]


def is_filtered(sampling: Sampling) -> bool:
    """Whether top-k or top-p drops tokens."""
    return not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1)


@shaped
def largest_blocks(
    scaled: Float[Array, "B V"],
) -> tuple[Int32[Array, "B U"], Float[Array, "B U"], Float[Array, " B"]]:
    """Ids (ascending) and values of the BLOCKS blocks of tokens with the largest maxima; the largest value outside."""
    batch, vocab = scaled.shape
    blocks = scaled.reshape(batch, vocab // BLOCK, BLOCK)
    maxima = blocks.max(axis=-1)
    # With one block more and slices of the result, XLA would sort everything.
    tops, which = jax.lax.top_k(maxima, BLOCKS)
    least = tops.min(axis=1, keepdims=True)
    below = jnp.max(jnp.where(maxima < least, maxima, -jnp.inf), axis=1)
    has_equal = jnp.sum(maxima >= least, axis=1) > BLOCKS
    outside = jnp.where(has_equal, least[:, 0], below)
    which = jnp.sort(which, axis=1)
    ids = which[:, :, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    values = jnp.take_along_axis(blocks, which[:, :, None], axis=1)
    return ids.reshape(batch, -1), values.reshape(batch, -1), outside


@jax.named_scope("filter")
@shaped
def filter(
    scaled: Float[Array, "*A V"],
    sampling: Sampling,
    total: Float[Array, "*A 1"] | None = None,
    unrolls: bool = False,
) -> Float[Array, "*A V"]:
    """Scaled logits, -inf at tokens outside top-k, then at tokens outside top-p of the rest.

    Tokens that tie with the last one kept are kept too. Greedy sampling filters nothing. `total`: the logsumexp of the
    whole vocabulary, when `scaled` holds only its largest logits. `unrolls`: without a loop.
    """
    if sampling.is_greedy:
        return scaled

    if 0 < sampling.top_k < scaled.shape[-1]:
        ordered = ordered_bits(scaled)
        ones = jnp.ones(scaled.shape, jnp.int32)
        border = largest_threshold(ordered, ones, sampling.top_k, unrolls)
        scaled, total = jnp.where(ordered >= border, scaled, -jnp.inf), None

    if sampling.top_p < 1:
        total = jax.nn.logsumexp(scaled, axis=-1, keepdims=True) if total is None else total
        ordered, probs = ordered_bits(scaled), jnp.exp(scaled - total)
        border = largest_threshold(ordered, probs, sampling.top_p, unrolls)
        scaled = jnp.where(ordered >= border, scaled, -jnp.inf)
    return scaled


@shaped
def ordered_bits(x: Float[Array, "*A V"]) -> UInt[Array, "*A V"]:
    """Unsigned integers in the order of the floats.

    Equal floats, +0 and -0 included, give equal integers.
    """
    kind = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), kind)
    sign = jnp.array(1, kind) << (bits.dtype.itemsize * 8 - 1)
    return jnp.where(bits & sign, ~bits, bits | sign)


@shaped
def largest_threshold(
    ordered: UInt[Array, "*A V"],
    weights: Shaped[Array, "*A V"],
    needed: int | float,
    unrolls: bool,
) -> UInt[Array, "*A 1"]:
    """The largest threshold such that the weights (>= 0) of values >= it sum to at least `needed`.

    A search over the bits from the highest on, one bit a pass, or BITS with `unrolls`; without sorting.
    """
    kind, width = ordered.dtype, ordered.dtype.itemsize * 8
    border = jnp.zeros((*ordered.shape[:-1], 1), kind)

    def append_bit(i: Array, border: Array) -> Array:
        candidate = border | (jnp.array(1, kind) << (width - 1 - i).astype(kind))
        kept = jnp.sum(jnp.where(ordered >= candidate, weights, 0), axis=-1, keepdims=True)
        return jnp.where(kept >= needed, candidate, border)

    if not unrolls:
        return jax.lax.fori_loop(0, width, append_bit, border)

    parts = *ordered.shape[:-1], math.gcd(ordered.shape[-1], PARTS), -1
    ordered, weights = ordered.reshape(parts), weights.reshape(parts)
    for shift in range(width - BITS, -1, -BITS):
        candidates = [border | jnp.array(j << shift, kind) for j in range(1, 2**BITS)]
        sums = sums_above(ordered, weights, candidates)
        # Rounded sums fall too as thresholds rise: the number of thresholds met is the index of the last one met.
        digit = jnp.sum(sums >= needed, axis=-1, keepdims=True, dtype=kind)
        border |= digit << shift
    return border


def sums_above(
    ordered: UInt[Array, "*A C U"],
    weights: Shaped[Array, "*A C U"],
    thresholds: Sequence[UInt[Array, "*A 1"]],
) -> Shaped[Array, "*A J"]:
    """For each of J thresholds the sum of the weights of values >= it, in one pass over both arrays.

    With J sums XLA makes J kernels on GPUs; with the thresholds on an axis it reads everything J times; and one reduction
    over shards gathers J times. So C, which may be sharded, is summed separately.
    """
    zero = jnp.zeros((), weights.dtype)
    kept = [jnp.where(ordered >= x[..., None], weights, zero) for x in thresholds]

    def add(xs: Sequence[Array], ys: Sequence[Array]) -> Sequence[Array]:
        return [x + y for x, y in zip(xs, ys, strict=True)]

    parts = jax.lax.reduce(kept, [zero] * len(kept), add, (ordered.ndim - 1,))
    return jnp.sum(jnp.stack(parts, axis=-2), axis=-1)


@jax.named_scope("sample")
@shaped
def choose(perturbed: Float[Array, "*A V"]) -> Int32[Array, "*A"]:
    """Id of the largest value; of equal values the lowest id.

    A maximum of the values and one of reversed ids, so that V may be sharded. Ids are compared as floats (exact up to
    2**24): on CPUs a float maximum is 7 times faster than an integer one.
    """
    last = perturbed.shape[-1] - 1
    reversed_ids = (
        last - jax.lax.broadcasted_iota(jnp.int32, perturbed.shape, perturbed.ndim - 1)
    ).astype(perturbed.dtype)
    best = jnp.max(perturbed, axis=-1, keepdims=True)
    return last - jnp.max(jnp.where(perturbed == best, reversed_ids, 0), axis=-1).astype(jnp.int32)


@shaped
def logprob(
    scaled: Float[Array, "*A V"], tokens: Int32[Array, "*A"]
) -> tuple[Float[Array, "*A"], Bool[Array, "*A"]]:
    """Log-probability of the chosen tokens over the full vocabulary, before top-k and top-p; and whether none can be drawn.

    That is so for logits with NaN or infinity, or with none above the vocabulary's padding.
    """
    chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    logprobs = chosen - jax.nn.logsumexp(scaled, axis=-1)
    return logprobs, ~jnp.isfinite(logprobs) | (chosen < LEAST)
