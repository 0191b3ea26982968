"""How a run formats prompts and samples answers: written beside its model, and read by what asks the model later.

Knows no model and no device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlt_jax.config import Config, changes, parse
from tlt_jax.data.encoder import Encoder
from tlt_jax.errors import ConfigError, DataError

NAME = "prompt_format.json"  # file in a model directory
OF_TEMPLATE = (
    "data.system",
    "data.chat_template_kwargs",
)  # without effect when data.chat_template is off
KNOBS = (
    "data.chat_template", *OF_TEMPLATE, "data.prompt_suffix", "rollout.stop", "rollout.temperature",
    "rollout.top_k", "rollout.top_p", "rollout.max_new_tokens",
)  # fmt: skip


def of(config: Config) -> dict[str, Any]:
    """The content of the file: knob -> value. Without chat template those that need one have no value."""
    values = parse.flatten(config)
    unused = () if config.data.chat_template else OF_TEMPLATE
    return {name: type(values[name])() if name in unused else values[name] for name in KNOBS}


def files(config: Config) -> dict[str, dict[str, Any]]:
    """The file by name, as models.hf.save wants it."""
    return {NAME: of(config)}


def read(directory: Path) -> dict[str, Any]:
    """What `of` gave for the run that made the model; empty for other models. Raises DataError."""
    path = directory / NAME
    if not path.is_file():
        return {}
    try:
        values = dict(json.loads(path.read_text("utf-8")))
        if unknown := sorted(values.keys() - set(KNOBS)):
            raise ConfigError(f"{', '.join(unknown)} is not one of {', '.join(KNOBS)}")
        parse.build(Config, values)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): correct it, or ignore it with --raw (raw=True in Python)"
        ) from error
    return values


def encoder(config: Config, tokenizer: Any) -> Encoder:
    """The encoder of a configuration. Raises DataError when the tokenizer has no chat template that it needs."""
    if config.data.chat_template and not tokenizer.chat_template:
        raise DataError(
            "data.chat_template is true, but the tokenizer has no chat template: set it to false"
        )
    return Encoder(config, tokenizer)


def describe(config: Config) -> str:
    """One line: what is put around a prompt, and how answers are sampled."""
    data, rollout = config.data, config.rollout
    parts = ["chat template" if data.chat_template else "text as it is"]
    if data.chat_template:
        parts += [f"{name} {value}" for name, value in data.chat_template_kwargs.items()]
        parts += [f"system {changes.short(data.system)}"] if data.system else []
    parts += [f"suffix {changes.short(data.prompt_suffix)}"] if data.prompt_suffix else []
    parts += [f"stop {changes.short(rollout.stop)}"] if rollout.stop else []
    parts.append(f"temperature {rollout.temperature:g}")
    parts += [f"top-k {rollout.top_k}"] if rollout.top_k else []
    parts += [f"top-p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    return f"prompts: {', '.join(parts)}"
