"""All random streams of a run, and how their keys derive from train.seed."""

from __future__ import annotations

import jax
import numpy as np

# The root of a stream is fold_in(key(seed), stream): each number is used once.
# Initial weights are drawn from the root.
POLICY_WEIGHTS, DRAFTER_WEIGHTS = 0, 1
# Sampling noise folds in the step, then the sequence's uid.
TRAIN_STREAM, EVAL_STREAM, GENERATE_STREAM, DRAFTER_STREAM = 3, 4, 5, 6
# The draw of a block drafter's anchors folds in the optimizer step.
DRAFTER_ANCHORS = 7
# New adapters (model.lora) are drawn from the root.
ADAPTER_WEIGHTS = 8
# Order of the training rows (prompts of RL steps, supervised solutions): seeds of grain.
ROLLOUT_STREAM, SFT_STREAM = 0, 1


def stream_key(seed: int, stream: int) -> jax.Array:
    """The root key of a stream; the generator is fixed, so that no JAX option changes its numbers."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)


def sequence_keys(seed: int, stream: int, step: int, uids: np.ndarray) -> np.ndarray:
    """Keys uint32[B, 2] of the sequences with `uids` [B], on the host."""
    step_key = jax.random.fold_in(stream_key(seed, stream), step)
    keys = jax.vmap(lambda uid: jax.random.key_data(jax.random.fold_in(step_key, uid)))(
        np.asarray(uids, np.uint32)
    )
    return np.asarray(keys)


def anchors_key(seed: int, step: jax.Array) -> jax.Array:
    """The key of the anchors of this optimizer step of a block drafter."""
    return jax.random.fold_in(stream_key(seed, DRAFTER_ANCHORS), step)


def environment_seed(seed: int, stream: int, step: int, prompt: int) -> int:
    """The seed of the environments of a prompt's answers, in a rollout of this stream and step."""
    return int(np.random.SeedSequence((seed, stream, step, prompt)).generate_state(1)[0])


def order_seed(seed: int, stream: int) -> int:
    """The seed of the order of the training rows."""
    return (seed * 2 + stream) % 2**32
