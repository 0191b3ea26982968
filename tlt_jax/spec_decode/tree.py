"""Draft trees, and their choice from candidates, also from those of two drafters at once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.interface import ABSENT, Candidates, DraftTree, score_order


@shaped
def root_only(tokens: Int32[Array, " B"]) -> DraftTree:
    """The tree of plain decoding: only the root."""
    zeros = jnp.zeros((tokens.shape[0], 1), jnp.int32)
    return DraftTree(tokens[:, None], zeros, zeros, zeros.astype(jnp.float32), zeros)


@shaped
def ancestors(parents: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """Row i marks the nodes that node i attends to: its ancestors and itself.

    Squares the relation until it covers the longest path: O(log N) products.
    """
    nodes = parents.shape[1]
    parent_BNN = parents[:, :, None] == jnp.arange(nodes)
    seen = parent_BNN | jnp.eye(nodes, dtype=bool)
    for _ in range(max(nodes - 2, 0).bit_length()):
        seen = jnp.einsum("bij,bjk->bik", seen.astype(jnp.int32), seen.astype(jnp.int32)) > 0
    return seen


def chosen(candidates: Candidates, places: Int32[Array, "B n"]) -> Candidates:
    """The candidates at these indices."""
    return jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, places, axis=1), candidates)


@jax.named_scope("rerank")
@shaped
def rerank(
    candidates: Candidates, roots: Int32[Array, " B"], nodes: int, counts: bool = False
) -> DraftTree:
    """The tree of the root and the nodes - 1 candidates of highest score.

    The reranking of EAGLE-2 (arXiv 2406.16858). Of equal scores the earlier candidate is chosen. A child never scores
    above its parent and comes after it, so the parent of a chosen node is chosen too. `counts`: without a sort, which
    takes more kernels on a GPU.
    """
    if candidates.scores.shape[1] == nodes - 1:  # all are chosen, as in a chain
        best, parents = candidates, 1 + candidates.parents
    elif counts:
        best, parents = counted(candidates, nodes - 1)
    else:
        places = jnp.sort(jax.lax.top_k(candidates.scores, nodes - 1)[1], axis=1)
        best = chosen(candidates, places)
        # A binary search would be a loop in every round, and the host launches each iteration of a loop on a GPU.
        found = partial(jnp.searchsorted, method="compare_all")
        parents = 1 + jax.vmap(found)(places, best.parents)

    here = best.scores > -jnp.inf
    parents = jnp.where(here & (best.parents >= 0), parents, 0).astype(jnp.int32)

    def with_root(root: Array, rest: Array) -> Array:
        return jnp.concatenate(
            [jnp.broadcast_to(root, rest[:, :1].shape).astype(rest.dtype), rest], axis=1
        )

    return DraftTree(
        tokens=with_root(roots[:, None], jnp.where(here, best.tokens, ABSENT)),
        parents=with_root(jnp.int32(0), parents),
        depths=with_root(jnp.int32(0), jnp.where(here, best.depths, 1)),
        scores=with_root(jnp.zeros((), best.scores.dtype), best.scores),
        ranks=with_root(jnp.int32(0), best.ranks),
    )


@shaped
def counted(candidates: Candidates, count: int) -> tuple[Candidates, Int32[Array, "B n"]]:
    """The `count` candidates of highest score in their order, and 1 + the index of each parent among them.

    A candidate's index among the chosen ones is the number of those before it: reductions over pairs, without a sort.
    """
    scores = candidates.scores
    is_chosen = score_order(scores) < count
    index = jnp.arange(scores.shape[1], dtype=jnp.int32)
    places = jnp.sum(is_chosen[:, None] & (index < index[:, None]), axis=2, dtype=jnp.int32)
    here = is_chosen[:, None] & (places[:, None] == jnp.arange(count, dtype=jnp.int32)[:, None])

    def at(leaf: Array) -> Array:
        least = jnp.array(-jnp.inf if jnp.issubdtype(leaf.dtype, jnp.floating) else -1, leaf.dtype)
        return jnp.max(jnp.where(here, leaf[:, None], least), axis=2)

    parents = jnp.maximum(candidates.parents, 0)
    above = jnp.take_along_axis(places, parents, axis=1, mode="promise_in_bounds")
    return jax.tree.map(at, candidates), 1 + at(above)


@shaped
def merge(first: Candidates, second: Candidates, depth: int) -> Candidates:
    """The candidates of two drafters, those of `first` before those of `second`; paths that both propose appear once.

    `depth`: most levels of `second`.

    Two candidates are equal when the tokens on their paths from the root are. The one of `second` then becomes padding
    (ABSENT, score -inf), and its children become children of the one of `first`, which gets the higher score. Scores keep
    the calibration of their drafters. `ranks` count the siblings of both, so they can be larger than each drafter's.

    The invariants of Candidates hold for the result when they hold for both. No child scores above its parent: a set that
    contains a node contains its parent, with at least the node's score, so the maximum of the parent's scores is at least
    the maximum of the node's.
    """
    own = first.tokens.shape[1] + jnp.arange(second.tokens.shape[1], dtype=jnp.int32)
    here = (second.scores > -jnp.inf)[:, :, None] & (first.scores > -jnp.inf)[:, None, :]
    alike = here & (second.tokens[:, :, None] == first.tokens[:, None, :])

    def found(nodes: Int32[Array, "B E"]) -> tuple[Bool[Array, "B E C"], Int32[Array, "B E"]]:
        """Which candidates of `second` equal which of `first`, and the parents of `second` in the merged set.

        Right one level deeper than `nodes`: the merged indices of second's candidates.
        """
        above = jnp.take_along_axis(nodes, jnp.maximum(second.parents, 0), axis=1)
        parents = jnp.where(second.parents < 0, -1, above)
        return alike & (parents[:, :, None] == first.parents[:, None, :]), parents

    def descend(_: Array, nodes: Array) -> Array:
        both, _ = found(nodes)
        return jnp.where(both.any(axis=2), jnp.argmax(both, axis=2).astype(jnp.int32), own)

    nodes = jnp.broadcast_to(own, second.tokens.shape)
    nodes = jax.lax.fori_loop(0, depth - 1, descend, nodes)
    both, parents = found(nodes)  # adds the last level
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
def ranks_of(candidates: Candidates) -> Int32[Array, "B C"]:
    """The largest sibling rank by score on the path to each candidate.

    Of equal scores the earlier candidate comes first. Pointer doubling: O(log C) steps.
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
