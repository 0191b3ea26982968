"""What a configuration names, loaded once: tokenizer, data, the policy's sizes, the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from tlt_jax.config import Config, validate
from tlt_jax.data.dataset import Dataset
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.job import Job
from tlt_jax.models import from_config
from tlt_jax.models.architecture import ModelConfig


@dataclass(frozen=True)
class Setup:
    """The inputs of a training command. `job`: the processes that run it together."""

    config: Config
    tokenizer: Any
    dataset: Dataset | None
    model: ModelConfig
    mesh: Mesh
    job: Job = field(default_factory=Job)

    @classmethod
    def of(
        cls, config: Config, tokenizer: Any, dataset: Dataset | None, job: Job | None = None
    ) -> Setup:
        """With the policy's sizes, and a mesh of the devices that exist.

        Raises ConfigError for a model or a mesh that does not fit them.
        """
        model = from_config.model_config(config, tokenizer)
        validate.validate_model(config, model, jax.device_count())
        mesh, job = meshes.make_mesh(config.mesh.data, config.mesh.model), job or Job()
        if job.is_first:
            from_config.warn_of_tokenizer(config, tokenizer)
        return cls(config, tokenizer, dataset, model, mesh, job)
