"""One optimizer step of the policy over the whole mesh, for GRPO or supervised learning.

It knows no rollout. Shapes: A accumulation steps, R packed rows, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax import optimizer
from tlt_jax.config import Config
from tlt_jax.data.packing import Packed
from tlt_jax.distributed.mesh import sharding
from tlt_jax.models import token_logprobs as scoring, transformer
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.optimizer import Adam, TrainState
from tlt_jax.train import losses


@dataclass(frozen=True)
class Objective:
    """What the update minimizes.

    The clipped policy gradient with KL and entropy terms (GRPO, arXiv 2402.03300), or with
    `is_supervised` the negative log-likelihood of the answers. `importance_cap` 0: no importance
    weights between sampler and trainer.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float = 0.0
    temperature: float = 1.0
    is_supervised: bool = False


@dataclass(frozen=True)
class Recipe:
    """The static arguments of the programs below."""

    model: ModelConfig
    mesh: Mesh
    adam: Adam
    objective: Objective
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: bool = False
    logits_chunk: int = 1024
    attention_block: int = 512

    @classmethod
    def of(cls, config: Config, model: ModelConfig, mesh: Mesh, total_steps: int) -> Recipe:
        """The recipe of a run of `total_steps` optimizer steps.

        Log-probs are at the temperature of the rollout.
        """
        algorithm = config.algorithm
        objective = Objective(
            algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef, algorithm.entropy_coef,
            algorithm.importance_cap, config.rollout.temperature,
        )  # fmt: skip
        return cls(
            model, mesh, Adam.of(config, total_steps), objective,
            config.model.param_dtype, config.model.compute_dtype, config.model.remat,
            config.train.logits_chunk, config.train.attention_block,
        )  # fmt: skip


PolicyState = TrainState  # with params of type transformer.Params


@struct.dataclass
class Batch:
    """A minibatch of packed rows; see packing.Packed.

    Per-token values are at the position of the target, 0 elsewhere; `weights` > 0 exactly at
    targets. `recorded`: the sampler's log-probs. `old`: the policy's before its first minibatch;
    None: the update's own, so that ratios are 1. `reference`: the frozen initial policy's. The
    first `count` accumulation steps hold examples.
    """

    tokens: Int32[Array, "*A R T"]
    positions: Int32[Array, "*A R T"]
    segments: Int32[Array, "*A R T"]
    targets: Int32[Array, "*A R T"]
    weights: Float[Array, "*A R T"]
    advantages: Float[Array, "*A R T"]
    count: Int32[Array, ""] | None
    recorded: Float[Array, "*A R T"] | None = None
    old: Float[Array, "*A R T"] | None = None
    reference: Float[Array, "*A R T"] | None = None

    def at(self, step: jax.Array) -> Batch:
        """The batch of one accumulation step, without leading axis A and without count."""
        return jax.tree.map(lambda leaf: leaf[step], self.replace(count=None))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are sharded over the mesh axis "data"."""
    return sharding(mesh, (None, "batch", None), "train")


def make_batch(
    packed: Packed,
    mesh: Mesh,
    weights: np.ndarray,
    advantages: np.ndarray,
    recorded: list[np.ndarray] | None = None,
) -> Batch:
    """The batch on the mesh.

    weights[n] and advantages[n] are per example, `recorded` log-probs per answer token.
    """
    rows = {name: getattr(packed, name) for name in ("tokens", "positions", "segments", "targets")}
    rows |= {"weights": packed.spread(weights), "advantages": packed.spread(advantages)}
    if recorded is not None:
        rows["recorded"] = packed.place(recorded)
    rows = jax.device_put(rows, batch_sharding(mesh))
    return Batch(
        **rows, count=jax.device_put(np.int32(packed.count), NamedSharding(mesh, PartitionSpec()))
    )


def abstract_batch(
    recipe: Recipe, steps: int, rows: int, row_tokens: int, given: tuple[str, ...] = ()
) -> Batch:
    """ShapeDtypeStructs with shardings of a batch.

    `given`: names of the optional fields that are not None.
    """

    def array(dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (steps, rows, row_tokens), dtype, sharding=batch_sharding(recipe.mesh)
        )

    wide = jnp.asarray(0.0).dtype
    integers = {name: array(jnp.int32) for name in ("tokens", "positions", "segments", "targets")}
    floats = {name: array(wide) for name in ("weights", "advantages", *given)}
    everywhere = NamedSharding(recipe.mesh, PartitionSpec())
    return Batch(
        **integers, **floats, count=jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    )


def create(params: Params, recipe: Recipe) -> PolicyState:
    """The state before the first update. It owns `params`: the first update donates them."""
    return optimizer.create(recipe.adam, params, recipe.mesh)


def abstract_state(recipe: Recipe) -> PolicyState:
    """ShapeDtypeStructs with shardings of the state: to restore a checkpoint, or to compile."""
    params = transformer.abstract(recipe.model, recipe.mesh, "train", recipe.param_dtype)
    return optimizer.abstract(recipe.adam, params, recipe.mesh)


def token_scores(
    params: Params, batch: Batch, recipe: Recipe, entropy_learns: bool
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Log-probability of each target, and entropy of each distribution, of one accumulation step.

    `entropy_learns`: whether the entropy carries a gradient.
    """
    x, _ = transformer.hidden(
        params,
        recipe.model,
        batch.tokens,
        batch.positions,
        batch.segments,
        compute_dtype=recipe.compute_dtype,
        remat=recipe.remat,
        block=recipe.attention_block,
        mesh=recipe.mesh,
    )
    return scoring.token_scores(
        params,
        recipe.model,
        recipe.mesh,
        x,
        batch.targets,
        temperature=recipe.objective.temperature,
        chunk=recipe.logits_chunk,
        entropy_learns=entropy_learns,
    )


def loss(
    params: Params, batch: Batch, recipe: Recipe
) -> tuple[Float[Array, ""], tuple[dict, dict]]:
    """The loss of one accumulation step; for metrics, sums over its targets and maxima.

    The loss is sum(weights * token loss).
    """
    objective, mask = recipe.objective, batch.weights > 0
    logprobs, entropy = token_scores(params, batch, recipe, objective.entropy_coef != 0)
    logprobs, entropy = jnp.where(mask, logprobs, 0), jnp.where(mask, entropy, 0)

    if objective.is_supervised:
        return jnp.sum(batch.weights * -logprobs), ({}, {})

    pg_loss, totals, maxima = policy_loss(objective, batch, logprobs, mask)
    token_loss = pg_loss - objective.entropy_coef * entropy
    totals |= {"tokens": mask, "entropy": entropy}

    if batch.reference is not None:
        totals["kl"] = kl = losses.kl_k3(logprobs, jnp.where(mask, batch.reference, 0))
        token_loss += objective.kl_coef * kl
    if batch.recorded is not None:
        totals["rollout_logprob_diff_mean"] = difference = jnp.abs(
            logprobs - jnp.where(mask, batch.recorded, 0)
        )
        maxima["rollout_logprob_diff_max"] = difference

    sums = {
        name: jnp.sum(jnp.where(mask, part, 0), dtype=token_loss.dtype)
        for name, part in totals.items()
    }
    sums["pg_loss"] = jnp.sum(batch.weights * pg_loss)
    return jnp.sum(batch.weights * token_loss), (
        sums,
        {name: jnp.max(jnp.where(mask, part, 0)) for name, part in maxima.items()},
    )


def policy_loss(
    objective: Objective, batch: Batch, logprobs: Float[Array, "R T"], mask: Bool[Array, "R T"]
) -> tuple[Float[Array, "R T"], dict, dict]:
    """Policy-gradient loss of each token; per-token values to sum and to maximize for metrics."""
    old = jax.lax.stop_gradient(logprobs) if batch.old is None else jnp.where(mask, batch.old, 0)
    policy = losses.policy_loss(
        logprobs, old, batch.advantages, objective.clip_low, objective.clip_high
    )
    totals = {
        "ratio_mean": policy.ratio,
        "pg_clipfrac": policy.clipped_low | policy.clipped_high,
        "pg_clipfrac_low": policy.clipped_low,
        "pg_clipfrac_high": policy.clipped_high,
    }

    if not objective.importance_cap:
        return policy.loss, totals, {"ratio_max": policy.ratio}
    weight = losses.importance_weight(
        old, jnp.where(mask, batch.recorded, 0), objective.importance_cap
    )
    return (
        weight * policy.loss,
        totals | {"importance_weight_mean": weight},
        {"ratio_max": policy.ratio},
    )


def update(
    state: PolicyState, batch: Batch, recipe: Recipe
) -> tuple[PolicyState, dict[str, Array]]:
    """The state after one optimizer step on the batch, and its metrics.

    Gradients accumulate in at least float32 over the first batch.count accumulation steps. An
    update that is not finite leaves weights and moments unchanged. Metrics are means over targets,
    or maxima. Raises ValueError as `check`.
    """
    check(batch, recipe)
    grad = jax.value_and_grad(partial(loss, recipe=recipe), has_aux=True)
    shardings = transformer.shardings(recipe.model, recipe.mesh, "train")

    def add(step: Int[Array, ""], carry: tuple) -> tuple:
        grads, total, sums, maxima = carry
        (value, (step_sums, step_maxima)), step_grads = grad(state.params, batch.at(step))
        grads = jax.tree.map(jnp.add, grads, optimizer.widen(step_grads))
        grads = jax.lax.with_sharding_constraint(grads, shardings)
        return (
            grads,
            total + value,
            jax.tree.map(jnp.add, sums, step_sums),
            jax.tree.map(jnp.maximum, maxima, step_maxima),
        )

    value, (sums, maxima) = jax.eval_shape(partial(loss, recipe=recipe), state.params, batch.at(0))
    empty = (optimizer.widen(state.params), value, sums, maxima)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)
    grads, total, sums, maxima = jax.lax.fori_loop(0, batch.count, add, empty)

    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(total) & jnp.isfinite(norm)
    state, rate = optimizer.advance(state, grads, is_finite, recipe.adam)

    tokens = sums.pop("tokens", None)
    means = {name: part if name == "pg_loss" else part / tokens for name, part in sums.items()}
    return state, {
        "loss": total,
        "grad_norm": norm,
        "lr": rate,
        "nonfinite": state.skipped,
        **means,
        **maxima,
    }


def check(batch: Batch, recipe: Recipe) -> None:
    """Raises ValueError when the batch lacks log-probs that the objective needs."""
    if recipe.objective.kl_coef and batch.reference is None:
        raise ValueError(
            f"kl_coef {recipe.objective.kl_coef} needs the reference's log-probs: give batch.reference"
        )
    if recipe.objective.importance_cap and batch.recorded is None:
        raise ValueError(
            f"importance_cap {recipe.objective.importance_cap} needs the sampler's log-probs: give batch.recorded"
        )


def token_logprobs(params: Params, batch: Batch, recipe: Recipe) -> Float[Array, "A R T"]:
    """Log-probability of each target, 0 elsewhere: for Batch.old and Batch.reference."""

    def one(step: Int[Array, ""], done: Float[Array, "A R T"]) -> Float[Array, "A R T"]:
        rows = batch.at(step)
        scores, _ = token_scores(params, rows, recipe, entropy_learns=False)
        return done.at[step].set(jnp.where(rows.weights > 0, scores, 0).astype(done.dtype))

    return jax.lax.fori_loop(0, batch.count, one, jnp.zeros_like(batch.weights))


class UpdatePrograms(NamedTuple):
    """The jitted functions of a recipe.

    update(state, batch) donates the state; token_logprobs(params, batch).
    """

    update: jax.stages.Wrapped
    token_logprobs: jax.stages.Wrapped


@cache
def programs(recipe: Recipe) -> UpdatePrograms:
    """The programs over the whole mesh.

    To compile them ahead of time, lower them with abstract_state and abstract_batch. `update`
    returns the state with the shardings of its argument, so that it compiles once.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(recipe))
    everywhere = NamedSharding(recipe.mesh, PartitionSpec())
    return UpdatePrograms(
        jax.jit(
            partial(update, recipe=recipe),
            donate_argnames="state",
            out_shardings=(shardings, everywhere),
        ),
        jax.jit(partial(token_logprobs, recipe=recipe), out_shardings=batch_sharding(recipe.mesh)),
    )
