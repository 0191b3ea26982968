"""One optimizer step of the drafter on packed rows; knows no rollout and no loss."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from tlt_jax import optimizer
from tlt_jax.drafter.batch import Batch
from tlt_jax.drafter.recipe import DrafterState, Recipe, abstract_state
from tlt_jax.models import drafter as drafters, transformer
from tlt_jax.models.architecture import Params
from tlt_jax.models.drafter import DrafterParams


def update(
    state: DrafterState, policy: Params, batch: Batch, recipe: Recipe
) -> tuple[DrafterState, dict[str, Array]]:
    """The state after one optimizer step on the batch, and its metrics. The policy is not trained.

    With features and states in the batch the policy may be in the "rollout" layout. An update that
    is not finite leaves weights and moments unchanged.
    """
    if batch.features is None:
        batch = observe(policy, batch, recipe)

    ids, trained = state.params.ids, state.params.replace(ids=None)
    shared = drafters.shared(policy)

    def trained_loss(trained: DrafterParams) -> tuple[Array, dict[str, Array]]:
        return recipe.objective.evaluate(
            trained.replace(ids=ids), shared, batch, recipe, state.step
        )

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


def observe(policy: Params, batch: Batch, recipe: Recipe) -> Batch:
    """The batch with the policy's features and states, computed in its "train" layout."""
    states, features = transformer.hidden(
        policy, recipe.model, batch.tokens, batch.positions, batch.segments, compute_dtype=recipe.compute_dtype,
        block=recipe.attention_block, mesh=recipe.mesh, captures=recipe.drafter.captures,
    )  # fmt: skip
    return batch.replace(features=features, states=states)


@cache
def program(recipe: Recipe) -> jax.stages.Wrapped:
    """The jitted update(state, policy, batch), which donates the state.

    It returns the state with the shardings of its argument.
    """
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(recipe))
    everywhere = NamedSharding(recipe.mesh, PartitionSpec())
    return jax.jit(
        partial(update, recipe=recipe), donate_argnames="state", out_shardings=(placed, everywhere)
    )


@cache
def observation(recipe: Recipe) -> jax.stages.Wrapped:
    """The jitted observe(policy, batch): one forward pass of the policy, without gradient."""
    return jax.jit(partial(observe, recipe=recipe))


def depths(metrics: dict[str, Any]) -> list[float]:
    """Acceptance at depth 1, 2, ..., each given the depths before."""
    found = []
    while (name := f"acceptance@{len(found) + 1}") in metrics:
        found.append(float(metrics[name]))
    return found
