"""Products of a layer with few tree nodes, each with its norm, bias and what follows as one kernel, on one NVIDIA GPU.

Every function returns None where XLA's operations run instead: for many nodes or large matrices (projection_sizes), on other
devices, with tensor parallelism, in other dtypes and without Triton. Features lie on the first axis, as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tlt_jax.distributed.mesh import device_kind
from tlt_jax.kernels import projection_sizes
from tlt_jax.kernels.fused import ADDED, GATED, HEADS, Fused
from tlt_jax.kernels.projection_sizes import Product

DTYPES = (jnp.bfloat16, jnp.float32)  # that the kernels take


def heads(
    inputs: Sequence[Float[Array, "D BN"]],
    norms: Sequence[Float[Array, " D"]],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...] | None],
    head_norms: tuple[Float[Array, " E"] | None, Float[Array, " E"] | None],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    shape: tuple[int, int, int],
    batch: int,
    eps: float,
    fused: Fused | None,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]] | None:
    """Rotated queries and keys, and values, of normed inputs, as tree_attention.attend takes them; `shape`: (K, G, E).

    `inputs` are one array or two, each normed alone; the matrices read both. `matrices`: one of shape [K, G + 2, E, In], with
    the queries, key and value of each key/value head, or those of queries, keys and values.
    """
    (K, G, E), width = shape, matrices[0].shape[-1]
    head = E if head_norms[0] is not None else 0
    given = chosen(HEADS, inputs[0], K * (G + 2) * E, width, fused, head)
    if given is None:
        return None
    from tlt_jax.kernels import projections_triton

    return projections_triton.heads(
        [x.T for x in inputs], norms, matrices, present(biases), present(head_norms),
        [angle.T for angle in angles], shape, batch, eps, **given,
    )  # fmt: skip


def added(
    x: Float[Array, "Out BN"],
    y: Float[Array, "In BN"],
    matrix: Float[Array, "Out In"],
    bias: Float[Array, " Out"] | None,
    arrivals: Int32[Array, " A"] | None,
    fused: Fused | None,
) -> Float[Array, "Out BN"] | None:
    """x + matrix @ y + bias. `arrivals`: those of `gated`, with which programs can share the reduction."""
    given = chosen(ADDED, y, *matrix.shape, fused, can_split=arrivals is not None)
    if given is None:
        return None
    from tlt_jax.kernels import projections_triton

    return projections_triton.added(x.T, y.T, matrix, bias, arrivals, **given).T


def gated(
    x: Float[Array, "D BN"],
    norm: Float[Array, " D"],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...] | None],
    eps: float,
    fused: Fused | None,
) -> tuple[Float[Array, "F BN"], Int32[Array, " A"]] | None:
    """silu(gate) * up of normed x, and arrivals for one call of `added`.

    `matrices`: one of shape [2, F, D], or those of gate and up.
    """
    *_, F, width = matrices[0].shape
    given = chosen(GATED, x, 2 * F, width, fused)
    if given is None:
        return None
    from tlt_jax.kernels import projections_triton

    y, arrivals = projections_triton.gated(x.T, norm, matrices, present(biases), eps, **given)
    return y.T, arrivals


def chosen(
    kind: str,
    x: Float[Array, "In BN"],
    out: int,
    width: int,
    fused: Fused | None,
    head: int = 0,
    can_split: bool = False,
) -> dict[str, Any] | None:
    """The arguments `fused` and `sizes` of the kernel for a product with x; None: XLA's."""
    if fused is None or kind not in fused.on or fused.mesh.size > 1 or x.dtype not in DTYPES:
        return None
    one = Product(kind.partition(".")[2], out, width, x.shape[1], x.dtype.itemsize, head, can_split)
    sizes = projection_sizes.sizes(device_kind(fused.mesh), one)
    return None if sizes is None else {"fused": fused, "sizes": sizes}


def present(arrays: Sequence[Array | None]) -> Sequence[Array] | None:
    """The arrays; None when they are absent."""
    return None if arrays[0] is None else arrays
