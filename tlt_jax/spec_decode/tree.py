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
    """Nodes to choose from. parents: index of a candidate, -1 for the root; a parent comes before its children."""

    tokens: Int32[Array, "B C"]
    parents: Int32[Array, "B C"]
    depths: Int32[Array, "B C"]
    scores: Float[Array, "B C"]
    ranks: Int32[Array, "B C"]


def chosen(candidates: Candidates, places: Int32[Array, "B n"]) -> Candidates:
    """The candidates at these places."""
    return jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, places, axis=1), candidates)


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
