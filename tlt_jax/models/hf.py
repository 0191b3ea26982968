"""Hugging Face model directories: tensor names, loading shard by shard, saving tensor by tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from tlt_jax import atomic
from tlt_jax.config.parse import HUB_ID
from tlt_jax.errors import ModelError
from tlt_jax.models.architecture import Layer, ModelConfig, Params, abstract, weights
from tlt_jax.models.hf_config import (
    eos_entry,
    from_hf_config,
    new_config,
    read_config,
    read_json,
    to_hf_config,
)
from tlt_jax.models.low_rank import merged

__all__ = ["from_hf_config", "load", "new_config", "read_config", "resolve", "save", "to_hf_config"]

TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
IN_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
DERIVED = re.compile(r".*rotary_emb\.inv_freq")  # in some old files; the config determines it
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
SHOWN = 5  # names that an error lists
SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "bool": "BOOL",
}  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class Tensor(NamedTuple):
    """One tensor of the files: its name and shape, its place in Params, and its dtype.

    layer None: a tensor outside the layers; dtype None: the dtype of the weights.
    """

    name: str
    shape: tuple[int, ...]
    leaf: str
    layer: int | None
    dtype: str | None = None


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a model's files, in the order of the network."""
    spec = weights(config, 1)
    D, V = config.hidden_size, config.vocab_size
    yield Tensor(TOP["embed"], (V, D), "embed", None)
    for layer in range(config.num_layers):
        for field in fields(Layer):
            weight = getattr(spec.layers, field.name)
            if weight is not None:
                yield Tensor(
                    f"model.layers.{layer}.{IN_LAYER[field.name]}",
                    weight.shape[1:],
                    field.name,
                    layer,
                )
    yield Tensor(TOP["final_norm"], (D,), "final_norm", None)
    if not config.tied:
        yield Tensor(TOP["head"], (V, D), "head", None)


def resolve(path: str | Path) -> Path:
    """The local directory of a model: the path itself, or the download of a hub id, made once."""
    if Path(path).is_dir():
        return Path(path)
    if not HUB_ID.fullmatch(str(path)):
        raise ModelError(
            f"model {str(path)!r} is neither a directory nor a hub id (owner/name): correct it"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {str(path)!r} is not a local directory, and its download failed: {reason}"
        ) from error


def load(directory: str | Path, config: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> Params:
    """Params in the "train" layout; each process reads only the bytes of its own shards."""
    directory = Path(directory)
    target = abstract(config, mesh, "train", dtype)
    with ExitStack() as stack:
        stored = open_tensors(directory, stack)
        check_tensors(directory, tensors(config), stored, {TOP["head"]} if config.tied else set())

        def top(leaf: str) -> jax.Array | None:
            spec = getattr(target, leaf)
            if spec is None:
                return None
            part = partial(read, stored[TOP[leaf]], shape=spec.shape, dtype=dtype)
            return jax.make_array_from_callback(spec.shape, spec.sharding, part)

        def stacked(leaf: str) -> jax.Array | None:
            spec = getattr(target.layers, leaf)
            if spec is None:
                return None
            layers = [
                stored[f"model.layers.{layer}.{IN_LAYER[leaf]}"]
                for layer in range(config.num_layers)
            ]

            def part(index: tuple[slice, ...]) -> np.ndarray:
                return np.stack(
                    [read(layer, index[1:], spec.shape[1:], dtype) for layer in layers[index[0]]]
                )

            return jax.make_array_from_callback(spec.shape, spec.sharding, part)

        layers = Layer(**{field.name: stacked(field.name) for field in fields(Layer)})
        return Params(
            embed=top("embed"), layers=layers, final_norm=top("final_norm"), head=top("head")
        )


def read(
    stored: Any, index: tuple[slice, ...], shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray:
    """This part of a stored tensor; zeros where `shape` exceeds it (vocabulary padding)."""
    bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    stored_range = [
        (min(a, n), min(b, n)) for (a, b), n in zip(bounds, stored.get_shape(), strict=True)
    ]
    part = np.zeros([b - a for a, b in bounds], dtype)
    if all(a < b for a, b in stored_range):
        found = stored[tuple(slice(a, b) for a, b in stored_range)]
        part[tuple(slice(0, size) for size in found.shape)] = found
    return part


def open_tensors(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """Lazy slices of every tensor of a model directory; the stack keeps their files open."""
    stored = {}
    for path in shard_files(directory):
        stored |= slices(path, stack)
    return stored


def slices(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Lazy slices of every tensor of a safetensors file, which the stack keeps open."""
    try:
        file = stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from error
    return {name: file.get_slice(name) for name in file.keys()}


def shard_files(directory: Path) -> list[Path]:
    """The weight files of a model directory: one file, or those of the index."""
    index = read_json(directory / INDEX)
    if index is not None:
        names = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing or not names:
            raise ModelError(
                f"{directory / INDEX} names {', '.join(missing) or 'no files'}, which do not exist"
            )
        return [directory / name for name in names]
    if not (directory / "model.safetensors").is_file():
        raise ModelError(
            f"{directory} has neither model.safetensors nor {INDEX}: only safetensors weights are read"
        )
    return [directory / "model.safetensors"]


def check_tensors(
    directory: Path,
    wanted: Iterable[Tensor],
    found: dict[str, Any],
    ignored: Collection[str],
    says: str = "config.json",
) -> None:
    """Raises ModelError that names tensors that are missing, unknown (and not in `ignored`) or of another shape.

    `says`: the file that says which there are.
    """
    expected = {tensor.name: tensor for tensor in wanted}
    missing = [name for name in expected if name not in found]
    extra = [
        name
        for name in found
        if name not in expected and name not in ignored and not DERIVED.fullmatch(name)
    ]
    shapes = {name: tuple(found[name].get_shape()) for name in expected if name in found}
    wrong = [
        f"{name} has shape {shapes[name]}, {says} says {expected[name].shape}"
        for name in shapes
        if shapes[name] != expected[name].shape
    ]
    named = (("missing ", missing), ("unknown ", extra), ("", wrong))
    problems = [what + listed(names) for what, names in named if names]
    if problems:
        raise ModelError(f"weights in {directory} do not fit its {says}: {'; '.join(problems)}")


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def save(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    mesh: Mesh,
    tokenizer: Any,
    dtype: DTypeLike,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, Any] = {},
) -> None:
    """Writes a directory that transformers loads: weights in this dtype, configs, tokenizer files.

    `tokenizer`: a directory to copy the files from, an object with save_pretrained, or None. `files`: JSON
    files to add, content by name. Adapters are merged. Only one tensor at a time is on the host. Every process takes
    part; process 0 writes.
    """
    directory, dtype = Path(directory), jnp.dtype(dtype)
    writes = jax.process_index() == 0
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in [*directory.glob("model*.safetensors"), directory / INDEX]:
            stale.unlink(missing_ok=True)
        write_configs(config, directory, tokenizer, dtype)
        for name, value in files.items():
            (directory / name).write_text(f"{json.dumps(value, indent=2)}\n")

    def pick(leaf: Any, layer: jax.Array | None) -> jax.Array:
        one = leaf if layer is None else jax.tree.map(lambda part: part[layer], leaf)
        return merged(one).astype(dtype)

    fetch = jax.jit(pick, out_shardings=NamedSharding(mesh, PartitionSpec()))
    shards = plan_shards(config, dtype.itemsize, shard_bytes)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        arrays = (host_copy(params, tensor, fetch, config.vocab_size) for tensor in shard)
        if writes:
            total += write_shard(directory / name, shard, dtype, arrays)
        else:
            for _ in arrays:
                pass
        weight_map |= {tensor.name: name for tensor in shard}
    if writes and len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def save_whole(
    params: Params,
    config: ModelConfig,
    directory: Path,
    mesh: Mesh,
    tokenizer: Any = None,
    dtype: DTypeLike = "float32",
    made_from: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] = {},
) -> None:
    """`save`, atomically: the directory exists whole or not at all. It records what it is `made_from`."""
    is_owner = jax.process_index() == 0

    def write(at: Path) -> None:
        save(params, config, at, mesh, tokenizer, dtype, files=files)

    atomic.write_directory(directory, write, is_owner, made_from)


def host_copy(params: Params, tensor: Tensor, fetch: Any, vocab_size: int) -> np.ndarray:
    """One tensor on the host, without vocabulary padding; the devices have finished computing it."""
    if tensor.layer is not None:
        array = fetch(getattr(params.layers, tensor.leaf), jnp.int32(tensor.layer))
    else:
        array = fetch(getattr(params, tensor.leaf), None)
    array = np.asarray(jax.block_until_ready(array))
    return array[:vocab_size] if tensor.leaf in ("embed", "head") else array


def plan_shards(config: ModelConfig, itemsize: int, shard_bytes: int) -> list[list[Tensor]]:
    """The tensors of each file: as many as fit in shard_bytes."""
    shards, room = [], 0
    for tensor in tensors(config):
        size = int(np.prod(tensor.shape)) * itemsize
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def write_shard(
    path: Path, shard: list[Tensor], dtype: np.dtype, arrays: Iterable[np.ndarray]
) -> int:
    """Writes a safetensors file tensor by tensor; returns its bytes of weights."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        kind = jnp.dtype(tensor.dtype or dtype)
        start, end = end, end + int(np.prod(tensor.shape)) * kind.itemsize
        entry = {
            "dtype": SAFETENSORS_DTYPES[kind.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        header[tensor.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic.replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).tobytes())
    return end


def write_configs(config: ModelConfig, directory: Path, tokenizer: Any, dtype: np.dtype) -> None:
    """config.json, generation_config.json and the tokenizer's files."""
    hf_config = to_hf_config(config, dtype)
    for name, value in (("config.json", hf_config), ("generation_config.json", eos_entry(config))):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
    if isinstance(tokenizer, (str, Path)):
        for name in TOKENIZER_FILES:
            if (Path(tokenizer) / name).is_file():
                shutil.copyfile(Path(tokenizer) / name, directory / name)
    elif tokenizer is not None:
        tokenizer.save_pretrained(directory)
