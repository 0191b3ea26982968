"""Adapters of a policy (LoRA, arXiv 2106.09685): their shapes and start, and the policy with them."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tlt_jax.config.schema import ALL_LINEAR, LORA_TARGETS, Lora as Knobs
from tlt_jax.errors import ModelError
from tlt_jax.models import architecture, params as trees
from tlt_jax.models.architecture import Layer, ModelConfig, Params
from tlt_jax.models.hf_families import FAMILIES
from tlt_jax.models.low_rank import Lora, LowRank, is_low_rank, merged
from tlt_jax.models.params import Weight

NAMES = tuple(target.removesuffix("_proj") for target in LORA_TARGETS)  # fields of a layer


@struct.dataclass
class Adapter:
    """The factors of the change of one matrix, of one layer or of stacked ones."""

    a: Float[Array, "*L r In"]
    b: Float[Array, "*L Out r"]


@struct.dataclass
class Adapters:
    """What a LoRA run trains; None where a matrix has no adapter. `scale`: of every change.

    `groups`: those of each group of layers, where layers have different shapes (Params); the others are None then.
    """

    q: Adapter | None
    k: Adapter | None
    v: Adapter | None
    o: Adapter | None
    gate: Adapter | None
    up: Adapter | None
    down: Adapter | None
    scale: float = struct.field(pytree_node=False)
    groups: tuple[Adapters, ...] = ()

    @property
    def present(self) -> dict[str, Adapter]:
        """The adapters that exist, by the field of Layer."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: one for name, one in values.items() if one is not None}

    @classmethod
    def made(cls, parts: dict[str, Adapter], scale: float) -> Adapters:
        """Those of these fields of Layer."""
        return cls(**{name: parts.get(name) for name in NAMES}, scale=scale)


def chosen(knobs: Knobs, model: ModelConfig) -> Lora | None:
    """The adapters of the section model.lora for this policy; None when it is off. Experts and routers have none.

    Raises ModelError for a target that no layer has.
    """
    if not knobs.rank:
        return None
    layers = architecture.weights(model, 1).layers
    layers = (layers,) if isinstance(layers, Layer) else layers
    known = [
        target
        for target, name in zip(LORA_TARGETS, NAMES, strict=True)
        if any(getattr(layer, name) is not None for layer in layers)
    ]
    names = known if ALL_LINEAR in knobs.targets else knobs.targets
    if missing := [name for name in names if name not in known]:
        raise ModelError(
            f"model.lora.targets {', '.join(missing)}: this model has none outside of experts, which have no adapters: use "
            f"{', '.join(known)}, or {ALL_LINEAR} for these"
        )
    return Lora(knobs.rank, knobs.alpha, tuple(one for one in known if one in names))


def weights(lora: Lora, model: ModelConfig, model_axis: int) -> Adapters:
    """A Weight for every factor, of all layers. Raises ModelError for some, but not all, matrices that a type's files join."""
    for whole, parts in FAMILIES[model.family].joined.items():
        if {*parts} & {*lora.fields} and not {*parts} <= {*lora.fields}:
            names = ", ".join(f"{part}_proj" for part in parts)
            raise ModelError(
                f"model.lora.targets {', '.join(lora.targets)}: files of model_type {model.family} join {names} in {whole}: "
                "name all of them, or none"
            )
    layers = architecture.weights(model, model_axis).layers
    if isinstance(layers, Layer):
        return of_layer(lora, layers)
    groups = tuple(of_layer(lora, layer) for layer in layers)
    return replace(Adapters.made({}, lora.scale), groups=groups)


def of_layer(lora: Lora, layer: Layer) -> Adapters:
    """A Weight for every factor of this layer of Weights, or of stacked ones; factors lie on the axes of their matrix."""

    def adapter(matrix: Weight) -> Adapter:
        node = architecture.with_factors(matrix, lora.rank, lora.scale, len(matrix.shape) - 2)
        return Adapter(node.a, node.b)

    matrices = {name: getattr(layer, name) for name in lora.fields}
    found = {name: adapter(matrix) for name, matrix in matrices.items() if matrix is not None}
    return Adapters.made(found, lora.scale)


def abstract(lora: Lora, model: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> Adapters:
    """Shape, dtype and sharding of every factor, in the "train" layout."""
    return trees.abstract(weights(lora, model, mesh.shape["model"]), mesh, "train", dtype)


def init(lora: Lora, model: ModelConfig, mesh: Mesh, key: jax.Array, dtype: DTypeLike) -> Adapters:
    """New adapters, the same on every mesh: `a` uniform as peft draws it, `b` 0, so that the policy is its base."""
    return trees.init(weights(lora, model, mesh.shape["model"]), mesh, key, dtype, 0.0)


def applied(base: Params, adapters: Adapters) -> Params:
    """The policy: the base in the "train" layout with adapters."""
    if not adapters.groups:
        return base.replace(layers=changed(base.layers, adapters))
    pairs = zip(base.layers, adapters.groups, strict=True)
    return base.replace(layers=tuple(changed(layer, one) for layer, one in pairs))


def changed(layer: Layer, adapters: Adapters) -> Layer:
    """The layer with a LowRank for every matrix with an adapter. Nothing is computed."""
    nodes = {
        name: LowRank(getattr(layer, name), one.a, one.b, adapters.scale)
        for name, one in adapters.present.items()
    }
    return layer.replace(**nodes)


def whole(trained: Params | Adapters, base: Params | None) -> Params:
    """The policy's weights from what is trained: all of them, or adapters of the base."""
    return applied(base, trained) if isinstance(trained, Adapters) else trained


def merge(base: Params, adapters: Adapters, dtype: DTypeLike) -> Params:
    """The policy without adapters, merged layer by layer in at least float32, then in this dtype; traced inside one jit."""

    def one(leaf: Array | LowRank) -> Array:
        if not is_low_rank(leaf):
            return leaf.astype(dtype)
        return jax.lax.map(lambda layer: merged(layer).astype(dtype), leaf)

    return jax.tree.map(one, applied(base, adapters), is_leaf=is_low_rank)


def parted(params: Params) -> tuple[Params | Adapters, Params | None]:
    """What is trained and the base, as `whole` takes them."""
    scales = {
        node.scale for node in jax.tree.leaves(params, is_leaf=is_low_rank) if is_low_rank(node)
    }
    if not scales:
        return params, None
    (scale,) = scales

    def of(layer: Layer) -> tuple[Adapters, Layer]:
        layer_fields = {one.name: getattr(layer, one.name) for one in fields(Layer)}
        nodes = {name: node for name, node in layer_fields.items() if is_low_rank(node)}
        parts = {name: Adapter(node.a, node.b) for name, node in nodes.items()}
        matrices = {name: node.weight for name, node in nodes.items()}
        return Adapters.made(parts, scale), layer.replace(**matrices)

    if isinstance(params.layers, Layer):
        adapters, layers = of(params.layers)
    else:
        groups, layers = zip(*map(of, params.layers), strict=True)
        adapters = replace(Adapters.made({}, scale), groups=groups)
    return adapters, params.replace(layers=layers)
