"""A run of the RL loop with knobs off their defaults equals NumPy's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import observed
import pytest
from loop_rollouts import check_keys, check_rules, check_tokens
from loop_updates import (
    check_batches,
    check_clipping,
    check_files,
    check_losses,
    check_remat,
    check_verbs,
)
from observed import Run

from tlt_jax.config import Config
from tlt_jax.train import health

GRAD_CLIP = 1.5
KNOBS = {
    "model.param_dtype": "float64", "model.compute_dtype": "float64", "model.remat": "full",
    "model.init": observed.TINY["model.init"] | {"initializer_range": 0.5},
    "rollout.prompts": 4, "rollout.samples": 3, "rollout.temperature": 0.8, "rollout.top_k": 7,
    "rollout.top_p": 0.9, "rollout.max_new_tokens": 10, "rollout.stop": ["=", "::"],
    "rollout.slots": 12,
    "reward.terms": {"toy_rewards:digest": 20.0},
    "algorithm.advantage": "rloo", "algorithm.aggregation": "sequence_mean",
    "algorithm.clip_low": 0.05, "algorithm.clip_high": 0.3, "algorithm.entropy_coef": 0.5,
    "algorithm.minibatches": 2,
    "optim.learning_rate": 0.02, "optim.grad_clip": GRAD_CLIP,
    "train.steps": 2, "train.seed": 5, "train.row_tokens": 32, "train.rows": 1,
    "data.eval_size": 4, "eval.every": 2, "eval.prompts": 3, "eval.samples": 4,
    "eval.temperature": 0.6, "eval.top_k": 5, "eval.top_p": 0.8, "eval.max_new_tokens": 6,
    "eval.correct_at": 8.0,
}  # fmt: skip
CHECKS = [
    check_keys, check_rules, check_tokens, check_files, check_batches, check_losses, check_clipping, check_remat, check_verbs,
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A recorded run."""
    return observed.watched(observed.configure(tmp_path_factory.mktemp("run"), KNOBS))


@pytest.mark.parametrize("check", CHECKS)
def test_the_run_is_what_its_configuration_says(run, check, x64):
    check(run)


def test_a_run_that_filters_tokens_says_what_its_log_probs_are_over(run):
    said = (Path(run.config.run) / "log.txt").read_text()
    assert (
        said.count(
            "rollout.top_k 7, rollout.top_p 0.9: tokens are drawn from the likeliest alone, and log-probs"
        )
        == 1
    )
    assert health.filtered(Config()) == ""
    nucleus = Config(rollout=replace(Config().rollout, top_p=0.5))
    assert health.filtered(nucleus).startswith("rollout.top_p 0.5: tokens")


def test_the_run_has_what_the_checks_are_about(run):
    answers = [answer for one in run.trainings for answer in one.result.completions]
    endings = {(answer.finish, int(answer.tokens[-1])) for answer in answers}
    assert {("stop", last) for last in (1, 9, 10)} <= endings, "EOS, and both stop texts"
    assert any(finish == "length" for finish, _ in endings)
    assert min(update.metrics["grad_norm"] for update in run.updates) > GRAD_CLIP > 1
    assert all(len(update.batch.tokens) > 1 for update in run.updates), "gradients accumulate"
    assert any((update.batch.segments > 1).any() for update in run.updates), "examples share rows"
    second = run.updates[1].metrics
    assert second["pg_clipfrac_low"] > 0 and second["pg_clipfrac_high"] > 0
