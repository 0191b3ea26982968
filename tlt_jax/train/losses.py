"""Losses of the policy update per token, and importance weights, on devices; knows no model.

Shapes: *T tokens, of whole packed rows [R, T] where a loss depends on whole answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tlt_jax.config import extension
from tlt_jax.config.schema import CISPO, GSPO, PPO, SEQUENCE
from tlt_jax.errors import ConfigError
from tlt_jax.shapes import shaped
from tlt_jax.train.answers import answer_mean, answer_sum

LOG_RATIO_LIMIT = 20.0  # log-ratios are clipped to +-20, so that no ratio or gradient overflows
SIGNATURE = (
    "loss(tokens: tlt_jax.train.losses.Tokens, clip_low, clip_high)"  # of a loss of one's own
)


class Tokens(NamedTuple):
    """What a loss is computed from, arrays [*T] of floats but `segments` and `mask`.

    `mask`: whether a token is one of an answer; at other tokens floats are 0. `segments`: the number of its prompt and
    answer in the row, from 1. `recorded`: log-probs of the rollout; None where there are none.
    """

    logprobs: Float[Array, "*T"]
    old_logprobs: Float[Array, "*T"]
    recorded: Float[Array, "*T"] | None
    advantages: Float[Array, "*T"]
    segments: Int[Array, "*T"]
    mask: Bool[Array, "*T"]


class PolicyLoss(NamedTuple):
    """Per token: loss, and whether the clip was active below or above, and the dual clip."""

    loss: Float[Array, "*T"]
    clipped_low: Bool[Array, "*T"]
    clipped_high: Bool[Array, "*T"]
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
    tokens: Tokens, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> PolicyLoss:
    """PPO's loss, with the ratio of each token."""
    ratio = exp_ratio(tokens.logprobs - tokens.old_logprobs)
    return clipped_loss(ratio, tokens.advantages, clip_low, clip_high, clip_dual)


@shaped
def gspo_loss(
    tokens: Tokens, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> PolicyLoss:
    """PPO's loss with one ratio for an answer, exp(mean of its log-ratios). GSPO, Zheng et al. 2025, arXiv 2507.18071.

    The gradient is that of GSPO-token (section 4.3), equal to GSPO's where the tokens of an answer have one advantage.
    `tokens` are whole rows.
    """
    log_ratio = answer_mean(tokens.logprobs - tokens.old_logprobs, tokens.segments, tokens.mask)
    own = tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)  # 0, with the token's gradient
    ratio = exp_ratio(jax.lax.stop_gradient(log_ratio) + own)
    return clipped_loss(ratio, tokens.advantages, clip_low, clip_high, clip_dual)


@shaped
def cispo_loss(tokens: Tokens, clip_low: float, clip_high: float) -> PolicyLoss:
    """-clip(ratio, 1 - clip_low, 1 + clip_high) A log-prob, the clipped ratio without a gradient.

    CISPO, MiniMax 2025, arXiv 2506.13585, eq. 4 and 5. A clipped token keeps its gradient.
    """
    ratio = exp_ratio(tokens.logprobs - tokens.old_logprobs)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    loss = -weight * tokens.advantages * tokens.logprobs
    return PolicyLoss(loss, ratio < 1 - clip_low, ratio > 1 + clip_high)


BUILT_IN = {PPO: policy_loss, GSPO: gspo_loss, CISPO: cispo_loss}


@shaped
def custom_loss(name: str, tokens: Tokens, clip_low: float, clip_high: float) -> Float[Array, "*T"]:
    """Loss per token from the user's function `name` (module:function)."""
    return extension.load("algorithm.loss", name)(tokens, clip_low, clip_high)


def check(name: str) -> None:
    """Raises ConfigError unless algorithm.loss names a loss of each token that JAX can trace and differentiate."""
    if name in BUILT_IN:
        return
    function = extension.load("algorithm.loss", name)
    floats, integers, mask = (
        jax.ShapeDtypeStruct((2, 3), dtype) for dtype in ("float32", "int32", "bool")
    )
    tokens = Tokens(floats, floats, floats, floats, integers, mask)
    if reason := extension.misfit(function, tokens, 0.2, 0.2):
        raise ConfigError(
            f"algorithm.loss {name!r} is called as {SIGNATURE}, and takes other arguments ({reason}): the arrays that it took "
            "are fields of tokens, docs/extending.md shows them"
        )
    try:
        found = jax.eval_shape(lambda tokens: function(tokens, 0.2, 0.2), tokens)
        if getattr(found, "shape", None) == floats.shape:
            jax.eval_shape(jax.grad(partial(total, function)), floats, tokens)
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


def total(function: Callable[..., Array], logprobs: Array, tokens: Tokens) -> Array:
    """The sum of a loss of one's own, as a function of the log-probs."""
    return jnp.sum(function(tokens._replace(logprobs=logprobs), 0.2, 0.2))


@shaped
def kl_k3(logprobs: Float[Array, "*T"], reference: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """Schulman's k3 estimate of KL(policy, reference) per token (arXiv 2402.03300, eq. 4).

    r - 1 - log r with r = reference / policy.
    """
    log_ratio = jnp.clip(reference - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(log_ratio) - 1 - log_ratio


@shaped
def importance(
    tokens: Tokens, level: str, cap: float, most: float = 0.0, veto: float = 0.0
) -> Importance:
    """Truncated importance weights of the trainer's policy over the sampler's, at most `cap`; 0 for masked tokens.

    `level`: token, or sequence for the product over the answer. With `most` m, a token is masked when its ratio, that of the
    level, is above m or below 1 / m; with `veto` v an answer when the ratio of one of its tokens is above v or below 1 / v.
    At level sequence and with `veto`, `tokens` are whole rows. Yao et al. 2025, Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training; the levels are those of verl's rollout_is, the masks its token_k1, seq_sum_k1, seq_max_k2.
    """
    log_ratio = jax.lax.stop_gradient(tokens.old_logprobs - tokens.recorded)
    masks = []
    if veto:
        is_outlier = is_beyond(exp_ratio(log_ratio), veto)
        masks.append(answer_sum(is_outlier, tokens.segments, tokens.mask) > 0)
    if level == SEQUENCE:
        log_ratio = answer_sum(log_ratio, tokens.segments, tokens.mask)
    ratio = exp_ratio(log_ratio)
    if most:
        masks.append(is_beyond(ratio, most))
    weight = jnp.minimum(ratio, cap)
    if not masks:
        return Importance(weight, ratio)
    is_masked = reduce(jnp.logical_or, masks)
    return Importance(jnp.where(is_masked, 0, weight), ratio, is_masked)


def is_beyond(ratio: Float[Array, "*T"], most: float) -> Bool[Array, "*T"]:
    """Whether a ratio is above `most` or below its inverse."""
    return (ratio > most) | (ratio < 1 / most)
