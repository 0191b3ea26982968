"""The static arguments of the programs of a drafter's update, and the state that it trains; knows no loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from jax.sharding import Mesh
from jaxtyping import Array

from tlt_jax import optimizer
from tlt_jax.data.packing import PackedRows
from tlt_jax.models import drafter as drafters
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter import DrafterConfig, DrafterParams, Shared
from tlt_jax.optimizer import Adam, TrainState

# Batches of at least this many tokens use the full learning rate. Gradients of smaller batches are noisier: with 190 tokens
# at the full rate, a well-trained drafter lost 5 % of its accept length in 20 RL steps.
WHOLE = 2048

DrafterState = TrainState  # with params of type DrafterParams; the ids have no moments


class Objective(Protocol):
    """What an update minimizes, one class for each family of drafters; hashable.

    `compile_steps`: what its programs take to compile, in draft steps of EAGLE.
    `evaluate(params, shared, batch, recipe, step)` is the loss of a batch with features and states in optimizer step `step`,
    and its metrics: `acceptance@1`, `acceptance@2`, ... by depth, given the depths before, `tokens`, and others.
    """

    @property
    def compile_steps(self) -> int: ...

    def evaluate(
        self,
        params: DrafterParams,
        shared: Shared,
        batch: PackedRows,
        recipe: Recipe,
        step: Array | int,
    ) -> tuple[Array, dict[str, Array]]: ...


@dataclass(frozen=True)
class Recipe:
    """The static arguments of the programs of drafter.update."""

    model: ModelConfig
    drafter: DrafterConfig
    mesh: Mesh
    adam: Adam
    objective: Objective | None  # None: for shapes only
    seed: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    logits_chunk: int = 1024
    attention_block: int = 512


def scaled(adam: Adam, tokens: int) -> Adam:
    """The optimizer for a batch of `tokens` tokens; below WHOLE its learning rate is smaller."""
    share = math.sqrt(min(tokens / WHOLE, 1.0))
    return replace(adam, learning_rate=share * adam.learning_rate)


def create(params: DrafterParams, recipe: Recipe) -> DrafterState:
    """The state before the first update. It owns `params`: the first update donates them."""
    return optimizer.create(recipe.adam, params.replace(ids=None), recipe.mesh).replace(
        params=params
    )


@cache
def abstract_state(recipe: Recipe) -> DrafterState:
    """ShapeDtypeStructs with shardings of the state, for restoring a checkpoint or compiling."""
    params = drafters.abstract(recipe.drafter, recipe.mesh, "train", recipe.param_dtype)
    return optimizer.abstract(recipe.adam, params.replace(ids=None), recipe.mesh).replace(
        params=params
    )
