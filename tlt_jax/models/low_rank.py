"""A frozen matrix with a trained change of low rank (LoRA, arXiv 2106.09685); knows no layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tlt_jax.kernels.numerics import widen

PyTree = Any


@dataclass(frozen=True)
class Lora:
    """Which matrices of every layer have an adapter, its rank, and the scale alpha / rank of its change; hashable."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # peft's names, in the order of a layer

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a layer that have an adapter: of `q_proj` it is `q`."""
        return tuple(target.removesuffix("_proj") for target in self.targets)


@struct.dataclass
class LowRank:
    """The matrix weight + scale * b @ a (section 4.1, equation 3), of one layer or of stacked ones.

    It stands where a layer has a matrix. `weight` is frozen; `a` and `b`, of rank r, are trained. A weight of several
    output axes has them in `b`, too.
    """

    weight: Float[Array, "*L Out In"]
    a: Float[Array, "*L r In"]
    b: Float[Array, "*L Out r"]
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.weight.shape


def is_low_rank(node: Any) -> bool:
    """Whether the node of a tree is a LowRank."""
    return isinstance(node, LowRank)


def kept_apart(lora: Lora | None, dtype: DTypeLike) -> Lora | None:
    """The adapters whose factors a rollout in this dtype keeps apart; None where they are merged.

    A dtype narrower than float32 would round most of a change away, since the base lies exactly on its grid.
    """
    return lora if jnp.finfo(dtype).bits < 32 else None


def joined(
    matrices: Sequence[Array | LowRank | None], join: Callable[[Sequence[Array]], Array]
) -> Array | LowRank | None:
    """`join` of matrices that read the same input, some with changes; None when they are absent.

    The factors of all are one `a`, below each other, and a `b` of blocks on its last axis: 0 where a matrix has no change.
    """
    if matrices[0] is None or not any(map(is_low_rank, matrices)):
        return None if matrices[0] is None else join(matrices)
    changed = [index for index, one in enumerate(matrices) if is_low_rank(one)]
    first, count = matrices[changed[0]], len(changed)
    rank = first.b.shape[-1]

    def block(index: int) -> Array:
        out = matrices[index].shape[0]
        if index not in changed:
            return jnp.zeros((out, count * rank), first.b.dtype)
        before = changed.index(index) * rank
        return jnp.pad(matrices[index].b, ((0, 0), (before, (count - 1) * rank - before)))

    return LowRank(
        join([one.weight if is_low_rank(one) else one for one in matrices]),
        jnp.concatenate([matrices[index].a for index in changed]),
        join([block(index) for index in range(len(matrices))]),
        first.scale,
    )


def with_scaled_factors(tree: PyTree) -> PyTree:
    """The tree with LowRanks of scale 1: b is multiplied instead, in at least float32, which saves an operation a product."""

    def one(node: Any) -> Any:
        if not is_low_rank(node):
            return node
        return node.replace(b=node.scale * node.b.astype(widen(node.b.dtype)), scale=1.0)

    return jax.tree.map(one, tree, is_leaf=is_low_rank)


def rows(matrix: Array | LowRank) -> list[Array | LowRank]:
    """The parts of a joined matrix along its first axis."""
    if not is_low_rank(matrix):
        return [*matrix]
    return [matrix.replace(weight=one, b=b) for one, b in zip(matrix.weight, matrix.b, strict=True)]


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
