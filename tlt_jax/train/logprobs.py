"""Log-probability and entropy of target tokens, a chunk of logits at a time; knows no loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from tlt_jax.mesh import sharding
from tlt_jax.models import transformer
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.shapes import shaped


@shaped
def score(
    logits: Float[Array, "*A V"], targets: Int[Array, "*A"], temperature: float, entropy_learns: bool
) -> tuple[Float[Array, "*A"], Float[Array, "*A"]]:
    """Log-probability of the targets and entropy, of logits over the temperature (0 counts as 1).

    Sums over V only, so V may be sharded. The entropy carries a gradient only if it `entropy_learns`.
    """
    if temperature not in (0, 1):
        logits = jnp.maximum(logits / temperature, jnp.finfo(logits.dtype).min)  # padding stays finite
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
def token_scores(
    params: Params,
    model: ModelConfig,
    mesh: Mesh,
    x: Float[Array, "R T D"],
    targets: Int[Array, "R T"],
    *,
    temperature: float,
    chunk: int,
    entropy_learns: bool,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Log-probability of the targets and entropy from the last hidden states.

    Each data group holds the logits of `chunk` tokens at once, and computes them again in the backward pass.
    """
    R, T, D = x.shape
    groups = mesh.shape["data"]
    length = max(1, min(T, chunk * groups // R))
    chunks = -(-T // length)
    length = -(-T // chunks)
    split = (groups, R // groups, chunks, length)
    pad = chunks * length - T
    x_chunks = jnp.moveaxis(jnp.pad(x, ((0, 0), (0, pad), (0, 0))).reshape(*split, D), 2, 0)
    target_chunks = jnp.moveaxis(jnp.pad(targets, ((0, 0), (0, pad))).reshape(split), 2, 0)

    # One copy of the head per data group: its gradient then sums over chunks inside the group, and over groups once.
    name = "embed" if params.head is None else "head"
    axes = getattr(transformer.weights(model, mesh.shape["model"]), name).axes
    matrix = getattr(params, name)
    copies = jnp.broadcast_to(matrix, (groups, *matrix.shape))
    copies = jax.lax.with_sharding_constraint(copies, sharding(mesh, ("batch", *axes), "rollout"))

    def group_logits(copy: jax.Array, x: jax.Array) -> jax.Array:
        return transformer.logits(params.replace(**{name: copy}), model, x)

    @jax.checkpoint
    def one(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jax.vmap(group_logits)(copies, x)
        logits = jax.lax.with_sharding_constraint(logits, sharding(mesh, ("batch", None, None, "vocab"), "train"))
        return score(logits, targets, temperature, entropy_learns)

    scores = jax.lax.map(lambda pair: one(*pair), (x_chunks, target_chunks))
    return tuple(jnp.moveaxis(part, 0, 2).reshape(R, chunks * length)[:, :T] for part in scores)
