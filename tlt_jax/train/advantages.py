"""Advantages of a group's answers and weights of their tokens, on the host; knows no model."""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-6  # added to the group's standard deviation


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


def group_advantages(rewards: np.ndarray, kind: str) -> np.ndarray:
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
