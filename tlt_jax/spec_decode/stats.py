"""What the trees of a chunk were worth, counted where they are verified; knows no cost and no clock."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.tree import ABSENT, DraftTree, score_order

BINS = 10  # of the reliability table of scores


@struct.dataclass
class Stats:
    """What the trees of live rows were worth, added up over the rounds of a chunk.

    hits[d, n, r]: accepted nodes of depth d + 1 that were n-th by score and whose `ranks` is r. In the reliability table,
    nodes[i] have a score that promises i/10 to (i+1)/10, promised[i] in all, and held[i] of them were accepted.
    `declined`: trees of a root only.
    """

    row_rounds: Int32[Array, ""]
    declined: Int32[Array, ""]
    hits: Int32[Array, "D N k"]
    nodes: Int32[Array, " bins"]
    promised: Float[Array, " bins"]
    held: Int32[Array, " bins"]


def nothing(strategy: Strategy) -> Stats:
    """What no trees were worth."""
    return Stats(
        row_rounds=jnp.int32(0),
        declined=jnp.int32(0),
        hits=jnp.zeros((strategy.depth, strategy.nodes, strategy.topk), jnp.int32),
        nodes=jnp.zeros(BINS, jnp.int32),
        promised=jnp.zeros(BINS, jnp.float32),
        held=jnp.zeros(BINS, jnp.int32),
    )


def measure(
    tree: DraftTree,
    path: Int32[Array, "B M"],
    counts: Int32[Array, " B"],
    live: Bool[Array, " B"],
    strategy: Strategy,
) -> Stats:
    """What the trees of one round were worth, of which path[b, :counts[b]] were visited."""
    drafted = (tree.tokens != ABSENT) & live[:, None] & (jnp.arange(strategy.nodes) > 0)
    steps = jnp.arange(strategy.path)
    accepted = (steps > 0) & (steps < counts[:, None])
    held = (path[:, :, None] == jnp.arange(strategy.nodes)) & accepted[:, :, None]
    held = held.any(axis=1) & drafted
    hits = jnp.zeros((strategy.depth, strategy.nodes, strategy.topk), jnp.int32)
    if strategy.depth:
        hits = hits.at[tree.depths - 1, score_order(tree.scores) - 1, tree.ranks].add(held.astype(jnp.int32))
    chance = jnp.where(drafted, jnp.exp(tree.scores), 0).astype(jnp.float32)
    which = jnp.clip((BINS * chance).astype(jnp.int32), 0, BINS - 1)
    here = which[..., None] == jnp.arange(BINS)  # sums, as XLA:TPU cannot compile these scatters together
    return Stats(
        row_rounds=live.sum(dtype=jnp.int32),
        declined=(live & ~drafted.any(axis=1)).sum(dtype=jnp.int32) * (strategy != PLAIN),
        hits=hits,
        nodes=(here & drafted[..., None]).sum((0, 1), dtype=jnp.int32),
        promised=jnp.where(here, chance[..., None], 0).sum((0, 1)),
        held=(here & held[..., None]).sum((0, 1), dtype=jnp.int32),
    )
