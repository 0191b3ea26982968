"""Checks that a run of the RL loop sampled and scored its answers as its configuration says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import references
from loop_updates import WIDTH, padded, programs_of
from observed import Run

from tlt_jax.config import Config
from tlt_jax.data import prompt_format
from tlt_jax.data.stop_rules import StopRules, stop_texts
from tlt_jax.spec_decode import noise
from tlt_jax.spec_decode.interface import DecodingParams, Sampling

TRAINING, EVALUATION = 3, 4  # streams of the noise


def sequence_keys(seed: int, stream: int, step: int, count: int) -> np.ndarray:
    """Key words of sequences, folded in one by one."""
    root_key = jax.random.key(seed, impl="threefry2x32")
    step_key = jax.random.fold_in(jax.random.fold_in(root_key, stream), step)
    keys = [jax.random.fold_in(step_key, uid) for uid in range(count)]
    return np.array([jax.random.key_data(key) for key in keys])


def rules(config: Config) -> StopRules | None:
    """The rules for the stop texts; a token of the toy task is a character."""
    ids = prompt_format.tokenizer_of(config).get_vocab()
    letters = [letter.replace("Ġ", " ").encode() for letter in sorted(ids, key=ids.get)]
    return stop_texts(config.rollout.stop, letters)


def stops(config: Config) -> tuple[tuple[int, ...], ...]:
    """The stop texts as ids."""
    ids = prompt_format.tokenizer_of(config).get_vocab()
    return tuple(tuple(ids[letter] for letter in text) for text in config.rollout.stop)


def eos(config: Config) -> int:
    return prompt_format.tokenizer_of(config).eos_token_id


def check_keys(run: Run) -> None:
    """Noise depends on (train.seed, stream, step, uid); evaluations have their own stream, and no step."""
    steps = [(EVALUATION, 0), (TRAINING, 0), (TRAINING, 1), (EVALUATION, 0)]
    for one, (stream, step) in zip(run.rollouts, steps, strict=True):
        expected = sequence_keys(run.config.train.seed, stream, step, len(one.request.keys))
        np.testing.assert_array_equal(one.request.keys, expected)


def check_rules(run: Run) -> None:
    """Steps sample as the section `rollout` says, evaluations as the section `eval`."""
    sections = [(one, run.config.rollout) for one in run.trainings]
    for one, knobs in sections + [(one, run.config.eval) for one in run.evaluations]:
        drawn = Sampling(knobs.temperature, knobs.top_k, knobs.top_p)
        expected = DecodingParams(drawn, (eos(run.config),), rules(run.config))
        assert one.request.params == expected
        assert one.request.max_new_tokens == (knobs.max_new_tokens,) * knobs.prompts
        assert (len(one.request.prompts), one.request.samples) == (knobs.prompts, knobs.samples)


def check_tokens(run: Run) -> None:
    """Every answer equals plain decoding with the policy of its step and the noise of its sequence."""
    updates, (training, evaluation) = run.updates, (run.config.rollout, run.config.eval)
    states = [updates[0].before, updates[0].before, updates[2].before, updates[3].after]
    sections = [evaluation, training, training, evaluation]
    for one, state, knobs in zip(run.rollouts, states, sections, strict=True):
        logits = np.asarray(programs_of(run)[0](state.params, padded(one.texts)))
        at = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), logits.shape[:2])
        keys = jnp.asarray(one.request.keys)
        ahead = np.asarray(noise.gumbel(keys, at, logits.shape[-1], jnp.float64))
        for answer, row, drawn in zip(one.result.completions, logits, ahead, strict=True):
            tokens, logprobs, finish = references.decode(
                lambda prefix, row=row: row[len(prefix) - 1],
                lambda position, drawn=drawn: drawn[position],
                one.request.prompts[answer.prompt],
                Sampling(knobs.temperature, knobs.top_k, knobs.top_p),
                (eos(run.config),), stops(run.config), knobs.max_new_tokens,
            )  # fmt: skip
            assert (answer.tokens.tolist(), answer.finish) == (tokens, finish)
            np.testing.assert_allclose(answer.logprobs, logprobs, rtol=0, atol=1e-9)
