"""The replay of the tokens that a filter kept: log-probs of rollout and update are of these alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sequence_losses as answers
from jobs import Job
from objectives import algorithm
from test_policy_update import assert_same, recipe_of
from training_runs import assert_close, completions, events

from tlt_jax import cli
from tlt_jax.config.schema import Teacher
from tlt_jax.errors import ConfigError
from tlt_jax.models import targets
from tlt_jax.train import batch as batches, loop, policy_update, teacher as teachers

KEPT = {
    "rollout.top_k": 4, "rollout.top_p": 0.8, "algorithm.support_replay": True, "train.steps": 2, "eval.every": 0,
    "model.compute_dtype": "float32", "algorithm.minibatches": 2,
}  # fmt: skip
DRAFTING = {
    "speculation.drafter": "ngram", "speculation.tuner": "fixed", "speculation.strategies": ["2_1_3"],
}  # fmt: skip


@pytest.mark.parametrize("has_target", [True, False])
def test_scores_of_a_support_are_those_of_the_renormalized_distribution(x64, has_target):
    """Value, entropy and gradient against NumPy, which knows the set as a mask."""
    random = np.random.default_rng(0)
    logits, ids = random.normal(size=(6, 11)), np.array([3, 5, 0, 10, 7, 2])
    others = [random.permutation(np.delete(np.arange(11), one))[:4] for one in ids]
    support = np.array(others)
    if has_target:
        support[:, 0] = ids
    support[::2, 2:] = -1
    mask = np.zeros((6, 11), bool)
    for row, kept in enumerate(support):
        mask[row, kept[kept >= 0]] = True
    mask[np.arange(6), ids] = True
    scaled = np.where(mask, logits / 0.7, -np.inf)
    p = np.exp(scaled) / np.exp(scaled).sum(axis=1, keepdims=True)

    def found(logits):
        return targets.score(logits, jnp.asarray(ids), 0.7, True, jnp.asarray(support))

    logprobs, entropy = found(jnp.asarray(logits))
    np.testing.assert_allclose(logprobs, np.log(p[np.arange(6), ids]), rtol=1e-12)
    logp = np.log(np.where(p > 0, p, 1))
    np.testing.assert_allclose(entropy, -np.sum(p * logp, axis=1), rtol=1e-10, atol=1e-12)
    gradient = jax.grad(lambda logits: found(logits)[0].sum())(jnp.asarray(logits))
    expected = (np.arange(11) == ids[:, None]) - p
    np.testing.assert_allclose(gradient, expected / 0.7, atol=1e-12)


known = answers.known  # a fixture


@pytest.mark.parametrize("top_k", [0, 3])
def test_gradients_do_not_depend_on_the_mesh(known, shallow, x64, top_k):
    """Of log-probs of supports, and of a teacher's likeliest tokens, where the vocabulary is sharded."""
    knobs = algorithm(teacher=Teacher("given", 0.7, top_k), entropy_coef=0.1)
    found = []
    for mesh in ((1, 1), (2, 2)):
        recipe = recipe_of(knobs, *mesh)
        params = answers.params_of(recipe)
        (rows,) = answers.batch_of(recipe, known, 8)
        ids = (rows.targets[..., None] + jnp.array([0, 4, 7])) % 11
        rows = batches.bare(rows)._replace(support=ids)
        if top_k:
            ids, logprobs = teachers.likeliest(recipe, top_k)(params, rows)
            rows = rows._replace(teacher_ids=ids, teacher_logprobs=logprobs - 0.3)
        loss = partial(policy_update.loss, recipe=recipe)
        found.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, rows))
    assert_same(*found, rtol=1e-9, atol=1e-12)
    assert np.abs(found[0][1].embed).max() > 1e-3


@pytest.fixture(scope="module")
def kept(configure, shared):
    config = configure(shared / "kept", KEPT)
    assert loop.train(config) == cli.DONE
    return config


def test_ratios_of_rollout_and_update_start_at_1(configure, kept, tmp_path):
    """Without the replay both are of all tokens, so that the log-probs of the same answers are lower."""
    assert max(value for _, value in events(kept)["actor/rollout_logprob_diff_max"]) < 1e-5
    plain = configure(tmp_path / "plain", KEPT | {"algorithm.support_replay": False})
    assert loop.train(plain) == cli.DONE
    first = min(completions(kept))
    path = Path("completions") / first
    ours, others = (
        [json.loads(line) for line in (Path(one.run) / path).read_text().splitlines()]
        for one in (kept, plain)
    )
    assert [one["completion"] for one in ours] == [one["completion"] for one in others]
    assert all(one["logprob"] > two["logprob"] + 0.1 for one, two in zip(ours, others, strict=True))


def test_drafts_change_neither_answers_nor_supports(configure, kept, tmp_path):
    drafted = configure(tmp_path / "drafted", KEPT | DRAFTING)
    assert loop.train(drafted) == cli.DONE
    assert completions(drafted) == completions(kept)
    assert max(value for _, value in events(drafted)["actor/rollout_logprob_diff_max"]) < 1e-5
    assert max(value for _, value in events(drafted)["speculation/accept_length"]) > 1


def test_two_processes_are_one(configure, kept, tmp_path):
    knobs = KEPT | {"mesh.fake_devices": 2}
    two = configure(tmp_path / "two", knobs)
    with Job(two, 2, by_launcher=True) as job:
        assert job.wait() == [cli.DONE], job.said()
    assert_close(two, kept)


def test_a_set_without_a_bound_is_refused(configure, tmp_path):
    for top_k in (0, 300):
        with pytest.raises(ConfigError, match=f"support_replay with rollout.top_k {top_k}, which"):
            configure(tmp_path / "run", KEPT | {"rollout.top_k": top_k})
