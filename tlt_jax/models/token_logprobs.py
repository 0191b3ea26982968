"""Log-probability and entropy of target tokens, from the logits of one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from tlt_jax.distributed.mesh import sharding
from tlt_jax.shapes import shaped

PyTree = Any


@shaped
def score(
    logits: Float[Array, "*A V"],
    targets: Int[Array, "*A"],
    temperature: float,
    entropy_learns: bool,
) -> tuple[Float[Array, "*A"], Float[Array, "*A"]]:
    """Log-probability of the targets and entropy, of logits over the temperature (0 counts as 1).

    Reduces over V only, so V may be sharded. Without `entropy_learns` the entropy has no gradient.
    """
    if temperature not in (0, 1):
        logits = jnp.maximum(
            logits / temperature, jnp.finfo(logits.dtype).min
        )  # padding stays finite
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(shifted), axis=-1)
    ids = jax.lax.broadcasted_iota(targets.dtype, shifted.shape, shifted.ndim - 1)
    chosen = jnp.sum(jnp.where(ids == targets[..., None], shifted, 0), axis=-1)
    logprobs = chosen - jnp.log(total)
    if not entropy_learns:
        shifted, total = jax.lax.stop_gradient((shifted, total))
    entropy = jnp.log(total) - jnp.sum(jnp.exp(shifted) * shifted, axis=-1) / total
    return logprobs, entropy


@shaped
def group_copies(
    weight: Float[Array, ...], axes: Sequence[str | None], mesh: Mesh
) -> Float[Array, "groups ..."]:
    """The weight gathered once for each data group."""
    copies = jnp.broadcast_to(weight, (mesh.shape["data"], *weight.shape))
    return jax.lax.with_sharding_constraint(copies, sharding(mesh, ("batch", *axes), "rollout"))


def in_chunks(
    one: Callable[..., PyTree],
    rows: tuple[Shaped[Array, "R T ..."], ...],
    mesh: Mesh,
    chunk: int,
) -> PyTree:
    """one(*rows), where `one` treats each token independently, on `chunk` tokens of each data group at once.

    `one` takes and returns arrays [groups, R / groups, t, ...]. The backward pass recomputes it, unless there is only one
    chunk, whose memory would not be freed earlier anyway.
    """
    R, T = rows[0].shape[:2]
    groups = mesh.shape["data"]
    length = max(1, min(T, chunk * groups // R))
    chunks = -(-T // length)
    length = -(-T // chunks)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0), (0, chunks * length - T), *[(0, 0)] * (array.ndim - 2)])
        return jnp.moveaxis(
            padded.reshape(groups, R // groups, chunks, length, *array.shape[2:]), 2, 0
        )

    def join(array: Array) -> Array:
        return jnp.moveaxis(array, 0, 2).reshape(R, chunks * length, *array.shape[4:])[:, :T]

    if chunks == 1:
        results = one(*[split(array)[0] for array in rows])
        return jax.tree.map(lambda array: join(array[None]), results)
    results = jax.lax.map(lambda parts: jax.checkpoint(one)(*parts), jax.tree.map(split, rows))
    return jax.tree.map(join, results)
