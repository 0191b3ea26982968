"""One optimizer step of the drafter on packed rows; knows no rollout.

Slot t of unrolled draft step j predicts token t + 2 + j (models/eagle.py). All arrays here are
indexed by the position s whose next token is predicted, s = t + 1 + j: the policy's distribution at
s is computed once, and compared with that of every draft step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax import keys, optimizer
from tlt_jax.distributed.mesh import sharding
from tlt_jax.drafter.batch import Batch
from tlt_jax.drafter.recipe import DrafterState, Objective, Recipe, abstract_state
from tlt_jax.kernels.numerics import contract, masked
from tlt_jax.models import eagle, token_logprobs as scoring, transformer
from tlt_jax.models.architecture import Params
from tlt_jax.models.eagle import DrafterParams, Shared
from tlt_jax.shapes import shaped

# Weight of the token loss; that of eagle's feature loss is 1 (arXiv 2401.15077, section 3.2).
TOKEN_WEIGHT = {"eagle": 0.1, "eagle3": 1.0}
TOP = 10  # tokens of the loss on the most likely ones (arXiv 2408.15766, section 4)
ETA = 3.0  # "acceptance" loss (arXiv 2602.23881): decay of the cross-entropy term with acceptance


def update(
    state: DrafterState, policy: Params, batch: Batch, recipe: Recipe
) -> tuple[DrafterState, dict[str, Array]]:
    """The state after one optimizer step on the batch, and its metrics. The policy is not trained.

    With features and states in the batch the policy may be in the "rollout" layout. An update that
    is not finite leaves weights and moments unchanged.
    """
    if batch.features is None:
        batch = observe(policy, batch, recipe)
    batch = batch.replace(features=batch.features + noise(state.step, batch.features, recipe))

    ids, trained = state.params.ids, state.params.replace(ids=None)

    def trained_loss(trained: DrafterParams) -> tuple[Array, dict[str, Array]]:
        return loss(trained.replace(ids=ids), eagle.shared(policy), batch, recipe)

    (total, metrics), grads = jax.value_and_grad(trained_loss, has_aux=True)(trained)
    placed = eagle.shardings(recipe.drafter, recipe.mesh, "train").replace(ids=None)
    grads = jax.lax.with_sharding_constraint(optimizer.widen(grads), placed)

    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(total) & jnp.isfinite(norm)
    state, rate = optimizer.advance(state.replace(params=trained), grads, is_finite, recipe.adam)

    state = state.replace(params=state.params.replace(ids=ids))
    return state, {
        "loss": total,
        "grad_norm": norm,
        "lr": rate,
        "nonfinite": state.skipped,
        **metrics,
    }


def observe(policy: Params, batch: Batch, recipe: Recipe) -> Batch:
    """The batch with the policy's features and states, computed in its "train" layout."""
    states, features = transformer.hidden(
        policy, recipe.model, batch.tokens, batch.positions, batch.segments, compute_dtype=recipe.compute_dtype,
        block=recipe.attention_block, mesh=recipe.mesh, captures=recipe.drafter.captures,
    )  # fmt: skip
    return batch.replace(features=features, states=states)


def noise(
    step: Int[Array, ""], features: Float[Array, "R T F"], recipe: Recipe
) -> Float[Array, "R T F"] | float:
    """The noise added to the features at this step: uniform, or 0.0 when off."""
    size = recipe.objective.noise
    if not size:
        return 0.0
    noise_key = keys.feature_noise_key(recipe.seed, step)
    return jax.random.uniform(noise_key, features.shape, features.dtype, -size, size)


@shaped
def loss(
    params: DrafterParams, shared: Shared, batch: Batch, recipe: Recipe
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""] | Int[Array, ""]]]:
    """The loss of a batch with features and states, and its metrics.

    Each term is a mean over the positions in `loss_mask` that draft step j can predict: j + 1 slots
    of their segment lie before them.
    """
    objective = recipe.objective
    hidden = eagle.unroll(
        params, recipe.drafter, shared, batch.tokens, batch.features, batch.positions, batch.segments,
        objective.unroll, recipe.attention_block, recipe.mesh, objective.detach,
    )  # fmt: skip
    aligned = [jnp.roll(step, j + 1, axis=1) for j, step in enumerate(hidden)]
    scores = token_scores(params, shared, batch.states, aligned, recipe)

    total, metrics = jnp.zeros((), scores[0].token_loss.dtype), {"tokens": jnp.sum(batch.loss_mask)}
    for j, (predicted, score) in enumerate(zip(aligned, scores, strict=True)):
        _, reaches = eagle.shift(batch.segments, batch.segments, j + 1)
        known = batch.loss_mask & jnp.roll(reaches, j + 1, axis=1)  # s - 1 - j is in s's segment
        token_loss = mean(score.token_loss, known & score.learns)
        step_loss = TOKEN_WEIGHT[recipe.drafter.kind] * token_loss
        if objective.top_loss:
            top_loss = mean(score.top_loss, known)
            step_loss += objective.top_loss * top_loss
            metrics |= {"top_loss": top_loss} if j == 0 else {}
        if recipe.drafter.kind == "eagle":
            feature_loss = mean(smooth_l1(predicted, batch.states), known)
            step_loss += feature_loss
            metrics |= {"feature_loss": feature_loss} if j == 0 else {}
        metrics |= {"token_loss": token_loss} if j == 0 else {}
        metrics[f"agreement@{j + 1}"] = mean(score.agrees, known)
        metrics[f"acceptance@{j + 1}"] = mean(score.acceptance, known)
        total += objective.decay**j * step_loss

    return total, metrics


@struct.dataclass
class Scores:
    """How well one draft step predicts each next token.

    `agrees`: drafter and policy have the same most likely token. `acceptance`: sum of min(p, q), the acceptance
    probability of speculative sampling (arXiv 2211.17192). `learns`: False where the draft vocabulary lacks the policy's
    most likely token. `top_loss`: the terms of the cross entropy to the policy of its most likely tokens; 0 when that
    loss is off.
    """

    token_loss: Float[Array, "*A"]
    agrees: Bool[Array, "*A"]
    acceptance: Float[Array, "*A"]
    learns: Bool[Array, "*A"]
    top_loss: Float[Array, "*A"]


def token_scores(
    params: DrafterParams,
    shared: Shared,
    states: Float[Array, "R T D"],
    hidden: list[Float[Array, "R T Z"]],
    recipe: Recipe,
) -> list[Scores]:
    """Scores of every draft step, from the policy's states and the drafter's hidden states.

    Computed in chunks of tokens, so that only one chunk's logits exist at a time.
    """
    model, mesh, ids = recipe.model, recipe.mesh, params.ids
    draft = draft_logits(params, shared, recipe)
    head = gathered(shared.head.astype(states.dtype), ("vocab", "embed"), mesh)
    part = head if ids is None else gathered(head[ids], (draft_axis(recipe), "embed"), mesh)

    def one(states: Array, *hidden: Array) -> list[Scores]:
        logits = contract("...d,vd->...v", states, head)
        logits = split(
            masked(logits, jnp.arange(logits.shape[-1]) < model.vocab_size), "vocab", mesh
        )
        top, normalizer = (
            jnp.argmax(logits, axis=-1),
            jax.nn.logsumexp(logits, axis=-1, keepdims=True),
        )
        if ids is not None:
            logits = split(contract("...d,vd->...v", states, part), draft_axis(recipe), mesh)
        rule = partial(score, logits - normalizer, top=top, ids=ids, objective=recipe.objective)
        return [rule(split(draft(state), draft_axis(recipe), mesh)) for state in hidden]

    return scoring.in_chunks(
        one, (states, *hidden), mesh, max(1, recipe.logits_chunk // (1 + len(hidden)))
    )


@shaped
def score(
    target: Float[Array, "*A U"],
    logits: Float[Array, "*A U"],
    top: Int[Array, "*A"],
    ids: Int32[Array, " U"] | None,
    objective: Objective,
) -> Scores:
    """Scores of draft logits against the policy's log-probs `target` of the same tokens.

    `top`: the policy's most likely token of its full vocabulary. `ids`: token ids of the draft
    vocabulary; None: the full one.
    """
    drafted = jax.nn.log_softmax(logits, axis=-1)
    p, q = jnp.exp(target), jnp.exp(drafted)
    guess = jnp.argmax(logits, axis=-1)
    acceptance = jnp.sum(jnp.minimum(p, q), axis=-1)
    token_loss = -jnp.sum(jax.nn.softmax(target, axis=-1) * drafted, axis=-1)
    if objective.loss == "acceptance":
        share = jax.lax.stop_gradient(jnp.exp(-ETA * acceptance))
        token_loss = share * token_loss + (1 - share) * (1 - acceptance)

    top_loss = jnp.zeros_like(token_loss)
    if objective.top_loss:
        least = jax.lax.top_k(target, min(TOP, target.shape[-1]))[0][..., -1:]
        top_loss = -jnp.sum(jnp.where(target >= least, p * drafted, 0), axis=-1)

    if ids is None:
        learns = jnp.ones(top.shape, bool)
        return Scores(token_loss, guess == top, acceptance, learns, top_loss)
    place = jnp.minimum(jnp.searchsorted(ids, top), ids.shape[0] - 1)
    return Scores(token_loss, ids[guess] == top, acceptance, ids[place] == top, top_loss)


def draft_logits(params: DrafterParams, shared: Shared, recipe: Recipe) -> Callable[[Array], Array]:
    """A function of hidden states [G, ..., Z] of G data groups that returns draft logits.

    The head's weights are gathered once per data group.
    """
    axes = eagle.weights(recipe.drafter, recipe.mesh.shape["model"])
    cast, names = eagle.cast(params, recipe.compute_dtype), ("final_norm", "head")
    copies = {
        name: scoring.group_copies(getattr(cast, name), getattr(axes, name).axes, recipe.mesh)
        for name in names
        if getattr(cast, name) is not None
    }
    shared = shared.replace(
        head=gathered(shared.head.astype(recipe.compute_dtype), ("vocab", "embed"), recipe.mesh)
    )

    def logits(copies: dict[str, Array], hidden: Array) -> Array:
        return eagle.logits(cast.replace(**copies), recipe.drafter, shared, hidden)

    return lambda hidden: jax.vmap(logits)(copies, hidden)


def draft_axis(recipe: Recipe) -> str | None:
    """The logical axis of the draft vocabulary; None when it does not divide over the mesh."""
    head = eagle.weights(recipe.drafter, recipe.mesh.shape["model"]).head
    return "vocab" if head is None else head.axes[0]


def gathered(weight: Array, axes: tuple[str | None, ...], mesh: Mesh) -> Array:
    """A frozen weight, replicated over the data groups."""
    return jax.lax.with_sharding_constraint(weight, sharding(mesh, axes, "rollout"))


def split(logits: Array, axis: str | None, mesh: Mesh) -> Array:
    """Logits [G, R, T, V], each group's vocabulary sharded over the mesh axis "model"."""
    return jax.lax.with_sharding_constraint(
        logits, sharding(mesh, ("batch", None, None, axis), "train")
    )


@shaped
def smooth_l1(predicted: Float[Array, "*A D"], target: Float[Array, "*A D"]) -> Float[Array, "*A"]:
    """Huber loss with delta 1, mean over the width, in at least float32."""
    wide = jnp.promote_types(predicted.dtype, jnp.float32)
    return jnp.mean(optax.losses.huber_loss(predicted.astype(wide), target.astype(wide)), axis=-1)


@shaped
def mean(values: Array, mask: Bool[Array, "*A"]) -> Float[Array, ""]:
    """Mean of the values where the mask is True; 0 when it is True nowhere."""
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)


@cache
def program(recipe: Recipe) -> jax.stages.Wrapped:
    """The jitted update(state, policy, batch), which donates the state.

    It returns the state with the shardings of its argument.
    """
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(recipe))
    everywhere = NamedSharding(recipe.mesh, PartitionSpec())
    return jax.jit(
        partial(update, recipe=recipe), donate_argnames="state", out_shardings=(placed, everywhere)
    )


@cache
def observation(recipe: Recipe) -> jax.stages.Wrapped:
    """The jitted observe(policy, batch): one forward pass of the policy, without gradient."""
    return jax.jit(partial(observe, recipe=recipe))


def depths(metrics: dict[str, Any]) -> list[float]:
    """Acceptance at depth 1, 2, ..., each given the depths before."""
    found = []
    while (name := f"acceptance@{len(found) + 1}") in metrics:
        found.append(float(metrics[name]))
    return found
