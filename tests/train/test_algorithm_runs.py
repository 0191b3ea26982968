"""Short runs of the losses and advantages: resumed with drafts the same bits, and advantages of the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jobs import Job
from training_runs import completions, events, resumed, state_of

from tlt_jax import cli
from tlt_jax.config import Config
from tlt_jax.train import loop

SHORT = {"train.steps": 2, "eval.every": 0, "mesh.data": 1, "model.remat": "none"}
DRAFTED = {
    "speculation.drafter": "ngram",
    "speculation.tuner": "fixed",
    "speculation.strategies": ["2_2_4"],
}
GSPO = {
    "algorithm.loss": "gspo",
    "algorithm.clip_low": 3e-4,
    "algorithm.clip_high": 4e-4,
    "algorithm.minibatches": 2,
}
ALGORITHMS = {
    "gspo": GSPO,
    "cispo, reinforce_pp, KL in the reward": {
        "algorithm.loss": "cispo", "algorithm.advantage": "reinforce_pp", "algorithm.kl_in": "reward",
        "algorithm.kl_coef": 0.1, "algorithm.minibatches": 3, "rollout.prompts": 6, "rollout.samples": 1,
    },
}  # fmt: skip


class Line(NamedTuple):
    """What the advantages of an answer in a completions file are computed from."""

    reward: float
    length: int
    advantage: float


def lines(config: Config, step: int) -> list[Line]:
    found = completions(config)[f"{step:06d}.jsonl"]
    return [Line(one[4], one[5], one[10]) for one in found]


def group_advantages(answers: list[Line]) -> np.ndarray:
    """GRPO's, of groups of three."""
    groups = np.array([one.reward for one in answers]).reshape(-1, 3)
    spread = groups.std(axis=1, ddof=1, keepdims=True) + 1e-6
    return ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)


def token_advantages(answers: list[Line]) -> np.ndarray:
    """REINFORCE++'s: each token has the reward of its answer, since in the first step policy and reference are equal."""
    rewards = np.array([one.reward for one in answers])
    tokens = np.repeat(rewards, [one.length for one in answers])
    return (rewards - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


@pytest.mark.parametrize(
    ("name", "advantages"),
    [*zip(ALGORITHMS, (group_advantages, token_advantages), strict=True)],
)
def test_drafting_changes_no_bit_of_a_policy_that_resumes_exactly(
    configure, tmp_path, name: str, advantages: Callable
):
    """In float32."""
    plain = configure(tmp_path / "plain", SHORT | ALGORITHMS[name])
    assert loop.train(plain) == cli.DONE
    measured = events(resumed(plain, tmp_path / "drafted", 1, DRAFTED))
    assert measured["speculation/share"][0][1] > 0
    found = lines(plain, 1)
    np.testing.assert_allclose(
        [one.advantage for one in found], advantages(found), rtol=1e-4, atol=1e-5
    )
    if "gspo" in name:
        assert measured["actor/sequence_ratio_max"][0][1] >= 1
        assert measured["actor/pg_clipfrac"][0][1] > 0, "the second minibatch leaves its limits"
    else:
        (_, first), (_, second) = measured["actor/reward_kl_penalty"]
        assert first == 0 and second != 0
        assert "actor/sequence_ratio_max" not in measured
        assert measured["actor/kl"][1][1] > 0, "the policy has moved from the reference"


def test_two_processes_learn_what_one_does_with_a_kl_in_the_reward(configure, tmp_path):
    """Each has half of the rows. In the second step the KL is no longer 0. With one minibatch all ratios are exactly 1."""
    knobs = ALGORITHMS["cispo, reinforce_pp, KL in the reward"] | {
        "algorithm.importance": "sequence", "algorithm.importance_mask": 1.5, "algorithm.minibatches": 1,
        "mesh.data": 2, "mesh.fake_devices": 2,
    }  # fmt: skip
    alone, both = (configure(tmp_path / name, SHORT | knobs) for name in ("alone", "both"))
    assert loop.train(alone) == cli.DONE
    with Job(both, 2, by_launcher=True) as job:
        assert job.wait() == [cli.DONE], job.said()
    for step in (1, 2):
        ours, theirs = ([one.advantage for one in lines(run, step)] for run in (both, alone))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert lines(both, 2)[0].reward == lines(alone, 2)[0].reward
    for one, other in zip(
        *(jax.tree.leaves(state_of(run, 2).params) for run in (both, alone)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    ours, theirs = (events(run)["actor/reward_kl_penalty"] for run in (both, alone))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-7)
    assert events(alone)["actor/ratio_max"] == [(1, 1.0), (2, 1.0)]


def test_with_importance_weights_drafting_changes_a_policy_by_rounding_alone(configure, tmp_path):
    """Recorded log-probs have last bits of the rollout's shape: the answers are the same, and the update up to rounding."""
    weighed = GSPO | {
        "algorithm.importance": "sequence", "algorithm.importance_cap": 1.0, "algorithm.importance_mask": 1.5,
        "train.steps": 1,
    }  # fmt: skip
    runs = [
        configure(tmp_path / str(len(knobs)), SHORT | weighed | knobs) for knobs in ({}, DRAFTED)
    ]
    for config in runs:
        assert loop.train(config) == cli.DONE
    plain, drafted = runs
    assert completions(plain) == completions(drafted)
    states = (state_of(config, 1).opt_state for config in runs)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        largest = np.abs(one).max(initial=0)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * largest)
    for measured in map(events, runs):
        ((_, mean),) = measured["rollout_corr/rollout_is_mean"]
        assert mean == pytest.approx(1, abs=1e-4)
        assert measured["rollout_corr/rollout_rs_seq_masked_fraction"] == [(1, 0.0)]
