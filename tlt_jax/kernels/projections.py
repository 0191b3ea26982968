"""Products of a layer with few tree nodes, each with its norm, bias and what follows as one kernel, on one NVIDIA GPU.

Every function returns None where XLA's operations run instead: for many nodes or large matrices (projection_sizes), on other
devices, with tensor parallelism, in other dtypes and without Triton. Features lie on the first axis, as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from tlt_jax.distributed.mesh import device_kind
from tlt_jax.kernels import projection_sizes, triton_support
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
    mesh: Mesh | None,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]] | None:
    """Rotated queries and keys, and values, of normed inputs, as tree_attention.attend takes them; `shape`: (K, G, E).

    `inputs` are one array or two, each normed alone; the matrices read both. `matrices`: one of shape [K, G + 2, E, In], with
    the queries, key and value of each key/value head, or those of queries, keys and values.
    """
    (K, G, E), width = shape, matrices[0].shape[-1]
    head = E if head_norms[0] is not None else 0
    given = chosen("heads", inputs[0], K * (G + 2) * E, width, mesh, head)
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
    mesh: Mesh | None,
) -> Float[Array, "Out BN"] | None:
    """x + matrix @ y + bias. `arrivals`: those of `gated`, with which programs can share the reduction."""
    given = chosen("added", y, *matrix.shape, mesh, can_split=arrivals is not None)
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
    mesh: Mesh | None,
) -> tuple[Float[Array, "F BN"], Int32[Array, " A"]] | None:
    """silu(gate) * up of normed x, and arrivals for one call of `added`.

    `matrices`: one of shape [2, F, D], or those of gate and up.
    """
    *_, F, width = matrices[0].shape
    given = chosen("gated", x, 2 * F, width, mesh)
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
    mesh: Mesh | None,
    head: int = 0,
    can_split: bool = False,
) -> dict[str, Any] | None:
    """The capability and sizes of the kernel for a product with x; None: XLA's."""
    if mesh is None or mesh.size > 1 or x.dtype not in DTYPES:
        return None
    capability = triton_support.capability(mesh)
    one = Product(kind, out, width, x.shape[1], x.dtype.itemsize, head, can_split)
    sizes = None if capability is None else projection_sizes.sizes(device_kind(mesh), one)
    return None if sizes is None else {"capability": capability, "sizes": sizes}


def present(arrays: Sequence[Array | None]) -> Sequence[Array] | None:
    """The arrays; None when they are absent."""
    return None if arrays[0] is None else arrays
