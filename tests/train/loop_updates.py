"""Checks that a run of the RL loop updated the policy as its configuration says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toy_rewards
from observed import Run
from training_runs import having

from tlt_jax.data import prompt_format
from tlt_jax.inference.engine import RolloutModel
from tlt_jax.models import architecture, from_config, transformer

BETA1 = 0.9
REMAT = "checkpoint", "remat2"  # its primitive, by version of JAX
WIDTH = 16  # tokens of the longest prompt and answer

# The policy, by whole rows


@cache
def programs(
    model: architecture.ModelConfig,
    temperature: float,
    clips: tuple[float, float],
    entropy_coef: float,
):
    """logits(params, tokens) of whole rows, and the value and gradient of `loss` in params."""

    def logits(params: architecture.Params, tokens: jax.Array) -> jax.Array:
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x, _ = transformer.hidden(
            params, model, tokens, at, jnp.ones_like(tokens), compute_dtype="float64"
        )
        return transformer.logits(params, model, x)[..., : model.vocab_size]

    def loss(params, tokens, weights, advantages, old):
        """GRPO's loss, summed with these weights; `old` is None in the first minibatch."""
        logp = jax.nn.log_softmax(logits(params, tokens)[:, :-1] / temperature)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
        ratio = jnp.exp(chosen - (jax.lax.stop_gradient(chosen) if old is None else old))
        kept = jnp.clip(ratio, 1 - clips[0], 1 + clips[1])
        gain = jnp.minimum(ratio * advantages[:, None], kept * advantages[:, None])
        return jnp.sum(weights * -(gain + entropy_coef * entropy)), chosen

    return jax.jit(logits), jax.jit(jax.value_and_grad(loss, has_aux=True))


def programs_of(run: Run):
    """The programs of a run's knobs."""
    knobs = run.config.algorithm
    model = from_config.model_config(run.config, prompt_format.tokenizer_of(run.config))
    clips = knobs.clip_low, knobs.clip_high
    return programs(model, run.config.rollout.temperature, clips, knobs.entropy_coef)


def padded(pairs: Sequence[tuple[list[int], list[int]]]) -> np.ndarray:
    """Prompts with their answers as rows."""
    return np.array([(prompt + answer + [0] * WIDTH)[:WIDTH] for prompt, answer in pairs])


# The update


def check_verbs(run: Run) -> None:
    """A loop on the engine that gets the answers of a step and their rewards makes the updates of the run, bit by bit."""
    knobs, (rolled, *_), (first, second, *_) = run.config.algorithm, run.trainings, run.updates
    rewards = np.array([one["reward"] for one in lines(run, 1)])
    groups = rewards.reshape(-1, run.config.rollout.samples)
    advantages = groups - (groups.sum(axis=1, keepdims=True) - groups) / (groups.shape[1] - 1)
    model = from_config.model_config(run.config, prompt_format.tokenizer_of(run.config))
    config = having(run.config, rollout__stop=())  # it has no tokenizer, and answers nothing
    with RolloutModel.opened(config, (model, first.before.params)) as engine:
        answers = [engine.answer(rolled.request.prompts, one) for one in rolled.result.completions]
        old = engine.forward(answers)
        parts = np.array_split(np.arange(len(answers)), knobs.minibatches)
        for part, updated in zip(parts, (first, second), strict=True):
            fields = {
                "advantages": advantages.ravel()[part],
                "old_logprobs": [old[i] for i in part],
            }
            found = engine.forward_backward([answers[i] for i in part], **fields)
            metrics = found.metrics | engine.optim_step()
            assert metrics == {name: updated.metrics[name] for name in metrics}
            jax.tree.map(np.testing.assert_array_equal, engine.params, updated.after.params)
        engine.load_state(run.config.run)
        jax.tree.map(np.testing.assert_array_equal, engine.params, run.updates[-1].after.params)


def lines(run: Run, step: int) -> list[dict]:
    """The completions file of a step, from 1."""
    path = Path(run.config.run) / "completions" / f"{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_files(run: Run) -> None:
    """The completions files have the decoded answers, and the rewards of their texts."""
    tokenizer, (weight,) = prompt_format.tokenizer_of(run.config), run.config.reward.terms.values()
    for step, one in enumerate(run.trainings, start=1):
        for line, (prompt, answer) in zip(lines(run, step), one.texts, strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            assert (line["prompt"], line["completion"]) == (tokenizer.decode(prompt), text)
            assert line["length"] == len(answer)
            assert line["reward"] == weight * toy_rewards.digest("", text, {})


def learned(run: Run) -> Iterator[tuple[list, np.ndarray, np.ndarray]]:
    """Texts, advantages (leave-one-out) and weights (equal for all answers that count) of every minibatch."""
    for step, one in enumerate(run.trainings, start=1):
        answers = lines(run, step)
        rewards = np.array([line["reward"] for line in answers])
        rewards = rewards.reshape(-1, one.request.samples)
        others = [[np.delete(group, i).mean() for i in range(len(group))] for group in rewards]
        advantages, pairs = (rewards - np.array(others)).reshape(-1), one.texts
        lengths = np.array([line["length"] for line in answers])
        counts = np.array([line["finish"] != "length" for line in answers])
        counts |= run.config.algorithm.overlong == "kept"
        size = len(pairs) // run.config.algorithm.minibatches
        for first in range(0, len(pairs), size):
            part = slice(first, first + size)
            weights = counts[part] * weights_of(run, lengths[part], counts[part])
            yield pairs[part], advantages[part], weights


def weights_of(run: Run, lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The weight of a token of the answers of a minibatch, where they count."""
    longest, most = run.config.rollout.max_new_tokens, max(counts.sum(), 1)
    return {
        "token_mean": np.full(len(lengths), 1 / max(lengths[counts].sum(), 1)),
        "sequence_mean": 1 / (most * lengths),
        "dr_grpo": np.full(len(lengths), 1 / (len(lengths) * longest)),
    }[run.config.algorithm.aggregation]


def rows(batch) -> list[tuple[np.ndarray, ...]]:
    """Tokens, positions, targets, weights and advantages of each example of a batch."""
    names = ("tokens", "positions", "targets", "weights", "advantages")
    shape, found = (-1, batch.tokens.shape[-1]), []
    held = zip(*(getattr(batch, name).reshape(shape) for name in names), strict=True)
    for segments, row in zip(batch.segments.reshape(shape), held, strict=True):
        found += [tuple(part[segments == s] for part in row) for s in range(1, segments.max() + 1)]
    return sorted(found, key=lambda example: example[0].tolist())


def check_batches(run: Run) -> None:
    """Every update has the answers of its minibatch, each with its advantage."""
    for update, (pairs, advantages, weights) in zip(run.updates, learned(run), strict=True):
        found, expected = rows(update.batch), zip(pairs, advantages, weights, strict=True)
        expected = sorted(expected, key=lambda one: one[0][0] + one[0][1])
        for example, ((prompt, answer), advantage, weight) in zip(found, expected, strict=True):
            tokens, positions, targets, weighed, judged = example
            assert tokens.tolist() == prompt + answer
            assert positions.tolist() == list(range(len(tokens)))
            is_target = np.arange(len(tokens) - 1) >= len(prompt) - 1
            assert targets.tolist() == [*np.where(is_target, tokens[1:], 0), 0]
            np.testing.assert_allclose(weighed, [*(weight * is_target), 0], rtol=1e-12)
            np.testing.assert_allclose(judged, [*(advantage * is_target), 0], rtol=0, atol=1e-12)


def references_of(run: Run) -> Iterator[tuple[float, architecture.Params]]:
    """Loss and gradient of every minibatch, computed at once."""
    _, loss = programs_of(run)
    per_step = run.config.algorithm.minibatches
    for number, (pairs, advantages, weights) in enumerate(learned(run)):
        tokens, old = padded(pairs), None
        spans = [(len(prompt) - 1, len(prompt + answer) - 1) for prompt, answer in pairs]
        at = np.arange(WIDTH - 1)
        weighed = weights[:, None] * np.array([(at >= a) & (at < b) for a, b in spans])
        params = run.updates[number].before.params
        if number % per_step:
            start = run.updates[number - number % per_step].before.params
            old = loss(start, tokens, weighed, advantages, None)[0][1]
        (value, _), gradient = loss(params, tokens, weighed, advantages, old)
        yield float(value), gradient


def check_losses(run: Run) -> None:
    """The loss of every update is GRPO's, with the knobs of the run."""
    for update, (loss, _) in zip(run.updates, references_of(run), strict=True):
        np.testing.assert_allclose(update.metrics["loss"], loss, rtol=1e-9)


def check_clipping(run: Run) -> None:
    """Adam's first moment has the gradient of the whole minibatch, clipped once."""
    for update, (_, gradient) in zip(run.updates, references_of(run), strict=True):
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
        np.testing.assert_allclose(update.metrics["grad_norm"], norm, rtol=1e-9)
        states = update.before.opt_state, update.after.opt_state
        before, after = (optax.tree.get(state, "mu") for state in states)
        for leaf, old, new in zip(*map(jax.tree.leaves, (gradient, before, after)), strict=True):
            moment = BETA1 * old + (1 - BETA1) * leaf * min(1, run.config.optim.grad_clip / norm)
            np.testing.assert_allclose(new, moment, rtol=1e-7, atol=1e-12)


def is_program(value) -> bool:
    return hasattr(value, "eqns")


def equations(jaxpr) -> Iterator:
    """All equations, including those of inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(inner)


def check_remat(run: Run) -> None:
    """The update recomputes a layer (identified by the gate of its MLP) in the backward pass."""
    again = [one for one in equations(run.updates[0].jaxpr) if one.primitive.name in REMAT]
    inner = {part.primitive.name for one in again for part in equations(one.params["jaxpr"])}
    assert "logistic" in inner
