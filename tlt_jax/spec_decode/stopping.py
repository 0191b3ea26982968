"""What the tokens of an answer depend on besides weights and keys, and when a stop sequence ends it; knows no rounds."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.sampling import Sampling

RUNNING, STOPPED, TRUNCATED = 0, 1, 2


@dataclass(frozen=True)
class DecodingParams:
    """What the tokens depend on besides weights and keys: how they are drawn, and what ends an answer."""

    sampling: Sampling = Sampling()
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def tail(self) -> int:
        """How many of its last tokens a sequence must remember to notice a stop sequence."""
        return max((len(stop) for stop in self.stop_ids), default=1) - 1


@shaped
def ends_sequence(rules: DecodingParams, tail: Int32[Array, "B W"], tokens: Int32[Array, "B M"]) -> Bool[Array, "B M"]:
    """Whether a stop sequence is complete with each token."""
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
    """The last W tokens after counts[b] more."""
    window = jnp.concatenate([tail, tokens], axis=1)
    return jnp.take_along_axis(window, counts[:, None] + jnp.arange(tail.shape[1]), axis=1)
