"""The configuration that asks a model: the one of the run that made it, and the user's knobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tlt_jax.config import Config, parse as parsing, validate
from tlt_jax.config.schema import NONE
from tlt_jax.data import prompt_format
from tlt_jax.errors import ConfigError

# They differ from training: one answer, and no drafter, since compiling one does not pay off for few prompts.
DEFAULTS = {"rollout.samples": 1, "speculation.drafter": NONE, "train.steps": 1}


def configuration_of(
    directory: str, pairs: Sequence[tuple[str, str]], of_run: Mapping[str, Any] = {}
) -> Config:
    """The configuration of a model for inference: what its run wrote (`of_run`), and these knobs. Raises ConfigError."""
    tree = DEFAULTS | {"model.path": directory} | dict(of_run)
    config = parsing.build(Config, tree, pairs)
    validate.validate_without_training(config)
    return replace(config, model=replace(config.model, param_dtype=config.model.compute_dtype))


def as_its_run(model: str, pairs: Sequence[tuple[str, str]], is_raw: bool) -> Config:
    """The configuration that asks a model as the run that made it did, unless `is_raw`; `pairs` take precedence.

    Raises ModelError without the model, DataError, and ConfigError when a knob of the chat template would have no effect.
    """
    from tlt_jax.models import hf

    directory = hf.resolve(model)
    config = configuration_of(
        str(directory), pairs, {} if is_raw else prompt_format.read(directory)
    )
    unused = [name for name, value in pairs if name in prompt_format.OF_TEMPLATE and value]
    if unused and not config.data.chat_template:
        raise ConfigError(
            f"{unused[0]} needs the chat template: add --chat (data.chat_template true in Python)"
        )
    return config
