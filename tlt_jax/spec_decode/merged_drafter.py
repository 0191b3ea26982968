"""Two drafters' candidates in one tree: a learned drafter's and those of one without a state; knows no network."""

from __future__ import annotations

import jax.numpy as jnp

from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, Drafter, PyTree
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import merge


def merged_drafter(learned: Drafter, other: Drafter) -> Drafter:
    """The Drafter of the candidates of both, over the state and the weights of `learned`.

    `other` has neither; the host context is its own. Ranks of candidates count the siblings of both
    drafters, so they can reach 2 topk - 1. They are clipped to topk - 1: every node of the tree is
    one of topk, so no count is lost, and what the same tree with fewer nodes would have accepted
    stays exact. A tree of smaller topk has more nodes than those of the clipped ranks that fit it,
    so its estimate is a lower bound.
    """

    def draft(
        weights: PyTree, state: PyTree, context: Context, strategy: Strategy, temperature: float
    ) -> Candidates:
        both = merge(
            learned.draft(weights, state, context, strategy, temperature),
            other.draft(weights, (), context, strategy, temperature),
            strategy.depth,
        )
        return both.replace(ranks=jnp.minimum(both.ranks, strategy.topk - 1))

    return learned._replace(draft=draft, host_context=other.host_context)
