"""On-policy distillation: gradients against formulas in NumPy, and runs with a teacher, alone or with a hint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sequence_losses as answers
from objectives import algorithm
from test_adaptive_runs import UNEVEN, drafter_of
from test_policy_update import MODEL, recipe_of
from test_step_training import SHARE
from training_runs import SIZES, assert_equal, assert_same_bits, completions, events, resumed, spied

from tlt_jax import cli
from tlt_jax.config.schema import Teacher
from tlt_jax.data import prompt_format
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.drafter import losses
from tlt_jax.errors import ConfigError, DataError, ModelError
from tlt_jax.models import architecture, from_config, hf, hf_config
from tlt_jax.train import batch as batches, loop, policy_update, teacher as teachers

known = answers.known  # a fixture
WEIGHT = 0.7  # of the teacher


def objective(top_k: int = 0, **knobs):
    return algorithm(teacher=Teacher("given", WEIGHT, top_k), **knobs)


def rows_of(recipe, known, rewarded: bool, **given):
    """Rows without old log-probs, as of one minibatch, with what the teacher gives."""
    (rows,) = answers.batch_of(recipe, known, 8)
    advantages = rows.advantages if rewarded else jnp.zeros_like(rows.advantages)
    return rows._replace(old_logprobs=None, advantages=advantages, **given)


def value_and_gradient(recipe, params, rows):
    found = jax.jit(jax.value_and_grad(partial(policy_update.loss, recipe=recipe), has_aux=True))
    (value, (sums, _)), gradient = found(params, rows)
    return value, sums, gradient


@pytest.mark.parametrize("loss", ["ppo", "gspo", "dppo"])
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_policy_that_is_its_own_teacher_has_a_gradient_of_0(known, shallow, x64, loss, top_k):
    recipe = recipe_of(objective(top_k, loss=loss))
    params = answers.params_of(recipe)
    rows = batches.bare(rows_of(recipe, known, rewarded=False))
    if top_k:
        ids, logprobs = teachers.likeliest(recipe, top_k)(params, rows)
        given = {"teacher_ids": ids, "teacher_logprobs": logprobs}
    else:
        given = {"teacher_logprobs": policy_update.programs(recipe).score(params, rows)}
    _, sums, gradient = value_and_gradient(recipe, params, rows._replace(**given))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) < 1e-12
    assert abs(float(sums["teacher_kl"])) < 1e-12


def test_the_sampled_reverse_kl_adds_to_the_advantages(known, shallow, x64):
    """The gradient of REINFORCE with advantage A + weight (log teacher - log policy), a token at a time."""
    recipe = recipe_of(objective())
    params, random = answers.params_of(recipe), np.random.default_rng(1)
    rows = rows_of(recipe, known, rewarded=True)
    rows = rows._replace(teacher_logprobs=jnp.asarray(random.normal(-2, 1, rows.tokens.shape)))
    logp, _ = map(np.asarray, answers.plain_scores(params, rows))
    value, sums, gradient = value_and_gradient(recipe, params, rows)
    mask, theirs = np.asarray(rows.mask), np.asarray(rows.teacher_logprobs)
    advantage = np.asarray(rows.advantages) + WEIGHT * (theirs - logp)
    expected = -np.sum((np.asarray(rows.weights) * advantage)[mask])
    assert float(value) == pytest.approx(expected, rel=1e-10)
    assert float(sums["teacher_kl"]) == pytest.approx((logp - theirs)[mask].sum())

    def linear(params):
        return -jnp.sum(rows.weights * advantage * answers.plain_scores(params, rows)[0])

    expected = jax.grad(linear)(params)
    for one, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("top_k", [1, 4, MODEL.vocab_size])
def test_the_kl_over_the_teachers_likeliest_tokens_is_that_of_trl(known, shallow, x64, top_k):
    """TRL's reverse KL of the top k with the tail as one event, and its derivative in the logits, in NumPy.

    With all tokens it is the whole reverse KL.
    """
    recipe = recipe_of(objective(top_k))
    params, teacher = answers.params_of(recipe), answers.params_of(recipe)
    teacher = replace(teacher, embed=teacher.embed[::-1] * 1.3)
    rows = rows_of(recipe, known, rewarded=False)
    ids, logprobs = teachers.likeliest(recipe, top_k)(teacher, batches.bare(rows))
    rows = rows._replace(teacher_ids=ids, teacher_logprobs=logprobs)
    value, sums, gradient = value_and_gradient(recipe, params, rows)

    embed = np.asarray(params.embed)[: MODEL.vocab_size]
    theirs = np.asarray(teacher.embed)
    total, slopes = 0.0, np.zeros(embed.shape)
    for row, token in zip(*np.nonzero(np.asarray(rows.mask)), strict=True):
        read = int(rows.tokens[row, token])
        logits = embed[read] @ embed.T / answers.TEMPERATURE
        p = np.exp(logits) / np.exp(logits).sum()
        logits = theirs[read] @ theirs[: MODEL.vocab_size].T / answers.TEMPERATURE
        t = np.exp(logits) / np.exp(logits).sum()
        kept = np.argsort(-t)[:top_k]
        assert {*np.asarray(ids)[row, token].tolist()} == {*kept.tolist()}
        event = np.full(len(p), top_k)  # of each token; the last one is the tail
        event[kept] = np.arange(top_k)
        sums_of = lambda q: np.bincount(event, q, minlength=top_k + 1)  # noqa: E731, B023
        log_ratio = np.log(np.maximum(sums_of(p), 2e-16)) - np.log(np.maximum(sums_of(t), 2e-16))
        kl = np.sum(sums_of(p) * log_ratio)
        weight = WEIGHT * float(rows.weights[row, token])
        total += weight * kl
        dlogits = weight * p * (log_ratio[event] - kl) / answers.TEMPERATURE
        slopes[read] += dlogits @ embed
        slopes += np.outer(dlogits, embed[read])
    assert float(value) == pytest.approx(total, rel=1e-9)
    np.testing.assert_allclose(gradient.embed[: MODEL.vocab_size], slopes, rtol=1e-7, atol=1e-11)
    assert np.abs(slopes).max() > 1e-3


# Runs


@pytest.fixture(scope="module")
def model_directory(configure, shared):
    """Another policy with the tokenizer of the runs, of two layers."""
    tokenizer = prompt_format.tokenizer_of(configure(shared / "unused"))
    config = hf_config.new_config(
        SIZES | {"num_hidden_layers": 2, "initializer_range": 0.5}, len(tokenizer), ()
    )
    mesh = make_mesh(1, 1)
    params = architecture.init(config, mesh, jax.random.key(7), "float32")
    hf.save(params, config, shared / "teacher", mesh, tokenizer, "float32")
    return shared / "teacher"


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_run_comes_nearer_to_its_teacher(configure, tmp_path, model_directory, top_k):
    """Also after it was resumed, with the same bits."""
    knobs = {
        "algorithm.teacher.path": str(model_directory), "algorithm.teacher.top_k": top_k, "algorithm.advantage": "none",
        "rollout.prompts": 8, "optim.learning_rate": 0.03, "eval.every": 0, "algorithm.minibatches": 2, "train.steps": 4,
    }  # fmt: skip
    config = configure(tmp_path / "run", knobs)
    assert loop.train(config) == cli.DONE
    found = [value for _, value in events(config)["actor/teacher_kl"]]
    assert found[-1] < 0.8 * found[0]
    if not top_k:
        assert completions(resumed(config, tmp_path / "again", 3)) == completions(config)


def test_weights_that_lie_with_the_host_give_the_same_log_probs(
    configure, tmp_path, model_directory, monkeypatch
):
    """As on accelerators: they are copied to the devices for each step."""
    config = configure(tmp_path / "run", {"algorithm.teacher.path": str(model_directory)})
    tokenizer, mesh = prompt_format.tokenizer_of(config), make_mesh(2, 1)
    recipe = policy_update.Recipe.of(config, from_config.model_config(config, tokenizer), mesh, 4)
    rows = batches.abstract_rows(mesh, 2, 64)
    rows = jax.tree.map(
        lambda leaf: jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding), rows
    )
    batch, found = batches.Batch([[rows]], [], np.ones(1), np.ones(1), 1.0, {}), []
    for is_here in (True, False):
        monkeypatch.setattr(teachers, "is_cpu", lambda mesh, is_here=is_here: is_here)
        teacher = teachers.load(config, recipe, None)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(teacher.params)}
        assert (kinds == {teachers.HOST}) != is_here
        found.append(teacher.scored(batch, None, [], []).minibatches[0][0].teacher_logprobs)
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0]).max() > 1


def test_a_drafter_learns_from_the_teacher_and_changes_no_bit_of_the_policy(
    configure, tmp_path, model_directory, monkeypatch
):
    """Also after the run was resumed."""
    knobs = UNEVEN | {
        "algorithm.teacher.path": str(model_directory), "algorithm.teacher.top_k": 5, "algorithm.advantage": "none",
        "train.steps": 2, "train.row_tokens": 96,
    }  # fmt: skip
    plain = configure(tmp_path / "plain", knobs)
    taught = configure(tmp_path / "taught", SHARE | knobs | {"algorithm.teacher.drafter": 0.5})
    given = spied(
        monkeypatch, losses, "mixed",
        lambda target, teacher, scale, ids, share: (teacher is not None and teacher.ids.shape[-1], share),
    )  # fmt: skip
    assert loop.train(plain) == loop.train(taught) == cli.DONE
    assert (5, 0.5) in given
    assert_same_bits(taught, plain)
    again = resumed(taught, tmp_path / "again", 1)
    assert_equal(drafter_of(again, 2), drafter_of(taught, 2))


def test_a_policy_with_a_hint_is_its_own_teacher(configure, tmp_path):
    knobs = {
        "algorithm.teacher.path": "self", "algorithm.teacher.hint": "answer", "train.steps": 2, "eval.every": 0,
    }  # fmt: skip
    config = configure(tmp_path / "run", knobs)
    assert loop.train(config) == cli.DONE
    assert all(abs(value) > 1e-6 for _, value in events(config)["actor/teacher_kl"])


def test_teachers_that_cannot_teach_are_refused_by_name(configure, tmp_path, model_directory):
    other = tmp_path / "other"
    other.mkdir()
    for file in model_directory.iterdir():
        text = file.read_bytes()
        (other / file.name).write_bytes(
            text.replace(b'"=": ', b'"~": ') if file.suffix == ".json" else text
        )
    config = configure(tmp_path / "run", {"algorithm.teacher.path": str(other)})
    with pytest.raises(ModelError, match="has another vocabulary than the policy"):
        loop.train(config)
    config = configure(
        tmp_path / "run", {"algorithm.teacher.path": "self", "algorithm.teacher.hint": "why"}
    )
    with pytest.raises(DataError, match="no column 'why', which algorithm.teacher.hint names"):
        loop.train(config)
    twice = {"algorithm.teacher.path": "self", "algorithm.teacher.hint": "prompt"}
    config = configure(tmp_path / "run", twice | {"rollout.max_new_tokens": 56})
    with pytest.raises(
        DataError, match="prompt and prompt of row .* and the teacher has 64 positions"
    ):
        loop.train(config)
    for change, said in (
        ({"algorithm.teacher.top_k": 4}, "top_k 4 without algorithm.teacher.path has no effect"),
        ({"algorithm.advantage": "none"}, "none without a teacher"),
        ({"algorithm.teacher.path": "self"}, "self without algorithm.teacher.hint"),
        (
            {
                "algorithm.teacher.path": "x",
                "algorithm.teacher.hint": "a",
                "algorithm.teacher.top_k": 4,
            },
            "set algorithm.teacher.top_k 0",
        ),
        ({"algorithm.teacher.drafter": 0.5}, "drafter 0.5 without algorithm.teacher.path has"),
        (
            {"algorithm.teacher.path": "x", "algorithm.teacher.drafter": 0.5},
            "drafter 0.5 with algorithm.teacher.top_k 0",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            configure(tmp_path / "run", change)
