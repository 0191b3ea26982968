"""The folder of a run: its resolved configuration, the frozen reference and the export; knows no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tlt_jax import atomic
from tlt_jax.config import Config, load as configuration
from tlt_jax.errors import ConfigError
from tlt_jax.models import hf
from tlt_jax.models.transformer import ModelConfig, Params

RESOLVED, REFERENCE, EXPORT, ANSWERS = "config.yaml", "reference", "hf", "answers"


def enter(config: Config) -> None:
    """Writes the resolved configuration; ConfigError, with the knobs that differ, when the folder is another run's.

    A run that stopped before its first step is nobody's loss: its configuration may be corrected in place.
    """
    path = Path(config.run) / RESOLVED
    if path.exists() and has_begun(config):
        different = configuration.differences(config, configuration.read(path))
        if different:
            raise ConfigError(
                f"{config.run} holds a run with other values of {', '.join(different)}: use those of {path}, or "
                "another run folder"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, configuration.to_yaml(config))
    except OSError as error:
        raise ConfigError(f"run {config.run!r} cannot be written ({error.strerror}): set another run folder") from error


def has_begun(config: Config) -> bool:
    """True when the folder holds a checkpoint or the answers of a step."""
    kept = ("checkpoints/[0-9]*", "completions/*.jsonl", f"{ANSWERS}/*.jsonl")
    return any(True for pattern in kept for _ in Path(config.run).glob(pattern))


def export(config: Config) -> Path:
    """Where the final policy goes."""
    return Path(config.run) / EXPORT


def is_exported(config: Config) -> bool:
    """True when the final policy is there, or is not wanted."""
    return not config.checkpoint.export or export(config).is_dir()


def write_model(
    config: Config, directory: Path, params: Params, model: ModelConfig, mesh: Mesh, tokenizer: Any = None
) -> None:
    """Writes a Hugging Face directory, which is there whole or not at all."""
    is_owner, dtype = jax.process_index() == 0, config.model.param_dtype
    atomic.write_directory(directory, lambda at: hf.save(params, model, at, mesh, tokenizer, dtype), is_owner)


def reference(config: Config, params: Params, model: ModelConfig, mesh: Mesh, is_new: bool) -> Params | None:
    """The frozen start policy of the KL term, saved once in the run folder; None when algorithm.kl_coef is 0.

    It is read back from the folder, so that it never shares buffers with the policy, which every update donates.
    """
    if not config.algorithm.kl_coef:
        return None
    directory = Path(config.run) / REFERENCE
    if is_new:
        write_model(config, directory, params, model, mesh)
    return hf.load(directory, model, mesh, config.model.param_dtype)
