"""Drafter directories as SGLang and vLLM load them: their tensors. hf_drafter_config handles config.json.

EAGLE-3: one `midlayer`, its own norm and head, and the draft vocabulary as offsets `d2t` unless it is the whole one.
EAGLE: `layers.0` without its first norm, no head, and a bias in `fc`, zero for a drafter without one. Block drafters: all
layers, and the heads of DSpark; a draft vocabulary is `t2d`, and the Markov head's rows of other tokens are zero. The
embedding, and the head of drafters without their own, are the policy's: they are neither written nor read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from tlt_jax.errors import ModelError
from tlt_jax.models import drafter as drafters, hf, hf_drafter_config
from tlt_jax.models.architecture import Layer, ModelConfig
from tlt_jax.models.drafter import DrafterConfig, DrafterParams, check_ids, weights
from tlt_jax.models.hf_config import read_json

WEIGHTS = "model.safetensors"
ACCEPTANCE = "acceptance.json"  # acceptance by depth; other engines do not read it
PREFIX = {"eagle": "layers.0.", "eagle3": "midlayer."}
TOP = {
    "fuse": "fc.weight", "fuse_bias": "fc.bias", "hidden_norm": "midlayer.hidden_norm.weight",
    "final_norm": "norm.weight", "head": "lm_head.weight",
}  # fmt: skip


BLOCK_TOP = {
    "fuse": "fc.weight", "hidden_norm": "hidden_norm.weight", "final_norm": "norm.weight",
    "markov_in": "markov_head.markov_w1.weight", "markov_out": "markov_head.markov_w2.weight",
    "confidence": "confidence_head.proj.weight", "confidence_bias": "confidence_head.proj.bias",
}  # fmt: skip
MASK_EMBEDDING = "mask_embedding.pt"  # of drafters whose mask is not a token of the policy


def tensors(config: DrafterConfig) -> Iterator[hf.Tensor]:
    """Every tensor that a drafter's file may hold, in network order; `layer` marks those of a layer."""
    if config.is_block:
        yield from block_tensors(config)
        return
    spec = weights(config, 1)
    yield hf.Tensor(TOP["fuse"], spec.fuse.shape, "fuse", None)
    if config.kind == "eagle":  # SGLang's fc has a bias, which stays random when the file has none
        yield hf.Tensor(TOP["fuse_bias"], (config.layers.hidden_size,), "fuse_bias", None)
    else:
        yield hf.Tensor(TOP["hidden_norm"], (config.layers.hidden_size,), "hidden_norm", None)
    if config.fc_norm:
        for capture in range(len(config.captures)):
            yield hf.Tensor(
                f"fc_norm.{capture}.weight", (config.layers.hidden_size,), "feature_norms", capture
            )
    for field in fields(Layer):
        weight = getattr(spec.layers, field.name)
        if weight is not None:
            yield hf.Tensor(
                PREFIX[config.kind] + hf.IN_LAYER[field.name], weight.shape, field.name, 0
            )
    if config.kind == "eagle3":
        yield hf.Tensor(TOP["final_norm"], (config.layers.hidden_size,), "final_norm", None)
        yield hf.Tensor(
            TOP["head"], (config.draft_vocab_size, config.layers.hidden_size), "head", None
        )
        yield hf.Tensor("d2t", (config.draft_vocab_size,), "ids", None, "int64")
        yield hf.Tensor("t2d", (config.layers.vocab_size,), "ids", None, "bool")


def block_tensors(config: DrafterConfig) -> Iterator[hf.Tensor]:
    """`tensors` of a block drafter."""
    spec, V = weights(config, 1), config.layers.vocab_size
    shapes = {
        "markov_in": (V, config.markov_rank), "markov_out": (V, config.markov_rank),
        "confidence": (1, config.layers.hidden_size + config.markov_rank), "confidence_bias": (1,),
    }  # fmt: skip
    for leaf, name in BLOCK_TOP.items():
        weight = getattr(spec, leaf)
        if weight is not None:
            yield hf.Tensor(name, shapes.get(leaf, weight.shape), leaf, None)
    for layer in range(config.layers.num_layers):
        for leaf, name in hf.IN_LAYER.items():
            weight = getattr(spec.layers, leaf)
            if weight is not None:
                yield hf.Tensor(f"layers.{layer}.{name}", weight.shape[1:], leaf, layer)
    yield hf.Tensor("t2d", (V,), "ids", None, "bool")


def load(
    directory: str | Path, policy: ModelConfig, mesh: Mesh, dtype: DTypeLike, positions: int = 0
) -> tuple[DrafterConfig, DrafterParams]:
    """The drafter of a directory, for this policy, in the "train" layout; each process reads the bytes of its own shards.

    `positions`: length of the longest sequence that it has to draft for. An all-zero bias in `fc` is ignored, unless the
    config declares it. Raises ModelError, in one line that names what does not fit: the config, the policy, the
    positions, the draft vocabulary or the tensors.
    """
    directory, config = Path(directory), hf_drafter_config.read_config(directory, policy, positions)
    with ExitStack() as stack:
        stored = hf.open_tensors(directory, stack)
        try:
            optional = {TOP["fuse_bias"], "t2d"} | ({"d2t"} if config.has_full_vocab else set())
            wanted = [
                tensor
                for tensor in tensors(config)
                if tensor.name in stored or tensor.name not in optional
            ]
            hf.check_tensors(directory, wanted, stored, {"embed_tokens.weight", hf.TOP["head"]})
            if config.is_block:
                if (directory / MASK_EMBEDDING).exists():
                    raise ModelError(f"{MASK_EMBEDDING}: only a mask that is a token is supported")
                return config, read_block(config, stored, mesh, dtype)
            bias = stored.get(TOP["fuse_bias"])  # config.json may not declare it
            has_bias = bias is not None and (config.fc_bias or bool(bias[:].any()))
            config = replace(config, fc_bias=has_bias)
            return config, read_params(config, stored, mesh, dtype)
        except ValueError as error:
            raise ModelError(f"drafter {directory}: {error}") from error


def read_params(
    config: DrafterConfig, stored: Mapping[str, Any], mesh: Mesh, dtype: DTypeLike
) -> DrafterParams:
    """DrafterParams from open tensors. Raises ValueError for an invalid draft vocabulary."""
    target = drafters.abstract(config, mesh, "train", dtype)

    def whole(spec: jax.ShapeDtypeStruct | None, name: str) -> jax.Array | None:
        if spec is None:
            return None
        part = partial(hf.read, stored[name], shape=spec.shape, dtype=dtype)
        return jax.make_array_from_callback(spec.shape, spec.sharding, part)

    def norms(spec: jax.ShapeDtypeStruct) -> jax.Array:
        rows = np.stack(
            [stored[f"fc_norm.{i}.weight"][:].astype(dtype) for i in range(len(config.captures))]
        )
        return jax.make_array_from_callback(spec.shape, spec.sharding, lambda index: rows[index])

    prefix = PREFIX[config.kind]
    ids = read_ids(config, stored)
    if ids is not None:
        ids = jax.make_array_from_callback(ids.shape, target.ids.sharding, ids.__getitem__)
    layer = {
        name: whole(getattr(target.layers, name), prefix + hf.IN_LAYER[name])
        for name in hf.IN_LAYER
    }
    return DrafterParams(
        layers=Layer(**layer),
        **dict.fromkeys(("markov_in", "markov_out", "confidence", "confidence_bias", "context_kv")),
        feature_norms=norms(target.feature_norms) if config.fc_norm else None,
        ids=ids,
        **{leaf: whole(getattr(target, leaf), name) for leaf, name in TOP.items()},
    )


def read_block(
    config: DrafterConfig, stored: Mapping[str, Any], mesh: Mesh, dtype: DTypeLike
) -> DrafterParams:
    """DrafterParams from open tensors. Raises ModelError unless t2d marks the draft vocabulary."""
    target = drafters.abstract(config, mesh, "train", dtype)
    marked = np.flatnonzero(stored["t2d"][:]) if "t2d" in stored else None
    if config.has_full_vocab and marked is not None and len(marked) < config.layers.vocab_size:
        raise ModelError(
            f"t2d marks {len(marked)} tokens, and config.json has no {hf_drafter_config.DRAFT_VOCAB}"
        )
    ids = None if config.has_full_vocab else check_ids(config, marked)

    def placed(spec: jax.ShapeDtypeStruct, part: Callable[..., np.ndarray]) -> jax.Array:
        return jax.make_array_from_callback(spec.shape, spec.sharding, part)

    def top(leaf: str) -> jax.Array | None:
        spec = getattr(target, leaf)
        if spec is None:
            return None
        if leaf.startswith("confidence"):
            return placed(
                spec, stored[BLOCK_TOP[leaf]][:].astype(dtype).reshape(spec.shape).__getitem__
            )
        if leaf == "markov_out" and ids is not None:
            return placed(spec, stored[BLOCK_TOP[leaf]][:][ids].astype(dtype).__getitem__)
        return placed(
            spec, partial(hf.read, stored[BLOCK_TOP[leaf]], shape=spec.shape, dtype=dtype)
        )

    def stacked(leaf: str) -> jax.Array | None:
        spec = getattr(target.layers, leaf)
        if spec is None:
            return None
        layers = [
            stored[f"layers.{i}.{hf.IN_LAYER[leaf]}"] for i in range(config.layers.num_layers)
        ]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            wanted = layers[index[0]]
            return np.stack([hf.read(one, index[1:], spec.shape[1:], dtype) for one in wanted])

        return placed(spec, part)

    return DrafterParams(
        layers=Layer(**{leaf: stacked(leaf) for leaf in hf.IN_LAYER}),
        **dict.fromkeys(("fuse_bias", "feature_norms", "context_kv", "head")),
        ids=None if ids is None else placed(target.ids, ids.__getitem__),
        **{leaf: top(leaf) for leaf in BLOCK_TOP},
    )


def read_ids(config: DrafterConfig, stored: Mapping[str, Any]) -> np.ndarray | None:
    """Ids of the draft vocabulary; None: all. Raises ModelError unless d2t and t2d describe one."""
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
    if "t2d" in stored and not np.array_equal(np.flatnonzero(stored["t2d"][:]), ids):
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
    """Writes a directory that SGLang and vLLM load, except for `hf_drafter_config.caveat`.

    Weights are in this dtype; `params`: "train" layout.

    `acceptance`: as `read_acceptance` returns it; cut at the first depth that was not measured (nan). Layer ids that
    begin with 1, as those of policies of 7 layers or more do, mean the same to all versions of SGLang and vLLM. Every
    process takes part; process 0 writes.
    """
    directory, dtype = Path(directory), jnp.dtype(dtype)
    # vLLM refuses a d2t of the whole vocabulary; SGLang needs none.
    listed = [
        tensor for tensor in tensors(config) if tensor.leaf != "ids" or not config.has_full_vocab
    ]
    arrays = (host_copy(params, tensor, config, dtype) for tensor in listed)
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        old = [*directory.glob("model*.safetensors"), directory / hf.INDEX, directory / ACCEPTANCE]
        for stale in old:
            stale.unlink(missing_ok=True)
        (directory / "config.json").write_text(
            json.dumps(hf_drafter_config.to_raw(config, dtype), indent=2) + "\n"
        )
        known = [*takewhile(math.isfinite, map(float, acceptance))]
        if known:
            (directory / ACCEPTANCE).write_text(json.dumps({"acceptance": known}) + "\n")
        hf.write_shard(directory / WEIGHTS, listed, dtype, arrays)
    else:
        for _ in arrays:
            pass


def host_copy(
    params: DrafterParams, tensor: hf.Tensor, config: DrafterConfig, dtype: np.dtype
) -> np.ndarray:
    """One tensor on the host, without vocabulary padding; zeros for an absent bias, and for tokens that are not drafted."""
    if config.is_block:
        return block_copy(params, tensor, config, dtype)
    if tensor.leaf == "ids":
        ids = np.asarray(params.ids, np.int64)
        return (
            ids - np.arange(ids.size)
            if tensor.name == "d2t"
            else np.isin(np.arange(config.layers.vocab_size), ids)
        )
    stacked = tensor.leaf == "feature_norms"
    leaf = getattr(params if stacked or tensor.layer is None else params.layers, tensor.leaf)
    if leaf is None:
        return np.zeros(tensor.shape, dtype)
    leaf = leaf[tensor.layer] if stacked else leaf
    copy = jax.block_until_ready(fetcher(leaf.sharding.mesh, dtype)(leaf))
    return np.asarray(copy)[: tensor.shape[0]]


def block_copy(
    params: DrafterParams, tensor: hf.Tensor, config: DrafterConfig, dtype: np.dtype
) -> np.ndarray:
    """`host_copy` for a block drafter."""
    if tensor.leaf == "ids":
        return np.isin(np.arange(config.layers.vocab_size), np.asarray(params.ids))
    inside = tensor.layer is not None
    leaf = getattr(params.layers if inside else params, tensor.leaf)
    leaf = leaf[tensor.layer] if inside else leaf
    copy = np.asarray(jax.block_until_ready(fetcher(leaf.sharding.mesh, dtype)(leaf)))
    if tensor.leaf == "markov_out" and not config.has_full_vocab:
        spread = np.zeros(tensor.shape, dtype)
        spread[np.asarray(params.ids)] = copy
        return spread
    return copy[: tensor.shape[0]] if copy.ndim == len(tensor.shape) else copy.reshape(tensor.shape)


@cache
def fetcher(mesh: Mesh, dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    """A jitted copy of a leaf in this dtype to every device."""
    return jax.jit(
        lambda leaf: leaf.astype(dtype), out_shardings=NamedSharding(mesh, PartitionSpec())
    )
