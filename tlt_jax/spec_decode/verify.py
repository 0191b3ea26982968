"""Verification of draft trees: the path that matches the tokens that the target chooses, and counts of accepted nodes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.interface import ABSENT, DraftTree, score_order
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

BINS = 10  # of the reliability diagram of scores


@struct.dataclass
class Visit:
    """The target's choice at one node of each row: the token, its log-probability, and whether the logits are broken."""

    tokens: Int32[Array, "*A"]
    logprobs: Float[Array, "*A"]
    broken: Bool[Array, "*A"]


@struct.dataclass
class Walk:
    """The accepted path of each tree: path[b, 0] is the root, then `accepted` nodes; after these the last node is repeated.

    `visits` [B, M]: the target's choices on the path: the accepted tokens, then the bonus token at m = accepted;
    undefined after it.
    """

    path: Int32[Array, "B M"]
    visits: Visit
    accepted: Int32[Array, " B"]


@jax.named_scope("verify")
@shaped
def path_of(
    tree: DraftTree,
    ancestors: Bool[Array, "B N N"],
    live: Bool[Array, " B"],
    depth: int,
    choices: Visit,
) -> Walk:
    """`walk` from the choices at all nodes [B, N], without a loop: a node is accepted when it and its ancestors are chosen."""
    nodes = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)
    wanted = jnp.take_along_axis(choices.tokens, tree.parents, axis=1, mode="promise_in_bounds")
    is_chosen = (tree.tokens == wanted) | (nodes == 0)
    follows = jnp.all(is_chosen[:, None] | ~ancestors, axis=2)
    follows &= live[:, None] | (nodes == 0)
    is_above = tree.depths[:, None] <= jnp.arange(depth + 1)[:, None]
    path = jnp.max(jnp.where(follows[:, None] & is_above, nodes, 0), axis=2)
    here = follows[:, None] & (tree.depths[:, None] == jnp.arange(depth + 1)[:, None])
    visits = Visit(
        jnp.max(jnp.where(here, choices.tokens[:, None], 0), axis=2),
        jnp.sum(jnp.where(here, choices.logprobs[:, None], 0), axis=2),
        jnp.any(here & choices.broken[:, None], axis=2),
    )
    return Walk(path, visits, jnp.sum(follows[:, 1:], axis=1, dtype=jnp.int32))


@jax.named_scope("verify")
@shaped
def walk(
    tree: DraftTree,
    live: Bool[Array, " B"],
    depth: int,
    visit: Callable[[Int32[Array, " B"], Int32[Array, ""], Bool[Array, " B"]], Visit],
    unrolls: bool = False,
) -> Walk:
    """The path that goes to the child equal to the token chosen at its parent.

    It ends where no child matches, or after `depth` steps. visit(nodes, step, alive) is the target's choice at one node
    of each row; it is evaluated on the nodes of the path only. The loop ends when no row is alive; `unrolls`: all `depth`
    steps, without a loop.
    """
    nodes = jnp.arange(tree.tokens.shape[1])
    root = jnp.zeros(live.shape, jnp.int32)
    first = visit(root, jnp.int32(0), live)
    if not depth:
        return Walk(root[:, None], jax.tree.map(lambda leaf: leaf[:, None], first), root)

    def wide(leaf: Array) -> Array:
        return jnp.zeros((live.shape[0], depth + 1), leaf.dtype).at[:, 0].set(leaf)

    def put(column: Int32[Array, ""], whole: Array, leaf: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, leaf[:, None], column, axis=1)

    def child(node: Array, alive: Array, wanted: Array) -> tuple[Array, Array]:
        hits = (tree.parents == node[:, None]) & (tree.tokens == wanted[:, None]) & (nodes > 0)
        alive &= hits.any(axis=1)
        return jnp.where(alive, jnp.argmax(hits, axis=1).astype(jnp.int32), node), alive

    def step(carry: tuple) -> tuple:
        count, node, alive, found = carry
        visited = visit(node, count, alive)
        visits = jax.tree.map(lambda whole, leaf: put(count, whole, leaf), found.visits, visited)
        here = jnp.where(jnp.arange(depth + 1) >= count, node[:, None], found.path)
        found = Walk(here, visits, found.accepted + alive)
        return (count + 1, *child(node, alive, visited.tokens), found)

    def has_alive(carry: tuple) -> Array:
        count, _, alive, _ = carry
        return (count <= depth) & alive.any()

    initial = Walk(
        jnp.zeros((live.shape[0], depth + 1), jnp.int32), jax.tree.map(wide, first), root
    )
    carry = (jnp.int32(1), *child(root, live, first.tokens), initial)
    if not unrolls:
        return jax.lax.while_loop(has_alive, step, carry)[-1]
    for _ in range(depth):
        carry = step(carry)
    return carry[-1]


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
