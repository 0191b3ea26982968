"""The static arguments of the programs of a policy update."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.config.schema import LOSS
from tlt_jax.config.validate import importance
from tlt_jax.data import packing
from tlt_jax.models import lora, targets
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.low_rank import Lora
from tlt_jax.models.remat import Remat
from tlt_jax.optimizer import Adam
from tlt_jax.train.objective import Objective


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
    lora: Lora | None = None  # None: all weights are trained

    @classmethod
    def of(cls, config: Config, model: ModelConfig, mesh: Mesh, total_steps: int) -> Recipe:
        """The recipe of a run of `total_steps` RL steps.

        Log-probs are at the temperature of the rollout. With model.remat auto, `memory.fitted` chooses the levels, without
        which programs with a backward pass cannot be made.
        """
        algorithm = config.algorithm
        objective = Objective(
            algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef if algorithm.kl_in == LOSS else 0.0,
            algorithm.entropy_coef, algorithm.importance_cap, config.rollout.temperature, loss=algorithm.loss,
            clip_dual=algorithm.clip_dual, importance=importance(algorithm, config.model.compute_dtype),
            importance_mask=algorithm.importance_mask, importance_veto=algorithm.importance_veto,
        )  # fmt: skip
        return cls(
            model, mesh, Adam.of(config, total_steps), objective,
            config.model.param_dtype, config.model.compute_dtype, (config.model.remat,) * model.num_layers,
            *targets.blocks(model.vocab_size, mesh), packing.longest(config),
            lora.chosen(config.model.lora),
        )  # fmt: skip
