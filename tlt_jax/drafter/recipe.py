"""A drafter update's objective, the static arguments of its programs, and the state that it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from tlt_jax import optimizer
from tlt_jax.config import Config
from tlt_jax.models import eagle_config
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.eagle_config import DrafterConfig, DrafterParams
from tlt_jax.optimizer import Adam, TrainState

# Batches of at least this many tokens use the full learning rate. Gradients of smaller batches are noisier: with 190 tokens
# at the full rate, a well-trained drafter lost 5 % of its accept length in 20 RL steps.
WHOLE = 2048
IDLE_WARMUP = 20  # micro-steps of linear warm-up

DrafterState = TrainState  # with params of type DrafterParams; the ids have no moments


@dataclass(frozen=True)
class Objective:
    """What the update minimizes: the weighted losses of `unroll` draft steps.

    The weight of draft step j is decay ** j. `loss`: cross_entropy or acceptance. `noise`: half width of the uniform
    noise on the features (arXiv 2401.15077, section 3.2). `top_loss`: weight of the loss on the policy's most likely
    tokens (arXiv 2408.15766, section 3.1); `detach`: no gradient flows from a draft step to the steps before it (section
    3.2).
    """

    unroll: int = 1
    decay: float = 0.8
    loss: str = "cross_entropy"  # cross_entropy | acceptance
    noise: float = 0.0
    top_loss: float = 0.0
    detach: bool = False


@dataclass(frozen=True)
class Recipe:
    """The static arguments of the programs of drafter.update."""

    model: ModelConfig
    drafter: DrafterConfig
    mesh: Mesh
    adam: Adam
    objective: Objective
    seed: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    logits_chunk: int = 1024
    attention_block: int = 512

    @classmethod
    def of(cls, config: Config, model: ModelConfig, drafter: DrafterConfig, mesh: Mesh) -> Recipe:
        """The recipe of `drafter_training`."""
        knobs, train = config.drafter_training, config.train
        unroll = knobs.unroll or {"eagle": 1, "eagle3": 5}[drafter.kind]
        return cls(
            model, drafter, mesh,
            Adam.short(config, knobs.learning_rate, knobs.steps),
            Objective(unroll),
            train.seed, config.model.param_dtype, config.model.compute_dtype, train.logits_chunk, train.attention_block,
        )  # fmt: skip

    @classmethod
    def while_idle(
        cls, config: Config, model: ModelConfig, drafter: DrafterConfig, mesh: Mesh
    ) -> Recipe:
        """The recipe of `idle_training`, on the objective of `drafter_training`: its learning rate never decays."""
        optim = config.optim
        adam = Adam(
            config.idle_training.learning_rate, 1, "constant", IDLE_WARMUP, 1.0, optim.beta1, optim.beta2,
            weight_decay=0.0, grad_clip=1.0,
        )  # fmt: skip
        return replace(cls.of(config, model, drafter, mesh), adam=adam)


def scaled(adam: Adam, tokens: int) -> Adam:
    """The optimizer for a batch of `tokens` tokens; below WHOLE its learning rate is smaller."""
    share = math.sqrt(min(tokens / WHOLE, 1.0))
    return replace(adam, learning_rate=share * adam.learning_rate)


def create(params: DrafterParams, recipe: Recipe) -> DrafterState:
    """The state before the first update. It owns `params`: the first update donates them."""
    return optimizer.create(recipe.adam, params.replace(ids=None), recipe.mesh).replace(
        params=params
    )


def abstract_state(recipe: Recipe) -> DrafterState:
    """ShapeDtypeStructs with shardings of the state, for restoring a checkpoint or compiling."""
    params = eagle_config.abstract(recipe.drafter, recipe.mesh, "train", recipe.param_dtype)
    return optimizer.abstract(recipe.adam, params.replace(ids=None), recipe.mesh).replace(
        params=params
    )
