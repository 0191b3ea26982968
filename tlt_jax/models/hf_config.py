"""Converts config.json of Hugging Face, in both dialects, to a ModelConfig and back; rejects unsupported features by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tlt_jax.errors import ModelError, refuse
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.hf_families import FAMILIES, SCALES, Raw, read_windows
from tlt_jax.models.rope import read_ropes, write_rope

# Models of images and text -> the entries of their text part, which text_config may lack.
WITH_IMAGES = {
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262208, "num_attention_heads": 8},
    "gemma4": {"model_type": "gemma4_text", "vocab_size": 262144, "num_attention_heads": 8, "hidden_size": 2304,
               "intermediate_size": 9216, "num_hidden_layers": 30},
}  # fmt: skip
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
# What `model.init` may hold: fields of a config.json that shape a new model, and those of its family.
INIT_FIELDS = (
    "model_type", *REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
    "initializer_range", "eos_token_id",
)  # fmt: skip
# Entries of which null says something else than that they are absent: no window, no cap.
NULL = "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"
INIT_DEFAULTS = {"model_type": "qwen2", "tie_word_embeddings": True}


def from_hf_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    tokenizer_eos: Iterable[int] = (),
) -> ModelConfig:
    """The ModelConfig of a config.json; EOS: all ids that config.json, generation_config.json and the tokenizer name.

    Of a model that reads images too, it is that of its text part.
    """
    raw = text_part(raw)
    refuse_unsupported(raw)
    missing = [name for name in REQUIRED if raw.get(name) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}: give sizes for them")
    check_numbers(raw)
    family = FAMILIES[raw["model_type"]]
    raw = family.defaults | {
        name: value for name, value in raw.items() if value is not None or name in NULL
    }
    heads, width, positions = (
        raw["num_attention_heads"],
        raw["hidden_size"],
        raw["max_position_embeddings"],
    )
    windows = read_windows(raw, family)
    eos = raw.get("eos_token_id"), (generation or {}).get("eos_token_id"), list(tokenizer_eos)
    lists = [one if isinstance(one, list) else [one] for one in eos]
    eos_ids = tuple(sorted({int(one) for ids in lists for one in ids if one is not None}))
    other = [number for number in eos_ids if not 0 <= number < raw["vocab_size"]]
    if other:
        raise ModelError(
            f"eos_token_id {other[0]} is not in the vocabulary of {raw['vocab_size']} tokens: correct one of the two"
        )
    try:
        return ModelConfig(
            family=raw["model_type"],
            vocab_size=raw["vocab_size"],
            hidden_size=width,
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or width // heads,
            mlp_dim=raw["intermediate_size"],
            max_positions=positions,
            **read_ropes(raw, positions, windows, family.ropes, family.local_theta),
            windows=windows,
            rms_eps=raw.get("rms_norm_eps", 1e-6),
            tied=bool(raw.get("tie_word_embeddings", False)),
            init_std=raw.get("initializer_range", 0.02),
            eos_ids=eos_ids,
            **family.read(raw),
        )
    except ValueError as error:
        raise ModelError(f"config.json: {error}") from error


def reads_images(raw: Raw) -> bool:
    """Whether a config.json is that of a model of images and text."""
    return raw.get("model_type") in WITH_IMAGES


def text_part(raw: Raw) -> Raw:
    """The entries of the text part of a model that also reads images; of another model all."""
    if not reads_images(raw):
        return raw
    own = {name: raw[name] for name in ("eos_token_id",) if raw.get(name) is not None}
    text = {**WITH_IMAGES[raw["model_type"]], **(raw.get("text_config") or {})}
    return text | own | {"model_type": WITH_IMAGES[raw["model_type"]]["model_type"]}


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raises ModelError for a feature that this code does not compute."""
    kind = raw.get("model_type")
    refuse(
        (kind not in FAMILIES, f"model_type {kind!r} is not supported: use {', '.join(FAMILIES)}")
    )
    name, only = FAMILIES[kind].activation
    act = raw.get(name) or only
    names = {"num_experts", "num_local_experts", "n_routed_experts"} - {*FAMILIES[kind].entries}
    experts = ", ".join(f"{name} {raw[name]}" for name in sorted(names) if raw.get(name))
    other = sorted({*(raw.get("layer_types") or [])} - {"full_attention", "sliding_attention"})
    refuse(
        (experts, f"{experts}: mixture of experts is not supported, use a dense model"),
        (other, f"layer_types {', '.join(other)}: not supported, only full_attention and sliding_attention"),
        (act != only, f"{name} {act!r} is not supported, only {only!r}"),
        (raw.get("quantization_config"),
         "quantization_config: quantized weights are not supported, use float32 or bfloat16 ones"),
    )  # fmt: skip


def check_numbers(raw: Mapping[str, Any]) -> None:
    """Raises ModelError for a size that is not an integer of at least 1, and for other numbers that are not positive."""
    sizes = (
        "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "num_experts", "num_local_experts",
        "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    )  # fmt: skip
    unused = {"sliding_window"} if raw.get("use_sliding_window") is False else {}
    for name in (*REQUIRED, *sizes):
        size = None if name in unused else raw.get(name)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ModelError(f"{name} {size!r}: use a whole number of at least 1")
    numbers = (
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        *SCALES.values(),
    )
    for name in ("rms_norm_eps", "rope_theta", "initializer_range", *numbers):
        value = raw.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
        ):
            raise ModelError(f"{name} {value!r}: use a number above 0")


def to_hf_config(config: ModelConfig, dtype: Any) -> dict[str, Any]:
    """The config.json of this model, in the dialect that transformers 4 and 5, vLLM and SGLang read."""
    family = FAMILIES[config.family]
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_positions,
        family.activation[0]: family.activation[1],
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": write_rope(config.rope),
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "torch_dtype": str(dtype),
        "use_cache": True,
    }
    found = raw | family.write(config) | eos_entry(config)
    if config.rope.kind == "proportional":  # rope_parameters alone say so
        del found["rope_theta"], found["rope_scaling"]
    return found


def eos_entry(config: ModelConfig) -> dict[str, Any]:
    """EOS for config.json and generation_config.json: one id, a list, or absent."""
    if not config.eos_ids:
        return {}
    return {"eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids)}


def new_config(init: Mapping[str, Any], vocab_size: int, eos_ids: Iterable[int]) -> ModelConfig:
    """The ModelConfig of `model.init`, with this vocabulary and EOS unless `init` has its own."""
    family = FAMILIES.get(init.get("model_type", INIT_DEFAULTS["model_type"]))
    usable = dict.fromkeys([*INIT_FIELDS, *(family.entries if family else ())])
    unknown = sorted(set(init) - set(usable))
    if unknown:
        raise ModelError(
            f"model.init has unknown fields {', '.join(unknown)}: use {', '.join(usable)}"
        )
    if init.get("vocab_size", vocab_size) < vocab_size:
        raise ModelError(
            f"model.init.vocab_size {init['vocab_size']} is below the tokenizer's {vocab_size} tokens"
        )
    return from_hf_config(INIT_DEFAULTS | {"vocab_size": vocab_size} | dict(init), None, eos_ids)


def read_config(
    directory: str | Path,
    tokenizer_eos: Iterable[int] = (),
    claimed: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The ModelConfig of a model directory. Raises ModelError when `claimed`, fields of a config.json, contradicts it."""
    directory = Path(directory)
    raw = read_json(directory / "config.json")
    if raw is None:
        raise ModelError(
            f"{directory} has no config.json: give the directory of a Hugging Face model"
        )
    raw, generation = text_part(raw), read_json(directory / "generation_config.json")
    config = from_hf_config(raw, generation, tokenizer_eos)
    for name, value in (claimed or {}).items():
        if from_hf_config(raw | {name: value}, generation, tokenizer_eos) != config:
            raise ModelError(
                f"model.init.{name} is {value!r}, and {directory / 'config.json'} says {raw.get(name)!r}: correct it, or "
                "leave model.init out"
            )
    return config


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
