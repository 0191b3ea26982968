"""Sampling of one token from logits and noise, and its log-probability.

It knows one position: no sequences, trees or networks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.decoding_params import Sampling

LEAST = -1e30  # no logit of a token is below; that of padding is the lowest number


@shaped
def scale(logits: Float[Array, "*A V"], sampling: Sampling) -> Float[Array, "*A V"]:
    """Logits divided by the temperature, in at least float32; unchanged when greedy."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return logits if sampling.temperature in (0, 1) else logits / sampling.temperature


@jax.named_scope("filter")
@shaped
def filter(scaled: Float[Array, "*A V"], sampling: Sampling) -> Float[Array, "*A V"]:
    """Scaled logits, -inf at tokens outside top-k, and of the rest outside top-p.

    Tokens that tie with the last one kept are kept too. Greedy sampling filters nothing.
    """
    if sampling.is_greedy:
        return scaled

    if 0 < sampling.top_k < scaled.shape[-1]:
        ordered = ordered_bits(scaled)
        border = largest_threshold(
            ordered, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= sampling.top_k
        )
        scaled = jnp.where(ordered >= border, scaled, -jnp.inf)

    if sampling.top_p < 1:
        ordered, probs = ordered_bits(scaled), jax.nn.softmax(scaled, axis=-1)
        border = largest_threshold(
            ordered, lambda kept: jnp.sum(jnp.where(kept, probs, 0), axis=-1) >= sampling.top_p
        )
        scaled = jnp.where(ordered >= border, scaled, -jnp.inf)
    return scaled


def ordered_bits(x: Float[Array, "*A V"]) -> UInt[Array, "*A V"]:
    """Unsigned integers in the order of the floats.

    Equal floats, +0 and -0 included, give equal integers.
    """
    kind = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), kind)
    sign = jnp.array(1, kind) << (bits.dtype.itemsize * 8 - 1)
    return jnp.where(bits & sign, ~bits, bits | sign)


def largest_threshold(
    ordered: UInt[Array, "*A V"], enough: Callable[[Bool[Array, "*A V"]], Bool[Array, "*A"]]
) -> UInt[Array, "*A 1"]:
    """The largest threshold such that the set of values >= it satisfies `enough`.

    Binary search over the bits, from the highest on; sorts nothing.
    """
    width = ordered.dtype.itemsize * 8

    def set_bit(i: Array, border: Array) -> Array:
        candidate = border | (jnp.array(1, ordered.dtype) << (width - 1 - i).astype(ordered.dtype))
        return jnp.where(enough(ordered >= candidate)[..., None], candidate, border)

    return jax.lax.fori_loop(0, width, set_bit, jnp.zeros((*ordered.shape[:-1], 1), ordered.dtype))


@jax.named_scope("sample")
@shaped
def choose(perturbed: Float[Array, "*A V"]) -> Int32[Array, "*A"]:
    """Id of the largest value; of equal values the lowest id.

    A maximum and one over reversed ids, so that it also works with V sharded. The ids are compared
    as floats (exact up to 2**24): on CPUs a float maximum is 7 times faster than an integer one.
    """
    last = perturbed.shape[-1] - 1
    reversed_ids = (
        last - jax.lax.broadcasted_iota(jnp.int32, perturbed.shape, perturbed.ndim - 1)
    ).astype(perturbed.dtype)
    best = jnp.max(perturbed, axis=-1, keepdims=True)
    return last - jnp.max(jnp.where(perturbed == best, reversed_ids, 0), axis=-1).astype(jnp.int32)


@shaped
def is_broken(
    scaled: Float[Array, "*A V"], tokens: Int32[Array, "*A"], logprobs: Float[Array, "*A"]
) -> Bool[Array, "*A"]:
    """True where no token can be drawn: logits with NaN or infinity, or without one above the vocabulary's padding.

    `tokens` are what was chosen of them, `logprobs` their log-probabilities.
    """
    chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return ~jnp.isfinite(logprobs) | (chosen < LEAST)


@shaped
def logprob(scaled: Float[Array, "*A V"], tokens: Int32[Array, "*A"]) -> Float[Array, "*A"]:
    """Log-probability of the tokens over the full vocabulary, before top-k and top-p."""
    chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)
