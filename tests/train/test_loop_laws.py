"""Laws of the RL loop: each step has new noise, evaluations share theirs, reward rises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import loop_mutants
import numpy as np
import observed
import pytest
from loop_mutants import plant
from loop_updates import lines
from observed import Run

from tlt_jax.data import dataset as datasets
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import from_config, hf
from tlt_jax.rollout import engine
from tlt_jax.train import batch as batches, evaluation
from tlt_jax.train.trainer import Trainer

SAMPLES, STEPS = 3, 8
STILL = {
    "rollout.prompts": 1, "rollout.samples": SAMPLES, "rollout.max_new_tokens": 12,
    "reward.terms": {"toy_rewards:digest": 1.0},
    "train.steps": 2, "eval.every": 1, "eval.samples": SAMPLES,
}  # fmt: skip
ARMED = {
    "rollout.prompts": 2, "rollout.samples": 8, "rollout.max_new_tokens": 1,
    "reward.terms": {"toy_rewards:digits": 1.0},
    "optim.learning_rate": 0.05, "train.steps": STEPS, "train.row_tokens": 16, "train.rows": 8,
    "eval.every": 0,
}  # fmt: skip


# The noise


@pytest.fixture(scope="module")
def still(tmp_path_factory) -> Callable[..., Run]:
    """still(folder, seed) -> a run with a given policy that never changes, and one prompt."""
    root = tmp_path_factory.mktemp("still")
    config = observed.configure(root, STILL)
    tokenizer, mesh = datasets.tokenizer(config), meshes.make_mesh(1, 1)
    model = from_config.model_config(config, tokenizer)
    hf.save(
        from_config.load_policy(config, model, mesh), model, root / "hf", mesh, tokenizer, "float32"
    )
    (root / "rows.jsonl").write_text(json.dumps({"prompt": "123:", "answer": "1"}))
    given = {"model.path": str(root / "hf"), "model.init": {}}
    given |= {f"data.{split}": str(root / "rows.jsonl") for split in ("train", "eval")}
    given["data.duplicates"] = "keep"  # a prompt in both shows whether the noise is the same

    def run(folder: Path, seed: int = 0) -> Run:
        knobs = STILL | given | {"train.seed": seed}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "update_policy", nothing_learned)
            return observed.watched(observed.configure(folder, knobs))

    return run


def nothing_learned(self, batch):
    """In place of Trainer.update_policy: the same policy."""
    return self.state.policy, [{"empty_updates": 0, "tokens": 1, "loss": 0.0, "grad_norm": 0.0}]


@pytest.fixture(scope="module")
def first(tmp_path_factory, still) -> Run:
    """A `still` run with seed 0."""
    return still(tmp_path_factory.mktemp("first"))


def texts_of(run: Run) -> tuple[list, list]:
    """The texts of every evaluation, and those of every step."""
    texts = [one.texts for one in run.rollouts]
    return texts[::2], texts[1::2]


def check_steps(run: Run) -> None:
    """Two steps with the same prompt and policy have other answers."""
    one, other = texts_of(run)[1]
    assert one != other


def check_evaluations(run: Run) -> None:
    """Evaluations of one policy are equal, and differ from its training."""
    evaluated, trained = texts_of(run)
    assert evaluated == [evaluated[0]] * 3
    assert evaluated[0] not in trained


def check_seeds(run: Run, other: Run) -> None:
    """Runs with other seeds have other answers, in training and in evaluation."""
    for ours, theirs in zip(texts_of(run), texts_of(other), strict=True):
        assert all(one != two for one, two in zip(ours, theirs, strict=True))


def test_the_noise_is_new_in_each_step_and_the_same_in_each_evaluation(first, still, tmp_path):
    check_steps(first)
    check_evaluations(first)
    check_seeds(first, still(tmp_path, seed=1))


def test_the_same_noise_in_every_step_is_caught(still, tmp_path, monkeypatch):
    plant(monkeypatch, engine, "sequence_keys", loop_mutants.the_same_in_every_step)
    spoiled = still(tmp_path)
    with pytest.raises(AssertionError):
        check_steps(spoiled)


def test_evaluation_with_the_noise_of_training_is_caught(still, tmp_path, monkeypatch):
    plant(monkeypatch, evaluation, "EVAL_STREAM", loop_mutants.the_training_noise)
    spoiled = still(tmp_path)
    with pytest.raises(AssertionError):
        check_evaluations(spoiled)


def test_noise_without_a_seed_is_caught(first, still, tmp_path, monkeypatch):
    plant(monkeypatch, engine, "sequence_keys", loop_mutants.of_seed_zero)
    spoiled = still(tmp_path, seed=1)
    with pytest.raises(AssertionError):
        check_seeds(first, spoiled)


# The sign


def check_reward_rises(run: Run) -> None:
    """A policy with two arms, a digit (rewarded) or not, learns to choose the digit."""
    rewards = [line["reward"] for step in (1, STEPS) for line in lines(run, step)]
    before, after = np.array(rewards).reshape(2, -1).mean(axis=1)
    assert before < 0.7 and after > 0.9


def test_reward_rises(tmp_path):
    check_reward_rises(observed.watched(observed.configure(tmp_path, ARMED)))


def test_a_flipped_sign_is_caught(tmp_path, monkeypatch):
    plant(monkeypatch, batches, "answer_advantages", loop_mutants.flipped)
    spoiled = observed.watched(observed.configure(tmp_path, ARMED))
    with pytest.raises(AssertionError):
        check_reward_rises(spoiled)
