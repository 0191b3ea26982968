"""Draft trees of a network that drafts all levels in one pass; knows no network.

Logits of a level are the same for all nodes, apart from a bias by the parent's token (DSpark, arXiv 2607.05147). The
confidence of a level scales the scores of its nodes.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, PyTree
from tlt_jax.spec_decode.network import Network
from tlt_jax.spec_decode.strategy import Strategy, name
from tlt_jax.spec_decode.tree_growth import Children, Guess, grow, noise_of


def expand(
    network: Network,
    guess: Guess,
    weights: PyTree,
    cache: PyTree,
    _: Float[Array, "B Z"],
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round. Raises ValueError when the strategy is deeper than the network drafts."""
    k, depth, block = strategy.topk, strategy.depth, network.passes
    if depth > block.depth:
        raise ValueError(
            f"strategy {name(strategy)}: the drafter drafts {block.depth} levels: use depth {block.depth} or less"
        )
    ids = network.ids(weights)
    roots = jnp.take_along_axis(context.history, context.lengths[:, None], axis=1)
    hidden = block.draft(weights, cache, roots[:, 0], context.lengths, depth)
    hidden = jnp.moveaxis(hidden, 1, 0)[:, :, None]  # levels first: XLA would copy the logits
    logits = network.logits(weights, hidden)

    def children_of(
        tokens: Int32[Array, "B w"],
        level: int | Int32[Array, ""],
        hidden: Float[Array, "B 1 Z"],
        logits: Float[Array, "B 1 U"],
    ) -> Children:
        """The children, at this level, of nodes with these tokens."""
        if block.bias is not None:
            logits = logits + block.bias(weights, tokens)
        shape = (*tokens.shape, k)
        found, scores = guess(logits, noise_of(context, level, ids), ids)
        found, scores = jnp.broadcast_to(found, shape), jnp.broadcast_to(scores, shape)
        if block.confidence is not None:
            sure = block.confidence(weights, hidden, tokens)[:, :, None]
            scores = scores + jnp.where(jnp.isnan(sure), -jnp.inf, sure)
        return found, scores

    def below(
        beams: Candidates, _: tuple, __: tuple, given: tuple
    ) -> tuple[Children, tuple, tuple]:
        level, *states = given
        return children_of(beams.tokens, level + 1, *states), (), ()

    root = children_of(roots, 0, hidden[0], logits[0])
    levels = np.arange(depth - 1, dtype=np.int32)  # constants of the unrolled levels
    return grow(network, root, below, (), (), (levels, hidden[1:], logits[1:]))
