"""The static arguments of the programs of a drafter's update, from a configuration, and the state that it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

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
IDLE_WARMUP = 20  # micro-steps of linear warm-up

DrafterState = TrainState  # with params of type DrafterParams; the ids have no moments


@dataclass(frozen=True)
class EagleObjective:
    """What the update of an EAGLE drafter minimizes: the weighted losses of `unroll` draft steps.

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

    @property
    def compile_steps(self) -> int:
        """What the programs of an update take to compile, in draft steps of EAGLE."""
        return self.unroll


@dataclass(frozen=True)
class BlockObjective:
    """What the update of a block drafter minimizes: weighted losses of every position of blocks at drawn anchors.

    Of position j, exp(-j / gamma) times the sum of: `token` times the cross-entropy of the row's next token; `variation`
    times the L1 distance of the drafter's and the policy's distribution; and for a confidence head, `confidence` times its
    cross-entropy to the acceptance probability. These weights are those published for DSpark (arXiv 2607.05147).

    Rows have one block for every `spacing` tokens. DSpark's training has at most 512 for 4096 tokens, of millions of texts;
    an RL run has few texts, and learns more from a row with more blocks.
    """

    compile_steps: ClassVar[int] = 3  # two layers: 8 to 9 s of a CPU, as 3 steps of eagle3
    token: float = 0.1
    variation: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0
    spacing: int = 2


@dataclass(frozen=True)
class Recipe:
    """The static arguments of the programs of drafter.update."""

    model: ModelConfig
    drafter: DrafterConfig
    mesh: Mesh
    adam: Adam
    objective: EagleObjective | BlockObjective | None  # None: for shapes only
    seed: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    logits_chunk: int = 1024
    attention_block: int = 512


def recipe_of(config: Config, model: ModelConfig, drafter: DrafterConfig, mesh: Mesh) -> Recipe:
    """The recipe of `drafter_training`."""
    knobs, train = config.drafter_training, config.train
    is_block = drafter.is_block
    return Recipe(
        model, drafter, mesh,
        Adam.short(config, knobs.learning_rate, knobs.steps),
        BlockObjective() if is_block else EagleObjective(knobs.unroll or UNROLL[drafter.kind]),
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


def scaled(adam: Adam, tokens: int) -> Adam:
    """The optimizer for a batch of `tokens` tokens; below WHOLE its learning rate is smaller."""
    share = math.sqrt(min(tokens / WHOLE, 1.0))
    return replace(adam, learning_rate=share * adam.learning_rate)


def create(params: DrafterParams, recipe: Recipe) -> DrafterState:
    """The state before the first update. It owns `params`: the first update donates them."""
    state = optimizer.create(recipe.adam, params.replace(ids=None), recipe.mesh)
    return state.replace(params=params)


@cache
def abstract_state(recipe: Recipe) -> DrafterState:
    """ShapeDtypeStructs with shardings of the state, for restoring a checkpoint or compiling."""
    params = drafters.abstract(recipe.drafter, recipe.mesh, "train", recipe.param_dtype)
    state = optimizer.abstract(recipe.adam, params.replace(ids=None), recipe.mesh)
    return state.replace(params=params)
