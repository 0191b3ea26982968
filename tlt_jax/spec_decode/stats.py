"""Counts of drafted and accepted nodes over the rounds of a chunk; knows no cost and no clock."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.spec_decode.draft_tree import ABSENT, DraftTree, score_order
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

BINS = 10  # of the reliability diagram of scores


@struct.dataclass
class Stats:
    """Counts over the live rows and the rounds of a chunk.

    hits[d, n, r]: accepted nodes of depth d + 1, rank n by score, and `ranks` r. Reliability diagram of the scores: bin i
    has nodes[i] nodes of predicted probability i/10 to (i+1)/10; promised[i] is the sum of these probabilities,
    accepted[i] the number of accepted nodes. row_rounds[b]: rounds in which row b was live. `declined`: row rounds whose
    tree was only a root.
    """

    row_rounds: Int32[Array, " B"]
    declined: Int32[Array, ""]
    hits: Int32[Array, "D N k"]
    nodes: Int32[Array, " bins"]
    promised: Float[Array, " bins"]
    accepted: Int32[Array, " bins"]


def nothing(strategy: Strategy, batch: int) -> Stats:
    """All counts 0, of `batch` rows."""
    return Stats(
        row_rounds=jnp.zeros(batch, jnp.int32),
        declined=jnp.int32(0),
        hits=jnp.zeros((strategy.depth, strategy.nodes, strategy.topk), jnp.int32),
        nodes=jnp.zeros(BINS, jnp.int32),
        promised=jnp.zeros(BINS, jnp.float32),
        accepted=jnp.zeros(BINS, jnp.int32),
    )


def measure(
    tree: DraftTree,
    path: Int32[Array, "B M"],
    counts: Int32[Array, " B"],
    live: Bool[Array, " B"],
    strategy: Strategy,
) -> Stats:
    """The counts of one round; path[b, :counts[b]] are the root and the accepted nodes."""
    drafted = (tree.tokens != ABSENT) & live[:, None] & (jnp.arange(strategy.nodes) > 0)
    declined = live & ~drafted.any(axis=1) if strategy != PLAIN else jnp.zeros_like(live)

    steps = jnp.arange(strategy.path)
    visited = (steps > 0) & (steps < counts[:, None])
    accepted = (path[:, :, None] == jnp.arange(strategy.nodes)) & visited[:, :, None]
    accepted = accepted.any(axis=1) & drafted

    hits = jnp.zeros((strategy.depth, strategy.nodes, strategy.topk), jnp.int32)
    if strategy.depth:
        hits = hits.at[tree.depths - 1, score_order(tree.scores) - 1, tree.ranks].add(
            accepted.astype(jnp.int32)
        )

    chance = jnp.where(drafted, jnp.exp(tree.scores), 0).astype(jnp.float32)
    which = jnp.clip((BINS * chance).astype(jnp.int32), 0, BINS - 1)
    # One-hot sums instead of scatters, as XLA:TPU cannot compile these scatters together.
    here = which[..., None] == jnp.arange(BINS)

    return Stats(
        row_rounds=live.astype(jnp.int32),
        declined=declined.sum(dtype=jnp.int32),
        hits=hits,
        nodes=(here & drafted[..., None]).sum((0, 1), dtype=jnp.int32),
        promised=jnp.where(here, chance[..., None], 0).sum((0, 1)),
        accepted=(here & accepted[..., None]).sum((0, 1), dtype=jnp.int32),
    )
