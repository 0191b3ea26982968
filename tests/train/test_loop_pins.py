"""A run of the RL loop with knobs off their defaults equals NumPy's; planted mistakes are caught (`-m matrix`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import loop_mutants
import observed
import pytest
from loop_mutants import plant, reading
from loop_rollouts import (
    check_evaluation_rules,
    check_keys,
    check_scores,
    check_tokens,
    check_training_rules,
)
from loop_updates import check_batches, check_clipping, check_files, check_losses, check_remat
from observed import Run

from tlt_jax import optimizer
from tlt_jax.config import Config
from tlt_jax.data import dataset as datasets
from tlt_jax.data.packing import Spans
from tlt_jax.optimizer import Adam
from tlt_jax.rollout import engine
from tlt_jax.train import batch as batches, evaluation, health
from tlt_jax.train.evaluation import Evaluator
from tlt_jax.train.policy_update import Recipe
from tlt_jax.train.trainer import Trainer

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
    "optim.learning_rate": 0.02, "optim.grad_clip": loop_mutants.GRAD_CLIP,
    "train.steps": 2, "train.seed": 5, "train.row_tokens": 32, "train.rows": 1,
    "data.eval_size": 4, "eval.every": 2, "eval.prompts": 3, "eval.samples": 4,
    "eval.temperature": 0.6, "eval.top_k": 5, "eval.top_p": 0.8, "eval.max_new_tokens": 6,
    "eval.correct_at": 8.0,
}  # fmt: skip
CHECKS = [
    check_keys, check_training_rules, check_evaluation_rules, check_tokens, check_scores,
    check_files, check_batches, check_losses, check_clipping, check_remat,
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A recorded run."""
    return observed.watched(observed.configure(tmp_path_factory.mktemp("run"), KNOBS))


@pytest.fixture
def replay(run, tmp_path) -> Callable[..., Run]:
    """replay({knob: value}) -> the run again with its answers, through the planted mutant."""
    return lambda changes=None: observed.watched(
        observed.configure(tmp_path, KNOBS | (changes or {})), run.rollouts
    )


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
    assert min(update.metrics["grad_norm"] for update in run.updates) > loop_mutants.GRAD_CLIP > 1
    assert all(len(update.batch.tokens) > 1 for update in run.updates), "gradients accumulate"
    assert any((update.batch.segments > 1).any() for update in run.updates), "examples share rows"
    second = run.updates[1].metrics
    assert second["pg_clipfrac_low"] > 0 and second["pg_clipfrac_high"] > 0


SWAPPED = {"algorithm__clip_low": 0.3, "algorithm__clip_high": 0.05}
EAGER = (
    (optimizer, "widen", loop_mutants.clipped_one_by_one),
    (Adam, "transformation", loop_mutants.never_clipped),
)
OF_ROLLOUTS = [
    (engine, "sequence_keys", loop_mutants.the_same_in_every_step, check_keys),
    (engine, "sequence_keys", loop_mutants.of_seed_zero, check_keys),
    (evaluation, "EVAL_STREAM", loop_mutants.the_training_noise, check_keys),
    (Trainer, "roll_out", reading(rollout__temperature=1.0), check_training_rules),
    (Trainer, "roll_out", reading(rollout__top_k=0), check_training_rules),
    (Trainer, "roll_out", reading(rollout__top_p=1.0), check_training_rules),
    (datasets, "stop_rules", reading(rollout__stop=[]), check_training_rules),
    (Evaluator, "evaluate", reading(eval__temperature=1.0), check_evaluation_rules),
    (Evaluator, "evaluate", reading(eval__top_k=0), check_evaluation_rules),
    (Evaluator, "evaluate", reading(eval__top_p=1.0), check_evaluation_rules),
    (Evaluator, "evaluate", reading(eval__max_new_tokens=0), check_evaluation_rules),
    (datasets, "load", reading(eval__prompts=0), check_evaluation_rules),
    (Evaluator, "evaluate", reading(eval__correct_at=1.0), check_scores),
]
OF_BATCHES = [
    (batches, "answer_advantages", loop_mutants.flipped, check_batches),
    (batches, "answer_advantages", loop_mutants.dealt_to_the_next, check_batches),
    (Spans, "spread", loop_mutants.dealt_in_the_order_of_packing, check_batches),
    (Spans, "spread", loop_mutants.of_the_first_minibatch, check_batches),
    (batches, "make_batch", loop_mutants.without_last_tokens, check_batches),
    (batches, "pack", reading(algorithm__advantage="grpo"), check_batches),
    (batches, "pack", reading(algorithm__aggregation="token_mean"), check_batches),
]
OF_UPDATES = [
    (Recipe, "of", reading(rollout__temperature=1.0), check_losses),
    (Recipe, "of", reading(algorithm__entropy_coef=0.0), check_losses),
    (Recipe, "of", reading(**SWAPPED), check_losses),
    (Recipe, "of", reading(optim__grad_clip=0.0), check_clipping),
    (Recipe, "of", reading(model__remat="none"), check_remat),
]


def named(mutant) -> str:
    return mutant[2].__name__


@pytest.mark.matrix
def test_a_replayed_run_passes_every_check(replay, x64):
    again = replay()
    for check in CHECKS:
        check(again)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", [*OF_ROLLOUTS, *OF_BATCHES, *OF_UPDATES], ids=named)
def test_a_mistake_is_caught(replay, monkeypatch, x64, mutant):
    *planted, check = mutant
    plant(monkeypatch, *planted)
    spoiled = replay()
    with pytest.raises(AssertionError):
        check(spoiled)


@pytest.mark.matrix
def test_clipping_before_accumulation_is_caught(replay, monkeypatch, x64):
    for planted in EAGER:
        plant(monkeypatch, *planted)
    spoiled = replay({"optim.beta2": 0.9})  # a program that was not traced yet
    with pytest.raises(AssertionError):
        check_clipping(spoiled)
