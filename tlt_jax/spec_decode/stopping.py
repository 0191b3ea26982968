"""Decoding parameters, and stop sequences within generated tokens; knows no rounds."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.decoding_params import DecodingParams

RUNNING, STOPPED, TRUNCATED = 0, 1, 2


@shaped
def ends_sequence(rules: DecodingParams, tail: Int32[Array, "B W"], tokens: Int32[Array, "B M"]) -> Bool[Array, "B M"]:
    """True at each token that completes a stop sequence; `tail`: the W tokens before."""
    window = jnp.concatenate([tail, tokens], axis=1)
    hit = jnp.zeros(tokens.shape, bool)
    for stop in rules.stop_ids:
        same = jnp.ones(tokens.shape, bool)
        for back, token in enumerate(reversed(stop)):
            start = tail.shape[1] - back
            same &= window[:, start : start + tokens.shape[1]] == token
        hit |= same
    return hit


@shaped
def shift(tail: Int32[Array, "B W"], tokens: Int32[Array, "B M"], counts: Int32[Array, " B"]) -> Int32[Array, "B W"]:
    """The last W tokens once tokens[b, :counts[b]] are appended to the tail."""
    window = jnp.concatenate([tail, tokens], axis=1)
    return jnp.take_along_axis(window, counts[:, None] + jnp.arange(tail.shape[1]), axis=1)
