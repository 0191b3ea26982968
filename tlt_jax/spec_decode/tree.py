"""Draft trees, and the interfaces of what drafts and what scores them; knows no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.shapes import shaped

PyTree = Any
ABSENT = -1  # token of a node that is not there: no choice ever equals it


@dataclass(frozen=True)
class Strategy:
    """Shape of a round's trees: levels below the root, children of a node, nodes with the root. Plain is (0, 0, 1)."""

    depth: int = 0
    topk: int = 0
    nodes: int = 1

    @property
    def path(self) -> int:
        """Most tokens that one round can emit: every level, and the token after it."""
        return self.depth + 1


PLAIN = Strategy()


@struct.dataclass
class DraftTree:
    """Token trees. Node 0 is the newest token and its own parent; parents[b, i] < i for i > 0; siblings are distinct.

    `scores` are the log-probabilities, as the drafter sees them, that the target goes all the way to the node; `ranks` the
    largest place among its siblings that the node or one on its way has. A node that is not there is ABSENT, below the root.
    """

    tokens: Int32[Array, "B N"]
    parents: Int32[Array, "B N"]
    depths: Int32[Array, "B N"]
    scores: Float[Array, "B N"]
    ranks: Int32[Array, "B N"]


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

    draft(weights, state, context, strategy, temperature) -> DraftTree; temperature is that of the target, 0 when greedy
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

    draft: Callable[..., DraftTree]
    catch_up: Callable[..., PyTree] | None
    extend: Callable[..., PyTree]
    reset: Callable[[PyTree, Array], PyTree]
    resize: Callable[..., PyTree]
    empty: Callable[[int, int], PyTree]
    guide: Callable[[int], PyTree]
    params: PyTree
    remembers: bool


@shaped
def root_only(tokens: Int32[Array, " B"]) -> DraftTree:
    """The tree of plain decoding: nothing but the root."""
    zeros = jnp.zeros((tokens.shape[0], 1), jnp.int32)
    return DraftTree(tokens[:, None], zeros, zeros, zeros.astype(jnp.float32), zeros)


def stateless(
    draft: Callable[..., DraftTree], remembers: bool = True, guide: Callable[[int], PyTree] = lambda batch: ()
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
) -> DraftTree:
    """The draft of no drafter. Raises ValueError for a strategy that needs one."""
    raise ValueError(f"{strategy} needs a drafter, and there is none")


NO_DRAFTER = stateless(undrafted, remembers=False)


@shaped
def ancestors(parents: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """Row i marks the nodes that node i sees: itself and the way up to the root. Doubles the reach of the parent links."""
    nodes = parents.shape[1]
    parent_BNN = parents[:, :, None] == jnp.arange(nodes)
    seen = parent_BNN | jnp.eye(nodes, dtype=bool)
    for _ in range(max(nodes - 2, 0).bit_length()):
        seen = jnp.einsum("bij,bjk->bik", seen.astype(jnp.int32), seen.astype(jnp.int32)) > 0
    return seen


@shaped
def score_order(scores: Float[Array, "B N"]) -> Int32[Array, "B N"]:
    """Place of every node, best first, earlier nodes first among equals; the root, whose score is 0, has place 0."""
    earlier = jnp.arange(scores.shape[1])[None, :] < jnp.arange(scores.shape[1])[:, None]
    better = (scores[:, None, :] > scores[:, :, None]) | ((scores[:, None, :] == scores[:, :, None]) & earlier)
    return better.sum(axis=-1, dtype=jnp.int32)
