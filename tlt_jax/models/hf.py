"""Hugging Face model directories: tensor names, loading shard by shard, saving tensor by tensor."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
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
from tlt_jax.models.hf_config import eos_entry, read_json, reads_images, to_hf_config
from tlt_jax.models.hf_families import FAMILIES, Family
from tlt_jax.models.low_rank import merged

TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "inputs_embed": "model.embed_tokens_per_layer.weight",
    "inputs_project": "model.per_layer_model_projection.weight",
    "inputs_norm": "model.per_layer_projection_norm.weight",
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
    "input_gate": "per_layer_input_gate.weight",
    "input_out": "per_layer_projection.weight",
    "input_norm": "post_per_layer_input_norm.weight",
    "out_scale": "layer_scalar",
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{}.gate_proj.weight",
    "expert_up": "mlp.experts.{}.up_proj.weight",
    "expert_down": "mlp.experts.{}.down_proj.weight",
    "shared_gate": "mlp.shared_expert_gate.weight",
}
# Of a layer with experts: the MLP that all tokens have.
SHARED = {name: f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")}
LLAMA = FAMILIES["llama"]
log = logging.getLogger(__name__)
PyTree = Any

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


# Of a model that also reads images: what stands before the names of the tensors of its text part, and its head.
TEXT = {
    "language_model.model.": "language_model.lm_head.weight",
    "model.language_model.": TOP["head"],
}
IMAGE_FILES = "preprocessor_config.json", "processor_config.json"


class Tensor(NamedTuple):
    """One tensor of the files: its name and shape, the leaf that it is in the tree of weights, and its dtype.

    `leaf`: a path of attributes, as "layers.q". `layer`: the index of the tensor in a leaf that is stacked, else None;
    `expert`: likewise, in a layer of a leaf of experts. dtype None: the dtype of the weights. `below`: further leaves of the
    tensor, which has one below the other; `rows`: of each. `columns`: of each, where each also stands to the right of the one
    before, and zeros around them; 0: where not.
    """

    name: str
    shape: tuple[int, ...]
    leaf: str
    layer: int | None
    dtype: str | None = None
    below: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    columns: int = 0
    expert: int | None = None

    @property
    def leaves(self) -> tuple[str, ...]:
        """All leaves in the tensor, from the top."""
        return self.leaf, *self.below


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a model's files, in the order of the network."""
    D, V = config.hidden_size, config.vocab_size
    yield Tensor(TOP["embed"], (V, D), "embed", None)
    if P := config.token_inputs:
        width = config.num_layers * P
        shapes = {"inputs_embed": (V, width), "inputs_project": (width, D), "inputs_norm": (P,)}
        for leaf, shape in shapes.items():
            yield Tensor(TOP[leaf], shape, leaf, None)
    family, layers = FAMILIES[config.family], weights(config, 1).layers
    if isinstance(layers, Layer):
        yield from layer_tensors("model.layers.{}.", layers, config.num_layers, family)
    else:
        for index in range(config.num_layers):
            group, place = config.place(index)
            prefix, leaf = f"model.layers.{index}.", f"layers.{group}"
            yield from tensors_of_layer(prefix, layers[group], family, leaf, place)
    yield Tensor(TOP["final_norm"], (D,), "final_norm", None)
    if not config.tied:
        yield Tensor(TOP["head"], (V, D), "head", None)


def layer_tensors(
    prefix: str, layers: Layer, count: int, family: Family = LLAMA
) -> Iterator[Tensor]:
    """The tensors of `count` layers with these Weights; a prefix without {} is that of one layer, which is not stacked."""
    for layer in range(count):
        place = layer if "{}" in prefix else None
        yield from tensors_of_layer(prefix.format(layer), layers, family, "layers", place)


def names_in_layer(family: Family, has_experts: bool) -> dict[str, str]:
    """Field of Layer -> its tensor in a layer."""
    return IN_LAYER | family.renamed | (SHARED if has_experts else {})


def tensors_of_layer(
    prefix: str, layers: Layer, family: Family, leaf: str, place: int | None
) -> Iterator[Tensor]:
    """The tensors of one layer: that at `place` of a stack of Weights, which is the leaf of this name; None: not stacked."""
    wholes = {fields[0]: (name, fields) for name, fields in family.joined.items()}
    parts = {field for fields in family.joined.values() for field in fields[1:]}
    for field, name in names_in_layer(family, layers.router is not None).items():
        if getattr(layers, field) is None or field in parts:
            continue
        if "{}" in name:
            count, *shape = getattr(layers, field).shape[0 if place is None else 1 :]
            for expert in range(count):
                named = prefix + name.format(expert)
                yield Tensor(named, tuple(shape), f"{leaf}.{field}", place, expert=expert)
            continue
        name, fields = wholes.get(field, (name, (field,)))
        shapes = [getattr(layers, one).shape[0 if place is None else 1 :] for one in fields]
        rows = tuple(shape[0] for shape in shapes)
        shape, leaves = (sum(rows), *shapes[0][1:]), [f"{leaf}.{one}" for one in fields]
        below = tuple(leaves[1:])
        yield Tensor(
            prefix + name, shape, leaves[0], place, below=below, rows=rows if below else ()
        )


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
    directory, wanted = Path(directory), [*tensors(config)]
    with ExitStack() as stack:
        stored = open_tensors(directory, stack)
        if theirs := text_names(stored):
            stored = {ours: stored[name] for ours, name in theirs.items()}
        unread = {TOP["head"]} if config.tied else set()
        for layer in set(range(config.num_layers)) - {
            *config.cached_layers
        }:  # some files have them
            names = "k_proj", "v_proj", "k_norm", "v_norm"
            unread |= {f"model.layers.{layer}.self_attn.{name}.weight" for name in names}
        check_tensors(directory, wanted, stored, unread)
        return read_tree(abstract(config, mesh, "train", dtype), wanted, stored)


def text_names(stored: Collection[str]) -> dict[str, str]:
    """Our names of the tensors of the text part of a model that also reads images -> theirs; {} for another model."""
    for prefix, head in TEXT.items():
        if prefix + "embed_tokens.weight" in stored:
            found = {
                "model." + name.removeprefix(prefix): name
                for name in stored
                if name.startswith(prefix)
            }
            return found | ({TOP["head"]: head} if head in stored else {})
    return {}


def read_tree(
    target: PyTree,
    wanted: Iterable[Tensor],
    stored: Mapping[str, Any],
    known: Mapping[str, np.ndarray | None] = {},
) -> PyTree:
    """Arrays of the shapes, dtypes and shardings of `target`, from stored tensors: one for a leaf, or a stack of several.

    Each process reads only the bytes of its own shards. `known`: whole arrays of leaves that are not stored as they are.
    """
    parts: dict[str, list[Tensor]] = {}
    for tensor in wanted:
        for leaf in tensor.leaves:
            parts.setdefault(leaf, []).append(tensor)

    def one(path: jax.tree_util.KeyPath, spec: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if name in known:
                return known[name][index].astype(spec.dtype)
            tensor = parts[name][0]
            stacked = 2 - (tensor.layer, tensor.expert).count(None)
            places = np.arange(len(parts[name])).reshape(spec.shape[:stacked])[index[:stacked]]
            found = None
            for at, place in np.ndenumerate(places):
                one = StoredRows.of(stored, parts[name][place], name)
                one = read(one, index[stacked:], spec.shape[stacked:], spec.dtype)
                if found is None:
                    found = np.empty((*places.shape, *one.shape), spec.dtype)
                found[at] = one
            return found

        return jax.make_array_from_callback(spec.shape, spec.sharding, part)

    return jax.tree_util.tree_map_with_path(one, target)


class StoredRows(NamedTuple):
    """The rows of a leaf in a stored tensor that has several leaves, one below the other."""

    stored: Any
    first: int
    count: int
    left: int = 0  # columns of other leaves before its own
    columns: int = 0  # of its own; 0: all

    @classmethod
    def of(cls, stored: Mapping[str, Any], tensor: Tensor, leaf: str) -> Any:
        """The stored tensor, or the leaf's rows of it."""
        if not tensor.below:
            return stored[tensor.name]
        place = tensor.leaves.index(leaf)
        first, left = sum(tensor.rows[:place]), tensor.columns * place
        return cls(stored[tensor.name], first, tensor.rows[place], left, tensor.columns)

    def get_shape(self) -> list[int]:
        rest = self.stored.get_shape()[1:]
        return [self.count, *([self.columns] if self.columns else rest)]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        starts = self.first, self.left, *[0] * len(index[2:])
        moved = [slice(n + one.start, n + one.stop) for n, one in zip(starts, index, strict=False)]
        return self.stored[tuple(moved)]


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
    source: Path | None = None,
) -> None:
    """Writes a directory that transformers loads: weights in this dtype, configs, tokenizer files.

    `tokenizer`: a directory to copy the files from, an object with save_pretrained, or None. `files`: JSON
    files to add, content by name. `source`: the directory that the policy was read from: where that is a model that also
    reads images, so is what is written, and the rest of it is a copy. Adapters are merged. Only one tensor at a time is on
    the host. Every process takes part; process 0 writes.
    """
    directory, dtype = Path(directory), jnp.dtype(dtype)
    writes = jax.process_index() == 0
    whole = (read_json(source / "config.json") if source else None) or {}
    whole = whole if reads_images(whole) else {}
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in [*directory.glob("model*.safetensors"), directory / INDEX]:
            stale.unlink(missing_ok=True)
        configs = {
            "config.json": whole | {"torch_dtype": str(dtype)}
            if whole
            else to_hf_config(config, dtype),
            "generation_config.json": eos_entry(config),
        }
        for name, value in (configs | {**files}).items():
            write_json(directory / name, value)
        if isinstance(tokenizer, (str, Path)):
            for name in TOKENIZER_FILES:
                if (Path(tokenizer) / name).is_file():
                    shutil.copyfile(Path(tokenizer) / name, directory / name)
        elif tokenizer is not None:
            tokenizer.save_pretrained(directory)

        for name in IMAGE_FILES if whole else ():
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)

    shards = plan_shards(config, dtype.itemsize, shard_bytes)
    if whole:
        save_with_images(params, directory, mesh, dtype, shards, source)
        return
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        arrays = (host_copy(params, tensor, mesh, dtype) for tensor in shard)
        total += write_shard(directory / name, shard, dtype, arrays)
        weight_map |= {tensor.name: name for tensor in shard}
    if writes and len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / INDEX, index)


def save_with_images(
    params: Params,
    directory: Path,
    mesh: Mesh,
    dtype: np.dtype,
    shards: list[list[Tensor]],
    source: Path,
) -> None:
    """The weights of a model that also reads images: its text part is the policy, the rest is copied from `source`.

    Names of tensors are those of `source`.
    """
    kinds = {text: name for name, text in SAFETENSORS_DTYPES.items()}
    with ExitStack() as stack:
        stored = open_tensors(source, stack)
        theirs = text_names(stored)
        others = [
            Tensor(name, tuple(one.get_shape()), "", None, kinds[one.get_dtype()])
            for name, one in stored.items()
            if name not in theirs.values()
        ]
        named = [[one._replace(name=theirs[one.name]) for one in shard] for shard in shards]
        count, weight_map, total = len(shards) + 1, {}, 0
        for number, shard in enumerate([*named, others], start=1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            if number < count:
                arrays = (host_copy(params, tensor, mesh, dtype) for tensor in shard)
            else:
                arrays = (stored[tensor.name][:] for tensor in shard)
            total += write_shard(directory / name, shard, dtype, arrays)
            weight_map |= {tensor.name: name for tensor in shard}
    if jax.process_index() == 0:
        log.info("%d tensors that are not of the text part are those of %s", len(others), source)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def save_whole(
    params: Params,
    config: ModelConfig,
    directory: Path,
    mesh: Mesh,
    tokenizer: Any = None,
    dtype: DTypeLike = "float32",
    made_from: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] = {},
    source: Path | None = None,
) -> None:
    """`save`, atomically: the directory exists whole or not at all. It records what it is `made_from`."""
    is_owner = jax.process_index() == 0

    def write(at: Path) -> None:
        save(params, config, at, mesh, tokenizer, dtype, files=files, source=source)

    atomic.write_directory(directory, write, is_owner, made_from)


def host_copy(tree: PyTree, tensor: Tensor, mesh: Mesh, dtype: np.dtype) -> np.ndarray:
    """One tensor in this dtype on the host, without padding of its first axis; the devices have finished computing it.

    Adapters are merged; an absent leaf is zeros.
    """
    if tensor.below:
        alone = [tensor._replace(leaf=leaf, below=(), rows=()) for leaf in tensor.leaves]
        width = [tensor.columns] if tensor.columns else tensor.shape[1:]
        shapes = [(count, *width) for count in tensor.rows]
        copies = [
            host_copy(tree, one._replace(shape=shape), mesh, dtype)
            for one, shape in zip(alone, shapes, strict=True)
        ]
        return block_diagonal(copies) if tensor.columns else np.concatenate(copies)
    leaf, shape = leaf_at(tree, tensor.leaf), tensor.shape
    if leaf is None:
        return np.zeros(shape, dtype)
    places = [jnp.int32(place) for place in (tensor.layer, tensor.expert) if place is not None]
    array = np.asarray(jax.block_until_ready(fetcher(mesh, dtype)(leaf, *places)))
    return array[: shape[0]] if array.ndim == len(shape) else array.reshape(shape)


def leaf_at(tree: PyTree, path: str) -> Any:
    """The leaf at a path of attributes and places in tuples, as Tensor has it."""
    for name in path.split("."):
        tree = tree[int(name)] if name.isdigit() else getattr(tree, name)
    return tree


def block_diagonal(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The matrices, each below and to the right of the one before, and zeros around them."""
    parts = list(parts)
    found = np.zeros(np.sum([part.shape for part in parts], axis=0), parts[0].dtype)
    row = column = 0
    for part in parts:
        found[row : row + part.shape[0], column : column + part.shape[1]] = part
        row, column = row + part.shape[0], column + part.shape[1]
    return found


@cache
def fetcher(mesh: Mesh, dtype: np.dtype) -> Callable[..., jax.Array]:
    """A jitted copy of a leaf, or of one layer of it, or of one expert there, in this dtype to every device."""

    def pick(leaf: PyTree, *places: jax.Array) -> jax.Array:
        one = jax.tree.map(lambda part: part[places], leaf)
        return merged(one).astype(dtype)

    return jax.jit(pick, out_shardings=NamedSharding(mesh, PartitionSpec()))


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
    """Writes a safetensors file tensor by tensor; returns its bytes of weights. Every process makes the arrays, 0 writes."""
    if jax.process_index():
        deque(arrays, maxlen=0)
        return 0
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


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, indented."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
