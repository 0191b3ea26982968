"""The policy that a configuration names: its sizes, its weights, new or read; knows no training and no rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from tlt_jax import keys
from tlt_jax.config import Config, parse
from tlt_jax.models import hf, transformer
from tlt_jax.models.transformer import ModelConfig, Params


def describe(config: Config, tokenizer: Any) -> ModelConfig:
    """Sizes and features: of the model directory, or of model.init with the tokenizer's vocabulary and EOS."""
    eos_ids = (tokenizer.eos_token_id,)
    if config.model.path:
        return hf.read_config(directory(config), eos_ids)
    return hf.new_config(config.model.init, len(tokenizer), eos_ids)


def load(config: Config, model: ModelConfig, mesh: Mesh) -> Params:
    """The weights of the model directory, or new ones drawn from train.seed; "train" layout."""
    if config.model.path:
        return hf.load(directory(config), model, mesh, config.model.param_dtype)
    init_key = keys.weights_key(config.train.seed, keys.POLICY_WEIGHTS)
    return transformer.init(model, mesh, init_key, config.model.param_dtype)


def directory(config: Config) -> Path:
    """The local directory of model.path; a hub id is downloaded once."""
    return hf.resolve(parse.expand(config.model.path, "model.path"))


def fingerprint(config: Config) -> list[tuple[str, int, int]]:
    """Name, size and time of each file of the model directory: changes when its weights do."""
    if not config.model.path:
        return []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(directory(config).iterdir())]
