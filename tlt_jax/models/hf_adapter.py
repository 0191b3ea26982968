"""Adapters in the format of Hugging Face's peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
         "rank_pattern", "alpha_pattern", "trainable_token_indices", "megatron_config", "alora_invocation_tokens",
         "velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config")
    ),
}  # fmt: skip
# Settings that change nothing here: which matrices have adapters is read from the tensors, and dropout is of a training.
READ = (
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "init_lora_weights",
    "target_modules", "exclude_modules", "lora_dropout", "inference_mode", "revision", "auto_mapping", "peft_version",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
)  # fmt: skip
# Values of init_lora_weights that leave the base's weights alone.
STARTS = (True, False, "gaussian", "eva", "orthogonal")
LAYER = r"base_model\.model\.model\.layers\.\d+\."
NAME = re.compile(LAYER + r"(?:self_attn|mlp)\.(\w+)\.lora_A\.weight")


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
    if unknown := sorted(found - set(LORA_TARGETS)) or not found:
        which = unknown[0] if found else "no matrix of a layer"
        raise ModelError(
            f"{directory / WEIGHTS} has adapters of {which}: supported are {', '.join(LORA_TARGETS)}"
        )
    factor = rank**0.5 if raw.get("use_rslora") else 1  # arXiv 2312.03732: alpha / sqrt(rank)
    targets = tuple(one for one in LORA_TARGETS if one in found)
    return Lora(int(rank), alpha * factor, targets)


def refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    """Raises ModelError for a setting that this code does not compute."""
    if raw.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type {raw.get('peft_type')!r} is not supported, only 'LORA'"
        )
    for name, value in raw.items():
        is_neutral = value == NEUTRAL[name] if name in NEUTRAL else not value
        if name not in READ and not (is_neutral or value in (None, False, [], {})):
            raise ModelError(
                f"{path}: {name} {value!r} is not supported: merge the adapter with peft's merge_and_unload, and give the "
                "merged model"
            )
    start = raw.get("init_lora_weights", True)
    if start not in STARTS:
        raise ModelError(
            f"{path}: init_lora_weights {start!r} changed the base's weights: merge the adapter with peft's "
            "merge_and_unload, and give the merged model"
        )


def tensors(lora: Lora, model: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the file; `leaf`: the field of Layer and the factor, "q.a"."""
    spec = adapting.weights(lora, model, 1)
    for layer in range(model.num_layers):
        for name, adapter in spec.present.items():
            matrix = f"layers.{layer}.{hf.IN_LAYER[name].removesuffix('.weight')}"
            for factor in ("a", "b"):
                shape = getattr(adapter, factor).shape[1:]
                file_name = f"base_model.model.model.{matrix}.lora_{factor.upper()}.weight"
                yield Tensor(file_name, shape, f"{name}.{factor}", layer)


def load(directory: Path, lora: Lora, model: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> Adapters:
    """The adapters of a directory that `read_lora` gave `lora` for, in the "train" layout.

    Each process reads only the bytes of its own shards. Raises ModelError, naming tensors that do not fit the model.
    """
    wanted = [*tensors(lora, model)]
    with ExitStack() as stack:
        stored = hf.slices(directory / WEIGHTS, stack)
        hf.check_tensors(directory, wanted, stored, set(), f"{CONFIG} and base")
        return hf.read_tree(adapting.abstract(lora, model, mesh, dtype), wanted, stored)


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
        for name, value in {CONFIG: adapter_config(lora, base), **files}.items():
            hf.write_json(directory / name, value)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
    arrays = (hf.host_copy(adapters, tensor, mesh, dtype) for tensor in wanted)
    hf.write_shard(directory / WEIGHTS, wanted, dtype, arrays)


def adapter_config(lora: Lora, base: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }


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
