"""Directories of adapters, as Hugging Face's peft writes them: the base that one names, and where its tokenizer is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlt_jax.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def is_adapter(directory: Path) -> bool:
    """Whether it is a directory of adapters."""
    return (directory / CONFIG).is_file()


def settings(directory: Path) -> dict[str, Any]:
    """The content of adapter_config.json. Raises ModelError."""
    path = directory / CONFIG
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def base_of(directory: Path) -> str:
    """The directory or hub id of the base that the adapters change. Raises ModelError when none is named."""
    base = settings(directory).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{directory / CONFIG} names no base: set base_model_name_or_path to the model's directory or hub id"
        )
    return base


def has_tokenizer(directory: Path) -> bool:
    """Whether a model directory holds a tokenizer."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def tokenizer_source(path: str) -> str:
    """Where the tokenizer of a model is: of adapters without one, their base; else the model itself."""
    directory = Path(path)
    if not is_adapter(directory) or has_tokenizer(directory):
        return path
    return base_of(directory)
