"""Drafter directories of Hugging Face, as other programs read them: config.json, tensors and what is accepted.

EAGLE in the format of SGLang and vLLM; block drafters in that of z-lab (DFlash, DFlash 2) and DeepSpec (DSpark), which vLLM
reads. A kind has one row in FORMATS.

The embedding, and the head of drafters without their own, are the policy's: they are neither written nor read. A draft
vocabulary of eagle3 is `d2t`, offsets, and `t2d`; of block drafters `t2d` alone, and the Markov head's rows of other tokens are
zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tlt_jax.errors import ModelError, refuse
from tlt_jax.models import drafter as drafters, hf, hf_families
from tlt_jax.models.architecture import NORMED, ModelConfig
from tlt_jax.models.drafter import DrafterConfig, DrafterParams, check_ids, check_policy
from tlt_jax.models.hf_config import from_hf_config, read_json, to_hf_config

WEIGHTS = "model.safetensors"
ACCEPTANCE = "acceptance.json"  # acceptance by depth; other engines do not read it
MASK_EMBEDDING = "mask_embedding.pt"  # of drafters whose mask is not a token of the policy
VLLM_EAGLE = {"llama"}  # families with an EAGLE class in vLLM
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DRAFT_VOCAB = "tlt_draft_vocab_size"  # ours: other programs draft from the whole vocabulary
READ = {
    "architectures", "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "tie_word_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "rms_norm_eps", "max_position_embeddings", "hidden_act", "target_hidden_size",
    "attention_bias", LAYER_IDS, "initializer_range", "original_max_position_embeddings", "quantization_config",
    "partial_rotary_factor", "use_sliding_window", "layer_types",
}  # fmt: skip
READ_EAGLE = {"bias", "fc_bias", "mlp_bias", "fc_norm", "norm_output", "eagle_config"}
READ_EAGLE3 = READ_EAGLE | {"norm_before_residual"}
# Of the speculators library: the section with the sizes of the layer, keys that say nothing of the network, and other names of
# tensors; files may also hold the policy's norm and head.
SECTION = "transformer_layer_config"
OF_SPECULATORS = {
    "speculators_model_type", "speculators_config", "speculators_version", "has_no_defaults_at_init", "embed_requires_grad",
}  # fmt: skip
OTHER_NAMES, OF_POLICY = (
    ("layers.0.", "midlayer."),
    {"verifier_lm_head.weight", "verifier_norm.weight"},
)
READ_MARKOV = {
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
}
READ_BLOCK = {
    "block_size", "num_target_layers", "dflash_config", "mask_token_id", "target_layer_ids", "num_anchors", "is_causal",
    DRAFT_VOCAB, *READ_MARKOV,
}  # fmt: skip
# Keys of DFlash 2, and fields of DrafterConfig.
DFLASH2 = {
    "conv_kernel_size": "conv_kernel_size", "conv_group_size": "conv_group_size", "selector_rank": "markov_rank",
    "selector_top_k": "selector_top_k",
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
    except ValueError as error:
        raise ModelError(f"drafter {directory}: {error}") from error
    if (most := config.layers.max_positions) < positions:
        raise ModelError(
            f"drafter {directory}: max_position_embeddings {most} is below the {positions} positions of a sequence: "
            "lower rollout lengths, or raise it if the drafter was trained that far"
        )
    return config


def from_raw(raw: Mapping[str, Any], policy: ModelConfig) -> DrafterConfig:
    """The configuration of a config.json. Raises ModelError or ValueError that names what is unsupported."""
    raw = flat(raw)
    named = raw.get("architectures") or [None]
    known = {
        name: (kind, form.architectures[name])
        for kind, form in FORMATS.items()
        for name in form.architectures
    }
    kind, family = known.get(named[0], (None, None))
    is_block = kind is not None and drafters.KINDS[kind].is_block
    target = [hf_families.FAMILIES[family].architecture] if family else []
    if kind is None or named[1:] not in ([[]] if is_block else [[], target]):
        raise ModelError(
            f"architectures {named} are not a supported drafter: use {', '.join(known)}"
        )
    refuse_unknown(raw, READ | FORMATS[kind].keys)
    own = FORMATS[kind].read(raw, policy, family)
    sizes = dict(raw) | {"model_type": family}
    has_windows = is_block and windows(raw)
    sizes |= {"use_sliding_window": has_windows}
    unsized = not has_windows and "sliding_attention" in (raw.get("layer_types") or ())
    refuse((unsized, "layer_types sliding_attention: a drafter's window needs sliding_window"))
    layers = replace(from_hf_config(sizes), tied=False, eos_ids=())
    shortest = min((one for one in layers.windows if one), default=math.inf)
    refuse(
        (is_block and own["block_size"] >= shortest, f"sliding_window {shortest} is not longer than a block")
    )  # fmt: skip
    config = DrafterConfig(
        kind, layers, policy.num_layers, **{"draft_vocab_size": layers.vocab_size} | own
    )
    check_policy(config, policy)
    return config


def flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the section of the speculators library, where norm_before_residual is true by default."""
    if not isinstance(raw.get(SECTION), dict):
        return dict(raw)
    own = {name: value for name, value in raw.items() if name not in {SECTION, *OF_SPECULATORS}}
    nested = {name: value for name, value in raw[SECTION].items() if name != "architectures"}
    return nested | {"norm_before_residual": True} | own


def refuse_unknown(raw: Mapping[str, Any], known: set[str]) -> None:
    """Raises ModelError for keys of a config.json that are neither known nor harmless, and for another width."""
    unknown = sorted(key for key in set(raw) - known - HARMLESS if raw[key] not in (None, False))
    ours, theirs = raw.get("target_hidden_size"), raw.get("hidden_size")
    refuse(
        (unknown, f"config.json names {', '.join(unknown)}: unknown here, and it may change the network"),
        (ours not in (None, theirs), f"target_hidden_size {ours} is not hidden_size {theirs}: only drafters as wide as their "
         "policy are supported"),
    )  # fmt: skip


def read_eagle(raw: Mapping[str, Any], policy: ModelConfig, family: str) -> dict[str, Any]:
    """`Format.read` of EAGLE."""
    return level_fields(raw, ("attention_bias", "mlp_bias") if family == "llama" else ())


def read_eagle3(raw: Mapping[str, Any], policy: ModelConfig, family: str) -> dict[str, Any]:
    """`Format.read` of EAGLE-3."""
    named = level_fields(raw, ("attention_bias", "mlp_bias", "bias"))
    named |= {"norm_before_residual": bool(raw.get("norm_before_residual"))}
    refuse(
        (raw.get("tie_word_embeddings"), "tie_word_embeddings true: an EAGLE-3 drafter needs an LM head of its own"),
        (not raw.get("draft_vocab_size"),
         "draft_vocab_size is missing: an EAGLE-3 drafter that shares the policy's LM head is not supported"),
    )  # fmt: skip
    own = {"captures": read_captures(raw, policy), "draft_vocab_size": raw["draft_vocab_size"]}
    return named | own


def level_fields(raw: Mapping[str, Any], biases: Sequence[str]) -> dict[str, Any]:
    """What EAGLE and EAGLE-3 have in common; of these biases they have none."""
    layers, biased = raw.get("num_hidden_layers"), [name for name in biases if raw.get(name)]
    refuse(
        (layers != 1, f"num_hidden_layers {layers}: only drafters of one layer are supported"),
        (biased, f"{', '.join(biased)} true: not supported in a drafter of this architecture"),
    )
    flags = {name: bool(raw.get(name)) for name in ("fc_norm", "norm_output")}
    return flags | {"captures": (NORMED,), "fc_bias": bool(raw.get("fc_bias") or raw.get("bias"))}


def windows(raw: Mapping[str, Any]) -> bool:
    """Whether a block drafter has layers with a sliding window of a known size, which is not switched off."""
    is_off = raw.get("use_sliding_window", True) is False
    has_layers = "sliding_attention" in (raw.get("layer_types") or ())
    return has_layers and bool(raw.get("sliding_window")) and not is_off


def read_block(raw: Mapping[str, Any], policy: ModelConfig, family: str) -> dict[str, Any]:
    """`Format.read` of block drafters."""
    named, depth = raw.get("model_type", "qwen3"), raw.get("num_target_layers")
    size = raw.get("draft_vocab_size")
    refuse(
        (named != "qwen3", f"model_type {named!r}: only block drafters with layers of qwen3 are supported"),
        (raw.get("attention_bias"), "attention_bias true: not supported in a block drafter"),
        (size not in (None, raw.get("vocab_size")),
         f"draft_vocab_size {size}: a block drafter with an LM head of its own is not supported"),
        (depth not in (None, policy.num_layers),
         f"num_target_layers {depth} is not the policy's {policy.num_layers}: it was made for another policy"),
    )  # fmt: skip
    nested = dict(raw.get("dflash_config") or {})
    mask, ids = (agreed(raw, nested, name) for name in ("mask_token_id", "target_layer_ids"))
    size = agreed(raw, nested, "block_size")
    # z-lab's layers with a window are causal unless is_causal says otherwise.
    causal, flag = nested.pop("causal", None), raw.get("is_causal")
    unsaid = causal is None and flag is None and windows(raw)
    flag = unsaid or flag
    unknown = sorted(name for name, value in nested.items() if value not in (None, False))
    names = f"dflash_config names {', '.join(unknown)}"
    refuse((unknown, f"{names}: unknown here, and it may change the network"))
    check_layer_ids("target_layer_ids", ids)
    counts, of_head = raw.get(LAYER_IDS), raw.get("markov_head_type", "vanilla")
    rank, sure = raw.get("markov_rank") or 0, bool(raw.get("enable_confidence_head"))
    reads = raw.get("confidence_head_with_markov")
    refuse(
        (unsaid and {*raw["layer_types"]} != {"sliding_attention"},
         "layer_types with and without sliding_attention, and no is_causal: write it"),
        (None not in (causal, flag) and bool(causal) != bool(flag),
         f"is_causal {flag}, but causal {causal} in dflash_config: keep the right one"),
        (counts not in (None, [one + 1 for one in ids]),
         f"{LAYER_IDS} {counts}, but target_layer_ids {ids}, which count from 0: keep the right ones"),
        (rank and of_head != "vanilla", f"markov_head_type {of_head!r} is not supported, only 'vanilla'"),
        (sure and bool(reads) != bool(rank), f"confidence_head_with_markov {reads} with markov_rank {rank}: only a confidence "
         "head that reads the Markov head, if there is one, is supported"),
    )  # fmt: skip
    return {
        "captures": tuple(one + 1 for one in ids), "block_size": size, "mask_token_id": mask,
        "causal": bool(causal or flag), "markov_rank": rank, "confidence": sure,
    } | ({"draft_vocab_size": raw[DRAFT_VOCAB]} if raw.get(DRAFT_VOCAB) else {})  # fmt: skip


def read_dflash2(raw: Mapping[str, Any], policy: ModelConfig, family: str) -> dict[str, Any]:
    """`Format.read` of DFlash 2."""
    nested = dict(raw.get("dflash_config") or {})
    own = {field: agreed(raw, nested, name) for name, field in DFLASH2.items()}
    return read_block(dict(raw) | {"dflash_config": nested}, policy, family) | own


def check_layer_ids(name: str, ids: Any) -> None:
    """Raises ModelError unless the value of this key is a list of layer ids."""
    if not (isinstance(ids, list) and ids and all(type(one) is int for one in ids)):
        raise ModelError(f"{name} {ids!r} is not a list of layer ids")


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
            "eagle_config.use_aux_hidden_state false: an EAGLE-3 drafter reads several hidden states"
        )
    if nested:
        raise ModelError(
            f"eagle_config names {', '.join(sorted(nested))}: unknown here, and it may change the network"
        )
    for ids in (outputs, counts):
        if ids is not None:
            check_layer_ids(LAYER_IDS, ids)
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


def to_raw(config: DrafterConfig, dtype: np.dtype) -> dict[str, Any]:
    """The config.json of a drafter."""
    form, raw, family = (
        FORMATS[config.kind],
        to_hf_config(config.layers, dtype),
        config.layers.family,
    )
    names = [next(name for name, one in form.architectures.items() if one == family)]
    if config.kind == "eagle" and family in VLLM_EAGLE:
        # SGLang reads the first name; vLLM prefixes "Eagle" and takes the name that it knows.
        names += raw["architectures"]
    return raw | {"architectures": names} | form.write(config)


def write_eagle(config: DrafterConfig) -> dict[str, Any]:
    """`Format.write` of EAGLE. `bias` is never true: SGLang and vLLM read it as the attention's."""
    return {"bias": False, "fc_bias": config.fc_bias}


def write_eagle3(config: DrafterConfig) -> dict[str, Any]:
    """`Format.write` of EAGLE-3."""
    outputs = [one - 1 for one in config.captures]
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **({"norm_before_residual": True} if config.norm_before_residual else {}),
        LAYER_IDS: list(config.captures),
        "eagle_config": {LAYER_IDS: outputs, "use_aux_hidden_state": True},
    }


def write_dflash(config: DrafterConfig) -> dict[str, Any]:
    """`Format.write` of DFlash."""
    outputs = [one - 1 for one in config.captures]
    shape = {"mask_token_id": config.mask_token_id, "target_layer_ids": outputs}
    own = {} if config.has_full_vocab else {DRAFT_VOCAB: config.draft_vocab_size}
    if config.layers.windows:  # of which others infer it
        own["is_causal"] = config.causal
    return own | {
        "block_size": config.block_size,
        "num_target_layers": config.policy_layers,
        "dflash_config": shape | ({"causal": True} if config.causal else {}),
    }


def write_dflash2(config: DrafterConfig) -> dict[str, Any]:
    """`Format.write` of DFlash 2; z-lab's has all numbers in dflash_config."""
    raw = write_dflash(config)
    raw["dflash_config"] |= {name: getattr(config, field) for name, field in DFLASH2.items()}
    raw["dflash_config"]["block_size"] = raw.pop("block_size")
    return raw | {"is_causal": config.causal}


def write_dspark(config: DrafterConfig) -> dict[str, Any]:
    """`Format.write` of DSpark."""
    raw = write_dflash(config)
    raw |= {name: raw["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    return (
        raw
        | ({"markov_head_type": "vanilla"} if config.markov_rank else {})
        | {
            "markov_rank": config.markov_rank,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence and config.markov_rank > 0,
            "num_anchors": 512,  # DeepSpec asks for it, and reads it in training only
        }
    )


class Format(NamedTuple):
    """The directories of drafters of a kind.

    `architectures`: by name, the model_type of the layers; the first that fits is written. `keys`: of config.json beside those
    of every drafter. `read(raw, policy, family)`: the fields of DrafterConfig beside the sizes of its layers; raises as
    `from_raw`. `write`: the keys of config.json beside the sizes of the layers. `tensors`, in the order of the file: leaf of
    DrafterParams, and name; {}: one tensor for each index of the leaf's first axis.
    """

    architectures: dict[str, str]
    keys: set[str]
    read: Callable[[Mapping[str, Any], ModelConfig, str], dict[str, Any]]
    write: Callable[[DrafterConfig], dict[str, Any]]
    tensors: tuple[tuple[str, str], ...]


BLOCK_TENSORS = (
    ("fuse", "fc.weight"),
    ("hidden_norm", "hidden_norm.weight"),
    ("final_norm", "norm.weight"),
    ("markov_in", "markov_head.markov_w1.weight"),
    ("markov_out", "markov_head.markov_w2.weight"),
    ("confidence", "confidence_head.proj.weight"),
    ("confidence_bias", "confidence_head.proj.bias"),
    ("layers", "layers.{}."),
    ("ids", "t2d"),
)
DFLASH2_TENSORS = (
    *BLOCK_TENSORS[:3],
    ("attention_conv.taps", "layers.{}.attention_conv.base_kernel"),
    ("attention_conv.change", "layers.{}.attention_conv.kernel_projection.weight"),
    ("mlp_conv.taps", "layers.{}.mlp_conv.base_kernel"),
    ("mlp_conv.change", "layers.{}.mlp_conv.kernel_projection.weight"),
    ("markov_gate", "candidate_selector.hidden_projection.weight"),
    ("markov_in", "candidate_selector.predecessor_codebook"),
    ("markov_out", "candidate_selector.successor_codebook"),
    *BLOCK_TENSORS[-2:],
)
FORMATS = {
    "eagle3": Format(
        # The second name: vLLM's class, which AngelSlim's checkpoints have; the last ones: of the speculators library.
        dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"), "llama"),
        READ_EAGLE3, read_eagle3, write_eagle3,
        (
            ("fuse", "fc.weight"), ("hidden_norm", "midlayer.hidden_norm.weight"), ("feature_norms", "fc_norm.{}.weight"),
            ("layers", "midlayer."), ("final_norm", "norm.weight"), ("head", "lm_head.weight"), ("ids", "d2t"), ("ids", "t2d"),
        ),
    ),
    "eagle": Format(
        {"LlamaForCausalLMEagle": "llama", "Qwen2ForCausalLMEagle": "qwen2"}, READ_EAGLE, read_eagle, write_eagle,
        # SGLang's fc has a bias, which stays random when the file has none.
        (("fuse", "fc.weight"), ("fuse_bias", "fc.bias"), ("layers", "layers.0.")),
    ),
    "dflash": Format(  # the second name: vLLM before 0.20
        {"DFlashDraftModel": "qwen3", "Qwen3DFlashDraftModel": "qwen3"}, READ_BLOCK, read_block, write_dflash, BLOCK_TENSORS
    ),
    "dflash2": Format(
        {"DFlash2DraftModel": "qwen3"}, READ_BLOCK - READ_MARKOV | {*DFLASH2}, read_dflash2, write_dflash2, DFLASH2_TENSORS
    ),
    # DeepSpec, also its DFlash: no Markov head and no confidence head.
    "dspark": Format({"Qwen3DSparkModel": "qwen3"}, READ_BLOCK, read_block, write_dspark, BLOCK_TENSORS),
}  # fmt: skip


# Types of policies whose hidden states the code of these engines (0.33.0, 0.5.23) gives to EAGLE-3 and block drafters. Of
# SGLang's, BLOCKLESS have EAGLE-3 alone.
TARGETS = {
    "vLLM": {*hf_families.FAMILIES} - {"gemma2", "gemma3_text", "qwen2_moe", "olmoe", "mixtral"},
    "SGLang": {"llama", "mistral", "phi3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma3_text", "gemma4_text"},
}  # fmt: skip
BLOCKLESS = {"qwen2", "qwen2_moe", "gemma3_text"}


def caveat(config: DrafterConfig, policy: str) -> str | None:
    """One line on what vLLM or SGLang do not load of this drafter's directory; None: nothing. `policy`: its model_type."""
    lacking = [name for name, known in TARGETS.items() if policy not in known]
    if config.is_block and policy in BLOCKLESS:
        lacking += ["SGLang"]
    if config.kind != "eagle" and lacking:
        return f"{' and '.join(lacking)} cannot draft with this drafter for policies of model_type {policy}"
    if config.is_block:
        if not config.has_full_vocab:
            return "other programs draft from the whole vocabulary with this drafter, not from its draft vocabulary"
        if config.kind == "dspark" and not config.markov_rank:
            return "vLLM loads DSpark drafters with a Markov head only"
        return None
    if config.kind == "eagle" and config.layers.family not in VLLM_EAGLE:
        return "vLLM has no EAGLE class for Qwen2: only SGLang loads this drafter; one of kind eagle3 loads in both"
    if config.norm_before_residual:
        return "SGLang is not known to read norm_before_residual: vLLM loads this drafter"
    if config.fc_bias:
        return "vLLM loads this drafter without the bias of its fc, and drafts worse with it than SGLang"
    return None


def tensors(config: DrafterConfig) -> Iterator[hf.Tensor]:
    """Every tensor that a drafter's file may hold, in its order."""
    spec = drafters.weights(replace(config, fc_bias=config.kind == "eagle"), 1)
    U, V = config.draft_vocab_size, config.layers.vocab_size
    Z, rank = config.layers.hidden_size, config.markov_rank
    heads = {"markov_out": (V, rank), "confidence": (1, Z + rank), "confidence_bias": (1,)}
    for leaf, name in FORMATS[config.kind].tensors:
        weight = reduce(lambda part, field: part and getattr(part, field), leaf.split("."), spec)
        if leaf == "ids":
            is_offset = name == "d2t"
            yield hf.Tensor(name, (U if is_offset else V,), leaf, None, "int64" if is_offset else "bool")  # fmt: skip
        elif leaf == "layers":
            yield from hf.layer_tensors(name, weight, config.layers.num_layers)
        elif "{}" in name and weight is not None:
            for index in range(weight.shape[0]):
                yield hf.Tensor(name.format(index), weight.shape[1:], leaf, index)
        elif weight is not None:
            shape = heads.get(leaf) or (weight.num_rows or weight.shape[0], *weight.shape[1:])
            yield hf.Tensor(name, shape, leaf, None)


def load(
    directory: str | Path, policy: ModelConfig, mesh: Mesh, dtype: DTypeLike, positions: int = 0
) -> tuple[DrafterConfig, DrafterParams]:
    """The drafter of a directory, for this policy, in the "train" layout; each process reads the bytes of its own shards.

    `positions`: length of the longest sequence that it has to draft for. An all-zero bias in `fc` is ignored, unless the
    config declares it. Raises ModelError, in one line that names what does not fit: the config, the policy, the
    positions, the draft vocabulary or the tensors.
    """
    directory, config = Path(directory), read_config(directory, policy, positions)
    with ExitStack() as stack:
        stored = hf.open_tensors(directory, stack)
        if config.kind == "eagle3" and not any(name.startswith(OTHER_NAMES[1]) for name in stored):
            stored = {name.replace(*OTHER_NAMES, 1): tensor for name, tensor in stored.items()}
        try:
            optional = {"fc.bias", "t2d"} | ({"d2t"} if config.has_full_vocab else set())
            wanted = [one for one in tensors(config) if one.name in stored or one.name not in optional]  # fmt: skip
            others = {"embed_tokens.weight", hf.TOP["head"]} | OF_POLICY
            hf.check_tensors(directory, wanted, stored, others)
            if config.is_block and (directory / MASK_EMBEDDING).exists():
                raise ModelError(f"{MASK_EMBEDDING}: only a mask that is a token is supported")
            if config.kind == "eagle":  # config.json may not declare its bias
                bias = stored.get("fc.bias")
                has_bias = bias is not None and (config.fc_bias or bool(bias[:].any()))
                config = replace(config, fc_bias=has_bias)
            ids = read_ids(config, stored)
            known = {"ids": ids}
            for one in wanted:
                if one.leaf == "markov_out" and ids is not None:
                    known[one.leaf] = stored[one.name][:][ids]
                elif one.leaf.startswith("confidence"):
                    known[one.leaf] = stored[one.name][:].reshape(
                        -1 if one.leaf == "confidence" else ()
                    )
            target = drafters.abstract(config, mesh, "train", dtype)
            return config, hf.read_tree(target, wanted, stored, known)
        except ValueError as error:
            raise ModelError(f"drafter {directory}: {error}") from error


def read_ids(config: DrafterConfig, stored: Mapping[str, Any]) -> np.ndarray | None:
    """Ids int32[U] of the draft vocabulary; None: all. Raises ModelError or ValueError unless d2t and t2d describe one."""
    marked = np.flatnonzero(stored["t2d"][:]) if "t2d" in stored else None
    if config.is_block:
        V = config.layers.vocab_size
        if config.has_full_vocab and marked is not None and len(marked) < V:
            raise ModelError(
                f"t2d marks {len(marked)} tokens, and config.json has no {DRAFT_VOCAB}"
            )
        return None if config.has_full_vocab else check_ids(config, marked)
    if config.kind == "eagle":
        return None
    known = np.arange(config.draft_vocab_size)
    ids = known + stored["d2t"][:].astype(np.int64) if "d2t" in stored else known
    try:
        check_ids(config, None if config.has_full_vocab and (ids == known).all() else ids)
    except ValueError as error:
        raise ModelError(
            f"d2t: {error}; it holds token id minus index in the draft vocabulary"
        ) from error
    if marked is not None and not np.array_equal(marked, ids):
        raise ModelError("t2d marks other tokens than d2t names")
    return None if config.has_full_vocab else ids.astype(np.int32)


def read_acceptance(directory: str | Path) -> tuple[float, ...]:
    """Probabilities that the policy accepts the draft at depth 1, 2, ..., each given the depths before; empty if unknown.

    Raises ModelError for an invalid file.
    """
    path = Path(directory) / ACCEPTANCE
    raw = read_json(path)
    levels = [] if raw is None else raw.get("acceptance")
    numbers = isinstance(levels, list) and all(type(one) in (int, float) for one in levels)
    if not numbers or not all(0 <= one <= 1 for one in levels):
        raise ModelError(
            f'{path}: write {{"acceptance": [...]}}, probabilities by depth, or delete it'
        )
    return tuple(map(float, levels))


def save(
    params: DrafterParams,
    config: DrafterConfig,
    directory: str | Path,
    dtype: DTypeLike,
    acceptance: Sequence[float] = (),
) -> None:
    """Writes a directory that SGLang and vLLM load, except for `caveat`.

    Weights are in this dtype; `params`: "train" layout.

    `acceptance`: as `read_acceptance` returns it; cut at the first depth that was not measured (nan). Layer ids that
    begin with 1, as those of policies of 7 layers or more do, mean the same to all versions of SGLang and vLLM. Every
    process takes part; process 0 writes.
    """
    directory, dtype, is_whole = Path(directory), jnp.dtype(dtype), config.has_full_vocab
    # vLLM refuses a d2t of the whole vocabulary; SGLang needs none.
    listed = [one for one in tensors(config) if one.leaf != "ids" or not is_whole]
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        old = [*directory.glob("model*.safetensors"), directory / hf.INDEX, directory / ACCEPTANCE]
        for stale in old:
            stale.unlink(missing_ok=True)
        hf.write_json(directory / "config.json", to_raw(config, dtype))
        known = [*takewhile(math.isfinite, map(float, acceptance))]
        if known:
            (directory / ACCEPTANCE).write_text(json.dumps({"acceptance": known}) + "\n")
    arrays = (host_copy(params, one, dtype) for one in listed)
    hf.write_shard(directory / WEIGHTS, listed, dtype, arrays)


def host_copy(params: DrafterParams, tensor: hf.Tensor, dtype: np.dtype) -> np.ndarray:
    """`hf.host_copy` of a drafter; a Markov head has zeros for tokens that are not drafted."""
    ids = None if params.ids is None else np.asarray(params.ids, np.int64)
    if tensor.name == "d2t":
        return ids - np.arange(ids.size)
    if tensor.name == "t2d":
        return np.isin(np.arange(*tensor.shape), ids)
    copy = hf.host_copy(params, tensor, params.fuse.sharding.mesh, dtype)
    if tensor.leaf == "markov_out" and ids is not None:
        spread = np.zeros(tensor.shape, dtype)
        spread[ids] = copy
        return spread
    return copy
