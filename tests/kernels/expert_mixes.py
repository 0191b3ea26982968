"""Mixtures of experts with their gradients, in the tests and in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from tlt_jax.kernels import experts
from tlt_jax.kernels.experts import TILES, Form


def found(mix, x, ids, gates, matrices, down, slope):
    """A mix, and the gradients of its product with `slope` of x, gates, matrices and down."""
    ids = jnp.asarray(ids)

    def total(x, gates, matrices, down):
        y = mix(x, ids, gates, matrices, down, jax.nn.silu)
        return jnp.sum(y.astype(slope.dtype) * slope), y

    run = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))
    slopes, y = run(x, gates, matrices, down)
    return y, slopes


def tiled(*arrays, block, fused):
    """`found` of the kernels of sorted rows, with blocks of so many."""
    return found(partial(experts.mix_sorted, form=Form(TILES, block, fused)), *arrays)


def mixed(*arrays, fused):
    """`experts.mix` of a data group."""
    return experts.mix(*arrays, jax.nn.silu, fused=fused, layout="rollout")
