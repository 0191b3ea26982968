"""Advantages of answers, and weights of their tokens; on the host, in NumPy.

Shapes: P prompts, G answers per prompt (a GRPO group).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tlt_jax.config.schema import MAXRL, NONE, PROMPT_MEAN, REINFORCE_PP
from tlt_jax.config.task import TOLERANCE

STD_FLOOR = 1e-6  # added to the standard deviation of a group
VARIANCE_FLOOR = 1e-8  # added to the variance of all tokens (reinforce_pp)


def zero_variance(rewards: np.ndarray) -> np.ndarray:
    """bool[P]: whether all rewards [P, G] of a group are equal, within TOLERANCE; such a group gives no gradient."""
    return rewards.max(axis=1) - rewards.min(axis=1) <= TOLERANCE


def grpo_advantages(rewards: np.ndarray) -> np.ndarray:
    """(reward - group mean) / group sample standard deviation (arXiv 2402.03300, section 4.1.2)."""
    return (rewards - rewards.mean(axis=1, keepdims=True)) / (
        rewards.std(axis=1, ddof=1, keepdims=True) + STD_FLOOR
    )


def rloo_advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards minus the mean of the group's other rewards (RLOO, Ahmadian et al. 2024)."""
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def dr_grpo_advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards minus the group mean (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def maxrl_advantages(rewards: np.ndarray) -> np.ndarray:
    """(reward - group mean) / group mean (MaxRL, Tajwar et al. 2026, arXiv 2602.02710): rare successes count more.

    Rewards are at least 0; 0 for a group whose mean is not above 0.
    """
    mean = rewards.mean(axis=1, keepdims=True)
    return np.where(mean > 0, (rewards - mean) / np.where(mean > 0, mean, 1), 0)


ADVANTAGES = {
    "grpo": grpo_advantages, "rloo": rloo_advantages, "dr_grpo": dr_grpo_advantages, MAXRL: maxrl_advantages,
}  # fmt: skip


def group_advantages(
    rewards: np.ndarray, kind: str, penalty: np.ndarray | float = 0.0
) -> np.ndarray:
    """Advantages float64[P, G] of rewards less `penalty` [P, G]; exactly 0 in groups of equal rewards.

    `kind`: a key of ADVANTAGES. Groups with a penalty that is not finite have advantages that are not. Raises ValueError for
    fewer than 2 answers per prompt, or rewards that are not finite.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards have shape {rewards.shape}: advantages need [prompts, samples], at least 2 samples"
        )
    check_finite(rewards)
    with np.errstate(invalid="ignore"):
        found = ADVANTAGES[kind](rewards - penalty)
    return np.where(zero_variance(rewards)[:, None], 0.0, found)


def check_finite(rewards: np.ndarray) -> None:
    """Raises ValueError for rewards that are not finite."""
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"{np.sum(~np.isfinite(rewards))} of {rewards.size} rewards are not finite"
        )


def are_equal(rewards: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether the rewards of all answers that count, with `lengths` above 0, are equal: reinforce_pp learns nothing then."""
    counted = rewards[lengths > 0]
    return not counted.size or bool(np.ptp(counted) <= TOLERANCE)


def whitened_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Advantages float64[P, G] of REINFORCE++ (Hu 2025, arXiv 2501.03262) of rewards [P, G], without a KL in the reward.

    (reward - mean) / sqrt(variance + 1e-8), of the rewards at all answer tokens: an answer counts by its `lengths` [P, G] in
    tokens, 0 for one that does not. The variance is the unbiased one, of n - 1. Exactly 0 when all rewards `are_equal`.
    Raises ValueError for rewards that are not finite.
    """
    rewards, lengths = np.asarray(rewards, np.float64), np.asarray(lengths, np.float64)
    check_finite(rewards)
    if are_equal(rewards, lengths):
        return np.zeros(rewards.shape)
    tokens = lengths.sum()
    centered = rewards - np.sum(lengths * rewards) / tokens
    variance = np.sum(lengths * centered**2) / (tokens - 1)
    return centered / np.sqrt(variance + VARIANCE_FLOOR)


def answer_advantages(rewards: np.ndarray, lengths: np.ndarray, kind: str) -> np.ndarray:
    """Advantages float64[P, G] of rewards [P, G] of answers of `lengths` [P, G] tokens; `kind`: algorithm.advantage."""
    if kind == REINFORCE_PP:
        return whitened_advantages(rewards, lengths)
    return np.zeros(rewards.shape) if kind == NONE else group_advantages(rewards, kind)


def penalized_advantages(
    rewards: np.ndarray, kl: Sequence[np.ndarray], counts: np.ndarray, kind: str, kl_coef: float
) -> list[np.ndarray]:
    """Advantages of each token, by answer, of rewards [P, G] less `kl_coef` times the KL, as verl's use_kl_in_reward.

    `kl`: log-prob - reference (k1) of each token of an answer; `counts` bool[P * G]: answers that are not finite do not count,
    and have a KL of 0. Group advantages are those of reward - kl_coef * sum of the answer's KL. With reinforce_pp a token's
    return is the reward less kl_coef times the KL of it and of the later tokens of its answer; the returns of all answers that
    count are whitened together, as verl's reinforce_plus_plus with gamma 1; the variance is the unbiased one. Where the rewards
    that are compared, of a group or with reinforce_pp of the step, are all equal, advantages are 0: the KL alone, scaled to
    unit size, would be a gradient that does not depend on kl_coef. A KL that is not finite gives advantages that are not.
    Raises ValueError for rewards that are not finite.
    """
    check_finite(rewards)
    if kind != REINFORCE_PP:
        penalty = kl_coef * np.array([one.sum() for one in kl]).reshape(rewards.shape)
        advantages = group_advantages(rewards, kind, penalty).reshape(-1)
        return [np.full(len(one), value) for one, value in zip(kl, advantages, strict=True)]
    if are_equal(rewards.reshape(-1), np.array([len(one) for one in kl]) * counts):
        return [np.zeros(len(one)) for one in kl]
    returns = [
        reward - kl_coef * np.cumsum(one[::-1])[::-1]
        for reward, one in zip(rewards.flat, kl, strict=True)
    ]
    tokens = np.concatenate([one for one, counted in zip(returns, counts, strict=True) if counted])
    with np.errstate(invalid="ignore"):
        mean, variance = tokens.mean(), tokens.var(ddof=1 if len(tokens) > 1 else 0)
        return [
            counted * (one - mean) / np.sqrt(variance + VARIANCE_FLOOR)
            for one, counted in zip(returns, counts, strict=True)
        ]


def answer_weights(
    lengths: np.ndarray,
    kind: str,
    max_new_tokens: int,
    is_kept: np.ndarray | None = None,
    prompts: Sequence[int] = (),
) -> np.ndarray:
    """Weight float64[n] of each token of the n answers of a minibatch; the loss is a weighted sum.

    token_mean: mean over all tokens (DAPO, arXiv 2503.14476). sequence_mean: mean over answers of
    their token means (GRPO, arXiv 2402.03300). prompt_mean: mean over prompts of the means over all
    tokens of their answers; `prompts` [n]: the prompt of each answer. dr_grpo: sum over the tokens of an answer divided by
    the longest length allowed, mean over answers (arXiv 2503.20783). `lengths` [n] in tokens.
    Answers that are not `is_kept` (bool[n]; None: all are) get 0, and the means are over the others;
    but dr_grpo divides by the number of all answers.
    """
    lengths = np.asarray(lengths, np.float64)
    kept = np.ones(len(lengths), bool) if is_kept is None else is_kept
    if not kept.any():
        return np.zeros(len(lengths))
    if kind == "token_mean":
        weights = np.full(len(lengths), 1.0 / lengths[kept].sum())
    elif kind == "sequence_mean":
        weights = 1.0 / (kept.sum() * lengths)
    elif kind == PROMPT_MEAN:
        of_prompt = np.equal.outer(prompts, prompts) & kept
        tokens = (of_prompt * lengths).sum(axis=1)
        weights = 1.0 / (len({*np.asarray(prompts)[kept]}) * np.maximum(tokens, 1))
    else:
        weights = np.full(len(lengths), 1.0 / (len(lengths) * max_new_tokens))
    return np.where(kept, weights, 0.0)
