"""Short runs of the losses and advantages: resumed with drafts they have the same bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from training_runs import completions, events, resumed, state_of

from tlt_jax import cli
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_drafting_changes_no_bit_of_a_policy_that_resumes_exactly(configure, tmp_path, name: str):
    """In float32."""
    plain = configure(tmp_path / "plain", SHORT | ALGORITHMS[name])
    assert loop.train(plain) == cli.DONE
    measured = events(resumed(plain, tmp_path / "drafted", 1, DRAFTED))
    assert measured["speculation/share"][0][1] > 0
    if "gspo" in name:
        assert measured["actor/sequence_ratio_max"][0][1] >= 1
        assert measured["actor/pg_clipfrac"][0][1] > 0, "the second minibatch leaves its limits"
    else:
        (_, first), (_, second) = measured["actor/reward_kl_penalty"]
        assert first == 0 and second != 0
        assert "actor/sequence_ratio_max" not in measured
        assert measured["actor/kl"][1][1] > 0, "the policy has moved from the reference"


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
