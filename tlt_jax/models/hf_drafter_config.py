"""config.json of drafter directories: EAGLE in the format of SGLang and vLLM, block drafters in that of z-lab (DFlash) and
DeepSpec (DSpark), which vLLM reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax.errors import ModelError
from tlt_jax.models import hf_config
from tlt_jax.models.architecture import NORMED, ModelConfig
from tlt_jax.models.drafter import DrafterConfig, check_policy
from tlt_jax.models.hf_config import from_hf_config, read_json, to_hf_config

ARCHITECTURES = {  # name -> kind, model_type
    "LlamaForCausalLMEagle3": ("eagle3", "llama"),
    "LlamaForCausalLMEagle": ("eagle", "llama"),
    "Qwen2ForCausalLMEagle": ("eagle", "qwen2"),
}
BLOCK_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "Qwen3DFlashDraftModel": "dflash",  # vLLM before 0.20
    "Qwen3DSparkModel": "dspark",  # DeepSpec, also its DFlash: no Markov head and no confidence head
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
DRAFT_VOCAB = "tlt_draft_vocab_size"  # ours: other programs draft from the whole vocabulary
OF_EAGLE = {
    "bias",
    "fc_bias",
    "mlp_bias",
    "fc_norm",
    "norm_output",
    "eagle_config",
}  # of READ: not of block drafters
READ_BLOCK = {
    "block_size", "num_target_layers", "dflash_config", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "num_anchors", DRAFT_VOCAB,
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
        raise ModelError(f"{directory} has no config.json: give the directory of a drafter")
    try:
        config = from_raw(raw, policy)
        check_positions(config, positions)
        return config
    except ValueError as error:
        raise ModelError(f"drafter {directory}: {error}") from error


def from_raw(raw: Mapping[str, Any], policy: ModelConfig) -> DrafterConfig:
    """The configuration of a config.json. Raises ModelError or ValueError that names what is unsupported."""
    named = raw.get("architectures") or [None]
    if len(named) == 1 and named[0] in BLOCK_ARCHITECTURES:
        return block_from_raw(raw, policy, BLOCK_ARCHITECTURES[named[0]])
    kind, family = ARCHITECTURES.get(named[0], (None, None))
    if kind is None or named[1:] not in ([], [hf_config.ARCHITECTURES[family]]):
        raise ModelError(
            f"architectures {named} are not a supported drafter: use {', '.join([*ARCHITECTURES, *BLOCK_ARCHITECTURES])}"
        )
    refuse_unsupported(raw, kind, family)
    layer = from_hf_config(dict(raw) | {"model_type": family})
    config = DrafterConfig(
        kind=kind,
        layers=replace(layer, tied=False, eos_ids=()),
        policy_layers=policy.num_layers,
        captures=read_captures(raw, policy) if kind == "eagle3" else (NORMED,),
        draft_vocab_size=raw["draft_vocab_size"] if kind == "eagle3" else layer.vocab_size,
        fc_bias=bool(raw.get("fc_bias") or raw.get("bias")),
        fc_norm=bool(raw.get("fc_norm")),
        norm_output=bool(raw.get("norm_output")),
    )
    check_policy(config, policy)
    return config


def refuse_unsupported(raw: Mapping[str, Any], kind: str, family: str) -> None:
    """Raises ModelError for keys and values of a config.json that describe another network."""
    refuse_unknown(raw, READ)
    if raw.get("num_hidden_layers") != 1:
        raise ModelError(
            f"num_hidden_layers {raw.get('num_hidden_layers')}: only drafters of one layer are supported"
        )
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


def refuse_unknown(raw: Mapping[str, Any], known: set[str]) -> None:
    """Raises ModelError for keys of a config.json that are neither known nor harmless, and for another width."""
    unknown = sorted(key for key in set(raw) - known - HARMLESS if raw[key] not in (None, False))
    if unknown:
        named = ", ".join(unknown)
        raise ModelError(f"config.json names {named}: unknown here, and it may change the network")
    if raw.get("target_hidden_size") not in (None, raw.get("hidden_size")):
        wide = f"target_hidden_size {raw['target_hidden_size']} is not hidden_size {raw.get('hidden_size')}"
        raise ModelError(f"{wide}: only drafters as wide as their policy are supported")


def block_from_raw(raw: Mapping[str, Any], policy: ModelConfig, kind: str) -> DrafterConfig:
    """The DrafterConfig of a config.json. Raises ModelError or ValueError that names what is unsupported."""
    refuse_unknown(raw, READ - OF_EAGLE | READ_BLOCK)
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ModelError(
            f"model_type {raw['model_type']!r}: only block drafters with layers of qwen3 are supported"
        )
    if raw.get("attention_bias"):
        raise ModelError("attention_bias true: not supported in a block drafter")
    if raw.get("draft_vocab_size") not in (None, raw.get("vocab_size")):
        raise ModelError(
            f"draft_vocab_size {raw['draft_vocab_size']}: a block drafter with an LM head of its own is not supported"
        )
    if raw.get("num_target_layers") not in (None, policy.num_layers):
        raise ModelError(
            f"num_target_layers {raw['num_target_layers']} is not the policy's {policy.num_layers}: it was made for another "
            "policy"
        )
    nested = dict(raw.get("dflash_config") or {})
    mask, ids = (agreed(raw, nested, name) for name in ("mask_token_id", "target_layer_ids"))
    size = agreed(raw, nested, "block_size")
    causal = nested.pop("causal", None)
    if unknown := sorted(name for name, value in nested.items() if value not in (None, False)):
        raise ModelError(
            f"dflash_config names {', '.join(unknown)}: unknown here, and it may change the network"
        )
    if not (isinstance(ids, list) and ids and all(type(one) is int for one in ids)):
        raise ModelError(f"target_layer_ids {ids!r} is not a list of layer ids")
    counts = raw.get(LAYER_IDS)
    if counts is not None and counts != [one + 1 for one in ids]:
        raise ModelError(
            f"{LAYER_IDS} {counts}, but target_layer_ids {ids}, which count from 0: keep the right ones"
        )
    rank, sure = raw.get("markov_rank") or 0, bool(raw.get("enable_confidence_head"))
    if rank and raw.get("markov_head_type", "vanilla") != "vanilla":
        raise ModelError(
            f"markov_head_type {raw['markov_head_type']!r} is not supported, only 'vanilla'"
        )
    if sure and bool(raw.get("confidence_head_with_markov")) != bool(rank):
        raise ModelError(
            f"confidence_head_with_markov {raw.get('confidence_head_with_markov')} with markov_rank {rank}: only a confidence "
            "head that reads the Markov head, if there is one, is supported"
        )
    layers = from_hf_config(dict(raw) | {"model_type": "qwen3"})
    config = DrafterConfig(
        kind=kind,
        layers=replace(layers, tied=False, eos_ids=()),
        policy_layers=policy.num_layers,
        captures=tuple(one + 1 for one in ids),
        draft_vocab_size=raw.get(DRAFT_VOCAB) or layers.vocab_size,
        block_size=size,
        mask_token_id=mask,
        causal=bool(causal),
        markov_rank=rank,
        confidence=sure,
    )
    check_policy(config, policy)
    return config


def agreed(raw: Mapping[str, Any], nested: dict[str, Any], name: str) -> Any:
    """A value that z-lab writes in dflash_config, from which it is removed, and DeepSpec at the top level.

    Raises ModelError when it is missing, or the two places disagree.
    """
    found = [one for one in (nested.pop(name, None), raw.get(name)) if one is not None]
    if not found:
        raise ModelError(f"config.json lacks {name}, in dflash_config or at the top level")
    if found[0] != found[-1]:
        raise ModelError(f"{name} {found[-1]}, but {found[0]} in dflash_config: keep the right one")
    return found[0]


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
            "drafters.use_aux_hidden_state false: an EAGLE-3 drafter reads several hidden states"
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
    if config.layers.max_positions < positions:
        raise ModelError(
            f"max_position_embeddings {config.layers.max_positions} is below the {positions} positions of a sequence: "
            "lower rollout lengths, or raise it if the drafter was trained that far"
        )


def to_raw(config: DrafterConfig, dtype: np.dtype) -> dict[str, Any]:
    """The config.json of a drafter. `bias` is never true: SGLang and vLLM read it as the attention's."""
    raw = to_hf_config(config.layers, dtype)
    if config.is_block:
        return raw | block_to_raw(config)
    if config.kind == "eagle":
        plain = raw["architectures"]
        # SGLang reads the first name; vLLM prefixes "Eagle" and takes the name that it knows.
        names = [plain[0] + "Eagle"]
        if config.layers.family in VLLM_EAGLE:
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


def block_to_raw(config: DrafterConfig) -> dict[str, Any]:
    """What the config.json of a block drafter has beside the sizes of its layers."""
    shape = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [one - 1 for one in config.captures],
    }
    named = {} if config.has_full_vocab else {DRAFT_VOCAB: config.draft_vocab_size}
    named |= {
        "architectures": ["DFlashDraftModel" if config.kind == "dflash" else "Qwen3DSparkModel"],
        "block_size": config.block_size,
        "num_target_layers": config.policy_layers,
        "dflash_config": shape | ({"causal": True} if config.causal else {}),
    }
    if config.kind == "dflash":
        return named
    heads = {
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.markov_rank > 0,
        "num_anchors": 512,  # DeepSpec asks for it, and reads it in training only
    }
    return named | shape | heads | ({"markov_head_type": "vanilla"} if config.markov_rank else {})


def caveat(config: DrafterConfig) -> str | None:
    """One line on what vLLM does not load of this drafter's directory; None: it loads all of it."""
    if config.is_block:
        if not config.has_full_vocab:
            return "other programs draft from the whole vocabulary with this drafter, not from its draft vocabulary"
        if config.kind == "dspark" and not config.markov_rank:
            return "vLLM loads DSpark drafters with a Markov head only"
        return None
    if config.kind == "eagle" and config.layers.family not in VLLM_EAGLE:
        return "vLLM has no EAGLE class for Qwen2: only SGLang loads this drafter; one of kind eagle3 loads in both"
    if config.fc_bias:
        return "vLLM loads this drafter without the bias of its fc, and drafts worse with it than SGLang"
    return None
