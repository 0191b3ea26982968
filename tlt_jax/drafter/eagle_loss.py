"""The loss of EAGLE drafters: unrolled draft steps at every position of packed rows.

Slot t of unrolled draft step j predicts token t + 2 + j (models/eagle.py). All arrays here are
indexed by the position s whose next token is predicted, s = t + 1 + j: the policy's distribution at
s is computed once, and compared with that of every draft step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax import keys
from tlt_jax.data.packing import PackedRows
from tlt_jax.drafter.recipe import Recipe
from tlt_jax.drafter.scores import gathered, mean, part_logits, policy_heads, policy_logits, split
from tlt_jax.models import drafter as drafters, eagle, token_logprobs as scoring
from tlt_jax.models.drafter import DrafterParams, Shared
from tlt_jax.shapes import shaped

# Weight of the token loss; that of eagle's feature loss is 1 (arXiv 2401.15077, section 3.2).
TOKEN_WEIGHT = {"eagle": 0.1, "eagle3": 1.0}
TOP = 10  # tokens of the loss on the most likely ones (arXiv 2408.15766, section 4)
ETA = 3.0  # "acceptance" loss (arXiv 2602.23881): decay of the cross-entropy term with acceptance


@dataclass(frozen=True)
class Objective:
    """What the update of an EAGLE drafter minimizes: the weighted losses of `unroll` draft steps.

    The weight of draft step j is decay ** j. `loss`: cross_entropy or acceptance. `noise`: half width of the uniform
    noise on the features (arXiv 2401.15077, section 3.2). `top_loss`: weight of the loss on the policy's most likely
    tokens (arXiv 2408.15766, section 3.1); `detach`: no gradient flows from a draft step to the steps before it (section
    3.2).
    """

    unroll: int = 1
    decay: float = 0.8
    loss: str = "cross_entropy"  # cross_entropy | acceptance
    noise: float = 0.0
    top_loss: float = 0.0
    detach: bool = False

    @property
    def compile_steps(self) -> int:
        return self.unroll

    def evaluate(
        self,
        params: DrafterParams,
        shared: Shared,
        batch: PackedRows,
        recipe: Recipe,
        step: Array | int,
    ) -> tuple[Array, dict[str, Array]]:
        """The loss of this objective, and its metrics: `loss`."""
        return loss(params, shared, batch, recipe, step)


@shaped
def loss(
    params: DrafterParams,
    shared: Shared,
    batch: PackedRows,
    recipe: Recipe,
    step: Int[Array, ""] | int,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""] | Int[Array, ""]]]:
    """The loss of a batch with features and states in optimizer step `step`, and its metrics.

    Each term is a mean over the positions in `is_answer` that draft step j can predict: j + 1 slots
    of their segment lie before them.
    """
    objective = recipe.objective
    features = batch.features + noise(step, batch.features, recipe)
    hidden = eagle.unroll(
        params, recipe.drafter, shared, batch.tokens, features, batch.positions, batch.segments,
        objective.unroll, recipe.attention_block, recipe.mesh, objective.detach,
    )  # fmt: skip
    aligned = [jnp.roll(step, j + 1, axis=1) for j, step in enumerate(hidden)]
    scores = token_scores(params, shared, batch.states, aligned, recipe)

    total, metrics = jnp.zeros((), scores[0].token_loss.dtype), {"tokens": jnp.sum(batch.is_answer)}
    for j, (predicted, score) in enumerate(zip(aligned, scores, strict=True)):
        _, reaches = eagle.shift(batch.segments, batch.segments, j + 1)
        known = batch.is_answer & jnp.roll(reaches, j + 1, axis=1)  # s - 1 - j is in s's segment
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


def noise(
    step: Int[Array, ""] | int, features: Float[Array, "R T F"], recipe: Recipe
) -> Float[Array, "R T F"] | float:
    """The noise added to the features at this step: uniform, or 0.0 when off."""
    size = recipe.objective.noise
    if not size:
        return 0.0
    noise_key = keys.feature_noise_key(recipe.seed, step)
    return jax.random.uniform(noise_key, features.shape, features.dtype, -size, size)


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
    mesh, ids, size = recipe.mesh, params.ids, recipe.model.vocab_size
    draft, axis = (
        draft_logits(params, shared, recipe),
        drafters.vocab_axis(recipe.drafter, mesh),
    )
    head, part = policy_heads(shared, ids, axis, states.dtype, mesh)

    def one(states: Array, *hidden: Array) -> list[Scores]:
        logits = policy_logits(states, head, size, mesh)
        top = jnp.argmax(logits, axis=-1)
        normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        target = (logits if ids is None else part_logits(states, part, axis, mesh)) - normalizer
        rule = partial(score, target, top=top, ids=ids, objective=recipe.objective)
        return [rule(split(draft(state), axis, mesh)) for state in hidden]

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
    axes = drafters.weights(recipe.drafter, recipe.mesh.shape["model"])
    cast, names = drafters.cast(params, recipe.compute_dtype), ("final_norm", "head")
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


@shaped
def smooth_l1(predicted: Float[Array, "*A D"], target: Float[Array, "*A D"]) -> Float[Array, "*A"]:
    """Huber loss with delta 1, mean over the width, in at least float32."""
    wide = jnp.promote_types(predicted.dtype, jnp.float32)
    return jnp.mean(optax.losses.huber_loss(predicted.astype(wide), target.astype(wide)), axis=-1)
