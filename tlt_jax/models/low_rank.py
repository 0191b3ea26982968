"""A frozen matrix with a trained change of low rank (LoRA, arXiv 2106.09685); knows no layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from tlt_jax.kernels.numerics import widen

PyTree = Any


@struct.dataclass
class LowRank:
    """The matrix weight + scale * b @ a (section 4.1, equation 3), of one layer or of stacked ones.

    It stands where a layer has a matrix. `weight` is frozen; `a` and `b`, of rank r, are trained.
    """

    weight: Float[Array, "*L Out In"]
    a: Float[Array, "*L r In"]
    b: Float[Array, "*L Out r"]
    scale: float = struct.field(pytree_node=False)


def is_low_rank(node: Any) -> bool:
    """Whether the node of a tree is a LowRank."""
    return isinstance(node, LowRank)


def merged(tree: PyTree) -> PyTree:
    """The tree with one matrix in the place of each LowRank, in at least float32; other leaves as they are."""

    def one(node: Any) -> Any:
        if not is_low_rank(node):
            return node
        wide = widen(node.weight.dtype)
        a, b = node.a.astype(wide), node.b.astype(wide)
        # Of the highest precision: a GPU would otherwise round the factors to 10 bits.
        change = jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
        return node.weight.astype(wide) + node.scale * change

    return jax.tree.map(one, tree, is_leaf=is_low_rank)
