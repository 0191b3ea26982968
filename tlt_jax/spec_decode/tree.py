"""Draft trees, and the interfaces of what drafts and what scores them; knows no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32

from tlt_jax.shapes import shaped

PyTree = Any


@dataclass(frozen=True)
class Strategy:
    """Shape of a round's trees: levels below the root, children of a node, nodes with the root. Plain is (0, 0, 1)."""

    depth: int = 0
    topk: int = 0
    nodes: int = 1

    @property
    def path(self) -> int:
        """Most tokens that one round can emit: every level, and the token after it."""
        return self.depth + 1


PLAIN = Strategy()


@struct.dataclass
class DraftTree:
    """Token trees. Node 0 is the newest token and its own parent; parents[b, i] < i for i > 0; siblings are distinct."""

    tokens: Int32[Array, "B N"]
    parents: Int32[Array, "B N"]
    depths: Int32[Array, "B N"]


class Target(NamedTuple):
    """The model that decides, as pure functions; a cache and a prefill are pytrees only it understands.

    forward(params, tokens[B,N], positions[B,N], ancestors[B,N,N], cache, lengths[B]) -> logits[B,N,V], features[B,N,F], scratch
    keep(cache, scratch, path[B,M], lengths[B]) -> cache with the path's nodes at slots lengths[b].. (all M are written)
    prefill(params, tokens[Q,P], lengths[Q]) -> what `insert` takes: slots 0..lengths of each prompt
    insert(cache, prefilled, source[B]) -> cache whose row b is prompt source[b]; -1 leaves the row
    resize(cache, rows[B], slots) -> cache of the given rows and committed slots; row -1 may hold anything
    empty(batch, slots) -> ShapeDtypeStructs, with shardings, of a cache that also has room for the scratch tail
    params: ShapeDtypeStructs, with shardings, of the weights
    """

    forward: Callable[..., tuple[Array, Array, PyTree]]
    keep: Callable[..., PyTree]
    prefill: Callable[..., PyTree]
    insert: Callable[..., PyTree]
    resize: Callable[..., PyTree]
    empty: Callable[[int, int], PyTree]
    params: PyTree


class Drafter(NamedTuple):
    """What guesses ahead, as pure functions; its state rides in the decoding state.

    draft(params, state, roots[B], lengths[B], keys[B,2], strategy) -> DraftTree
    extend(params, state, tokens[B,M], counts[B], features[B,M,F]) -> state after the tokens emitted in a round
    """

    draft: Callable[..., DraftTree]
    extend: Callable[..., PyTree]


@shaped
def root_only(tokens: Int32[Array, " B"]) -> DraftTree:
    """The tree of plain decoding: nothing but the root."""
    zeros = jnp.zeros((tokens.shape[0], 1), jnp.int32)
    return DraftTree(tokens[:, None], zeros, zeros)


NO_DRAFTER = Drafter(
    draft=lambda params, state, roots, lengths, keys, strategy: root_only(roots),
    extend=lambda params, state, tokens, counts, features: state,
)


@shaped
def ancestors(parents: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """Row i marks the nodes that node i sees: itself and the way up to the root. Doubles the reach of the parent links."""
    nodes = parents.shape[1]
    parent_BNN = parents[:, :, None] == jnp.arange(nodes)
    seen = parent_BNN | jnp.eye(nodes, dtype=bool)
    for _ in range(max(nodes - 2, 0).bit_length()):
        seen = jnp.einsum("bij,bjk->bik", seen.astype(jnp.int32), seen.astype(jnp.int32)) > 0
    return seen
