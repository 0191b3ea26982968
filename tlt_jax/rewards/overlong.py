"""The penalty of long answers, a part of the reward in training; knows no process and imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tlt_jax.config import Config
from tlt_jax.rewards.scorer import Score

# Reward terms, with verl's names: the penalty, and whether there is one.
PENALTY, IS_PENALIZED = "overlong_reward", "overlong"


def penalty(length: int, longest: int, buffer: int, factor: float) -> float:
    """What the length of an answer adds to its reward: min((longest - buffer - length) / buffer * factor, 0).

    The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), times `factor`. All lengths in tokens; `longest`: of
    any answer.
    """
    return min((longest - buffer - length) / buffer * factor, 0.0)


def penalized(
    config: Config, scores: Mapping[int, Score], lengths: Mapping[int, int]
) -> dict[int, Score]:
    """The scores that training uses, by uid: with the penalty of reward.overlong_buffer, which is a term of its own.

    `lengths`: tokens of the answers, by uid. A score that failed stays reward.failure_score.
    """
    reward, longest = config.reward, config.rollout.max_new_tokens
    if not reward.overlong_buffer:
        return dict(scores)

    found = {}
    for uid, score in scores.items():
        found[uid] = score
        if not score.failure:
            lost = penalty(lengths[uid], longest, reward.overlong_buffer, reward.overlong_factor)
            parts = dict(score.parts) | {PENALTY: lost, IS_PENALIZED: float(lost < 0)}
            found[uid] = replace(score, value=score.value + lost, parts=parts)
    return found
