"""How a run formats prompts and samples answers: written beside its model, and read by what asks the model later.

For other models: how their makers sample, of generation_config.json.

Knows no model and no device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
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
MAKERS = "generation_config.json"  # file in a model directory, of transformers
SAMPLING = ("temperature", "top_k", "top_p")  # settings of that file that are knobs of `rollout`
# Others that change answers, which nothing here does, with the value that changes none; so does null.
UNSUPPORTED = {
    "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 0, "repetition_penalty": 1,
    "encoder_repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "no_repeat_ngram_size": 0,
    "num_beams": 1, "penalty_alpha": 0, "guidance_scale": 1, "min_length": 0, "min_new_tokens": 0,
    **dict.fromkeys(
        ("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
         "forced_eos_token_id", "exponential_decay_length_penalty", "stop_strings", "watermarking_config"), None,
    ),
}  # fmt: skip


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
    return read_object(directory / NAME, of_run)


def read_makers(directory: Path) -> dict[str, Any]:
    """What the makers of a model say of generating from it; empty when they say nothing. Raises DataError."""
    return read_object(directory / MAKERS, of_makers)


def read_object(path: Path, knobs: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The JSON object in a file; empty without the file. Raises DataError, also when its `knobs` are invalid."""
    if not path.is_file():
        return {}
    try:
        found = dict(json.loads(path.read_text("utf-8")))
        parse.build(Config, knobs(found))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): correct it, or ignore it with --raw (raw=True in Python)"
        ) from error
    return found


def of_run(found: dict[str, Any]) -> dict[str, Any]:
    """The knobs that a run wrote. Raises ConfigError for others."""
    if unknown := sorted(found.keys() - set(KNOBS)):
        raise ConfigError(f"{', '.join(unknown)} is not one of {', '.join(KNOBS)}")
    return found


def of_makers(found: dict[str, Any]) -> dict[str, Any]:
    """The knobs of what `read_makers` found: how to sample, and greedy where do_sample is false. Raises ConfigError."""
    samples = found.get("do_sample")
    if not isinstance(samples, bool | None):
        raise ConfigError(f"do_sample {samples!r} is not true or false")
    if samples is False:
        return {"rollout.temperature": 0.0}
    return {f"rollout.{name}": found[name] for name in SAMPLING if found.get(name) is not None}


def describe_makers(found: Mapping[str, Any], given: Collection[str]) -> str:
    """The end of the line of `describe`: what of `read_makers` is used where no knob is `given`, and what is not supported."""
    used = [name.removeprefix("rollout.") for name in of_makers(found) if name not in given]
    odd = [
        f"{name} {changes.short(found[name])}"
        for name, neutral in UNSUPPORTED.items()
        if found.get(name) not in (None, neutral)
    ]
    parts = [f"{', '.join(used)} from {MAKERS}"] if used else []
    parts += [f"not supported: {', '.join(odd)} of {MAKERS}"] if odd else []
    return "".join(f"; {part}" for part in parts)


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
