"""Draft trees of a network that runs once for each level; knows no network."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, PyTree
from tlt_jax.spec_decode.network import Network
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree_growth import Children, Guess, grow, noise_of


def expand(
    network: Network,
    guess: Guess,
    weights: PyTree,
    cache: PyTree,
    hidden: Float[Array, "B Z"],
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round; `hidden`: the state at the token before the root."""
    B, k, depth = context.lengths.shape[0], strategy.topk, strategy.depth
    ids = network.ids(weights)
    root = guess(network.logits(weights, hidden[:, None]), noise_of(context, 0, ids), ids)

    def below(
        beams: Candidates, of_beams: tuple[Array, Array], scratch: PyTree, level: Int32[Array, ""]
    ) -> tuple[Children, tuple[Array, Array], PyTree]:
        hidden, seen = of_beams
        seen = seen | (jnp.arange(seen.shape[2]) == level * k + jnp.arange(k)[:, None])
        positions = jnp.broadcast_to((context.lengths + level)[:, None], (B, k))
        scratch, hidden = network.passes.step(
            weights, cache, scratch, beams.tokens, hidden, positions, context.lengths, seen, level
        )
        found = guess(network.logits(weights, hidden), noise_of(context, level + 1, ids), ids)
        return found, (hidden, seen), scratch

    nodes = k * (depth - 1)
    hidden = jnp.broadcast_to(hidden[:, None], (B, k, hidden.shape[-1]))
    of_beams, scratch = (hidden, jnp.zeros((B, k, nodes), bool)), network.passes.scratch(B, nodes)
    levels = np.arange(depth - 1, dtype=np.int32)  # constants of the unrolled levels
    return grow(network, root, below, of_beams, scratch, levels)
