"""Answers that are too long: their penalty and their place in the loss are NumPy's, from the completions of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import observed
import pytest
import toy_rewards
from loop_updates import check_batches, check_clipping, check_losses, learned, lines
from observed import Rolled, Run

from tlt_jax.config import Config
from tlt_jax.config.schema import Rollout
from tlt_jax.config.task import Reward
from tlt_jax.config.validate import validate_rl
from tlt_jax.data import prompt_format
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.errors import ConfigError
from tlt_jax.models import from_config
from tlt_jax.rewards import Score, scorer as scorers
from tlt_jax.train import batch as batches
from tlt_jax.train.policy_update import Recipe

LONGEST, BUFFER, FACTOR = 6, 4, 0.7
KNOBS = {
    "model.param_dtype": "float64", "model.compute_dtype": "float64",
    "model.init": observed.TINY["model.init"] | {"initializer_range": 0.5},
    "rollout.prompts": 4, "rollout.samples": 4, "rollout.max_new_tokens": LONGEST, "rollout.stop": ["=", "::"],
    "rollout.slots": 16,
    "reward.terms": {"toy_rewards:digest": 2.0},
    "reward.overlong_buffer": BUFFER, "reward.overlong_factor": FACTOR,
    "algorithm.overlong": "filtered", "algorithm.advantage": "rloo",
    "algorithm.entropy_coef": 0.1, "algorithm.minibatches": 2,
    "optim.learning_rate": 0.02, "optim.weight_decay": 0.1, "optim.grad_clip": 1.5,
    "train.steps": 2, "train.seed": 3, "train.row_tokens": 32, "train.rows": 1,
    "data.eval_size": 4, "eval.every": 2,
}  # fmt: skip


def scalars(run: Run, step: int) -> dict[str, float]:
    """The metrics of a step."""
    text = (Path(run.config.run) / "metrics.jsonl").read_text()
    return next(one for one in map(json.loads, text.splitlines()) if one["step"] == step)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A recorded run that filters, and penalizes the last tokens."""
    return observed.watched(observed.configure(tmp_path_factory.mktemp("run"), KNOBS))


@pytest.fixture
def replay(run, tmp_path) -> Callable[..., Run]:
    """replay(rollouts, {knob: value}) -> the run again with these answers."""
    return lambda rollouts, changes=None: observed.watched(
        observed.configure(tmp_path, KNOBS | (changes or {})), rollouts
    )


def check_rewards(run: Run) -> None:
    """The reward of each answer is its terms' and the penalty of its length; metrics and completions have it as a term."""
    for step in (1, 2):
        answers, found = lines(run, step), scalars(run, step)
        lost = np.array(
            [min((LONGEST - BUFFER - one["length"]) / BUFFER * FACTOR, 0.0) for one in answers]
        )
        terms = np.array([2.0 * toy_rewards.digest("", one["completion"], {}) for one in answers])
        np.testing.assert_allclose([one["reward"] for one in answers], terms + lost, rtol=1e-12)
        assert [one["parts"]["overlong_reward"] for one in answers] == lost.tolist()
        assert [one["parts"]["overlong"] for one in answers] == (lost < 0).tolist()
        assert found["reward/mean"] == pytest.approx(np.mean(terms + lost), rel=1e-12)
        assert found["reward/terms/overlong_reward"] == pytest.approx(lost.mean(), rel=1e-12)
        assert found["reward/terms/overlong"] == np.mean(lost < 0)


CHECKS = [check_rewards, check_batches, check_losses, check_clipping]


@pytest.mark.parametrize("check", CHECKS)
def test_a_run_penalizes_and_filters_as_its_configuration_says(run, check, x64):
    check(run)


def test_the_run_has_what_the_checks_are_about(run):
    answers = [one for step in (1, 2) for one in lines(run, step)]
    kinds = {(one["finish"], one["parts"]["overlong_reward"] < 0) for one in answers}
    assert kinds == {("stop", False), ("stop", True), ("length", True)}
    assert all(
        any(one["advantage"] for one in lines(run, step) if one["finish"] == "length")
        for step in (1, 2)
    )
    assert run.updates[1].metrics["pg_clipfrac"] > 0


def all_cut(rollouts: list[Rolled], first: int, last: int) -> list[Rolled]:
    """The rollouts, the answers first to last - 1 of the first step cut at their limit."""
    answers = [
        replace(one, finish="length") if first <= i < last else one
        for i, one in enumerate(rollouts[1].result.completions)
    ]
    return [
        replace(one, result=replace(one.result, completions=answers)) if i == 1 else one
        for i, one in enumerate(rollouts)
    ]


def test_a_minibatch_of_filtered_answers_is_left_out(run, replay, x64):
    knobs = {"algorithm.kl_coef": 0.1, "algorithm.importance_cap": 2.0}
    again = replay(all_cut(run.rollouts, 8, 16), knobs | {"algorithm.aggregation": "dr_grpo"})
    check_batches(again)
    first, second, *rest = again.updates
    for one, other in zip(*map(jax.tree.leaves, (second.before, second.after)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not second.batch.weights.any() and second.batch.is_answer.any()
    assert [one.metrics["empty_updates"] for one in again.updates] == [0, 1, 0, 0]
    assert [int(one.after.step) for one in again.updates] == [1, 1, 2, 3]
    found = scalars(again, 1)
    assert found["actor/empty_updates"] == 1 and found["actor/nonfinite"] == 0
    # Means are those of the other minibatch: zeros of this one do not count.
    assert found["actor/ratio_mean"] == first.metrics["ratio_mean"] > 0.9
    assert all(np.isfinite(value) for value in found.values() if isinstance(value, float))


def test_a_run_goes_on_without_the_answers_that_are_not_finite(run, replay, x64):
    """With a KL in the reward, which has all of their log-probs, and beside answers that are cut."""
    first, out = run.rollouts[1], (0, 5, 11)
    answers = [
        replace(one, finish="nonfinite", logprobs=np.full(len(one.tokens), np.nan))
        if i in out
        else one
        for i, one in enumerate(first.result.completions)
    ]
    rollouts = [*run.rollouts]
    rollouts[1] = replace(first, result=replace(first.result, completions=answers))
    again = replay(rollouts, {"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1})
    for update, part in zip(again.updates, (answers[:8], answers[8:]), strict=False):
        finite = [len(one.tokens) for one in part if one.finish != "nonfinite"]
        kept = [len(one.tokens) for one in part if one.finish == "stop"]
        batch = update.batch
        assert (int(batch.is_answer.sum()), int((batch.weights > 0).sum())) == (
            sum(finite),
            sum(kept),
        )
        np.testing.assert_allclose(np.unique(batch.weights), [0, 1 / sum(kept)])
    found = scalars(again, 1)
    assert found["response_length/nonfinite"] == 3 and found["actor/nonfinite"] == 0
    assert found["actor/kl"] > 0 and found["actor/reward_kl_penalty"] is not None
    assert all(np.isfinite(one["advantage"]) for one in lines(again, 1))


def test_a_step_of_filtered_answers_changes_nothing_and_has_metrics(run, replay, x64, capsys):
    again = replay(all_cut(run.rollouts, 0, 16))
    start, end = again.updates[0].before, again.updates[1].after
    for one, other in zip(*map(jax.tree.leaves, (start, end)), strict=True):
        np.testing.assert_array_equal(one, other)
    found = scalars(again, 1)
    assert found["actor/empty_updates"] == 2 and found["response_length/clip_ratio"] == 1
    assert found["actor/loss"] == found["actor/grad_norm"] == 0 and found["actor/lr"] == 0.02
    assert all(np.isfinite(value) for value in found.values() if isinstance(value, float))
    assert scalars(again, 2)["actor/empty_updates"] == 0
    said = capsys.readouterr().out
    assert "step 1/2  2 of 2 updates were left out: all of their answers were cut" in said
    assert said.count("left out") == 1


def test_the_drafter_learns_from_answers_that_the_loss_leaves_out(run):
    assert not all(weights.all() for *_, weights in learned(run))
    for update, (pairs, *_) in zip(run.updates, learned(run), strict=True):
        assert update.batch.is_answer.sum() == sum(len(answer) for _, answer in pairs)


def test_the_rows_that_programs_are_compiled_for_are_those_of_the_update(run):
    config, mesh = run.config, make_mesh(1, 1)
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    rows = batches.abstract_rows_of(config, Recipe.of(config, model, mesh, 4))
    assert jax.tree.structure(rows) == jax.tree.structure(run.updates[0].batch)


def test_evaluations_are_not_penalized(run):
    for file in (Path(run.config.run) / "evaluation").iterdir():
        for one in map(json.loads, file.read_text().splitlines()):
            assert one["reward"] == 2.0 * toy_rewards.digest("", one["completion"], {})
            assert "overlong_reward" not in one["parts"]


# Without a run


@pytest.mark.parametrize(
    ("length", "reward"), [(1, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0)]
)
def test_the_penalty_is_that_of_dapo(length, reward):
    """Its numbers (section 4.1): the longest answer has 20,480 tokens, the last 4,096 of them are penalized."""
    assert scorers.penalty(length, 20480, 4096, 1.0) == reward
    assert scorers.penalty(length, 20480, 4096, 0.5) == reward / 2


def test_a_failed_score_stays_as_it_is(tmp_path):
    config = observed.configure(tmp_path, KNOBS)
    failed = Score(-2.0, {}, "timeout", "no answer after 10 s")
    assert scorers.penalized(config, {7: failed}, {7: LONGEST}) == {7: failed}


def test_right_answers_to_a_prompt_lose_reward_by_their_length():
    """Two prompts with four answers: worked by hand. Wrong and failed answers, and one right one alone, lose nothing."""
    config = Config(reward=Reward(length_penalty=0.5), rollout=Rollout(samples=4))
    values = [1.0, 0.0, 1.0, 1.0, 0.2, 1.0, 0.0, 0.0]
    scores = {uid: Score(value, {"task": value}) for uid, value in enumerate(values)}
    scores[7] = Score(1.0, {}, "timeout")
    found = scorers.shortened(config, scores, dict(enumerate([10, 99, 20, 50, 5, 7, 9, 1])))
    assert [one.value for one in found.values()] == [1.0, 0.0, 0.875, 0.5, 0.2, 1.0, 0.0, 1.0]
    assert found[3].parts == {"task": 1.0, "length_penalty": -0.5} and found[1] == scores[1]
    assert scorers.shortened(Config(), scores, {}) == scores


def test_a_buffer_longer_than_any_answer_is_refused(tmp_path):
    for knobs, message in (
        (
            {"reward.overlong_buffer": 7},
            "overlong_buffer 7 is longer than .* rollout.max_new_tokens 6: use at most",
        ),
        ({"reward.overlong_factor": 0}, "overlong_factor"),
        ({"algorithm.overlong": "masked"}, "algorithm.overlong"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate_rl(observed.configure(tmp_path, KNOBS | knobs))
