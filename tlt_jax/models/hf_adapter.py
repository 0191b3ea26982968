"""Adapters in the format of Hugging Face's peft: adapter_config.json and adapter_model.safetensors.

Where the files of a model type join matrices, such as q, k and v of Phi in qkv_proj, so do those of its adapters. The factors
of n parts are written as one adapter of n times the rank: the a below each other, the b on a block diagonal. Read is also the
adapter that peft makes: one a, which every part gets, and the rows of b.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tlt_jax.config.schema import LORA_TARGETS
from tlt_jax.data.adapter_files import CONFIG, WEIGHTS, settings
from tlt_jax.errors import ModelError
from tlt_jax.models import hf, lora as adapting
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.hf import Tensor
from tlt_jax.models.hf_families import FAMILIES
from tlt_jax.models.lora import Adapters
from tlt_jax.models.low_rank import Lora

# Settings that change what adapters compute, and that this code does not compute: with any other value they are refused.
NEUTRAL = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    **dict.fromkeys(
        ("modules_to_save", "layers_to_transform", "layers_pattern", "layer_replication", "target_parameters",
         "trainable_token_indices", "megatron_config", "alora_invocation_tokens",
         "velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config")
    ),
}  # fmt: skip
# Settings that change nothing here: which matrices have adapters is read from the tensors, and dropout is of a training.
READ = (
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "init_lora_weights",
    "target_modules", "exclude_modules", "lora_dropout", "inference_mode", "revision", "auto_mapping", "peft_version",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying", "rank_pattern", "alpha_pattern",
)  # fmt: skip
# Values of init_lora_weights that leave the base's weights alone.
MERGE = "merge the adapter with peft's merge_and_unload, and give the merged model"
STARTS = (True, False, "gaussian", "eva", "orthogonal")
# Targets of types whose files join matrices -> the targets that they join.
JOINED = {
    name.split(".")[1]: tuple(f"{part}_proj" for part in parts)
    for family in FAMILIES.values()
    for name, parts in family.joined.items()
}
LAYER = r"base_model\.model\.model\.layers\.\d+\."
NAME = re.compile(LAYER + r"(?:self_attn|mlp|mlp\.shared_expert)\.(\w+)\.lora_A\.weight")
MLP = "gate_proj", "up_proj", "down_proj"
PARAMETER = re.compile(rf".*\bmlp\.(?:shared_expert\.)?(?:{'|'.join(MLP)})\.weight")


def read_lora(directory: Path) -> Lora:
    """Rank, alpha and targets of a directory; with use_rslora the alpha whose alpha / rank is its scale.

    Raises ModelError for a setting that is not supported, by name.
    """
    path, raw = directory / CONFIG, settings(directory)
    refuse_unsupported(path, raw)
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    for name, value in (("r", rank), ("lora_alpha", alpha)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{path}: {name} {value!r}: use a number above 0")
    with ExitStack() as stack:
        matches = map(NAME.fullmatch, hf.slices(directory / WEIGHTS, stack))
        found = {match[1] for match in matches if match}
    joined = found & {*JOINED}
    check_patterns(path, raw, {name: len(JOINED[name]) for name in joined}, rank, alpha)
    found = found - joined | {part for name in joined for part in JOINED[name]}
    if unknown := sorted(found - set(LORA_TARGETS)) or not found:
        which = unknown[0] if found else "no matrix of a layer"
        raise ModelError(
            f"{directory / WEIGHTS} has adapters of {which}: supported are {', '.join(LORA_TARGETS)}"
        )
    factor = rank**0.5 if raw.get("use_rslora") else 1  # arXiv 2312.03732: alpha / sqrt(rank)
    targets = tuple(one for one in LORA_TARGETS if one in found)
    return Lora(int(rank), alpha * factor, targets)


def check_patterns(
    path: Path, raw: Mapping[str, Any], parts: Mapping[str, int], rank: float, alpha: float
) -> None:
    """Raises ModelError unless rank_pattern and alpha_pattern are absent or those of `adapter_config`; `parts`: by target."""
    for name, value in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        given = raw.get(name) or {}
        if given and (raw.get("use_rslora") or given != {one: parts[one] * value for one in parts}):
            raise ModelError(f"{path}: {name} {given!r} is not supported: {MERGE}")


def refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    """Raises ModelError for a setting that this code does not compute."""
    if raw.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type {raw.get('peft_type')!r} is not supported, only 'LORA'"
        )
    for name, value in raw.items():
        is_neutral = value == NEUTRAL[name] if name in NEUTRAL else not value
        if name == "target_parameters":
            is_neutral = all(map(PARAMETER.fullmatch, value or ()))
        if name not in READ and not (is_neutral or value in (None, False, [], {})):
            raise ModelError(f"{path}: {name} {value!r} is not supported: {MERGE}")
    start = raw.get("init_lora_weights", True)
    if start not in STARTS:
        raise ModelError(f"{path}: init_lora_weights {start!r} changed the base's weights: {MERGE}")


def tensors(lora: Lora, model: ModelConfig, shares_a: bool = False) -> Iterator[Tensor]:
    """Every tensor of the file; `leaf`: the field of Layer and the factor, "q.a".

    `shares_a`: of joined matrices, one `a` is that of every part, as in the files of peft.
    """
    whole, joined = adapting.weights(lora, model, 1), FAMILIES[model.family].joined
    wholes = {parts[0]: (name, parts) for name, parts in joined.items()}
    behind = {part for parts in joined.values() for part in parts[1:]}
    for layer in range(model.num_layers):
        group, place = model.place(layer)
        names = hf.names_in_layer(FAMILIES[model.family], layer in model.expert_layers)
        spec = (whole.groups[group] if whole.groups else whole).present
        prefix = f"groups.{group}." if whole.groups else ""
        for name in (name for name in spec if name not in behind):
            matrix, parts = wholes.get(name, (names[name], (name,)))
            file_name = f"base_model.model.model.layers.{layer}.{matrix.removesuffix('.weight')}"
            for factor in ("a", "b"):
                shapes = [getattr(spec[part], factor).shape[1:] for part in parts]
                leaves = [f"{prefix}{part}.{factor}" for part in parts]
                rows = [one[0] for one in shapes]
                named, width = f"{file_name}.lora_{factor.upper()}.weight", shapes[0][1]
                if len(parts) == 1 or (factor == "a" and shares_a):
                    for leaf in leaves:
                        yield Tensor(named, shapes[0], leaf, place)
                    continue
                columns = width if factor == "b" and not shares_a else 0
                shape = sum(rows), width * len(parts) if columns else width
                below = tuple(leaves[1:])
                yield Tensor(named, shape, leaves[0], place, None, below, tuple(rows), columns)


def load(directory: Path, lora: Lora, model: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> Adapters:
    """The adapters of a directory that `read_lora` gave `lora` for, in the "train" layout.

    Each process reads only the bytes of its own shards. Raises ModelError, naming tensors that do not fit the model.
    """
    shares_a = not settings(directory).get("rank_pattern")
    wanted = [*tensors(lora, model, shares_a)]
    with ExitStack() as stack:
        stored = hf.slices(directory / WEIGHTS, stack)
        hf.check_tensors(directory, wanted, stored, set(), f"{CONFIG} and base")
        for tensor in wanted:
            if tensor.columns:
                check_blocks(directory, tensor, stored[tensor.name][:])
        return hf.read_tree(adapting.abstract(lora, model, mesh, dtype), wanted, stored)


def check_blocks(directory: Path, tensor: Tensor, whole: np.ndarray) -> None:
    """Raises ModelError unless a matrix has numbers on its block diagonal alone."""
    first = np.cumsum((0, *tensor.rows))
    kept = np.zeros(whole.shape, bool)
    for part, (begin, end) in enumerate(zip(first, first[1:], strict=False)):
        kept[begin:end, part * tensor.columns : (part + 1) * tensor.columns] = True
    if (whole[~kept] != 0).any():
        raise ModelError(
            f"{directory / WEIGHTS}: {tensor.name} changes several of the matrices that it joins at once: {MERGE}"
        )


def save(
    adapters: Adapters,
    lora: Lora,
    model: ModelConfig,
    directory: Path,
    mesh: Mesh,
    base: str,
    tokenizer: Any,
    dtype: DTypeLike,
    files: Mapping[str, Any] = {},
) -> None:
    """Writes a directory that peft loads on `base`, a model directory or hub id, with the tokenizer and JSON `files`.

    Every process takes part; process 0 writes.
    """
    wanted, dtype = [*tensors(lora, model)], jnp.dtype(dtype)
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        described = adapter_config(lora, base, FAMILIES[model.family].joined)
        if model.num_experts:
            described |= beside_experts(lora, wanted)
        for name, value in {CONFIG: described, **files}.items():
            hf.write_json(directory / name, value)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
    arrays = (hf.host_copy(adapters, tensor, mesh, dtype) for tensor in wanted)
    hf.write_shard(directory / WEIGHTS, wanted, dtype, arrays)


def adapter_config(lora: Lora, base: str, joined: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The content of adapter_config.json; `joined`: see hf_families.Family."""
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    found = {name.split(".")[1]: parts for name, parts in joined.items() if parts[0] in lora.fields}
    inside = {f"{part}_proj" for parts in found.values() for part in parts}
    counts = {name: len(parts) for name, parts in found.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "target_modules": [*found, *(one for one in lora.targets if one not in inside)],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {name: count * lora.rank for name, count in counts.items()},
        "alpha_pattern": {name: count * alpha for name, count in counts.items()},
        "inference_mode": True,
    }


def beside_experts(lora: Lora, wanted: Sequence[Tensor]) -> dict[str, Any]:
    """Entries of a model with experts: peft 0.21 takes an MLP's name in target_modules for its experts, not for these MLPs."""
    names = (re.sub(r"base_model\.model\.(.*)\.lora_[AB]", r"\1", one.name) for one in wanted)
    found = dict.fromkeys(name for name in names if PARAMETER.fullmatch(name))
    others = [target for target in lora.targets if target not in MLP]
    return {"target_modules": others, "target_parameters": [*found]}


def check(lora: Lora, directory: Path) -> None:
    """Raises ModelError when the adapters of a directory do not continue with these knobs of model.lora."""
    saved = read_lora(directory)
    is_same = saved.rank == lora.rank and saved.targets == lora.targets
    if not is_same or not np.isclose(saved.alpha, lora.alpha, rtol=1e-6):
        theirs, ours = (
            f"{{rank: {one.rank}, alpha: {one.alpha:g}, targets: [{', '.join(one.targets)}]}}"
            for one in (saved, lora)
        )
        raise ModelError(
            f"model.lora {ours}, and {directory} has {theirs}: use its values, or rank 0, which trains all weights of the "
            "merged model"
        )
