"""The verbs of a loop of one's own: gradients, optimizer steps, log-probs and states of the engine, and the examples."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from training_runs import SIZES, assert_equal

import tlt_jax
from tlt_jax.data import tasks
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import UserError
from tlt_jax.models import architecture, hf, hf_config

EXAMPLES = Path(tlt_jax.__file__).parents[1] / "examples"
PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 5, 4, 3]]
KNOBS = {
    "rollout.compile_cache": os.environ["TLT_JAX_TEST_PROGRAMS"], "speculation.drafter": "none", "rollout.prompts": 4,
    "rollout.samples": 2, "rollout.max_new_tokens": 12, "data.max_prompt_tokens": 16, "train.row_tokens": 32,
    "mesh.data": 2, "optim.learning_rate": 0.01,
}  # fmt: skip
TOKENIZER = tasks.make("fold", {}).tokenizer()
MODEL = hf_config.new_config(
    SIZES | {"initializer_range": 0.4}, len(TOKENIZER), [TOKENIZER.eos_token_id]
)
ADVANTAGES = np.linspace(-1, 1, 8)
SHARES = np.full(8, 1 / 60)


def weights(seed: int = 0) -> architecture.Params:
    return architecture.init(MODEL, meshes.make_mesh(1, 1), jax.random.key(seed), "float32")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Model directories of two seeds."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        hf.save(
            weights(seed), MODEL, root / str(seed), meshes.make_mesh(1, 1), TOKENIZER, "float32"
        )
    return [root / "0", root / "1"]


@pytest.fixture(scope="module")
def engine():
    with tlt_jax.open_engine((MODEL, weights()), KNOBS) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine):
    """Answers of the weights of seed 0."""
    return engine.generate(PROMPTS, 0)


@pytest.fixture(autouse=True)
def start(engine):
    """Every test starts from the weights of seed 0, without gradients."""
    engine.update_weights(weights())


def host(tree):
    return jax.tree.map(np.array, tree)


def test_log_probs_are_those_of_the_rollout(engine, answers):
    found = engine.forward(answers)
    for one, logprobs in zip(answers, found, strict=True):
        np.testing.assert_allclose(logprobs, one.logprobs, atol=1e-5)
    pairs = [(one.prompt_tokens, one.tokens.tolist()) for one in answers]
    assert_equal(engine.forward(pairs), found)
    assert_equal(
        engine.forward_backward(answers, advantages=ADVANTAGES, with_logprobs=True).logprobs, found
    )


def test_gradients_of_several_calls_are_added_also_of_other_losses(engine, answers):
    def given(part):
        return {"advantages": ADVANTAGES[part], "weights": SHARES[part]}

    first, rest = slice(0, 3), slice(3, 8)
    whole = engine.forward_backward(answers, **given(slice(0, 8)))
    at_once = host(engine.sums.grads)
    engine.update_weights(weights())
    parts = [engine.forward_backward(answers[part], **given(part)) for part in (first, rest)]
    near = {"rtol": 1e-4, "atol": 1e-6}
    assert whole.loss == pytest.approx(sum(one.loss for one in parts), rel=1e-4)
    assert whole.metrics["tokens"] == sum(one.metrics["tokens"] for one in parts)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **near), at_once, host(engine.sums.grads)
    )
    # At the weights of the rollout, and an advantage of 1, PPO's gradient is that of the likelihood.
    engine.update_weights(weights())
    liked = engine.forward_backward(answers, "cross_entropy", weights=SHARES)
    assert liked.loss == pytest.approx(-sum(one.logprobs.sum() for one in answers) / 60, rel=1e-4)
    engine.forward_backward(answers, "ppo", advantages=-np.ones(8), weights=SHARES)
    for leaf in jax.tree.leaves(host(engine.sums.grads)):
        np.testing.assert_allclose(leaf, 0, atol=1e-5)
    assert engine.optim_step()["loss"] == pytest.approx(liked.loss + answers.num_tokens / 60)


def surrogate(rows, clip_low, clip_high):
    """PPO's loss as one would write it."""
    ratio = jax.numpy.exp(rows.update_logprobs - rows.old_logprobs)
    kept = jax.numpy.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jax.numpy.minimum(ratio * rows.advantages, kept * rows.advantages)


def test_values_of_tokens_and_a_loss_of_ones_own(engine, answers):
    """Ratios are to old_logprobs, and a token of weight 0 has no gradient."""
    old = [one.logprobs - 0.1 for one in answers]
    advantages = [np.linspace(-1, 1, len(one.tokens)) for one in answers]
    shares = [np.where(np.arange(len(one.tokens)) % 2, 0.1, 0) for one in answers]
    fields = {"advantages": advantages, "weights": shares, "old_logprobs": old}
    losses = [engine.forward_backward(answers, loss, **fields) for loss in ("ppo", surrogate)]
    expected = -sum((np.exp(0.1) * a * w).sum() for a, w in zip(advantages, shares, strict=True))
    for one in losses:
        assert one.loss == pytest.approx(expected, rel=1e-4)
        assert one.metrics["ratio_mean"] == pytest.approx(np.exp(0.1), rel=1e-4)
    assert losses[0].metrics["tokens"] == sum(len(one.tokens) // 2 for one in answers)


def step(engine, answers, rate=None) -> dict:
    engine.forward_backward(answers, advantages=ADVANTAGES)
    return engine.optim_step(rate)


def test_a_loaded_state_continues_as_if_nothing_had_stopped(engine, answers, tmp_path):
    given = weights()
    engine.update_weights(given)
    step(engine, answers)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "the caller's own"
    engine.save_state(tmp_path / "state")
    calls = engine.calls
    metrics, params = step(engine, answers, 0.02), host(engine.params)
    assert metrics["lr"] == pytest.approx(0.02)
    drawn = [one.tokens.tolist() for one in engine.generate(PROMPTS)]
    with tlt_jax.open_engine((MODEL, weights(1)), KNOBS) as other:
        other.load_state(tmp_path / "state")
        assert int(other.policy.step) == 1 and other.calls == calls
        assert step(other, answers, 0.02) == metrics
        assert_equal(other.params, params)
        assert [one.tokens.tolist() for one in other.generate(PROMPTS)] == drawn
        other.save_state(tmp_path / "state")
    engine.load_state(tmp_path / "state")
    assert int(engine.policy.step) == 2, "the newest one of the directory"
    assert len([*(tmp_path / "state" / "checkpoints").glob("[0-9]*")]) == 1


def test_a_mistake_is_one_line(engine, answers, tmp_path):
    smaller = hf_config.new_config(SIZES | {"hidden_size": 32}, len(TOKENIZER), [1])
    with tlt_jax.open_engine(
        (smaller, architecture.init(smaller, meshes.make_mesh(1, 1), jax.random.key(0), "float32")),
        KNOBS,
    ) as other:
        other.save_state(tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    learn, count = engine.forward_backward, len(answers[0].tokens)
    mistakes = [
        (engine.optim_step, "there are no gradients: call forward_backward"),
        (lambda: learn([], advantages=[]), "there are no answers to learn from"),
        (lambda: learn([3]), "answer 0 is a int: give those of generate, or (prompt, token ids)"),
        (lambda: learn([([1], [2, 99])], "cross_entropy"), "answer 0: token 99 is outside the vocabulary of"),
        (lambda: learn([([1], [-2])], "cross_entropy"), "answer 0: [-2] are no token ids"),
        (lambda: learn([([1], [2] * 40)], "cross_entropy"), "answer 0 has 41 tokens with its prompt, and an update takes 28"),
        (lambda: learn(answers), "loss ppo needs advantages: give an entry for each answer"),
        (lambda: learn(answers, advantages=[1.0]), "advantages are not one entry for each of the 8 answers"),
        (lambda: learn(answers, advantages=1.0), "advantages are not one entry for each of the 8 answers"),
        (lambda: learn(answers, advantages=[np.ones(count + 1)] * 8), f"and it has {count} tokens: give a number, or"),
        (lambda: learn(answers, advantages=[np.nan] * 8), "advantages of answer 0 are not finite"),
        (lambda: learn(answers, advantages=ADVANTAGES, weights=-SHARES), "weights are below 0"),
        (lambda: learn(answers, advantages=ADVANTAGES, rewards=SHARES), "there is no 'rewards': give some of advantages,"),
        (lambda: learn(answers, "pop", advantages=ADVANTAGES), "algorithm.loss 'pop'"),
        (lambda: (learn(answers, advantages=ADVANTAGES), engine.optim_step(-1)), "learning_rate -1: give a number above 0"),
        (lambda: engine.save_state(tmp_path / "x"), "a state has no gradients: call optim_step before save_state"),
        (lambda: (engine.optim_step(), engine.save_state(tmp_path / "run")), "is a run folder: give another directory"),
        (lambda: engine.load_state(tmp_path / "nowhere"), "does not exist: give the folder of a run that has saved"),
        (lambda: engine.load_state(tmp_path / "other"), "holds another model: policy.params"),
    ]  # fmt: skip
    for mistake, message in mistakes:
        with pytest.raises(UserError) as error:
            mistake()
        assert message in str(error.value) and "\n" not in str(error.value)
    assert step(engine, answers)["grad_norm"] > 0, "the engine stays usable"


def test_the_examples_learn(directories):
    def ones(text, _):
        return text.count("1") / 12

    changes = KNOBS | {"rollout.prompts": 16, "rollout.samples": 8, "optim.learning_rate": 0.02}
    for name in ("grpo_loop.py", "best_of_n.py"):
        train = runpy.run_path(str(EXAMPLES / name))["train"]
        rewards = [*train(directories[0], 6, ones, changes)]
        assert rewards[-1] > rewards[0] + 0.1, (name, rewards)
    train = runpy.run_path(str(EXAMPLES / "distill_loop.py"))["train"]
    gaps = [*train(*directories, 6, changes)]
    assert gaps[-1] < 0.8 * gaps[0], gaps
