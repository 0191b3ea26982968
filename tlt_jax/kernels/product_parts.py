"""Large products of few tokens in parts that XLA makes, and one Triton kernel that adds them and does what follows.

XLA splits the reduction of such a product so that enough programs run, and adds the parts in a kernel that the next norm does
not join. Here the split is ours, and the sum is part of the kernel that follows. Every function returns None where XLA's
operations run instead: for many tokens, small matrices, on other devices, with tensor parallelism, in other dtypes and without
Triton. Features lie on the first axis, as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tlt_jax.kernels import projection_sizes
from tlt_jax.kernels.fused import PART_ADDED, PART_HEADS, Fused

# Small matrices XLA splits into more and narrower parts than `splits`, and would split ours again.
LEAST_MATRIX = projection_sizes.MOST_MATRIX
MOST_TOKENS = 256  # XLA splits the products of a 7B policy up to there, into as many parts or more
BUSY = (
    396  # programs that keep a large GPU busy: three for each of the 132 multiprocessors of an H200
)
TILE = 64  # rows of the matrix, and tokens, of a program of XLA's product, which is assumed
MOST_SPLITS = 8
LEAST_WIDTH, LARGE_WIDTH = 512, 8192  # of the reduction of a part; XLA splits a wider one again
MOST_WIDTH = 16384  # of a row that a program holds in registers


def heads(
    x: Float[Array, "In BN"],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...] | None],
    head_norms: tuple[Float[Array, " E"] | None, Float[Array, " E"] | None],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    shape: tuple[int, int, int],
    batch: int,
    eps: float,
    fused: Fused | None,
    change: Float[Array, "K J E BN"] | None = None,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]] | None:
    """Rotated queries and keys, and values, as tree_attention.attend takes them, of what the product reads; `shape`: (K, G, E).

    `matrices`: one of shape [K, G + 2, E, In], or those of queries, keys and values; `biases` likewise.
    `change`: in float32, is added to the product with one matrix.
    """
    if not runs(PART_HEADS, x, sum(one.size for one in matrices), fused):
        return None
    from tlt_jax.kernels import product_parts_triton

    matrix = jnp.concatenate(
        [one.reshape(-1, len(x)) for one in matrices]
    )  # XLA reads each in its place
    bias = None if biases[0] is None else jnp.concatenate([one.reshape(-1) for one in biases])
    norms = None if head_norms[0] is None else head_norms
    if change is not None:
        change = change.reshape(-1, x.shape[1]).T
    return product_parts_triton.heads(
        product(x, matrix), change, bias, norms, [angle.T for angle in angles], shape, len(matrices) == 1,
        batch, eps, x.dtype, fused,
    )  # fmt: skip


def added(
    x: Float[Array, "Out BN"],
    y: Float[Array, "In BN"],
    matrix: Float[Array, "Out In"],
    bias: Float[Array, " Out"] | None,
    norm: Float[Array, " Out"],
    eps: float,
    fused: Fused | None,
    change: Float[Array, "Out BN"] | None = None,
) -> tuple[Float[Array, "Out BN"], Float[Array, "Out BN"]] | None:
    """x + matrix @ y + change + bias, and that normed by `norm`; the change is in float32."""
    if not runs(PART_ADDED, y, matrix.size, fused) or len(x) > MOST_WIDTH:
        return None
    from tlt_jax.kernels import product_parts_triton

    change = None if change is None else change.T
    total, normed = product_parts_triton.added(
        product(y, matrix), change, x.T, bias, norm, eps, fused
    )
    return total.T, normed.T


def runs(name: str, x: Float[Array, "In BN"], numbers: int, fused: Fused | None) -> bool:
    """Whether the kernel runs, for a product of x with this many numbers."""
    if fused is None or name not in fused.on or fused.mesh.size > 1:
        return False
    is_large = numbers * x.dtype.itemsize > LEAST_MATRIX
    return is_large and x.dtype in (jnp.bfloat16, jnp.float32) and x.shape[1] <= MOST_TOKENS


def product(y: Float[Array, "In T"], matrix: Float[Array, "Out In"]) -> Float[Array, "S T Out"]:
    """Parts in float32 whose sum over the first axis is matrix @ y."""
    (out, width), tokens = matrix.shape, y.shape[1]
    count = splits(out, width, tokens)
    y, matrix = y.T.reshape(tokens, count, -1), matrix.reshape(out, count, -1)
    dimensions = ((2,), (2,)), ((1,), (1,))
    return jax.lax.dot_general(y, matrix, dimensions, preferred_element_type=jnp.float32)


def splits(out: int, width: int, tokens: int) -> int:
    """Parts of the reduction of a product with a matrix [out, width], so that BUSY programs run."""
    programs, count = out / TILE * -(-tokens // TILE), 1
    while count < MOST_SPLITS and (programs * count < BUSY or width > count * LARGE_WIDTH):
        if width % (2 * count) or width < 2 * count * LEAST_WIDTH:
            break
        count *= 2
    return count
