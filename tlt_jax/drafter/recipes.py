"""The recipes of a configuration: which objective a kind of drafter has, and the optimizer of each place of training."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.drafter import block_loss, eagle_loss
from tlt_jax.drafter.recipe import Recipe
from tlt_jax.models import drafter as drafters, targets
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.optimizer import Adam

UNROLL = {"eagle": 1, "eagle3": 5}  # default draft steps
IDLE_WARMUP = 20  # micro-steps of linear warm-up


def recipe_of(config: Config, model: ModelConfig, drafter: DrafterConfig, mesh: Mesh) -> Recipe:
    """The recipe of `drafter_training`."""
    knobs, train = config.drafter_training, config.train
    if drafter.kind in drafters.BLOCK_KINDS:
        objective = block_loss.Objective()
    else:
        objective = eagle_loss.Objective(knobs.unroll or UNROLL[drafter.kind])
    return Recipe(
        model, drafter, mesh,
        Adam.short(config, knobs.learning_rate, knobs.steps),
        objective,
        train.seed, config.model.param_dtype, config.model.compute_dtype, *targets.blocks(model.vocab_size, mesh),
    )  # fmt: skip


def idle_recipe(config: Config, model: ModelConfig, drafter: DrafterConfig, mesh: Mesh) -> Recipe:
    """The recipe of `idle_training`, on the objective of `drafter_training`: its learning rate never decays."""
    optim = config.optim
    adam = Adam(
        config.idle_training.learning_rate, 1, "constant", IDLE_WARMUP, 1.0, optim.beta1, optim.beta2,
        weight_decay=0.0, grad_clip=1.0,
    )  # fmt: skip
    return replace(recipe_of(config, model, drafter, mesh), adam=adam)
