"""The arithmetic of GRPO: advantages and weights on the host, losses of single tokens on devices; knows no model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tlt_jax.shapes import shaped

LOG_RATIO_LIMIT = 20.0  # log-ratios are cut here, so that no ratio or its gradient overflows


class PolicyLoss(NamedTuple):
    """Loss of each token, its probability ratio, and whether the clip cut it below or above."""

    loss: Float[Array, "*T"]
    ratio: Float[Array, "*T"]
    clipped_low: Bool[Array, "*T"]
    clipped_high: Bool[Array, "*T"]


def exp_ratio(log_ratio: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """exp of log-ratios, cut at plus and minus LOG_RATIO_LIMIT."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@shaped
def policy_loss(
    logprobs: Float[Array, "*T"],
    old_logprobs: Float[Array, "*T"],
    advantages: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)."""
    ratio = exp_ratio(logprobs - old_logprobs)
    kept = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(ratio * advantages, kept * advantages)
    return PolicyLoss(
        loss,
        ratio,
        clipped_low=(advantages < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
    )


@shaped
def kl_k3(logprobs: Float[Array, "*T"], reference: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """Schulman's k3 estimate of KL(policy, reference) at each token: r - 1 - log r with r = reference / policy."""
    log_ratio = jnp.clip(reference - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(log_ratio) - 1 - log_ratio


@shaped
def importance_weight(old_logprobs: Float[Array, "*T"], recorded: Float[Array, "*T"], cap: float) -> Float[Array, "*T"]:
    """Truncated importance weight between trainer and sampler, at most `cap`; carries no gradient."""
    return jax.lax.stop_gradient(jnp.minimum(exp_ratio(old_logprobs - recorded), cap))
