"""Placeholder."""

from __future__ import annotations

import jax.numpy as jnp

from tlt_jax.kernels.numerics import widen


def mix(x, ids, gates, matrices, down, activation, mesh=None, fused=None, layout="train"):
    wide = widen(x.dtype)
    if len(matrices) == 1:
        gate, up = matrices[0][:, 0], matrices[0][:, 1]
    else:
        gate, up = matrices
    h = activation(jnp.einsum("...d,...kfd->...kf", x, gate[ids])) * jnp.einsum(
        "...d,...kfd->...kf", x, up[ids]
    )
    y = jnp.einsum("...kf,...kdf->...kd", h, down[ids])
    return jnp.einsum("...k,...kd->...d", gates, y.astype(wide)).astype(x.dtype)
