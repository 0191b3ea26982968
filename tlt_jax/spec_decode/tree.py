"""Draft trees, and the interfaces of what drafts and what scores them; knows no network."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.shapes import shaped

ABSENT = -1  # token of a node that is not there: no choice ever equals it


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


@shaped
def root_only(tokens: Int32[Array, " B"]) -> DraftTree:
    """The tree of plain decoding: nothing but the root."""
    zeros = jnp.zeros((tokens.shape[0], 1), jnp.int32)
    return DraftTree(tokens[:, None], zeros, zeros, zeros.astype(jnp.float32), zeros)


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


@struct.dataclass
class Candidates:
    """Nodes to choose from; those of score -inf are not there.

    `scores` and `ranks` are as in a DraftTree. parents: index of a candidate, -1 for the root; a
    parent comes before its children. Of the nodes that are there, siblings are distinct and no
    child scores above its parent.
    """

    tokens: Int32[Array, "B C"]
    parents: Int32[Array, "B C"]
    depths: Int32[Array, "B C"]
    scores: Float[Array, "B C"]
    ranks: Int32[Array, "B C"]


def chosen(candidates: Candidates, places: Int32[Array, "B n"]) -> Candidates:
    """The candidates at these places."""
    return jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, places, axis=1), candidates)


@jax.named_scope("rerank")
@shaped
def rerank(candidates: Candidates, roots: Int32[Array, " B"], nodes: int) -> DraftTree:
    """The tree of the root and the best nodes - 1 candidates, earlier ones first among equals.

    A child never scores above its parent and comes after it, so a chosen node's parent is chosen too.
    """
    if candidates.scores.shape[1] == nodes - 1:  # a chain, say: nothing to choose
        best, parents = candidates, 1 + candidates.parents
    else:
        places = jnp.sort(jax.lax.top_k(candidates.scores, nodes - 1)[1], axis=1)
        best = chosen(candidates, places)
        parents = 1 + jax.vmap(jnp.searchsorted)(places, best.parents)
    here = best.scores > -jnp.inf
    parents = jnp.where(here & (best.parents >= 0), parents, 0).astype(jnp.int32)

    def with_root(root: Array, rest: Array) -> Array:
        return jnp.concatenate([jnp.broadcast_to(root, rest[:, :1].shape).astype(rest.dtype), rest], axis=1)

    return DraftTree(
        tokens=with_root(roots[:, None], jnp.where(here, best.tokens, ABSENT)),
        parents=with_root(jnp.int32(0), parents),
        depths=with_root(jnp.int32(0), jnp.where(here, best.depths, 1)),
        scores=with_root(jnp.zeros((), best.scores.dtype), best.scores),
        ranks=with_root(jnp.int32(0), best.ranks),
    )


@shaped
def merge(first: Candidates, second: Candidates) -> Candidates:
    """The candidates of both drafters, those of `first` in front; what both propose is one node.

    Two candidates are the same when the tokens on their ways from the root are. The one of `second`
    is then ABSENT with score -inf; its children become those of the one of `first`, which gets the
    larger score. Scores stay on the scales of their drafters: nothing here makes them comparable.
    `ranks` are among the siblings of both, so they may be larger than either drafter gives.

    What Candidates promise of `first` and of `second` holds of the merged set too. No child scores
    above its parent: a set that holds a node holds its parent, with at least the node's score, so
    the larger of the parent's scores is at least the larger of the node's.
    """
    both, parents = shared(first, second)
    absorbed = both.any(axis=2)
    gained = jnp.max(jnp.where(both, second.scores[:, :, None], -jnp.inf), axis=1)
    parts = (
        first.replace(scores=jnp.maximum(first.scores, gained)),
        second.replace(
            tokens=jnp.where(absorbed, ABSENT, second.tokens),
            parents=parents,
            scores=jnp.where(absorbed, -jnp.inf, second.scores),
        ),
    )
    union = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
    return union.replace(ranks=ranks_of(union))


@shaped
def shared(
    first: Candidates, second: Candidates
) -> tuple[Bool[Array, "B E C"], Int32[Array, "B E"]]:
    """Which of `second` are which of `first`, and the parents of `second` in the merged set."""
    count = first.tokens.shape[1]
    own = count + jnp.arange(second.tokens.shape[1], dtype=jnp.int32)
    here = (second.scores > -jnp.inf)[:, :, None] & (first.scores > -jnp.inf)[:, None, :]
    alike = here & (second.tokens[:, :, None] == first.tokens[:, None, :])

    def found(nodes: Array) -> tuple[Array, Array]:
        """What `shared` gives, one level further than `nodes`: the places of second's nodes."""
        above = jnp.take_along_axis(nodes, jnp.maximum(second.parents, 0), axis=1)
        parents = jnp.where(second.parents < 0, -1, above)
        return alike & (parents[:, :, None] == first.parents[:, None, :]), parents

    def descend(_: Array, nodes: Array) -> Array:
        both, _ = found(nodes)
        return jnp.where(both.any(axis=2), jnp.argmax(both, axis=2).astype(jnp.int32), own)

    turns = jnp.max(second.depths) - 1  # the last level is found after them
    return found(jax.lax.fori_loop(0, turns, descend, jnp.broadcast_to(own, second.tokens.shape)))


@shaped
def ranks_of(candidates: Candidates) -> Int32[Array, "B C"]:
    """The largest place among its siblings, best first, that a candidate or one on its way has.

    Earlier ones come first among equals. Doubles the reach of the parent links.
    """
    scores, parents = candidates.scores, candidates.parents
    index = jnp.arange(scores.shape[1])
    earlier = (scores[:, None, :] == scores[:, :, None]) & (index[None, :] < index[:, None])
    better = (scores[:, None, :] > scores[:, :, None]) | earlier
    siblings = parents[:, None, :] == parents[:, :, None]
    ranks = jnp.sum(siblings & better, axis=2, dtype=jnp.int32)
    above = jnp.where(parents < 0, index, parents)  # the first level is its own parent
    for _ in range(max(scores.shape[1] - 1, 0).bit_length()):
        ranks = jnp.maximum(ranks, jnp.take_along_axis(ranks, above, axis=1))
        above = jnp.take_along_axis(above, above, axis=1)
    return ranks
