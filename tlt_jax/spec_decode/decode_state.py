"""The state of sequences in decoding: admission, resizing, stop texts, and copies of the target's features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, UInt32

from tlt_jax.data.stop_rules import StopRules
from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.interface import Drafter, PyTree, Target

RUNNING, STOPPED, TRUNCATED, BROKEN = 0, 1, 2, 3  # BROKEN: the target's logits are not finite
TURN = 4  # on the host: a turn has ended, and the sequence may go on


@struct.dataclass
class Weights:
    """Parameters of the target and of the drafter."""

    target: PyTree
    drafter: PyTree


@struct.dataclass
class DecodeState:
    """Sequences in decoding. The root is the newest token, at position `lengths`; the cache holds all tokens before it.

    `limits`: most tokens of prompt and answer together. `history`: tokens of the sequences, up to the root (S is 0 when
    no drafter reads them). `stop_state`: state of the stop rules. A row that is not live changes nothing in its slots
    below `lengths`.
    """

    roots: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    live: Bool[Array, " B"]
    keys: UInt32[Array, "B 2"]
    stop_state: Int32[Array, " B"]
    history: Int32[Array, "B S"]
    cache: PyTree
    drafter: PyTree


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


@struct.dataclass
class Appended:
    """Tokens that R sequences go on with, each in its row, and their new limits; the first counts[r] >= 1 of tokens[r].

    Entries may be equal, to fill up their number.
    """

    rows: Int32[Array, " R"]
    tokens: Int32[Array, "R W"]
    counts: Int32[Array, " R"]
    limits: Int32[Array, " R"]


def append(
    target: Target, slots: int, state: DecodeState, weights: Weights, new: Appended
) -> tuple[DecodeState, PyTree]:
    """The state in which these sequences are live again, and the target's record of the token before each of the reply.

    Only the reply passes through the target, whose cache has `slots` committed slots for all of its W tokens. Without a
    record the second is a small array that is ready with the state.
    """
    rows, W = new.rows, new.tokens.shape[1]
    roots, lengths = state.roots[rows], state.lengths[rows]
    chain = jnp.concatenate([roots[:, None], new.tokens[:, :-1]], axis=1)
    steps = jnp.arange(W, dtype=jnp.int32)
    seen = jnp.broadcast_to(steps[:, None] >= steps, (len(rows), W, W))
    own = target.resize(state.cache, rows, slots)
    _, scratch = target.forward(weights.target, chain, lengths[:, None] + steps, seen, own, lengths)
    last = jnp.take_along_axis(new.tokens, new.counts[:, None] - 1, axis=1)[:, 0]
    history = state.history
    if history.shape[1]:
        is_new = steps < new.counts[:, None]
        places = jnp.where(is_new, lengths[:, None] + 1 + steps, history.shape[1])
        history = history.at[rows[:, None], places].set(new.tokens, mode="drop")
    after = state.replace(
        roots=state.roots.at[rows].set(last),
        lengths=state.lengths.at[rows].set(lengths + new.counts),
        limits=state.limits.at[rows].set(new.limits),
        live=state.live.at[rows].set(True),
        stop_state=state.stop_state.at[rows].set(0),
        history=history,
        cache=target.append(state.cache, scratch, rows, lengths),
    )
    return after, target.record.of(scratch) if target.record else after.lengths.max()


def resize(
    target: Target, drafter: Drafter, slots: int, state: DecodeState, rows: Int32[Array, " C"]
) -> DecodeState:
    """The given rows of the state (-1: an empty row), with slots for `slots` committed tokens."""
    source = jnp.maximum(rows, 0)
    taken = {
        name: getattr(state, name)[source]
        for name in ("roots", "lengths", "limits", "keys", "stop_state")
    }
    history, padded = (
        state.history[source],
        target.padded_slots(slots) if drafter.reads_history else 0,
    )
    history = jnp.pad(history, ((0, 0), (0, max(padded - history.shape[1], 0))))[:, :padded]
    return state.replace(
        live=state.live[source] & (rows >= 0),
        history=history,
        cache=target.resize(state.cache, rows, slots),
        drafter=drafter.resize(state.drafter, rows, slots),
        **taken,
    )


@shaped
def follow(
    rules: StopRules, states: Int32[Array, " B"], tokens: Int32[Array, "B M"]
) -> Int32[Array, "B M"]:
    """The state of the rules after each token; `states`: those before. rules.end: the token completes a stop text."""
    table = jnp.asarray(rules.table)
    classes = jnp.asarray(rules.classes).at[tokens].get(mode="fill", fill_value=rules.other)
    after = []
    for m in range(tokens.shape[1]):
        states = table[states, classes[:, m]]
        after.append(states)
    return jnp.stack(after, axis=1)


@struct.dataclass
class Features:
    """The target's features of R windows of W positions; undefined from a sequence's root on.

    `states`: its normed last hidden states; None when they are not captured, or when the features are these states.
    """

    features: Float[Array, "R W F"]
    states: Float[Array, "R W D"] | None


def harvest(
    target: Target,
    width: int,
    state: DecodeState,
    rows: Int32[Array, " R"],
    starts: Int32[Array, " R"],
) -> Features:
    """Copies of positions starts[r], ..., starts[r] + width - 1 of rows[r]; past the last slot, of the last slot."""

    def cut(array: Float[Array, "B S X"]) -> Float[Array, "R W X"]:
        slots = jnp.clip(starts[:, None] + jnp.arange(width), 0, array.shape[1] - 1)
        return array.at[rows[:, None], slots].get(mode="promise_in_bounds")

    states = target.states(state.cache) if target.states else None
    return Features(
        features=cut(target.features(state.cache)), states=None if states is None else cut(states)
    )
