"""The static arguments of the programs of a drafter's update, from a configuration, and the state that it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from jax.sharding import Mesh

from tlt_jax import optimizer
from tlt_jax.config import Config
from tlt_jax.models import drafter as drafters, targets
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter import DrafterConfig, DrafterParams
from tlt_jax.optimizer import Adam, TrainState

# Batches of at least this many tokens use the full learning rate. Gradients of smaller batches are noisier: with 190 tokens
# at the full rate, a well-trained drafter lost 5 % of its accept length in 20 RL steps.
WHOLE = 2048
UNROLL = {"eagle": 1, "eagle3": 5}  # default draft steps
BLOCK_COMPILE_STEPS = 3  # two layers: 8 to 9 s of a CPU, as 3 steps of eagle3
IDLE_WARMUP = 20  # micro-steps of linear warm-up

DrafterState = TrainState  # with params of type DrafterParams; the ids have no moments


@dataclass(frozen=True)
class DrafterRecipe:
    """The static arguments of the programs of drafter.update.

    `unroll`: draft steps of EAGLE, 0 of a block drafter. `teacher_share`: of the policy's teacher, where rows have its tokens.
    """

    model: ModelConfig
    drafter: DrafterConfig
    mesh: Mesh
    adam: Adam
    unroll: int = 0
    seed: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    logits_chunk: int = 1024
    attention_block: int = 512
    teacher_share: float = 0.0

    @property
    def compile_steps(self) -> int:
        """What the programs of an update take to compile, in draft steps of EAGLE."""
        return self.unroll or BLOCK_COMPILE_STEPS


def recipe_of(
    config: Config, model: ModelConfig, drafter: DrafterConfig, mesh: Mesh
) -> DrafterRecipe:
    """The recipe of `drafter_training`."""
    knobs, train = config.drafter_training, config.train
    return DrafterRecipe(
        model, drafter, mesh,
        Adam.short(config, knobs.learning_rate, knobs.steps),
        0 if drafter.is_block else knobs.unroll or UNROLL[drafter.kind],
        train.seed, config.model.param_dtype, config.model.compute_dtype, *targets.blocks(model.vocab_size, mesh),
        config.algorithm.teacher.drafter,
    )  # fmt: skip


def idle_recipe(
    config: Config, model: ModelConfig, drafter: DrafterConfig, mesh: Mesh
) -> DrafterRecipe:
    """The recipe of `idle_training`, on the loss of `drafter_training`: its learning rate never decays."""
    optim = config.optim
    adam = Adam(
        config.idle_training.learning_rate, 1, "constant", IDLE_WARMUP, 1.0, optim.beta1, optim.beta2,
        weight_decay=0.0, grad_clip=1.0,
    )  # fmt: skip
    return replace(recipe_of(config, model, drafter, mesh), adam=adam)


def scaled(adam: Adam, tokens: int) -> Adam:
    """The optimizer for a batch of `tokens` tokens; below WHOLE its learning rate is smaller."""
    share = math.sqrt(min(tokens / WHOLE, 1.0))
    return replace(adam, learning_rate=share * adam.learning_rate)


def create(params: DrafterParams, recipe: DrafterRecipe) -> DrafterState:
    """The state before the first update. It owns `params`: the first update donates them."""
    state = optimizer.create(recipe.adam, params.replace(ids=None), recipe.mesh)
    return state.replace(params=params)


@cache
def abstract_state(recipe: DrafterRecipe) -> DrafterState:
    """ShapeDtypeStructs with shardings of the state, for restoring a checkpoint or compiling."""
    params = drafters.abstract(recipe.drafter, recipe.mesh, "train", recipe.param_dtype)
    state = optimizer.abstract(recipe.adam, params.replace(ids=None), recipe.mesh)
    return state.replace(params=params)
