"""No two random streams of a run share numbers."""

from __future__ import annotations

import jax
import numpy as np

from tlt_jax import keys

STREAMS = (
    keys.TRAIN_STREAM,
    keys.EVAL_STREAM,
    keys.GENERATE_STREAM,
    keys.DRAFTER_STREAM,
    keys.POLICY_WEIGHTS,
    keys.DRAFTER_WEIGHTS,
    keys.DRAFTER_ANCHORS,
)


def words(key: jax.Array) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_no_two_streams_share_a_key():
    """Roots, anchors and sequences, for the first steps and two seeds."""
    found = []
    for seed in (0, 1):
        found += [words(keys.stream_key(seed, stream)) for stream in STREAMS]
        found += [words(keys.anchors_key(seed, step)) for step in range(8)]
        for stream in STREAMS[:4]:
            for step in range(3):
                found += map(tuple, keys.sequence_keys(seed, stream, step, np.arange(4)).tolist())
    assert len(set(found)) == len(found) > 100


def test_the_key_of_a_sequence_is_folded_together_one_number_at_a_time():
    """Stream, step and uid, with a fixed generator."""
    key = jax.random.key(5, impl="threefry2x32")
    for number in (keys.EVAL_STREAM, 7, 3):
        key = jax.random.fold_in(key, number)
    assert words(key) == tuple(keys.sequence_keys(5, keys.EVAL_STREAM, 7, np.array([3]))[0])
