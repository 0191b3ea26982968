"""The objective of a policy update, and the static arguments of its programs."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.config.learning import PPO
from tlt_jax.data import packing
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.remat import Remat
from tlt_jax.optimizer import Adam


@dataclass(frozen=True)
class Objective:
    """The loss that the update minimizes.

    The clipped policy gradient, or the user's `loss`, with KL and entropy terms (GRPO, arXiv
    2402.03300), or with `is_supervised` the negative log-likelihood of the answers.
    `importance_cap` 0: no importance weights between sampler and trainer.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float = 0.0
    temperature: float = 1.0
    is_supervised: bool = False
    loss: str = PPO


@dataclass(frozen=True)
class Recipe:
    """The static arguments of the programs of train.policy_update."""

    model: ModelConfig
    mesh: Mesh
    adam: Adam
    objective: Objective
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: Remat = ()
    logits_chunk: int = 1024
    attention_block: int = 128
    longest: int | None = None  # tokens of the longest example; None: the row length

    @classmethod
    def of(cls, config: Config, model: ModelConfig, mesh: Mesh, total_steps: int) -> Recipe:
        """The recipe of a run of `total_steps` optimizer steps.

        Log-probs are at the temperature of the rollout. With model.remat auto, `memory.fitted` chooses the levels, without
        which programs with a backward pass cannot be made.
        """
        algorithm = config.algorithm
        objective = Objective(
            algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef, algorithm.entropy_coef,
            algorithm.importance_cap, config.rollout.temperature, loss=algorithm.loss,
        )  # fmt: skip
        return cls(
            model, mesh, Adam.of(config, total_steps), objective,
            config.model.param_dtype, config.model.compute_dtype, (config.model.remat,) * model.num_layers,
            config.train.logits_chunk, config.train.attention_block, packing.longest(config),
        )  # fmt: skip
