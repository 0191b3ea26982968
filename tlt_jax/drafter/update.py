"""The drafter's optimizer step on packed rows, and its copies that idle data groups train and that are merged afterwards.

Every data group trains a copy on its sub-mesh, without collectives across groups (local SGD). The merge is the mean of the
copies, weighted by the tokens that each was trained on. Copies are one state whose leaves have a leading axis of G data
groups, sharded over the mesh axis "data".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32

from tlt_jax import optimizer
from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import losses
from tlt_jax.drafter.recipe import DrafterRecipe, DrafterState, abstract_state, scaled
from tlt_jax.models import drafter as drafters, moe, transformer
from tlt_jax.models.architecture import Params
from tlt_jax.models.drafter import DrafterParams
from tlt_jax.models.params import whole
from tlt_jax.rollout.executables.programs import GroupShapes, Program, StateShape


def update(
    state: DrafterState, policy: Params, batch: PackedRows, recipe: DrafterRecipe
) -> tuple[DrafterState, dict[str, Array]]:
    """The state after one optimizer step on the batch, and its metrics. The policy is not trained.

    With features and states in the batch the policy may be in the "rollout" layout. An update that
    is not finite leaves weights and moments unchanged.
    """
    if batch.features is None:
        batch = observe(policy, batch, recipe)

    ids, trained = state.params.ids, state.params.replace(ids=None)
    shared = drafters.shared(policy)
    shared = shared.replace(head=whole(shared.head))  # of the rollout, where few tokens read tiles

    def trained_loss(trained: DrafterParams) -> tuple[Array, dict[str, Array]]:
        return losses.loss(trained.replace(ids=ids), shared, batch, recipe, state.step)

    (total, metrics), grads = jax.value_and_grad(trained_loss, has_aux=True)(trained)
    placed = drafters.shardings(recipe.drafter, recipe.mesh, "train").replace(ids=None)
    grads = jax.lax.with_sharding_constraint(optimizer.widen(grads), placed)

    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(total) & jnp.isfinite(norm)
    state, rate = optimizer.advance(state.replace(params=trained), grads, is_finite, recipe.adam)

    state = state.replace(params=state.params.replace(ids=ids))
    return state, {
        "loss": total,
        "grad_norm": norm,
        "lr": rate,
        "nonfinite": state.skipped,
        **metrics,
    }


def observe(policy: Params, batch: PackedRows, recipe: DrafterRecipe) -> PackedRows:
    """The batch with the policy's features and states, computed in its "train" layout."""
    states, features = transformer.hidden(
        policy, recipe.model, batch.tokens, batch.positions, batch.segments, compute_dtype=recipe.compute_dtype,
        block=recipe.attention_block, mesh=recipe.mesh, captures=recipe.drafter.captures,
        replayed=moe.by_layer(batch.experts, recipe.model),
    )  # fmt: skip
    return batch._replace(features=features, states=states)


def on_mesh(rows: PackedRows, mesh: Mesh) -> PackedRows:
    """The rows [R, T] of NumPy arrays on the mesh, sharded over its axis "data"."""
    return meshes.put(rows, meshes.sharding(mesh, ("batch", None), "train"))


def abstract_rows(mesh: Mesh, rows: int, tokens: int) -> PackedRows:
    """ShapeDtypeStructs with shardings of rows for the drafter without features, for compilation."""
    placed = meshes.sharding(mesh, ("batch", None), "train")
    small = partial(jax.ShapeDtypeStruct, (rows, tokens), sharding=placed)
    return PackedRows(*(small(jnp.int32) for _ in range(3)), is_answer=small(jnp.bool_))


@cache
def program(recipe: DrafterRecipe) -> jax.stages.Wrapped:
    """The jitted update(state, policy, batch), which donates the state.

    It returns the state with the shardings of its argument.
    """
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(recipe))
    everywhere = NamedSharding(recipe.mesh, PartitionSpec())
    return jax.jit(
        partial(update, recipe=recipe), donate_argnames="state", out_shardings=(placed, everywhere)
    )


@cache
def observation(recipe: DrafterRecipe) -> jax.stages.Wrapped:
    """The jitted observe(policy, batch): one forward pass of the policy, without gradient."""
    return jax.jit(partial(observe, recipe=recipe))


def depths(metrics: dict[str, Any]) -> list[float]:
    """Acceptance at depth 1, 2, ..., each given the depths before."""
    found = []
    while (name := f"acceptance@{len(found) + 1}") in metrics:
        found.append(float(metrics[name]))
    return found


@cache
def merge_programs(recipe: DrafterRecipe) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """The jitted spread(state) -> copies and merge(copies, tokens[G]) -> state, over the whole mesh of a recipe."""
    state = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(recipe))
    copies = jax.tree.map(lambda leaf: leaf.sharding, abstract_copies(recipe))

    def spread(state: DrafterState) -> DrafterState:
        groups = recipe.mesh.shape["data"]
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (groups, *leaf.shape)), state)

    return jax.jit(spread, out_shardings=copies), jax.jit(merge, out_shardings=state)


def abstract_copies(recipe: DrafterRecipe, group: Mesh | None = None) -> DrafterState:
    """ShapeDtypeStructs [G, ...] with shardings of the copies of all data groups, or [1, ...] of one on its sub-mesh."""
    mesh = recipe.mesh if group is None else group

    def copies(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = (None if axis == "data" else axis for axis in leaf.sharding.spec)
        spec = PartitionSpec("data" if group is None else None, *axes)
        shape = mesh.shape["data"], *leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(copies, abstract_state(recipe))


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


@dataclass(frozen=True)
class Copies:
    """The copies of a recipe's drafter on the devices of this process's data `groups`."""

    recipe: DrafterRecipe
    groups: Mapping[int, Mesh]

    def spread(self, state: DrafterState) -> dict[int, DrafterState]:
        """The copy [1, ...] of each data group, on its sub-mesh; zero-copy."""
        copies = merge_programs(self.recipe)[0](state)
        return {index: meshes.part(copies, mesh) for index, mesh in self.groups.items()}

    def blank(self, group: int) -> DrafterState:
        """Zeros in the place of a data group's copy."""
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            abstract_copies(self.recipe, self.groups[group]),
        )

    def merged(self, copies: Mapping[int, DrafterState], tokens: Sequence[int]) -> DrafterState:
        """The merge of all copies; `tokens` of the data groups of all processes, at least one above 0."""
        together = meshes.whole([copies[group] for group in self.groups], self.recipe.mesh)
        return merge_programs(self.recipe)[1](together, np.asarray(tokens, np.float32))


@dataclass(frozen=True)
class MicroStep:
    """micro_step(copy[1, ...], policy, batch, learns) -> copy, metrics; donates the copy.

    The batch is a packed row of `tokens` tokens with features; the policy is in the "rollout" layout. `recipe`: that of
    the whole mesh. A batch of fewer than WHOLE tokens scales the learning rate by sqrt(tokens / WHOLE): the
    square root scaling rule of Adam (arXiv 2205.10287).
    """

    group: int
    tokens: int
    recipe: DrafterRecipe

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        copy = abstract_copies(self.recipe, shapes.mesh)
        adam = scaled(self.recipe.adam, self.tokens)
        placed = jax.tree.map(lambda leaf: leaf.sharding, copy)
        program = jax.jit(
            partial(micro_step, recipe=replace(self.recipe, mesh=shapes.mesh, adam=adam)),
            donate_argnums=0,
            out_shardings=(placed, shapes.replicated),
        )
        learns = jax.ShapeDtypeStruct((), jnp.bool_, sharding=shapes.replicated)
        return program.lower(copy, shapes.target.params, self.batch(shapes), learns)

    def batch(self, shapes: GroupShapes) -> PackedRows:
        """ShapeDtypeStructs with shardings of a batch; features are sharded as in the decoding state."""
        state = shapes.state(StateShape(self.group, 1, self.tokens))
        features = shapes.target.features(state.cache)
        states = shapes.target.states(state.cache) if shapes.target.states else features

        def like(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            whole = (1, self.tokens, leaf.shape[-1])
            return jax.ShapeDtypeStruct(whole, leaf.dtype, sharding=leaf.sharding)

        rows = abstract_rows(shapes.mesh, 1, self.tokens)
        return rows._replace(features=like(features), states=like(states))

    @property
    def relative_seconds(self) -> float:
        """Expected compile seconds over a plain chunk's: on 12 layers 1.8, 1.9, 3.9 with 1, 3, 5 draft steps."""
        return 1.4 + 0.4 * self.recipe.compile_steps

    def __str__(self) -> str:
        return f"drafter step of {self.tokens} tokens, group {self.group}"


def micro_step(
    copy: DrafterState,
    policy: Params,
    batch: PackedRows,
    learns: Bool[Array, ""],
    recipe: DrafterRecipe,
) -> tuple[DrafterState, dict[str, Array]]:
    """The copy [1, ...] after one optimizer step if `learns`, else unchanged; and the metrics before the step."""
    state = jax.tree.map(lambda leaf: leaf[0], copy)
    after, metrics = update(state, policy, batch, recipe)
    after = jax.tree.map(partial(jnp.where, learns), after, state)
    return jax.tree.map(lambda leaf: leaf[None], after), metrics
