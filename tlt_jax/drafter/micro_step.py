"""The program of idle drafter training: one optimizer step of a data group's copy of the drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from tlt_jax.drafter import batch as drafter_batch, merge, update
from tlt_jax.drafter.batch import Batch
from tlt_jax.drafter.recipe import DrafterState, Recipe, scaled
from tlt_jax.models.architecture import Params
from tlt_jax.optimizer import Adam
from tlt_jax.rollout.executables.programs import GroupShapes, StateShape
from tlt_jax.rollout.executables.protocols import Program


@dataclass(frozen=True)
class MicroStep:
    """micro_step(copy[1, ...], policy, batch, learns) -> copy, metrics; donates the copy.

    The batch is `rows` packed rows of `tokens` tokens with features; the policy is in the "rollout" layout. `recipe`:
    that of the whole mesh. A batch of fewer than WHOLE tokens scales the learning rate by sqrt(tokens / WHOLE): the
    square root scaling rule of Adam (arXiv 2205.10287).
    """

    group: int
    rows: int
    tokens: int
    recipe: Recipe

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        copy = merge.abstract_copy(self.recipe, shapes.mesh)
        placed = jax.tree.map(lambda leaf: leaf.sharding, copy)
        program = jax.jit(
            partial(micro_step, recipe=replace(self.recipe, mesh=shapes.mesh, adam=self.adam)),
            donate_argnums=0,
            out_shardings=(placed, shapes.replicated),
        )
        learns = jax.ShapeDtypeStruct((), jnp.bool_, sharding=shapes.replicated)
        return program.lower(copy, shapes.target.params, self.batch(shapes), learns)

    @property
    def adam(self) -> Adam:
        """The recipe's optimizer, for a batch of this size."""
        return scaled(self.recipe.adam, self.rows * self.tokens)

    def batch(self, shapes: GroupShapes) -> Batch:
        """ShapeDtypeStructs with shardings of a batch; features are sharded as in the decoding state."""
        size = self.rows, self.tokens
        state = shapes.state(StateShape(self.group, 1, self.tokens))
        features = shapes.target.features(state.cache)
        states = shapes.target.states(state.cache) if shapes.target.states else features

        def like(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            whole = (*size, leaf.shape[-1])
            return jax.ShapeDtypeStruct(whole, leaf.dtype, sharding=leaf.sharding)

        placed = drafter_batch.batch_sharding(shapes.mesh)
        small = partial(jax.ShapeDtypeStruct, size, sharding=placed)
        ids = (small(jnp.int32) for _ in range(3))
        return Batch(*ids, small(jnp.bool_), like(features), like(states))

    @property
    def relative_seconds(self) -> float:
        """Expected compile seconds over a plain chunk's: on 12 layers 1.8, 1.9, 3.9 with 1, 3, 5 draft steps."""
        return 1.4 + 0.4 * self.recipe.objective.compile_steps

    def __str__(self) -> str:
        return f"drafter step of {self.rows} x {self.tokens}, group {self.group}"


def micro_step(
    copy: DrafterState, policy: Params, batch: Batch, learns: Bool[Array, ""], recipe: Recipe
) -> tuple[DrafterState, dict[str, Array]]:
    """The copy [1, ...] after one optimizer step if `learns`, else unchanged; and the metrics before the step."""
    state = jax.tree.map(lambda leaf: leaf[0], copy)
    after, metrics = update.update(state, policy, batch, recipe)
    after = jax.tree.map(partial(jnp.where, learns), after, state)
    return jax.tree.map(lambda leaf: leaf[None], after), metrics
