"""The noise: the right distribution, and values that depend on nothing but (key, position, token id)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.spec_decode import noise

PINNED = [0.547256, -0.795906, -0.058246, 2.451566]  # changing the noise would change every run


def keys_of(uids: np.ndarray, seed: int = 0, stream: int = 0, step: int = 0) -> jax.Array:
    return jnp.asarray(sequence_keys(seed, stream, step, uids))


@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_random123(key, counter, words):
    found = noise.threefry(
        tuple(jnp.uint32(word) for word in key), tuple(jnp.uint32(word) for word in counter)
    )
    assert tuple(int(word) for word in found) == words


def test_values_do_not_depend_on_vocabulary_batch_depth_or_sharding():
    # In a separate process, compiled as for users: with conftest's flags, a logarithm's rounding depends on its index.
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(here.parents[1]),
    }
    command = [sys.executable, "-c", "import test_noise; test_noise.compare_shapes()"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compare_shapes():
    """Asserts that noise is the same in other shapes and shards."""
    keys, positions = keys_of(np.arange(4), step=3), jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    whole = np.asarray(noise.gumbel(keys, positions, 96))
    np.testing.assert_array_equal(noise.gumbel(keys, positions, 50), whole[:, :, :50])
    np.testing.assert_array_equal(noise.gumbel(keys[2:3], positions[2:3, 1:], 96), whole[2:3, 1:])
    sharded = NamedSharding(meshes.make_mesh(1, 4), PartitionSpec(None, None, "model"))
    compiled = (
        jax.jit(lambda: noise.gumbel(keys, positions, 96), out_shardings=sharded).lower().compile()
    )
    np.testing.assert_array_equal(compiled(), whole)
    assert "[4,2,96]" not in compiled.as_text(), (
        "the noise is made in the vocabulary shard, never whole"
    )


def test_every_part_of_the_identity_changes_the_noise():
    uids = np.arange(3)
    keys = [keys_of(uids, *parts) for parts in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    words = {tuple(row) for block in keys for row in block.tolist()}
    assert len(words) == 12
    positions = jnp.array([[5, 6]] * 12, jnp.int32)
    values = np.asarray(noise.gumbel(jnp.concatenate(keys), positions, 500, jnp.float32)).reshape(
        24, 500
    )
    correlation = np.corrcoef(values) - np.eye(24)
    assert np.abs(correlation).max() < 5 / np.sqrt(500)


def test_values_of_the_noise_are_pinned():
    keys = keys_of(np.array([5]), 7, 2, 11)
    values = np.asarray(noise.gumbel(keys, jnp.array([[9]], jnp.int32), 4))[0, 0]
    np.testing.assert_allclose(values, PINNED, rtol=1e-5)


def test_the_law_is_gumbel():
    keys = keys_of(np.arange(500))
    values = np.sort(np.asarray(noise.gumbel(keys, jnp.full((500, 1), 3, jnp.int32), 4000)).ravel())
    n = values.size  # Kolmogorov-Smirnov at alpha 1e-4: finds a distribution function that is off by 0.002 (a scale of 1.01)
    cdf = np.exp(-np.exp(-values.astype(np.float64)))
    distance = max(np.max(np.arange(1, n + 1) / n - cdf), np.max(cdf - np.arange(n) / n))
    assert distance < 2.23 / np.sqrt(n)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_tails_are_finite_and_resolved_to_64_bits(x64, dtype):
    ends = jnp.array([0, 0, 1, 2**32 - 1], jnp.uint32), jnp.array([0, 1, 0, 2**32 - 1], jnp.uint32)
    values = np.asarray(noise.from_words(*ends, jnp.dtype(dtype)), np.float64)
    exact = -np.log([2.0**-65, 1.5 * 2.0**-64, 2.0**-32])
    np.testing.assert_allclose(values[:3], exact, rtol=1e-6)
    assert -4 < values[3] < -2.7


def test_both_precisions_give_the_same_noise(x64):
    keys, positions = keys_of(np.arange(3)), jnp.full((3, 1), 17, jnp.int32)
    single, double = (
        noise.gumbel(keys, positions, 1000, dtype) for dtype in (jnp.float32, jnp.float64)
    )
    np.testing.assert_allclose(single, double, rtol=1e-5, atol=2e-6)


def test_noise_that_is_drawn_at_once_is_that_of_its_positions(x64):
    keys, starts = keys_of(np.arange(4)), jnp.array([1, 6, 7, 30], jnp.int32)
    ahead = noise.drawn_whole(keys, starts, 3, 11, jnp.float64)
    for step in range(3):
        expected = noise.gumbel(keys, starts[:, None] + step, 11, jnp.float64)[:, 0]
        np.testing.assert_allclose(ahead.values[ahead.places(starts + step)], expected, rtol=1e-12)


def test_noise_ahead_is_that_of_its_positions_and_drawn_once(x64):
    """Rows advance by 0 to M positions a round, some finish; noise that was drawn before is reused unchanged."""
    rng, (B, M, vocab) = np.random.default_rng(0), (5, 4, 7)
    keys = keys_of(np.arange(B))
    starts, live = rng.integers(1, 30, B).astype(np.int32), np.ones(B, bool)
    ahead = noise.nothing_drawn(jnp.asarray(starts), M, vocab, jnp.float64)
    draw = jax.jit(noise.draw_ahead)
    marks = np.zeros((B, 100))  # how often a position was drawn
    for _ in range(12):
        before = np.asarray(ahead.values) + 1000.0  # marks reused values
        ahead = draw(
            ahead.replace(values=jnp.asarray(before)), keys, jnp.asarray(starts), jnp.asarray(live)
        )
        values = np.asarray(ahead.values)
        for row in np.flatnonzero(live):
            for position in range(starts[row], starts[row] + M):
                place = int(ahead.places(jnp.full(B, position, jnp.int32))[row])
                is_new = values[place, 0] < 500
                marks[row, position] += is_new
                found = values[place] - (0 if is_new else 1000 * round(values[place, 0] / 1000))
                expected = noise.gumbel(
                    keys[row : row + 1], jnp.array([[position]], jnp.int32), vocab, jnp.float64
                )
                np.testing.assert_allclose(found, expected[0, 0], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(
            np.asarray(ahead.ends)[live], starts[live] + M, "and no row that has ended is drawn"
        )
        for row in np.flatnonzero(~live):
            places = slice(row * M, row * M + M)
            np.testing.assert_array_equal(values[places], before[places])
        starts = starts + np.where(live, rng.integers(0, M + 1, B), 0).astype(np.int32)
        live &= rng.random(B) > 0.05
    assert marks.max() == 1 and marks.sum() > 60
