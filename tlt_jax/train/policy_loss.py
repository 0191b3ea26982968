"""The policy-gradient loss of the objective on targets of packed rows, and its metrics; knows no model.

Shapes: *T targets, of whole packed rows [R, T] where the objective needs whole answers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tlt_jax.config.schema import NONE
from tlt_jax.train import losses
from tlt_jax.train.answers import answer_mean, answer_sum
from tlt_jax.train.losses import Tokens
from tlt_jax.train.objective import Objective

TOKENS, ANSWERS = "tokens", "answers"  # totals that are the divisors of means
# Totals that are means over answers; the others, but pg_loss, are means over targets.
OF_ANSWERS = (
    "sequence_ratio_mean",
    "rollout_corr/rollout_is_seq_mean",
    "rollout_corr/rollout_rs_seq_masked_fraction",
)

Metrics = tuple[dict[str, Array], dict[str, Array]]  # totals, maxima


class Slope(NamedTuple):
    """The policy-gradient loss of whole rows: its value, its gradient in each log-prob, and its totals and maxima."""

    loss: Float[Array, ""]
    grads: Float[Array, "R T"]
    metrics: Metrics


def policy_loss(
    objective: Objective, tokens: Tokens
) -> tuple[Float[Array, "*T"], dict[str, Array], dict[str, Array]]:
    """Policy-gradient loss of each token; for metrics, per-token values to sum and to take the maximum of."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    ratio = losses.exp_ratio(log_ratio)
    token_loss, totals = loss_of(objective, tokens)
    totals |= {"ratio_mean": ratio, "ppo_kl": -log_ratio}
    maxima = {"ratio_max": ratio}
    if objective.needs_answers:
        sequence = losses.exp_ratio(answer_mean(log_ratio, tokens.segments, tokens.mask))
        totals["sequence_ratio_mean"] = maxima["sequence_ratio_max"] = sequence
    if objective.importance == NONE:
        return token_loss, totals, maxima
    weight, more, peaks = importance(objective, tokens)
    return weight * token_loss, totals | more, maxima | peaks


def loss_of(objective: Objective, tokens: Tokens) -> tuple[Float[Array, "*T"], dict]:
    """The loss of each token without importance weights, and whether it was clipped, by metric."""
    limits = objective.clip_low, objective.clip_high
    if objective.loss not in losses.BUILT_IN:
        return losses.custom_loss(objective.loss, tokens, *limits), {}
    dual = (objective.clip_dual,) if objective.clip_dual else ()
    found = losses.BUILT_IN[objective.loss](tokens, *limits, *dual)
    low, high = found.clipped_low, found.clipped_high
    totals = {"pg_clipfrac": low | high, "pg_clipfrac_low": low, "pg_clipfrac_high": high}
    if dual:
        totals["pg_clipfrac_lower"] = found.clipped_dual
    return found.loss, totals


def importance(objective: Objective, tokens: Tokens) -> tuple[Float[Array, "*T"], dict, dict]:
    """The weight of each token's loss between rollout and update, and its metrics, named as verl's rollout_corr."""
    cap, masks = objective.importance_cap, (objective.importance_mask, objective.importance_veto)
    weight, ratio, is_masked = losses.importance(tokens, objective.importance, cap, *masks)
    totals = {
        "rollout_corr/rollout_is_mean": ratio,
        "rollout_corr/rollout_is_ratio_fraction_high": ratio > cap,
        "rollout_corr/kl": tokens.recorded - tokens.old_logprobs,
    }
    maxima = {"rollout_corr/rollout_is_max": ratio}
    if objective.needs_answers:
        whole = answer_mean(ratio, tokens.segments, tokens.mask)
        totals["rollout_corr/rollout_is_seq_mean"] = maxima["rollout_corr/rollout_is_seq_max"] = (
            whole
        )
    if is_masked is not None:
        totals["rollout_corr/rollout_rs_masked_fraction"] = is_masked
        if objective.needs_answers:
            some = answer_sum(is_masked, tokens.segments, tokens.mask) > 0
            totals["rollout_corr/rollout_rs_seq_masked_fraction"] = some
    return weight, totals, maxima


def slope(objective: Objective, tokens: Tokens, weights: Float[Array, "R T"]) -> Slope:
    """The policy-gradient loss sum(weights * token loss) of whole rows, and its gradient in the log-probs.

    tokens.old_logprobs are constants, also where they equal the log-probs.
    """
    mask = tokens.mask

    def total(logprobs: Float[Array, "R T"]) -> tuple[Float[Array, ""], Metrics]:
        token_loss, totals, maxima = policy_loss(objective, tokens._replace(logprobs=logprobs))
        count = answer_sum(mask, tokens.segments, mask)
        share = (1 / jnp.maximum(count, 1)).astype(token_loss.dtype)
        totals[ANSWERS] = jnp.ones_like(share)
        for name in (*OF_ANSWERS, ANSWERS):
            if name in totals:
                totals[name] = totals[name] * share
        sums, peaks = summed(mask, totals, token_loss.dtype), largest(mask, maxima)
        sums["pg_loss"] = jnp.sum(weights * jnp.where(mask, token_loss, 0), axis=-1)
        loss = jnp.sum(sums["pg_loss"])
        return loss, (jax.tree.map(jnp.sum, sums), jax.tree.map(jnp.max, peaks))

    (loss, metrics), grads = jax.value_and_grad(total, has_aux=True)(tokens.logprobs)
    return Slope(loss, jnp.where(mask, grads, 0), metrics)


def summed(
    mask: Bool[Array, "G t"], totals: dict[str, Array], dtype: jax.typing.DTypeLike
) -> dict[str, Float[Array, " G"]]:
    """The sums of values over the targets of each group or row."""
    return {
        name: jnp.sum(jnp.where(mask, part, 0), axis=-1, dtype=dtype)
        for name, part in totals.items()
    }


def largest(mask: Bool[Array, "G t"], maxima: dict[str, Array]) -> dict[str, Float[Array, " G"]]:
    """The maxima of values over targets, at least 0."""
    return {name: jnp.max(jnp.where(mask, part, 0), axis=-1) for name, part in maxima.items()}


def means(totals: dict[str, Array]) -> dict[str, Array]:
    """The metrics of totals: means over targets or over answers, 0 without any; pg_loss and the divisors themselves."""

    def of(name: str) -> Array:
        if name in ("pg_loss", TOKENS, ANSWERS):
            return totals[name]
        return totals[name] / jnp.maximum(totals[divisor(name)], 1)

    return {name: of(name) for name in totals}


def divisor(name: str) -> str:
    """The total that the mean of this name is divided by."""
    return ANSWERS if name in OF_ANSWERS else TOKENS
