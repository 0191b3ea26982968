"""Laws of the RL loop: each step has new noise, evaluations share theirs, reward rises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import observed
import pytest
from loop_updates import lines
from observed import Run

from tlt_jax.data import dataset as datasets
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import from_config, hf
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


def texts_of(run: Run) -> tuple[list, list]:
    """The texts of every evaluation, and those of every step."""
    texts = [one.texts for one in run.rollouts]
    return texts[::2], texts[1::2]


def test_the_noise_is_new_in_each_step_and_the_same_in_each_evaluation(still, tmp_path):
    """Two steps with the same prompt and policy have other answers, evaluations of one policy the same, another seed others."""
    first, other = (texts_of(still(tmp_path / str(seed), seed)) for seed in (0, 1))
    evaluated, trained = first
    assert trained[0] != trained[1]
    assert evaluated == [evaluated[0]] * 3
    assert evaluated[0] not in trained
    for ours, theirs in zip(first, other, strict=True):
        assert all(one != two for one, two in zip(ours, theirs, strict=True))


# The sign


def test_reward_rises(tmp_path):
    """A policy with two arms, a digit (rewarded) or not, learns to choose the digit."""
    run = observed.watched(observed.configure(tmp_path, ARMED))
    rewards = [line["reward"] for step in (1, STEPS) for line in lines(run, step)]
    before, after = np.array(rewards).reshape(2, -1).mean(axis=1)
    assert before < 0.7 and after > 0.9
