"""What scores trees and what drafts them, as pure functions; knows no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct
from jaxtyping import Array, Float, Int32

from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import Candidates

PyTree = Any


@struct.dataclass
class Context:
    """What a drafter may look at: tokens 0..lengths (the last one is the root), and features of all before the root.

    `guide` is what the host gave along with the chunk; `noise` is that of positions lengths + 1, + 2, ..., or None when
    tokens are chosen without noise.
    """

    history: Int32[Array, "B S"]
    lengths: Int32[Array, " B"]
    features: Float[Array, "B S F"]
    guide: PyTree
    noise: Float[Array, "B M V"] | None = None


class Target(NamedTuple):
    """The model that decides, as pure functions; a cache and a prefill are pytrees only it understands.

    forward(params, tokens[B,N], positions[B,N], ancestors[B,N,N], cache, lengths[B]) -> logits[B,N,V], scratch
    keep(cache, scratch, path[B,M], lengths[B]) -> cache with the path's nodes at slots lengths[b].. (all M are written)
    features(cache) -> [B,S,F], what the drafter asked for, of every committed slot
    prefill(params, tokens[Q,P], lengths[Q]) -> what `insert` takes: slots 0..lengths of each prompt
    insert(cache, prefilled, rows[R], source[R]) -> cache whose row rows[r] is prompt source[r]; rows from B on are dropped
    resize(cache, rows[B], slots) -> cache of the given rows and committed slots; row -1 may hold anything
    empty(batch, slots) -> ShapeDtypeStructs, with shardings, of a cache that also has room for the scratch tail
    room(slots) -> slots of that cache
    vocab: width of the logits
    params: ShapeDtypeStructs, with shardings, of the weights
    """

    forward: Callable[..., tuple[Array, PyTree]]
    keep: Callable[..., PyTree]
    features: Callable[[PyTree], Array]
    prefill: Callable[..., PyTree]
    insert: Callable[..., PyTree]
    resize: Callable[..., PyTree]
    empty: Callable[[int, int], PyTree]
    room: Callable[[int], int]
    vocab: int
    params: PyTree


class Drafter(NamedTuple):
    """What guesses ahead, as pure functions; its state rides in the decoding state. `weights` are the target's too.

    draft(weights, state, context, strategy, temperature) -> at least strategy.nodes - 1 candidates; temperature is that of
        the target, 0 when greedy
    catch_up(weights, state, context, live[B], missing) -> state that knows all committed tokens of live rows but the last
        `missing` >= 1 or fewer; None when there is nothing to catch up with
    extend(weights, state, context, width) -> state that knows `width` more of them
    reset(state, fresh[B]) -> state whose fresh rows know nothing
    resize(state, rows[B], slots) -> state of the given rows, for a cache of so many slots
    empty(batch, slots) -> ShapeDtypeStructs, with shardings, of a state
    guide(batch) -> ShapeDtypeStructs of what the host gives along with a chunk that drafts
    params: ShapeDtypeStructs, with shardings, of its own weights
    remembers: whether it reads `Context.history`
    """

    draft: Callable[..., Candidates]
    catch_up: Callable[..., PyTree] | None
    extend: Callable[..., PyTree]
    reset: Callable[[PyTree, Array], PyTree]
    resize: Callable[..., PyTree]
    empty: Callable[[int, int], PyTree]
    guide: Callable[[int], PyTree]
    params: PyTree
    remembers: bool


def stateless(
    draft: Callable[..., Candidates], remembers: bool = True, guide: Callable[[int], PyTree] = lambda batch: ()
) -> Drafter:
    """A drafter without weights or state of its own."""
    return Drafter(
        draft=draft,
        catch_up=None,
        extend=lambda weights, state, context, width: state,
        reset=lambda state, fresh: state,
        resize=lambda state, rows, slots: state,
        empty=lambda batch, slots: (),
        guide=guide,
        params=(),
        remembers=remembers,
    )


def undrafted(
    weights: PyTree, state: PyTree, context: Context, strategy: Strategy, temperature: float
) -> Candidates:
    """The draft of no drafter. Raises ValueError for a strategy that needs one."""
    raise ValueError(f"{strategy} needs a drafter, and there is none")


NO_DRAFTER = stateless(undrafted, remembers=False)


class Network(NamedTuple):
    """A learned drafter's network, as pure functions of all weights, its own and the target's.

    Its cache slot t comes from (features of token t, token t + 1), at rotary position t.

    extend(weights, cache, tokens[B,W], features[B,W,F], starts[B], last[B]) -> cache, hidden[B,Z] of window place `last`:
        slots starts.. are written
    fill(weights, cache, tokens[R,W], features[R,W,F], rows[R], starts[R]) -> cache: slots starts.. of these rows are written
    step(weights, cache, scratch, tokens[B,k], hidden[B,k,Z], positions[B,k], starts[B], ancestors[B,k,R], level)
        -> scratch, hidden[B,k,Z]: `hidden` are those of the parents; the k nodes see `starts` slots, and of the first R
        scratch rows, the last k of which are themselves, those that `ancestors` marks
    logits(weights, hidden[...,Z]) -> [...,U]
    ids(weights) -> token ids int32[U] of the logits, or None when they are 0, 1, ...
    resize(cache, rows[B], slots) -> cache
    empty(batch, slots) -> ShapeDtypeStructs, with shardings, of a cache
    scratch(batch, rows) -> zeros
    params: ShapeDtypeStructs, with shardings, of its own weights
    hidden: ShapeDtypeStruct of hidden[1,Z], with its sharding
    top(values[...,U], k) -> the k largest of the logits' axis and their places, as lax.top_k
    """

    extend: Callable[..., tuple[PyTree, Array]]
    fill: Callable[..., PyTree]
    step: Callable[..., tuple[PyTree, Array]]
    logits: Callable[..., Array]
    ids: Callable[[PyTree], Array | None]
    resize: Callable[..., PyTree]
    empty: Callable[[int, int], PyTree]
    scratch: Callable[[int, int], PyTree]
    params: PyTree
    hidden: jax.ShapeDtypeStruct
    top: Callable[[Array, int], tuple[Array, Array]] = jax.lax.top_k
