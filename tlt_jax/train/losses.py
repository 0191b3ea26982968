"""The arithmetic of GRPO: advantages and weights on the host, losses of single tokens on devices; knows no model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tlt_jax.shapes import shaped

STD_FLOOR = 1e-6  # added to the group's standard deviation
LOG_RATIO_LIMIT = 20.0  # log-ratios are cut here, so that no ratio or its gradient overflows


def zero_variance(rewards: np.ndarray) -> np.ndarray:
    """Which groups [P] have equal rewards [P, G] throughout: they teach nothing."""
    return rewards.max(axis=1) == rewards.min(axis=1)


def grpo_advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards less the group's mean, over the group's sample standard deviation."""
    return (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, ddof=1, keepdims=True) + STD_FLOOR)


def rloo_advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards less the mean of the other rewards of the group (Ahmadian et al. 2024)."""
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def dr_grpo_advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards less the group's mean (Liu et al. 2025)."""
    return rewards - rewards.mean(axis=1, keepdims=True)


ADVANTAGES = {"grpo": grpo_advantages, "rloo": rloo_advantages, "dr_grpo": dr_grpo_advantages}


def advantages(rewards: np.ndarray, kind: str) -> np.ndarray:
    """Advantages [P, G] in float64 of the rewards [P, G] of P prompts; exactly 0 in groups of equal rewards."""
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards have shape {rewards.shape}: advantages need [prompts, samples], at least 2 samples")
    if not np.isfinite(rewards).all():
        raise ValueError(f"{np.sum(~np.isfinite(rewards))} of {rewards.size} rewards are not finite")
    return np.where(zero_variance(rewards)[:, None], 0.0, ADVANTAGES[kind](rewards))


def answer_weights(lengths: np.ndarray, kind: str, max_new_tokens: int) -> np.ndarray:
    """Weight [n] in float64 of each token of the n answers of a minibatch, so that the loss is a weighted sum.

    token_mean: all tokens alike, sum 1. sequence_mean: all answers alike, sum 1. dr_grpo: one over the answers times
    the longest answer allowed. Reads lengths only.
    """
    lengths = np.asarray(lengths, np.float64)
    if kind == "token_mean":
        return np.full(len(lengths), 1.0 / lengths.sum())
    if kind == "sequence_mean":
        return 1.0 / (len(lengths) * lengths)
    return np.full(len(lengths), 1.0 / (len(lengths) * max_new_tokens))


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
