"""Losses of the policy update per token, with importance weights and metrics, on devices.

Shapes: *T tokens, of whole packed rows [R, T] where a loss depends on whole answers; S segments that a row may have. The
algorithm of a loss has its importance resolved, and a KL coefficient only where the loss has the KL
(policy_update.Recipe).
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from tlt_jax.config import extension
from tlt_jax.config.schema import (
    AUTO,
    CISPO,
    DPPO,
    GEOMETRIC,
    GSPO,
    NONE,
    PPO,
    SAPO,
    SEQUENCE,
    TOKEN,
    Algorithm,
)
from tlt_jax.data.packing import PackedRows
from tlt_jax.errors import ConfigError
from tlt_jax.shapes import most_segments, shaped

LOG_RATIO_LIMIT = 20.0  # log-ratios are clipped to +-20, so that no ratio or gradient overflows
SIGNATURE = "loss(rows: tlt_jax.data.packing.PackedRows, clip_low, clip_high)"  # of a custom loss
TOKENS, ANSWERS = "tokens", "answers"  # totals that are the divisors of means
# Totals that are means over answers; the others, but pg_loss, are means over targets.
OF_ANSWERS = (
    "sequence_ratio_mean",
    "rollout_corr/rollout_is_seq_mean",
    "rollout_corr/rollout_rs_seq_masked_fraction",
)

Metrics = tuple[dict[str, Array], dict[str, Array]]  # totals, maxima


class PolicyLoss(NamedTuple):
    """Per token: loss, and whether the clip was active below or above, and the dual clip; None where there is no such clip."""

    loss: Float[Array, "*T"]
    clipped_low: Bool[Array, "*T"] | None = None
    clipped_high: Bool[Array, "*T"] | None = None
    clipped_dual: Bool[Array, "*T"] | None = None


class Importance(NamedTuple):
    """Per token, without a gradient: weight of its loss, ratio before it is capped, and whether it is masked."""

    weight: Float[Array, "*T"]
    ratio: Float[Array, "*T"]
    is_masked: Bool[Array, "*T"] | None = None


def exp_ratio(log_ratio: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """exp of log-ratios, clipped to plus and minus LOG_RATIO_LIMIT."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@shaped
def clipped_loss(
    ratio: Float[Array, "*T"],
    advantages: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> PolicyLoss:
    """PPO's clipped surrogate: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); a ratio at a limit is not clipped.

    Schulman et al. 2017, arXiv 1707.06347, eq. 7, with separate limits as in DAPO, arXiv 2503.14476. With `clip_dual` c,
    the loss of a negative advantage is at most -c A (Ye et al. 2020, arXiv 1912.09729).
    """
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    # Chosen, because the gradients of clip and minimum are halved where two values are equal: at a limit.
    used = jnp.where(low, 1 - clip_low, jnp.where(high, 1 + clip_high, ratio))
    loss = -(used * advantages)
    if not clip_dual:
        return PolicyLoss(loss, low, high)
    most = -clip_dual * advantages
    is_dual = (advantages < 0) & (loss > most)
    return PolicyLoss(jnp.where(is_dual, most, loss), low, high, is_dual)


@shaped
def policy_loss(
    rows: PackedRows, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> PolicyLoss:
    """PPO's loss, with the ratio of each token."""
    ratio = exp_ratio(rows.update_logprobs - rows.old_logprobs)
    return clipped_loss(ratio, rows.advantages, clip_low, clip_high, clip_dual)


@shaped
def gspo_loss(
    rows: PackedRows, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> PolicyLoss:
    """PPO's loss with one ratio for an answer, exp(mean of its log-ratios). GSPO, Zheng et al. 2025, arXiv 2507.18071.

    The gradient is that of GSPO-token (section 4.3), equal to GSPO's where the tokens of an answer have one advantage.
    `rows` are whole.
    """
    log_ratio = answer_mean(rows.update_logprobs - rows.old_logprobs, rows.segments, rows.mask)
    # 0, with the token's gradient.
    own = rows.update_logprobs - jax.lax.stop_gradient(rows.update_logprobs)
    ratio = exp_ratio(jax.lax.stop_gradient(log_ratio) + own)
    return clipped_loss(ratio, rows.advantages, clip_low, clip_high, clip_dual)


@shaped
def cispo_loss(rows: PackedRows, clip_low: float, clip_high: float) -> PolicyLoss:
    """-clip(ratio, 1 - clip_low, 1 + clip_high) A log-prob, the clipped ratio without a gradient.

    CISPO, MiniMax 2025, arXiv 2506.13585, eq. 4 and 5. A clipped token keeps its gradient.
    """
    ratio = exp_ratio(rows.update_logprobs - rows.old_logprobs)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    loss = -weight * rows.advantages * rows.update_logprobs
    return PolicyLoss(loss, ratio < 1 - clip_low, ratio > 1 + clip_high)


@shaped
def dppo_loss(rows: PackedRows, clip_low: float, clip_high: float) -> PolicyLoss:
    """-ratio A; 0 where the token's probability has already moved from the sampler's by more than a limit, in A's direction.

    DPPO with the binary total variation, Qi et al. 2026, arXiv 2602.04879: the limits bound differences of probabilities,
    where PPO's bound ratios. The sampler's probabilities are those of the rollout, if rows have them, else the old ones.
    """
    sampled = rows.old_logprobs if rows.rollout_logprobs is None else rows.rollout_logprobs
    moved = jnp.exp(jax.lax.stop_gradient(rows.update_logprobs)) - jnp.exp(sampled)
    low = (rows.advantages < 0) & (moved < -clip_low)
    high = (rows.advantages > 0) & (moved > clip_high)
    loss = -exp_ratio(rows.update_logprobs - rows.old_logprobs) * rows.advantages
    return PolicyLoss(jnp.where(low | high, 0, loss), low, high)


@shaped
def sapo_loss(rows: PackedRows, positive: float, negative: float) -> PolicyLoss:
    """-4 / t sigmoid(t (ratio - 1)) A with a temperature t for A > 0 and one for other advantages, without a clip.

    SAPO, Gao et al. 2025, arXiv 2511.20347. At ratio 1 the gradient is that of PPO.
    """
    temperature = jnp.where(rows.advantages > 0, positive, negative)
    ratio = exp_ratio(rows.update_logprobs - rows.old_logprobs)
    gate = 4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1))
    return PolicyLoss(-gate * rows.advantages)


BUILT_IN = {PPO: policy_loss, GSPO: gspo_loss, CISPO: cispo_loss, DPPO: dppo_loss, SAPO: sapo_loss}


def check(name: str) -> None:
    """Raises ConfigError unless algorithm.loss names a loss of each token that JAX can trace and differentiate."""
    if name in BUILT_IN:
        return
    function = extension.load("algorithm.loss", name)
    floats, integers, bools = (
        jax.ShapeDtypeStruct((2, 3), dtype) for dtype in ("float32", "int32", "bool")
    )
    rows = PackedRows(*[integers] * 4, bools, *[floats] * 6)
    if reason := extension.misfit(function, rows, 0.2, 0.2):
        raise ConfigError(
            f"algorithm.loss {name!r} is called as {SIGNATURE}, and takes other arguments ({reason}): the arrays that it took "
            "are fields of rows, docs/extending.md shows them"
        )

    def total(logprobs: Array, rows: PackedRows) -> Array:
        return jnp.sum(function(rows._replace(update_logprobs=logprobs), 0.2, 0.2))

    try:
        found = jax.eval_shape(lambda rows: function(rows, 0.2, 0.2), rows)
        if getattr(found, "shape", None) == floats.shape:
            jax.eval_shape(jax.grad(total), floats, rows)
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"algorithm.loss {name!r} is called as {SIGNATURE}, and JAX cannot trace or differentiate it: {reason}"
        ) from error
    if getattr(found, "shape", None) != floats.shape:
        what = f"shape {found.shape}" if hasattr(found, "shape") else f"a {type(found).__name__}"
        raise ConfigError(
            f"algorithm.loss {name!r} gave {what} for tokens of shape {floats.shape}: return an array with the loss of each"
        )


@shaped
def kl_k3(logprobs: Float[Array, "*T"], reference: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """Schulman's k3 estimate of KL(policy, reference) per token (arXiv 2402.03300, eq. 4).

    r - 1 - log r with r = reference / policy.
    """
    log_ratio = jnp.clip(reference - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(log_ratio) - 1 - log_ratio


@shaped
def importance(
    rows: PackedRows,
    level: str,
    cap: float,
    most: float = 0.0,
    veto: float = 0.0,
    least: float = 0.0,
    mask_level: str = AUTO,
) -> Importance:
    """Truncated importance weights of the trainer's policy over the sampler's, at most `cap`; 0 for masked tokens.

    `level`: token, or sequence for the product over the answer, or geometric for its root of the number of tokens. With
    `most` or `least`, a token is masked when its ratio, that of `mask_level` (auto: of the level), is above `most` or below
    `least`; 0: the inverse of the other. With `veto` v an answer is when the ratio of one of its tokens is above v or below
    1 / v. But for tokens alone, `rows` are whole. Yao et al. 2025, Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training; the levels are those of verl's rollout_is, the masks its token_k1, seq_sum_k1, seq_mean_k1 and
    seq_max_k2. Masked tokens with two bounds are IcePop's (Ling team 2025, arXiv 2510.18855).
    """
    log_ratio = jax.lax.stop_gradient(rows.old_logprobs - rows.rollout_logprobs)
    places = rows.segments, rows.mask
    whole = {TOKEN: lambda one, *_: one, SEQUENCE: answer_sum, GEOMETRIC: answer_mean}
    masks = []
    if veto:
        is_outlier = is_beyond(exp_ratio(log_ratio), 1 / veto, veto)
        masks.append(answer_sum(is_outlier, *places) > 0)
    ratio = exp_ratio(whole[level](log_ratio, *places))
    if most or least:
        of_mask = ratio
        if mask_level not in (AUTO, level):
            of_mask = exp_ratio(whole[mask_level](log_ratio, *places))
        masks.append(is_beyond(of_mask, least or 1 / most, most or 1 / least))
    weight = jnp.minimum(ratio, cap)
    if not masks:
        return Importance(weight, ratio)
    is_masked = reduce(jnp.logical_or, masks)
    return Importance(jnp.where(is_masked, 0, weight), ratio, is_masked)


def is_beyond(ratio: Float[Array, "*T"], least: float, most: float) -> Bool[Array, "*T"]:
    """Whether a ratio is above `most` or below `least`."""
    return (ratio > most) | (ratio < least)


def needs_answers(algorithm: Algorithm) -> bool:
    """Whether the loss of a token depends on other tokens of its answer. Else it is computed some tokens at a time."""
    is_own = algorithm.loss not in (PPO, CISPO, DPPO, SAPO)
    levels = {algorithm.importance, algorithm.importance_mask_level}
    return is_own or bool(levels & {SEQUENCE, GEOMETRIC}) or algorithm.importance_veto > 0


class Slope(NamedTuple):
    """The policy-gradient loss of whole rows: its value, its gradient in each log-prob, and its totals and maxima."""

    loss: Float[Array, ""]
    grads: Float[Array, "R T"]
    metrics: Metrics


def token_losses(
    algorithm: Algorithm, rows: PackedRows
) -> tuple[Float[Array, "*T"], dict[str, Array], dict[str, Array]]:
    """Policy-gradient loss of each token; for metrics, per-token values to sum and to take the maximum of."""
    log_ratio = rows.update_logprobs - rows.old_logprobs
    ratio = exp_ratio(log_ratio)
    token_loss, totals = loss_of(algorithm, rows)
    totals |= {"ratio_mean": ratio, "ppo_kl": -log_ratio}
    maxima = {"ratio_max": ratio}
    if needs_answers(algorithm):
        sequence = exp_ratio(answer_mean(log_ratio, rows.segments, rows.mask))
        totals["sequence_ratio_mean"] = maxima["sequence_ratio_max"] = sequence
    if algorithm.importance == NONE:
        return token_loss, totals, maxima
    weight, more, peaks = weigh(algorithm, rows)
    return weight * token_loss, totals | more, maxima | peaks


def loss_of(algorithm: Algorithm, rows: PackedRows) -> tuple[Float[Array, "*T"], dict]:
    """The loss of each token without importance weights, and whether it was clipped, by metric."""
    limits = algorithm.clip_low, algorithm.clip_high
    if algorithm.loss not in BUILT_IN:
        return extension.load("algorithm.loss", algorithm.loss)(rows, *limits), {}
    if algorithm.loss == SAPO:
        return sapo_loss(rows, algorithm.sapo_positive, algorithm.sapo_negative).loss, {}
    dual = (algorithm.clip_dual,) if algorithm.clip_dual else ()
    found = BUILT_IN[algorithm.loss](rows, *limits, *dual)
    low, high = found.clipped_low, found.clipped_high
    totals = {"pg_clipfrac": low | high, "pg_clipfrac_low": low, "pg_clipfrac_high": high}
    if dual:
        totals["pg_clipfrac_lower"] = found.clipped_dual
    return found.loss, totals


def weigh(algorithm: Algorithm, rows: PackedRows) -> tuple[Float[Array, "*T"], dict, dict]:
    """The weight of each token's loss between rollout and update, and its metrics, named as verl's rollout_corr."""
    cap, masks = algorithm.importance_cap, (algorithm.importance_mask, algorithm.importance_veto)
    lowest = algorithm.importance_mask_low, algorithm.importance_mask_level
    weight, ratio, is_masked = importance(rows, algorithm.importance, cap, *masks, *lowest)
    totals = {
        "rollout_corr/rollout_is_mean": ratio,
        "rollout_corr/rollout_is_ratio_fraction_high": ratio > cap,
        "rollout_corr/kl": rows.rollout_logprobs - rows.old_logprobs,
    }
    maxima = {"rollout_corr/rollout_is_max": ratio}
    if needs_answers(algorithm):
        whole = answer_mean(ratio, rows.segments, rows.mask)
        totals["rollout_corr/rollout_is_seq_mean"] = maxima["rollout_corr/rollout_is_seq_max"] = (
            whole
        )
    if is_masked is not None:
        totals["rollout_corr/rollout_rs_masked_fraction"] = is_masked
        if needs_answers(algorithm):
            some = answer_sum(is_masked, rows.segments, rows.mask) > 0
            totals["rollout_corr/rollout_rs_seq_masked_fraction"] = some
    return weight, totals, maxima


def slope(algorithm: Algorithm, rows: PackedRows) -> Slope:
    """The policy-gradient loss sum(rows.weights * token loss) of whole rows, and its gradient in the log-probs.

    rows.old_logprobs are constants, also where they equal the log-probs.
    """
    mask = rows.mask

    def total(logprobs: Float[Array, "R T"]) -> tuple[Float[Array, ""], Metrics]:
        token_loss, totals, maxima = token_losses(
            algorithm, rows._replace(update_logprobs=logprobs)
        )
        count = answer_sum(mask, rows.segments, mask)
        share = (1 / jnp.maximum(count, 1)).astype(token_loss.dtype)
        totals[ANSWERS] = jnp.ones_like(share)
        for name in (*OF_ANSWERS, ANSWERS):
            if name in totals:
                totals[name] = totals[name] * share
        sums, peaks = summed(mask, totals, token_loss.dtype), largest(mask, maxima)
        sums["pg_loss"] = jnp.sum(rows.weights * jnp.where(mask, token_loss, 0), axis=-1)
        loss = jnp.sum(sums["pg_loss"])
        return loss, (jax.tree.map(jnp.sum, sums), jax.tree.map(jnp.max, peaks))

    (loss, metrics), grads = jax.value_and_grad(total, has_aux=True)(rows.update_logprobs)
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


@shaped
def answer_sum(
    values: Shaped[Array, "R T"], segments: Int[Array, "R T"], mask: Bool[Array, "R T"]
) -> Shaped[Array, "R T"]:
    """At each token of an answer the sum over its tokens, of bool values the number; 0 at other tokens.

    All tokens of an answer have the same bits. It has a gradient. Its sums have a fixed order, on every device.
    """
    is_here = of_segments(segments, mask)
    sums = jnp.sum(jnp.where(is_here, values[..., None], 0), axis=1)
    return jnp.sum(jnp.where(is_here, sums[:, None], 0), axis=-1)


@shaped
def answer_mean(
    values: Float[Array, "R T"], segments: Int[Array, "R T"], mask: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """At each token of an answer the mean over its tokens; 0 at other tokens."""
    count = answer_sum(mask, segments, mask)
    return answer_sum(values, segments, mask) / jnp.maximum(count, 1)


def of_segments(segments: Int[Array, "R T"], mask: Bool[Array, "R T"]) -> Bool[Array, "R T S"]:
    """Whether a token is one of an answer, and of the segment. XLA fuses it: no array of this size is made."""
    numbers = jnp.arange(1, most_segments(segments.shape[1]) + 1)
    return (segments[..., None] == numbers) & mask[..., None]
