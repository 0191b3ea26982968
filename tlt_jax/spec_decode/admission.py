"""Admission of sequences into a decoding state, and its resizing; knows no round of decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32, UInt32

from tlt_jax.spec_decode.decode_state import DecodeState
from tlt_jax.spec_decode.interface import Drafter, PyTree, Target


@struct.dataclass
class Admission:
    """R new sequences, each for another row of the state, from a row of a prefill; `history` holds their prompts.

    Entries with rows >= B are padding and are dropped.
    """

    rows: Int32[Array, " R"]
    source: Int32[Array, " R"]
    roots: Int32[Array, " R"]
    lengths: Int32[Array, " R"]
    limits: Int32[Array, " R"]
    keys: UInt32[Array, "R 2"]
    history: Int32[Array, "R P"]


def admit(
    target: Target, drafter: Drafter, state: DecodeState, prefilled: PyTree, new: Admission
) -> DecodeState:
    """The state with new sequences in its rows; each takes the keys and values of its prompt from a prefill."""

    def put(ours: Array, theirs: Array | int | bool) -> Array:
        return ours.at[new.rows].set(theirs, mode="drop", unique_indices=True)

    remembered = state.history[:, : new.history.shape[1]]
    return state.replace(
        roots=put(state.roots, new.roots),
        lengths=put(state.lengths, new.lengths),
        limits=put(state.limits, new.limits),
        live=put(state.live, True),
        keys=put(state.keys, new.keys),
        stop_state=put(state.stop_state, 0),
        history=jax.lax.dynamic_update_slice(state.history, put(remembered, new.history), (0, 0)),
        cache=target.insert(state.cache, prefilled, new.rows, new.source),
        drafter=drafter.reset(state.drafter, put(jnp.zeros_like(state.live), True)),
    )


def resize(
    target: Target, drafter: Drafter, slots: int, state: DecodeState, rows: Int32[Array, " C"]
) -> DecodeState:
    """The given rows of the state (-1: an empty row), with slots for `slots` committed tokens."""
    source = jnp.maximum(rows, 0)
    taken = {
        name: getattr(state, name)[source]
        for name in ("roots", "lengths", "limits", "keys", "stop_state")
    }
    history, padded = state.history[source], target.padded_slots(slots) if drafter.remembers else 0
    history = jnp.pad(history, ((0, 0), (0, max(padded - history.shape[1], 0))))[:, :padded]
    return state.replace(
        live=state.live[source] & (rows >= 0),
        history=history,
        cache=target.resize(state.cache, rows, slots),
        drafter=drafter.resize(state.drafter, rows, slots),
        **taken,
    )
