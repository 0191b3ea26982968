"""Descriptions of weights (trees of Weight), and their shardings, abstract arrays and initial values, for any network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from tlt_jax.distributed.mesh import sharding

PyTree = Any


@dataclass(frozen=True)
class Weight:
    """Shape, logical axes and initializer (normal | ones | zeros | kaiming | identity | ids) of one weight.

    "kaiming": uniform between -1 / sqrt(width) and 1 / sqrt(width), as torch starts a Linear; width: of the last axis.
    "identity", of taps [..., k, width]: the first is 1, others are 0. "ids" are token ids: int32 whatever the dtype of the
    network, and passed to `init`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    num_rows: int | None = None  # later rows are padding and start as zeros; None: no padding

    def dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Its dtype in a network of this dtype."""
        return jnp.int32 if self.init == "ids" else dtype


def shardings(weights: PyTree, mesh: Mesh, layout: str) -> PyTree:
    """The NamedSharding of every Weight of the tree."""
    return jax.tree.map(lambda weight: sharding(mesh, weight.axes, layout), weights)


def abstract(weights: PyTree, mesh: Mesh, layout: str, dtype: DTypeLike) -> PyTree:
    """Shape, dtype and sharding of every Weight of the tree."""

    def one(weight: Weight) -> jax.ShapeDtypeStruct:
        placed = sharding(mesh, weight.axes, layout)
        return jax.ShapeDtypeStruct(weight.shape, weight.dtype(dtype), sharding=placed)

    return jax.tree.map(one, weights)


def init(
    weights: PyTree,
    mesh: Mesh,
    key: jax.Array,
    dtype: DTypeLike,
    std: float,
    ids: ArrayLike | None = None,
) -> PyTree:
    """An array for every Weight of the tree, in the "train" layout; the same numbers on every mesh.

    The key is split once, into one part per Weight in the order of the tree, whatever its initializer.
    """
    leaves, structure = jax.tree.flatten(weights)
    program = initializer(tuple(leaves), structure, mesh, np.dtype(dtype), std)
    return program(key, None if ids is None else jnp.asarray(ids, jnp.int32))


@cache
def initializer(
    leaves: tuple[Weight, ...],
    structure: jax.tree_util.PyTreeDef,
    mesh: Mesh,
    dtype: np.dtype,
    std: float,
) -> Callable[[jax.Array, jax.Array | None], PyTree]:
    """The program of `init`: initialize(key, ids or None)."""

    def draw(weight: Weight, key: jax.Array, ids: jax.Array | None) -> jax.Array:
        if weight.init == "ids":
            return ids
        if weight.init == "kaiming":
            bound = weight.shape[-1] ** -0.5
            return jax.random.uniform(key, weight.shape, dtype, -bound, bound)
        if weight.init == "identity":
            return jnp.zeros(weight.shape, dtype).at[..., 0, :].set(1)
        if weight.init != "normal":
            return jnp.full(weight.shape, {"ones": 1, "zeros": 0}[weight.init], dtype)
        drawn = std * jax.random.normal(key, weight.shape, dtype)
        return drawn if weight.num_rows is None else drawn.at[weight.num_rows :].set(0)

    def initialize(key: jax.Array, ids: jax.Array | None) -> PyTree:
        parts = jax.random.split(key, len(leaves))
        drawn = [draw(*pair, ids) for pair in zip(leaves, parts, strict=True)]
        return structure.unflatten(drawn)

    placed = shardings(structure.unflatten(leaves), mesh, "train")
    return jax.jit(initialize, out_shardings=placed)
