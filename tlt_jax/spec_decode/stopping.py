"""Decoding parameters, and stop sequences within generated tokens; knows no rounds."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.decoding_params import DecodingParams

RUNNING, STOPPED, TRUNCATED = 0, 1, 2


@shaped
def ends_sequence(
    params: DecodingParams, stop_window: Int32[Array, "B W"], tokens: Int32[Array, "B M"]
) -> Bool[Array, "B M"]:
    """True at each token that completes a stop sequence; `stop_window`: the W tokens before."""
    window = jnp.concatenate([stop_window, tokens], axis=1)
    hit = jnp.zeros(tokens.shape, bool)
    for stop in params.stop_ids:
        same = jnp.ones(tokens.shape, bool)
        for back, token in enumerate(reversed(stop)):
            start = stop_window.shape[1] - back
            same &= window[:, start : start + tokens.shape[1]] == token
        hit |= same
    return hit


@shaped
def shift(
    stop_window: Int32[Array, "B W"], tokens: Int32[Array, "B M"], counts: Int32[Array, " B"]
) -> Int32[Array, "B W"]:
    """The last W tokens once tokens[b, :counts[b]] are appended to the stop_window."""
    window = jnp.concatenate([stop_window, tokens], axis=1)
    return jnp.take_along_axis(window, counts[:, None] + jnp.arange(stop_window.shape[1]), axis=1)
