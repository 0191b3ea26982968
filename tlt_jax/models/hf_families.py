"""The model types of Hugging Face: how each differs from the others in its config.json and in the tensors of its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tlt_jax.errors import ModelError, refuse
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.rope import ROPES, write_ropes

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


def read_experts(raw: Raw) -> dict[str, Any]:
    """The experts of Qwen's types, and which layers have none."""
    count, step = raw["num_hidden_layers"], raw["decoder_sparse_step"]
    named = raw.get("mlp_only_layers") or ()
    dense = tuple(i for i in range(count) if i in named or (i + 1) % step)
    return {
        "num_experts": raw.get("num_local_experts", raw["num_experts"]), "experts_per_token": raw["num_experts_per_tok"],
        "expert_dim": raw["moe_intermediate_size"], "shared_dim": raw.get("shared_expert_intermediate_size", 0),
        "normed_gates": bool(raw["norm_topk_prob"]), "dense_layers": dense,
    }  # fmt: skip


def write_experts(config: ModelConfig) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": config.shared_dim} if config.shared_dim else {}
    return shared | {
        "num_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_dim, "norm_topk_prob": config.normed_gates,
        "decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers),
    }  # fmt: skip


def read_olmoe(raw: Raw) -> dict[str, Any]:
    """OLMoE's experts; its norms of queries and keys are of all heads together."""
    refuse((raw.get("clip_qkv") is not None, "clip_qkv is not supported: use null"))
    return read_attention_bias(raw) | {
        "qk_norm": "width", "num_experts": raw["num_experts"], "experts_per_token": raw["num_experts_per_tok"],
        "expert_dim": raw["intermediate_size"], "normed_gates": bool(raw["norm_topk_prob"]),
    }  # fmt: skip


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    names = "num_experts", "num_experts_per_tok", "norm_topk_prob"
    found = {name: value for name, value in write_experts(config).items() if name in names}
    return write_attention_bias(config) | NO_PADDING | found


def read_mixtral(raw: Raw) -> dict[str, Any]:
    return {
        "num_experts": raw["num_local_experts"], "experts_per_token": raw["num_experts_per_tok"],
        "expert_dim": raw["intermediate_size"], "normed_gates": True,
    }  # fmt: skip


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    counts = {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }
    return write_window(config) | counts  # fmt: skip


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


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    window = {"use_sliding_window": bool(config.windows)} | write_window(config)
    return write_attention_bias(config) | window | write_experts(config)


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
EXPERTS = {"norm_topk_prob": False, "decoder_sparse_step": 1}
EXPERT_ENTRIES = (
    "num_experts", "num_experts_per_tok", "norm_topk_prob", "num_local_experts", "moe_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
MIXTRAL = {"router": "block_sparse_moe.gate.weight"} | {
    f"expert_{part}": f"block_sparse_moe.experts.{{}}.{name}.weight"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
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
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        QWEN | EXPERTS | {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
        "shared_expert_intermediate_size": 5632, "qkv_bias": True},
        ("qkv_bias", "shared_expert_intermediate_size", *EXPERT_ENTRIES, *QWEN_WINDOWS),
        lambda raw: read_experts(raw) | {"qkv_bias": bool(raw["qkv_bias"])},
        lambda config: {"qkv_bias": config.qkv_bias} | write_qwen_windows(config) | write_experts(config), in_last_layers,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        EXPERTS | {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
        ("attention_bias", "use_sliding_window", "sliding_window", *EXPERT_ENTRIES),
        lambda raw: read_attention_bias(raw) | {"qk_norm": "head"} | read_experts(raw), write_qwen3_moe,
        lambda raw, layer: True,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64,
         "norm_topk_prob": False},
        ("attention_bias", "clip_qkv", *EXPERT_ENTRIES[:3]), read_olmoe, write_olmoe,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
         "num_experts_per_tok": 2, "num_local_experts": 8},
        ("sliding_window", "num_local_experts", "num_experts_per_tok"), read_mixtral, write_mixtral,
        lambda raw, layer: True, renamed=MIXTRAL,
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
