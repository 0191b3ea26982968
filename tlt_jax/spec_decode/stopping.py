"""Decoding parameters, and stop sequences within generated tokens; knows no rounds."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.sampling import Sampling

RUNNING, STOPPED, TRUNCATED = 0, 1, 2


@dataclass(frozen=True)
class DecodingParams:
    """All that generated tokens depend on, besides weights and random keys.

    `eos_ids`: tokens that end a sequence; `stop_ids`: token sequences that end it.
    """

    sampling: Sampling = Sampling()
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def tail(self) -> int:
        """W: how many of its last tokens a sequence keeps to detect a stop sequence."""
        return max((len(stop) for stop in self.stop_ids), default=1) - 1


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
