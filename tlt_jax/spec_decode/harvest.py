"""Copies of the target's features of windows, out of a decoding state; knows no host and no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from tlt_jax.shapes import shaped


@struct.dataclass
class Features:
    """The target's features of R windows of W positions; undefined from a sequence's root on.

    `states`: its normed last hidden states; None when they are not captured, or when the features are these states.
    """

    features: Float[Array, "R W F"]
    states: Float[Array, "R W D"] | None


def harvest(
    features: Callable[[Any], Array],
    states: Callable[[Any], Array] | None,
    width: int,
    state: Any,
    rows: Int32[Array, " R"],
    starts: Int32[Array, " R"],
) -> Features:
    """Copies of positions starts[r], ..., starts[r] + width - 1 of rows[r].

    `features`, `states`: the target's functions of a cache. The DecodeState is unchanged.
    """
    return Features(
        features=cut(features(state.cache), rows, starts, width),
        states=cut(states(state.cache), rows, starts, width) if states else None,
    )


@shaped
def cut(
    array: Float[Array, "B S X"], rows: Int32[Array, " R"], starts: Int32[Array, " R"], width: int
) -> Float[Array, "R W X"]:
    """array[rows[r], starts[r] : starts[r] + width]; indices past the last slot read the last slot."""
    slots = jnp.clip(starts[:, None] + jnp.arange(width), 0, array.shape[1] - 1)
    return array.at[rows[:, None], slots].get(mode="promise_in_bounds")
