"""Copies of the drafter for the data groups, and their merge at the end of a rollout; knows no rollout.

Every data group trains a local copy on its sub-mesh, without collectives across groups (local SGD). The merge is the mean
of the copies, weighted by the tokens that each was trained on. Copies are one state whose leaves have a leading axis of G
data groups, sharded over the mesh axis "data".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter.recipe import DrafterState, Recipe, abstract_state


class MergePrograms(NamedTuple):
    """The jitted programs over the whole mesh.

    spread(state) -> copies; merge(copies, tokens[G]) -> state.
    """

    spread: jax.stages.Wrapped
    merge: jax.stages.Wrapped


@cache
def programs(recipe: Recipe) -> MergePrograms:
    """The programs of a recipe over the whole mesh; the state is in the "train" layout."""
    state = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(recipe))
    copies = jax.tree.map(lambda leaf: leaf.sharding, abstract_copies(recipe))
    groups = recipe.mesh.shape["data"]
    return MergePrograms(
        jax.jit(partial(spread, groups), out_shardings=copies),
        jax.jit(merge, out_shardings=state),
    )


def abstract_copies(recipe: Recipe) -> DrafterState:
    """ShapeDtypeStructs [G, ...] with shardings of the copies of all data groups."""
    groups = recipe.mesh.shape["data"]

    def copies(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("data", *without_data(leaf.sharding.spec))
        sharding = NamedSharding(recipe.mesh, spec)
        return jax.ShapeDtypeStruct((groups, *leaf.shape), leaf.dtype, sharding=sharding)

    return jax.tree.map(copies, abstract_state(recipe))


def abstract_copy(recipe: Recipe, group: Mesh) -> DrafterState:
    """ShapeDtypeStructs [1, ...] with shardings of one data group's copy on its sub-mesh."""

    def copy(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(group, PartitionSpec(None, *leaf.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return jax.tree.map(copy, abstract_copies(recipe))


def without_data(spec: PartitionSpec) -> tuple[str | None, ...]:
    """The spec without the mesh axis "data"."""
    return tuple(None if axis == "data" else axis for axis in spec)


def spread(groups: int, state: DrafterState) -> DrafterState:
    """The copies [G, ...] of a state."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (groups, *leaf.shape)), state)


def merge(copies: DrafterState, tokens: Float32[Array, " G"]) -> DrafterState:
    """The state whose weights and moments are the means of the copies', weighted by `tokens`; at least one of these is > 0.

    A copy with 0 tokens has no effect, whatever its values. Counters are the maximum over the copies; token ids are the
    same in all.
    """

    def mean(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.max(leaf, axis=0)
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        share = tokens.astype(wide.dtype) / jnp.sum(tokens.astype(wide.dtype))
        weight = share.reshape(-1, *[1] * (leaf.ndim - 1))
        counted = jnp.where(weight > 0, weight * wide, 0)
        return jnp.sum(counted, axis=0).astype(leaf.dtype)

    return jax.tree.map(mean, copies)


def parts(copies: DrafterState, groups: Sequence[Mesh]) -> list[DrafterState]:
    """The copy [1, ...] of each of these data groups, on its sub-mesh; zero-copy."""
    return [meshes.part(copies, group) for group in groups]


def merged(copies: Sequence[DrafterState], tokens: Sequence[int], recipe: Recipe) -> DrafterState:
    """The merge of the data groups' copies [1, ...]. At least one was trained on a token."""
    together = meshes.whole(copies, recipe.mesh)
    return programs(recipe).merge(together, np.asarray(tokens, np.float32))


@dataclass(frozen=True)
class DeviceCopies:
    """The copies of a recipe's drafter on the devices of this process's data `groups`."""

    recipe: Recipe
    groups: Mapping[int, Mesh]

    def spread(self, state: DrafterState) -> dict[int, DrafterState]:
        """The copy [1, ...] of each data group."""
        whole = parts(programs(self.recipe).spread(state), self.groups.values())
        return dict(zip(self.groups, whole, strict=True))

    def blank(self, group: int) -> DrafterState:
        """Zeros in the place of a data group's copy."""
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            abstract_copy(self.recipe, self.groups[group]),
        )

    def merged(self, copies: Mapping[int, DrafterState], tokens: Sequence[int]) -> DrafterState:
        """The merge of all copies; `tokens` of the data groups of all processes."""
        return merged([copies[group] for group in self.groups], tokens, self.recipe)
