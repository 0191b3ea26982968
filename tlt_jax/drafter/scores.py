"""What the losses of all kinds of drafters share: the policy's distribution over the draft vocabulary, and means."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tlt_jax.distributed.mesh import sharding
from tlt_jax.kernels.numerics import contract, masked
from tlt_jax.models.drafter import Shared
from tlt_jax.shapes import shaped


def policy_heads(
    shared: Shared, ids: Array | None, axis: str | None, dtype: DTypeLike, mesh: Mesh
) -> tuple[Float[Array, "V D"], Float[Array, "U D"]]:
    """The policy's LM head, and its rows of the draft vocabulary `ids` (None: all); every data group has both.

    `axis`: the logical axis of the draft vocabulary.
    """
    head = gathered(shared.head.astype(dtype), ("vocab", "embed"), mesh)
    return head, head if ids is None else gathered(head[ids], (axis, "embed"), mesh)


def policy_logits(
    states: Float[Array, "G *A D"], head: Float[Array, "V D"], size: int, mesh: Mesh
) -> Float[Array, "G *A V"]:
    """The policy's logits of all tokens, from its states of G data groups; those of padding, from `size` on, are the lowest."""
    logits = contract("...d,vd->...v", states, head)
    return split(masked(logits, jnp.arange(logits.shape[-1]) < size), "vocab", mesh)


def part_logits(
    states: Float[Array, "G *A D"], part: Float[Array, "U D"], axis: str | None, mesh: Mesh
) -> Float[Array, "G *A U"]:
    """The policy's logits of a draft vocabulary, from its states of G data groups."""
    return split(contract("...d,vd->...v", states, part), axis, mesh)


def gathered(weight: Array, axes: tuple[str | None, ...], mesh: Mesh) -> Array:
    """A frozen weight, replicated over the data groups."""
    return jax.lax.with_sharding_constraint(weight, sharding(mesh, axes, "rollout"))


def split(logits: Array, axis: str | None, mesh: Mesh) -> Array:
    """Logits [G, R, T, V], each group's vocabulary sharded over the mesh axis "model"."""
    return jax.lax.with_sharding_constraint(
        logits, sharding(mesh, ("batch", None, None, axis), "train")
    )


@shaped
def mean(
    values: Array, mask: Bool[Array, "*A"], weights: Float[Array, " P"] | None = None
) -> Float[Array, ""]:
    """Mean of the values where the mask is True, with these weights (None: all 1); 0 when it is True nowhere."""
    if weights is None:
        return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)
    weights = jnp.where(mask, weights.astype(values.dtype), 0)
    total = jnp.sum(weights)
    return jnp.sum(weights * jnp.where(mask, values, 0)) / jnp.where(total > 0, total, 1)
