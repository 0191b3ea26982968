"""The configuration that asks a model: the one of the run that made it, or of its makers, and the user's knobs."""

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
    directory: str, pairs: Sequence[tuple[str, str]], of_model: Mapping[str, Any] = {}
) -> Config:
    """The configuration of a model for inference: what its directory says, and these knobs. Raises ConfigError."""
    tree = DEFAULTS | {"model.path": directory} | dict(of_model)
    config = parsing.build(Config, tree, pairs)
    validate.validate_without_training(config)
    return replace(config, model=replace(config.model, param_dtype=config.model.compute_dtype))


def as_meant(
    model: str, pairs: Sequence[tuple[str, str]], is_raw: bool = False
) -> tuple[Config, str]:
    """The configuration that asks a model as the run that made it did, and what to say of what its makers say.

    Of a model that no run made, the sampling is that of its generation_config.json, or of that of the adapters' base.
    `pairs` take precedence; `is_raw`: nothing of the directory is used. Raises ModelError without the model, DataError, and
    ConfigError when a knob of the chat template would have no effect.
    """
    from tlt_jax.models import from_config, hf

    directory, of_model, makers = hf.resolve(model), {}, {}
    if not is_raw and (directory / prompt_format.NAME).is_file():
        of_model = prompt_format.read(directory)
    elif not is_raw:
        base = from_config.policy_directory(configuration_of(str(directory), pairs))
        makers = prompt_format.read_makers(base)
        of_model = prompt_format.of_makers(makers)
    config = configuration_of(str(directory), pairs, of_model)
    unused = [name for name, value in pairs if name in prompt_format.OF_TEMPLATE and value]
    if unused and not config.data.chat_template:
        raise ConfigError(
            f"{unused[0]} needs the chat template: add --chat (data.chat_template true in Python)"
        )
    return config, prompt_format.describe_makers(makers, {name for name, _ in pairs})
