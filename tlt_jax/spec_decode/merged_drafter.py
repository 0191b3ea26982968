"""Candidates of two drafters in one tree: a learned drafter and one without a state; knows no network."""

from __future__ import annotations

import jax.numpy as jnp

from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, Drafter, PyTree
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import merge


def merged_drafter(learned: Drafter, other: Drafter) -> Drafter:
    """The Drafter of the candidates of both, with the state and weights of `learned` and the host context of `other`.

    `other` has neither state nor weights. Ranks count the siblings of both drafters, so they can reach 2 topk - 1. They
    are clipped to topk - 1, the last rank that Stats.hits counts, so no count is lost, and the accept length estimated
    for the same tree with fewer nodes stays exact. For a tree of smaller topk the estimate is a lower bound: that tree
    has more nodes than those whose clipped ranks fit it.
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
