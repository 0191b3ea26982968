"""When a run cannot go on, by its answers, rewards and updates; knows no device."""

from __future__ import annotations

from collections.abc import Mapping

from tlt_jax.config import Config
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import NONFINITE, RolloutResult


class Health:
    """What the steps of a run have in common with those before: how many rewards failed in a row."""

    def __init__(self, config: Config):
        self.config = config
        self.failed_steps = 0  # the last ones, in which every reward failed

    def problem(self, rollout: RolloutResult, scores: Mapping[int, Score], skips: int) -> str:
        """Why the run has to stop after this step, and what to do; empty when it need not.

        `skips`: updates in a row that were not finite. To be asked once a step.
        """
        failed = [score for _, score in sorted(scores.items()) if score.failure]
        self.failed_steps = self.failed_steps + 1 if failed and len(failed) == len(scores) else 0
        if all(answer.finish == NONFINITE for answer in rollout.completions):
            return (
                "the policy's logits are not finite in any answer: look at the weights of model.path, or lower "
                "optim.learning_rate and go on from an earlier checkpoint"
            )
        if skips >= self.config.train.max_nonfinite:
            return (
                f"{skips} updates in a row were not finite: lower optim.learning_rate, or look at the rewards and completions "
                "in the run folder"
            )
        if self.failed_steps >= self.config.reward.max_failed:
            return (
                f"every reward failed, {self.failed_steps} steps in a row: correct it, or raise reward.max_failed or "
                f"reward.timeout_s; the first: {failed[0].failure}: {failed[0].detail}"
            )
        return ""


def failures(scores: Mapping[int, Score]) -> str:
    """How many rewards of a step failed, and why the first did; empty when none did."""
    failed = [score for _, score in sorted(scores.items()) if score.failure]
    if not failed:
        return ""
    first = failed[0]
    return (
        f"{len(failed)} of {len(scores)} rewards failed; the first: {first.failure}: {first.detail}"
    )
