"""Descriptions of weights (trees of Weight), their shardings, abstract arrays, initial values and tiles, for any network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from tlt_jax.distributed.mesh import is_cpu, sharding

PyTree = Any

TILE = 64  # outputs of a tile
GROUP = 12  # most tiles of a product, for each of which the columns are repeated
COLUMNS = 8  # most that are multiplied by tiles; for more, the whole matrix is as fast or faster
FEWEST = 2**18  # numbers of a matrix that is tiled; the cache of a core holds a smaller one


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


@struct.dataclass
class Tiles:
    """A matrix of a rollout on a CPU, and a copy of it as [In, TILE] for each TILE outputs, in groups of up to GROUP.

    It stands where a layer has a matrix. A product with few columns reads such a tile once and in order. Of a whole matrix
    YNNPACK multiplies a number by all columns at a time, which use a part of a vector register. Processor ms for 3072 x 576
    and 2, 4, 8, 16 and 32 columns: 0.29, 0.29, 0.36, 0.51, 0.83; whole 0.38, 0.43, 0.54, 0.60, 0.78.
    """

    weight: Float[Array, "*Out In"]
    parts: tuple[Float[Array, "g In t"], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.weight.shape


def whole(matrix: Array | Tiles) -> Array:
    """The matrix itself."""
    return matrix.weight if isinstance(matrix, Tiles) else matrix


def for_columns(matrix: Array | Tiles, count: int) -> Array | Tiles:
    """What a product of the matrix with this many columns reads: the tiles, if it has some, or the whole matrix."""
    return whole(matrix) if count > COLUMNS else matrix


def tile(matrix: Array | Weight) -> Tiles:
    """A matrix, or its description, in tiles; an array that does not divide into them raises in `reshape`."""
    *outs, inner = matrix.shape
    count = math.prod(outs) // TILE
    groups = -(-count // GROUP)
    ends = [count * index // groups for index in range(groups + 1)]
    if isinstance(matrix, Weight):
        shapes = [(end - begin, inner, TILE) for begin, end in zip(ends, ends[1:], strict=False)]
        parts = [Weight(shape, (None,) * 3, matrix.init) for shape in shapes]
    else:
        parts = jnp.split(jnp.swapaxes(matrix.reshape(-1, TILE, inner), 1, 2), ends[1:-1])
    return Tiles(matrix, tuple(parts))


def tiled(tree: PyTree, names: Sequence[str], mesh: Mesh, dtype: DTypeLike) -> PyTree:
    """The dataclass with tiles for those of these fields that are large matrices, on a CPU that does not split them.

    Not in a dtype narrower than float32, in which products are slow there.
    """
    if not is_cpu(mesh) or mesh.shape["model"] > 1 or jnp.finfo(dtype).bits < 32:
        return tree
    found = {name: getattr(tree, name) for name in names}
    fits = {
        name: tile(matrix)
        for name, matrix in found.items()
        if isinstance(matrix, (jax.Array, Weight))
        and math.prod(matrix.shape) >= FEWEST
        and not math.prod(matrix.shape[:-1]) % TILE
    }
    return tree.replace(**fits)


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
