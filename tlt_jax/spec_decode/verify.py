"""Verification of draft trees: the path that agrees with the tokens the target chose.

It knows neither noise nor networks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.draft_tree import DraftTree


@struct.dataclass
class Match:
    """The accepted path of each tree: path[b, 0] is the root, then `accepted` nodes.

    After these the last node is repeated. tokens[b, m] is the token the target chose at
    path[b, m]: the accepted tokens, then the bonus token at m = accepted.
    """

    path: Int32[Array, "B M"]
    tokens: Int32[Array, "B M"]
    accepted: Int32[Array, " B"]


@jax.named_scope("verify")
@shaped
def match(tree: DraftTree, chosen: Int32[Array, "B N"], depth: int) -> Match:
    """The path that goes to the child equal to the token chosen at its parent.

    It ends where no child is, or after `depth` steps. `chosen`: the target's token at each node.
    """
    nodes = jnp.arange(chosen.shape[1])
    node = jnp.zeros(chosen.shape[0], jnp.int32)
    alive = jnp.ones(chosen.shape[0], bool)
    accepted = jnp.zeros_like(node)
    path = [node]

    for _ in range(depth):
        wanted = jnp.take_along_axis(chosen, node[:, None], axis=1)
        hits = (tree.parents == node[:, None]) & (tree.tokens == wanted) & (nodes > 0)
        alive &= hits.any(axis=1)
        node = jnp.where(alive, jnp.argmax(hits, axis=1).astype(jnp.int32), node)
        accepted += alive
        path.append(node)

    path_BM = jnp.stack(path, axis=1)
    return Match(path_BM, jnp.take_along_axis(chosen, path_BM, axis=1), accepted)
