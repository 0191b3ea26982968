"""Converts config.json of Hugging Face, in both dialects, to a ModelConfig and back; rejects unsupported features by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tlt_jax.errors import ModelError, refuse
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.rope import ROPES, read_ropes, write_rope, write_ropes

Raw = Mapping[str, Any]  # of a config.json


class Family(NamedTuple):
    """How a model type differs from the others, in its config.json and in the tensors of its files.

    `defaults`: of entries that a config.json may lack, as transformers has them. `entries`: further ones that are read, and
    `read(raw)`: the ModelConfig's fields from them; `write(config)`: the entries from the fields. `is_windowed(raw, layer)`:
    whether a layer has the window, where layer_types does not say so. `local_theta`: the base of rotary embeddings of these
    layers, where they have their own; 0: that of the others, unscaled. `activation`: the entry and its value. `renamed`:
    field of Layer -> its tensor in a layer, where that is not hf.IN_LAYER's. `joined`: a tensor in a layer that has those of
    several fields, one below the other -> these fields. `ropes`: types of rotary embeddings; where they are others than
    usual, partial_rotary_factor is read.
    """

    architecture: str
    defaults: Raw = {}
    entries: tuple[str, ...] = ()
    read: Callable[[Raw], dict[str, Any]] = lambda raw: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    is_windowed: Callable[[Raw, int], bool] = lambda raw, layer: False
    local_theta: float | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    renamed: Mapping[str, str] = {}
    joined: Mapping[str, tuple[str, ...]] = {}
    ropes: tuple[str, ...] = ROPES


def read_biases(raw: Raw) -> dict[str, Any]:
    """Biases of attention and of the MLP."""
    bias = bool(raw.get("attention_bias"))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(raw.get("mlp_bias"))}


def write_biases(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def read_attention_bias(raw: Raw) -> dict[str, Any]:
    """Biases of attention, where the MLP has none."""
    return read_biases({"attention_bias": raw.get("attention_bias")})


def write_attention_bias(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


SCALES = {
    "embed_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "score_scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def read_scales(raw: Raw) -> dict[str, Any]:
    """Granite's four factors; its attention_multiplier stands in the place of head_dim ** -0.5."""
    given = {field: float(raw.get(name, 1.0)) for field, name in SCALES.items()}
    width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    given |= {
        "score_scale": given["score_scale"] * math.sqrt(width),
        "logit_scale": 1 / given["logit_scale"],
    }
    return read_biases(raw) | given


def write_scales(config: ModelConfig) -> dict[str, Any]:
    found = {name: getattr(config, field) for field, name in SCALES.items()}
    found["attention_multiplier"] /= math.sqrt(config.head_dim)
    return write_biases(config) | found | {"logits_scaling": 1 / config.logit_scale}


def read_unrotated(raw: Raw) -> dict[str, Any]:
    """SmolLM3's layers without rotary embedding."""
    count = raw["num_hidden_layers"]
    return read_biases(raw) | {
        "unrotated": tuple(i for i in range(count) if not is_rotated(raw, i))
    }


def is_rotated(raw: Raw, layer: int) -> bool:
    """Whether a layer of SmolLM3 has a rotary embedding: named one by one, or all but every few."""
    named = raw.get("no_rope_layers")
    if named is None:
        return bool((layer + 1) % raw.get("no_rope_layer_interval", 4))
    if len(named) != raw["num_hidden_layers"]:
        raise ModelError(
            f"no_rope_layers has {len(named)} entries for {raw['num_hidden_layers']} layers: give each layer one"
        )
    return bool(named[layer])


def write_unrotated(config: ModelConfig) -> dict[str, Any]:
    rotated = [int(i not in config.unrotated) for i in range(config.num_layers)]
    named = {"no_rope_layers": rotated} | NO_PADDING
    return write_biases(config) | named | write_switched_windows(config)


def read_windows(raw: Raw, family: Family) -> tuple[int, ...]:
    """The window of each layer, 0 for those without one; () when no window is shorter than the longest sequence."""
    window, count = raw.get("sliding_window"), raw["num_hidden_layers"]
    if raw.get("use_sliding_window", True) is False or window is None:
        return ()
    kinds = raw.get("layer_types")
    if kinds is None:
        found = [family.is_windowed(raw, layer) for layer in range(count)]
    else:
        refuse(
            (len(kinds) != count, f"layer_types has {len(kinds)} entries for {count} layers: give each layer one"),
        )  # fmt: skip
        found = [kind == "sliding_attention" for kind in kinds]
    says_more = "global_head_dim" in raw  # there layers without a window have other shapes
    if not any(found) or (window >= raw["max_position_embeddings"] and not says_more):
        return ()
    return tuple(window if has else 0 for has in found)


def write_window(config: ModelConfig) -> dict[str, Any]:
    """The window of all layers."""
    return {"sliding_window": max(config.windows, default=None)}


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The window, and which layers have it."""
    kinds = [
        "sliding_attention" if window else "full_attention"
        for window in config.windows or (0,) * config.num_layers
    ]
    return write_window(config) | {"layer_types": kinds}


def write_switched_windows(config: ModelConfig) -> dict[str, Any]:
    """The same of a type whose windows are off unless one entry says otherwise."""
    if not config.windows:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True} | write_windows(config)


def write_qwen_windows(config: ModelConfig) -> dict[str, Any]:
    """Also the number of layers before the first with a window; nothing where none has one."""
    if not config.windows:
        return {}
    first = next(i for i, window in enumerate(config.windows) if window)
    return write_switched_windows(config) | {"max_window_layers": first}


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    original = config.rope.original_max_positions or config.max_positions
    return write_window(config) | NO_PADDING | {
        "original_max_position_embeddings": original, "partial_rotary_factor": config.rope.fraction
    }  # fmt: skip


def read_olmo(raw: Raw) -> dict[str, Any]:
    """Norms of all query or key heads together, and of what attention and MLP give."""
    return read_attention_bias(raw) | {"qk_norm": "width", "norms": "after"}


def write_olmo(config: ModelConfig) -> dict[str, Any]:
    return write_attention_bias(config) | NO_PADDING


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    return (
        write_olmo(config)
        | write_windows(config)
        | write_ropes(config.rope, config.window_rope or config.rope)
    )


def read_gemma(raw: Raw) -> dict[str, Any]:
    """Gemma 2, and the text model of Gemma 3."""
    refuse(
        (
            raw.get("use_bidirectional_attention"),
            "use_bidirectional_attention true is not supported",
        )
    )
    return read_attention_bias(raw) | {
        "norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh", "embed_scale": math.sqrt(raw["hidden_size"]),
        "score_scale": math.sqrt(raw["head_dim"] / raw["query_pre_attn_scalar"]),
        "score_cap": float(raw.get("attn_logit_softcapping") or 0),
        "logit_cap": float(raw.get("final_logit_softcapping") or 0),
    }  # fmt: skip


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    own = {
        "query_pre_attn_scalar": round(config.head_dim / config.score_scale**2),
        "attn_logit_softcapping": config.score_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
    }
    return write_attention_bias(config) | own | NO_PADDING | write_windows(config)


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    local = {"rope_local_base_freq": (config.window_rope or config.rope).theta}
    return write_gemma(config) | local | write_ropes(config.rope, config.window_rope or config.rope)


def read_gemma4(raw: Raw) -> dict[str, Any]:
    """The text model of Gemma 4: heads of another width in layers without a window, and keys and values for several layers."""
    count, rows = raw["num_hidden_layers"], raw.get("vocab_size_per_layer_input", raw["vocab_size"])
    windows = read_windows(raw, FAMILIES["gemma4_text"]) or (0,) * count
    full, own = full_layers(raw, windows), windows[: count - raw["num_kv_shared_layers"]]
    refuse(
        (windows[-1], "layer_types: the last layer has to be full_attention"),
        (raw.get("use_bidirectional_attention") == "all", "use_bidirectional_attention 'all' is not supported"),
        (raw.get("enable_moe_block"), "enable_moe_block true: mixture of experts is not supported, use a dense model"),
        (raw["hidden_size_per_layer_input"] and rows != raw["vocab_size"],
         f"vocab_size_per_layer_input {rows} is not vocab_size {raw['vocab_size']}"),
        ({*windows} != {*own},
         f"num_kv_shared_layers {raw['num_kv_shared_layers']}: a kind of layer would have no keys and values"),
    )  # fmt: skip
    width = raw["intermediate_size"]
    return read_attention_bias(raw) | {
        "qk_norm": "head", "norms": "both", "activation": "gelu_tanh", "embed_scale": math.sqrt(raw["hidden_size"]),
        "score_scale": math.sqrt(raw["head_dim"]), "logit_cap": float(raw.get("final_logit_softcapping") or 0),
        "value_norm": True, "full_head_dim": full.get("head_dim", raw["head_dim"]),
        "full_kv_heads": full.get("num_key_value_heads", 0), "keys_as_values": bool(raw.get("attention_k_eq_v")),
        "shared_layers": raw["num_kv_shared_layers"], "shared_mlp_dim": width * 2 if raw.get("use_double_wide_mlp") else 0,
        "token_inputs": raw["hidden_size_per_layer_input"], "out_scale": True,
    }  # fmt: skip


def full_layers(raw: Raw, windows: tuple[int, ...]) -> Raw:
    """What layers without a window have of their own, in either dialect: by name, or for each of them."""
    if (each := raw.get("per_layer_config")) is not None:
        kinds = {json.dumps(one, sort_keys=True) for one in each.values()}
        wanted = [layer for layer, window in enumerate(windows) if not window]
        refuse(
            (len(kinds) > 1 or sorted(map(int, each)) != wanted,
             "per_layer_config: supported is one for all layers of full_attention, and for no other"),
        )  # fmt: skip
        return json.loads(*kinds)
    heads = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
    return {"head_dim": raw["global_head_dim"]} | ({"num_key_value_heads": heads} if heads else {})


def write_gemma4(config: ModelConfig) -> dict[str, Any]:
    own = {
        "final_logit_softcapping": config.logit_cap or None,
        "global_head_dim": config.full_head_dim,
        "num_global_key_value_heads": config.full_kv_heads or None,
        "attention_k_eq_v": config.keys_as_values,
        "num_kv_shared_layers": config.shared_layers,
        "use_double_wide_mlp": bool(config.shared_mlp_dim),
        "hidden_size_per_layer_input": config.token_inputs,
        "vocab_size_per_layer_input": config.vocab_size,
    }
    return (
        write_attention_bias(config)
        | own
        | NO_PADDING
        | write_windows(config)
        | write_ropes(config.rope, config.window_rope or config.rope)
    )


NO_PADDING = {"pad_token_id": None}  # transformers would take one that the vocabulary may not have
QWEN = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN_WINDOWS = "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"
BIASES = "attention_bias", "mlp_bias"
NORMS_AFTER = {
    "attended_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
NORMS_BOTH = NORMS_AFTER | {"mlp_norm": "pre_feedforward_layernorm.weight"}
GELU = "hidden_activation", "gelu_pytorch_tanh"
GEMMA = {
    "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 4096, "query_pre_attn_scalar": 256
}  # fmt: skip
GEMMA4 = {
    "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 512, "global_head_dim": 512,
    "max_position_embeddings": 131072, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    },
}  # fmt: skip
GEMMA4_ENTRIES = (
    "attention_bias", "sliding_window", "layer_types", "final_logit_softcapping", "global_head_dim",
    "num_global_key_value_heads", "per_layer_config", "attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp",
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_bidirectional_attention",
)  # fmt: skip
GEMMA_ENTRIES = (
    "attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping",
)  # fmt: skip
FUSED = {
    "self_attn.qkv_proj.weight": ("q", "k", "v"),
    "mlp.gate_up_proj.weight": ("gate", "up"),
}


def in_last_layers(raw: Raw, layer: int) -> bool:
    """Whether a layer is one of Qwen's with a window."""
    return layer >= raw["max_window_layers"]


FAMILIES = {
    "qwen2": Family(
        "Qwen2ForCausalLM", QWEN, QWEN_WINDOWS, lambda raw: {"qkv_bias": True}, write_qwen_windows, in_last_layers
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", QWEN | {"head_dim": 128}, ("attention_bias", *QWEN_WINDOWS),
        lambda raw: read_attention_bias(raw) | {"qk_norm": "head"},
        lambda config: write_attention_bias(config) | write_qwen_windows(config), in_last_layers,
    ),
    "llama": Family(
        "LlamaForCausalLM", {"max_position_embeddings": 2048}, BIASES, read_biases, write_biases
    ),
    "mistral": Family(
        "MistralForCausalLM", {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
        ("sliding_window",), write=write_window, is_windowed=lambda raw, layer: True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"max_position_embeddings": 32768, "rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True,
         "use_sliding_window": False},
        (*BIASES, "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"),
        read_unrotated, write_unrotated, lambda raw, layer: not is_rotated(raw, layer),
    ),
    "granite": Family(
        "GraniteForCausalLM", {"max_position_embeddings": 2048}, (*BIASES, *SCALES.values()), read_scales, write_scales
    ),
    "phi3": Family(
        "Phi3ForCausalLM", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ("sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
        write=write_phi3, is_windowed=lambda raw, layer: True, ropes=("default", "longrope"), joined=FUSED,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}, ("attention_bias",), read_olmo,
        write_olmo, renamed=NORMS_AFTER,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        ("attention_bias", "sliding_window", "layer_types"), read_olmo, write_olmo3,
        lambda raw, layer: bool((layer + 1) % 4), 0.0, renamed=NORMS_AFTER,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA | {"max_position_embeddings": 131072, "rope_theta": 1e6, "sliding_window_pattern": 6},
        (*GEMMA_ENTRIES, "sliding_window_pattern", "rope_local_base_freq"),
        lambda raw: read_gemma(raw) | {"qk_norm": "head"}, write_gemma3,
        lambda raw, layer: bool((layer + 1) % raw["sliding_window_pattern"]), 10000.0, GELU, NORMS_BOTH,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", GEMMA | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0}, GEMMA_ENTRIES, read_gemma, write_gemma, lambda raw, layer: layer % 2 == 0,
        activation=GELU, renamed=NORMS_BOTH,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", GEMMA4, GEMMA4_ENTRIES, read_gemma4, write_gemma4, lambda raw, layer: bool((layer + 1) % 6),
        10000.0, GELU, NORMS_BOTH, ropes=("default", "proportional"),
    ),
}  # fmt: skip
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
    names = "num_experts", "num_local_experts", "n_routed_experts"
    experts = ", ".join(f"{name} {raw[name]}" for name in names if raw.get(name))
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
    sizes = "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"
    for name in (*REQUIRED, *sizes):
        size = raw.get(name)
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
