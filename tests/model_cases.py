"""Tiny models of every family and config feature, with weights that any program makes alike from their names."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from tlt_jax.models import hf, hf_config, kv_cache

GOLDENS = Path(__file__).parent / "goldens" / "models.npz"
LENGTH = 11
SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}
# A policy without goldens.
SMALL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
OLD, NEW = {"torch_dtype": "float32"}, {"dtype": "float32"}
PHI4_MINI = {
    "model_type": "phi3", "pad_token_id": None, "sliding_window": 64, "tie_word_embeddings": True,
    "partial_rotary_factor": 0.75, **OLD,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.2, 1.1], "long_factor": [1.1, 2.0, 5.5]},
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "sliding_window": 4, "vocab_size_per_layer_input": 37,
    "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None, "tie_word_embeddings": True, **OLD,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6, **OLD},
    "qwen2_mha": {
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        **OLD,
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "rope_theta": 5e4,
        "rope_scaling": {"type": "yarn", **YARN},
        **OLD,
    },
    "qwen2_wide_heads": {
        "model_type": "qwen2",
        "head_dim": 16,
        "rope_parameters": {"rope_theta": 500.0},
        **NEW,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        **OLD,
    },
    "qwen3_bias": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "beta_fast": 8.0,
            "truncate": False,
            **YARN,
        },
        **NEW,
    },
    "llama": {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        **OLD,
    },
    "llama_linear": {
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 2.0},
        **OLD,
    },
    "llama_bias": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
        **NEW,
    },
    "mistral": {
        "model_type": "mistral",
        "sliding_window": None,
        "head_dim": 16,
        "rope_theta": 1e6,
        **OLD,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "no_rope_layer_interval": 2,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        **NEW,
    },
    "smollm3_named": {
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 1],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        **NEW,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "tie_word_embeddings": True,
        "attention_bias": True,
        **OLD,
    },
    "phi3": {"model_type": "phi3", "sliding_window": None, "pad_token_id": None, **OLD},
    "phi3_partial": {"original_max_position_embeddings": 16, **PHI4_MINI},
    "phi3_long": {"original_max_position_embeddings": LENGTH - 1, **PHI4_MINI},
    "olmo2": {"model_type": "olmo2", "rope_theta": 5e5, "pad_token_id": None, **OLD},
    "olmo2_bias": {
        "model_type": "olmo2",
        "attention_bias": True,
        "num_key_value_heads": 4,
        "pad_token_id": None,
        **NEW,
    },
    "qwen2_windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        **OLD,
    },
    "mistral_mha": {
        "model_type": "mistral",
        "max_position_embeddings": 8192,
        "sliding_window": None,
        "num_key_value_heads": 4,
        **OLD,
    },
    "mistral_window": {"model_type": "mistral", "sliding_window": 4, **OLD},
    "smollm3_windows": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 3,
        "pad_token_id": None,
        **NEW,
    },
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 5,
        "sliding_window": 4,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", **YARN},
        "pad_token_id": None,
        **OLD,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": None,
        **OLD,
    },
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": None,
        **OLD,
    },
    "gemma3_scaled": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 21,
        "rope_local_base_freq": 1e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "pad_token_id": None,
        **OLD,
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "final_logit_softcapping": 3.0,
        **GEMMA4,
    },
    "gemma4_keys": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        **GEMMA4,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 16,
        **OLD,
    },
    "qwen3_moe_mixed": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": 4,
        "attention_bias": True,
        **NEW,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
        **OLD,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
        **OLD,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "sliding_window": None,
        "rope_theta": 1e6,
        **OLD,
    },
    "llama_yarn_factor": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "yarn", "attention_factor": 0.7, **YARN},
        **OLD,
    },
}
FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "smollm3",
    "granite",
    "phi3",
    "olmo3",
    "gemma2",
    "gemma3",
    "gemma4",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen2_moe",
)
TOKENS = np.random.RandomState(0).randint(0, SIZES["vocab_size"], (2, LENGTH))


def raw_config(case: str) -> dict[str, Any]:
    """The config.json of a case."""
    return SIZES | CASES[case]


def arrays(case: str) -> dict[str, np.ndarray]:
    """Every tensor of a case's files, in float32: norms near 1, matrices that keep the size of what they multiply."""

    config = hf_config.from_hf_config(raw_config(case))

    def draw(tensor: hf.Tensor) -> np.ndarray:
        noise = np.random.RandomState(zlib.crc32(tensor.name.encode())).randn(*tensor.shape)
        if tensor.leaf.endswith(("norm", "scale")):
            noise = (0 if config.norm_offset else 1) + 0.3 * noise
        elif len(tensor.shape) == 2 and tensor.leaf != "embed":
            noise = 1.5 * noise / np.sqrt(tensor.shape[1])
        return noise.astype(np.float32)

    return {tensor.name: draw(tensor) for tensor in hf.tensors(config)}


def write(case: str, directory: Path) -> Path:
    """Writes the Hugging Face directory of a case."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw_config(case)))
    save_file(arrays(case), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def empty_cache(
    config, batch: int, slots: int, features: int, dtype, mesh, *captures
) -> kv_cache.KVCache:
    """A cache of zeros."""
    spec = kv_cache.abstract(config, batch, slots, features, dtype, mesh, *captures)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), spec)
