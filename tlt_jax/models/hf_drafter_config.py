"""config.json of drafter directories, in the format of SGLang and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax.errors import ModelError
from tlt_jax.models import eagle_config, hf_config
from tlt_jax.models.architecture import NORMED, ModelConfig
from tlt_jax.models.eagle_config import DrafterConfig
from tlt_jax.models.hf_config import from_hf_config, read_json, to_hf_config

ARCHITECTURES = {  # name -> kind, model_type
    "LlamaForCausalLMEagle3": ("eagle3", "llama"),
    "LlamaForCausalLMEagle": ("eagle", "llama"),
    "Qwen2ForCausalLMEagle": ("eagle", "qwen2"),
}
VLLM_EAGLE = {"llama"}  # families with an EAGLE class in vLLM
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
READ = {
    "architectures", "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "tie_word_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "rms_norm_eps", "max_position_embeddings", "hidden_act", "target_hidden_size",
    "bias", "attention_bias", "mlp_bias", "fc_norm", "norm_output", "eagle_config", LAYER_IDS, "initializer_range",
    "original_max_position_embeddings", "quantization_config", "partial_rotary_factor", "use_sliding_window",
    "layer_types", "fc_bias",
}  # fmt: skip
HARMLESS = {
    "_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "max_window_layers",
    "pad_token_id", "pretraining_tp", "sliding_window", "target_model_type", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip


def read_config(directory: str | Path, policy: ModelConfig, positions: int = 0) -> DrafterConfig:
    """The config of a drafter directory, for this policy and sequences of this length; reads config.json only.

    Raises ModelError, in one line that names what does not fit: the config, the policy or the positions.
    """
    directory = Path(directory)
    raw = read_json(directory / "config.json")
    if raw is None:
        raise ModelError(
            f"{directory} has no config.json: give the directory of an EAGLE or EAGLE-3 drafter"
        )
    try:
        config = from_raw(raw, policy)
        check_positions(config, positions)
        return config
    except ValueError as error:
        raise ModelError(f"drafter {directory}: {error}") from error


def from_raw(raw: Mapping[str, Any], policy: ModelConfig) -> DrafterConfig:
    """The DrafterConfig of a config.json. Raises ModelError or ValueError that names what is unsupported."""
    named = raw.get("architectures") or [None]
    kind, family = ARCHITECTURES.get(named[0], (None, None))
    if kind is None or named[1:] not in ([], [hf_config.ARCHITECTURES[family]]):
        raise ModelError(
            f"architectures {named} are not a supported drafter: use {', '.join(ARCHITECTURES)}"
        )
    refuse_unsupported(raw, kind, family)
    layer = from_hf_config(dict(raw) | {"model_type": family})
    config = DrafterConfig(
        kind=kind,
        hidden_size=layer.hidden_size,
        mlp_dim=layer.mlp_dim,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab_size=layer.vocab_size,
        draft_vocab_size=raw["draft_vocab_size"] if kind == "eagle3" else layer.vocab_size,
        captures=read_captures(raw, policy) if kind == "eagle3" else (NORMED,),
        max_positions=layer.max_positions,
        rope=layer.rope,
        rms_eps=layer.rms_eps,
        qkv_bias=layer.qkv_bias,
        fc_bias=bool(raw.get("fc_bias") or raw.get("bias")),
        fc_norm=bool(raw.get("fc_norm")),
        norm_output=bool(raw.get("norm_output")),
        init_std=layer.init_std,
    )
    eagle_config.check_policy(config, policy)
    return config


def refuse_unsupported(raw: Mapping[str, Any], kind: str, family: str) -> None:
    """Raises ModelError for keys and values of a config.json that describe another network."""
    unknown = sorted(key for key in set(raw) - READ - HARMLESS if raw[key] not in (None, False))
    if unknown:
        named = ", ".join(unknown)
        raise ModelError(f"config.json names {named}: unknown here, and it may change the network")
    if raw.get("num_hidden_layers") != 1:
        raise ModelError(
            f"num_hidden_layers {raw.get('num_hidden_layers')}: only drafters of one layer are supported"
        )
    if raw.get("target_hidden_size") not in (None, raw.get("hidden_size")):
        wide = f"target_hidden_size {raw['target_hidden_size']} is not hidden_size {raw.get('hidden_size')}"
        raise ModelError(f"{wide}: only drafters as wide as their policy are supported")
    biased = [
        name for name in ("attention_bias", "mlp_bias") if raw.get(name) and family == "llama"
    ]
    if kind == "eagle3":
        if raw.get("bias"):
            biased.append("bias")
        if raw.get("tie_word_embeddings"):
            raise ModelError(
                "tie_word_embeddings true: an EAGLE-3 drafter needs an LM head of its own"
            )
        if not raw.get("draft_vocab_size"):
            raise ModelError(
                "draft_vocab_size is missing: an EAGLE-3 drafter that shares the policy's LM head is not supported"
            )
    if biased:
        raise ModelError(
            f"{', '.join(biased)} true: not supported in a drafter of this architecture"
        )


def read_captures(raw: Mapping[str, Any], policy: ModelConfig) -> tuple[int, ...]:
    """The policy's hidden states that an EAGLE-3 drafter reads; without ids, SGLang's and vLLM's default.

    Two conventions exist. vLLM's ids, at the top level, count the layers before the state, as ours do. SGLang's, in
    eagle_config, name the layer whose output it is: one less. Each place alone may hold either convention: SGLang (since
    May 2026, its pull request 25454) reads ids that begin with 1 as outputs, and others as counts. Raises ModelError when
    the two places disagree.
    """
    nested = dict(raw.get("eagle_config") or {})
    outputs, counts = nested.pop(LAYER_IDS, None), raw.get(LAYER_IDS)
    if nested.pop("use_aux_hidden_state", True) is not True:
        raise ModelError(
            "eagle_config.use_aux_hidden_state false: an EAGLE-3 drafter reads several hidden states"
        )
    if nested:
        raise ModelError(
            f"eagle_config names {', '.join(sorted(nested))}: unknown here, and it may change the network"
        )
    for ids in (outputs, counts):
        if ids is not None and not (
            isinstance(ids, list) and ids and all(isinstance(one, int) for one in ids)
        ):
            raise ModelError(f"{LAYER_IDS} {ids!r} is not a list of layer ids")
    if outputs is None and counts is None:
        return 2, policy.num_layers // 2, policy.num_layers - 3
    after = tuple(one + 1 for one in outputs or ())
    if outputs and counts and tuple(counts) == after:
        return after
    if outputs and counts and outputs != counts:
        raise ModelError(
            f"{LAYER_IDS} {counts}, but {outputs} in eagle_config: other layers, keep the right ones"
        )
    ids = outputs or counts
    return tuple(one + 1 for one in ids) if ids[0] == 1 else tuple(ids)


def check_positions(config: DrafterConfig, positions: int) -> None:
    """Raises ModelError when sequences get longer than the drafter was made for."""
    if config.max_positions < positions:
        raise ModelError(
            f"max_position_embeddings {config.max_positions} is below the {positions} positions of a sequence: "
            "lower rollout lengths, or raise it if the drafter was trained that far"
        )


def to_raw(config: DrafterConfig, dtype: np.dtype) -> dict[str, Any]:
    """The config.json of a drafter. `bias` is never true: SGLang and vLLM read it as the attention's."""
    raw = to_hf_config(config.block, dtype)
    if config.kind == "eagle":
        plain = raw["architectures"]
        # SGLang reads the first name; vLLM prefixes "Eagle" and takes the name that it knows.
        names = [plain[0] + "Eagle"]
        if config.block.family in VLLM_EAGLE:
            names += plain
        return raw | {"architectures": names, "bias": False, "fc_bias": config.fc_bias}
    return raw | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        LAYER_IDS: list(config.captures),
        "eagle_config": {
            LAYER_IDS: [one - 1 for one in config.captures],
            "use_aux_hidden_state": True,
        },
    }


def caveat(config: DrafterConfig) -> str | None:
    """One line on what vLLM does not load of this drafter's directory; None: it loads all of it."""
    if config.kind == "eagle" and config.block.family not in VLLM_EAGLE:
        return "vLLM has no EAGLE class for Qwen2: only SGLang loads this drafter; one of kind eagle3 loads in both"
    if config.fc_bias:
        return "vLLM loads this drafter without the bias of its fc, and drafts worse with it than SGLang"
    return None
