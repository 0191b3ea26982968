"""Verification of draft trees: the path that matches the tokens that the target chooses; knows no noise and no network."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.draft_tree import DraftTree


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
