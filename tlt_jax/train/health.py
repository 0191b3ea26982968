"""Decides from answers, rewards and updates whether a run must stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tlt_jax.config import Config
from tlt_jax.metrics.run import Series
from tlt_jax.optimizer import MAX_NONFINITE
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import NONFINITE, RolloutResult
from tlt_jax.train.losses import TOKENS
from tlt_jax.train.policy_update import EMPTY

MAX_FAILED = 3  # steps in a row in which every reward failed end a run
FIRST = 3  # steps whose mean difference between rollout and update is that of rounding
GROWN = 3.0  # times as large a difference is warned of
LEAST = 0.02  # nats a token: a smaller difference is not


class Health:
    """Checks each step of a run, and remembers earlier ones."""

    def __init__(self, config: Config):
        self.config = config
        self.failed_steps = 0  # consecutive steps in which every reward failed
        self.differences: list[float] = []  # between rollout and update, of the first steps

    def problem(
        self,
        rollout: RolloutResult,
        scores: Mapping[int, Score],
        skips: int,
        is_untrained: bool = False,
    ) -> str:
        """Why the run has to stop after this step, and what to do; empty when it can continue.

        `skips`: consecutive updates that were not finite; `is_untrained`: it was the last step, and every update of the run
        was skipped. Call it once a step.
        """
        failed = [score for _, score in sorted(scores.items()) if score.failure]
        self.failed_steps = self.failed_steps + 1 if failed and len(failed) == len(scores) else 0
        if all(answer.finish == NONFINITE for answer in rollout.completions):
            return (
                "the policy's logits are not finite in any answer: check the weights of model.path, or lower "
                "optim.learning_rate and resume from an earlier checkpoint"
            )
        if skips >= MAX_NONFINITE:
            return (
                f"{skips} updates in a row were not finite: lower optim.learning_rate, or check the rewards and completions "
                "in the run folder"
            )
        if is_untrained:
            return (
                "every update of the run was skipped, because none was finite: the policy is still the start policy, and is "
                "not exported: check the weights of model.path and the completions in the run folder, or lower "
                "optim.learning_rate"
            )
        if self.failed_steps >= MAX_FAILED:
            return (
                f"every reward failed, {self.failed_steps} steps in a row: correct it, or raise "
                f"reward.timeout_s; the first: {failed[0].failure}: {failed[0].detail}"
            )
        return ""

    def grown(self, difference: float | None) -> str:
        """A warning when rollout and update differ more than in the first steps; empty otherwise.

        `difference`: actor/rollout_logprob_diff_mean of the step; None when it has none. Call it once a step.
        """
        if difference is None:
            return ""
        if len(self.differences) < FIRST:
            self.differences.append(difference)
            return ""
        usual = sum(self.differences) / FIRST
        if not difference > max(LEAST, GROWN * usual):
            return ""
        self.differences = [difference] * FIRST
        return (
            f"warning: the log-probs of rollout and update differ by {difference:.3g} a token, and by {usual:.3g} in the "
            "first steps: model.compute_dtype float32 tells whether it is rounding"
        )


def filtered(config: Config) -> str:
    """What a run learns from whose rollout filters tokens; empty when it draws from all."""
    rollout = config.rollout
    knobs = [f"rollout.top_k {rollout.top_k}"] * (rollout.top_k > 0)
    knobs += [f"rollout.top_p {rollout.top_p:g}"] * (rollout.top_p < 1)
    if not knobs:
        return ""
    if config.algorithm.support_replay:
        return f"{', '.join(knobs)}: log-probs, importance weights, KL and entropy are of the tokens that were not filtered out"
    return (
        f"{', '.join(knobs)}: tokens are drawn from the likeliest alone, and log-probs, importance weights, KL and entropy "
        "are over the whole vocabulary; with algorithm.support_replay they are of the tokens that were drawn from"
    )


def remarks_of_step(
    scores: Mapping[int, Score], updates: Sequence[Mapping[str, float]]
) -> Iterator[str]:
    """What a step says of failed rewards, and of optimizer steps that were not finite or had nothing to learn from."""
    if failed := [score for _, score in sorted(scores.items()) if score.failure]:
        first = f"the first: {failed[0].failure}: {failed[0].detail}"
        yield f"{len(failed)} of {len(scores)} rewards failed; {first}"
    empty = [update for update in updates if update[EMPTY]]
    skipped = sum(
        not update[EMPTY] and not all(map(math.isfinite, (update["loss"], update["grad_norm"])))
        for update in updates
    )
    without = sum(not update[TOKENS] for update in empty)
    cut = "all of their answers were cut at rollout.max_new_tokens (algorithm.overlong filtered) or not finite"
    alike = "their gradient is 0, as where the rewards of every group are equal"
    for count, reason in (
        (skipped, "skipped: not finite"),
        (without, f"left out: {cut}"),
        (len(empty) - without, f"left out: {alike}"),
    ):
        if count:
            yield f"{count} of {len(updates)} updates were {reason}"


def remarks(metrics: Mapping[str, Series], applied: int, skips: int) -> list[str]:
    """What the end of a run says of answers and updates that were not finite, and of a policy that never changed.

    `metrics`: of all steps; `applied`, `skips`: number of updates that the policy got, and that were skipped.
    """
    series, found = metrics.get("response_length/nonfinite"), []
    counts = np.zeros(0) if series is None else series.values
    if steps := np.count_nonzero(counts):
        found.append(
            f"{counts.sum():.0f} answers, in {steps} of {len(counts)} steps, ended as nonfinite"
        )
    if skips:
        found.append(f"{skips} of {applied + skips} updates were skipped: not finite")
    if not applied:
        found.append("no update: the policy is the start policy")
    return found
