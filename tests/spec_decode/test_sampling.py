"""Sampling: filters against a sort, the exact law of the chosen token, ties, and the log-probs that are recorded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from jax.sharding import NamedSharding, PartitionSpec

from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.spec_decode import noise, sampling
from tlt_jax.spec_decode.decoding_params import Sampling

SETTINGS = [  # pairwise over temperature, top-k, top-p
    Sampling(0.5, 0, 1.0), Sampling(0.5, 3, 0.8), Sampling(0.5, 6, 0.5), Sampling(1.0, 0, 0.8), Sampling(1.0, 3, 0.5),
    Sampling(1.0, 6, 1.0), Sampling(2.0, 0, 0.5), Sampling(2.0, 3, 1.0), Sampling(2.0, 6, 0.8), Sampling(1.0, 0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_filter_keeps_what_a_sort_keeps(x64, setting):
    logits = np.round(
        np.random.default_rng(0).normal(size=(40, 11)), 1
    )  # rounded, so that there are ties
    logits[0] = [0.0, -0.0, 0.0, -1.0, 2.0, 0.0, -0.0, 1.0, -3.0, 0.5, 0.0]
    found = sampling.filter(sampling.scale(jnp.asarray(logits), setting), setting)
    for row, exact in zip(np.asarray(found), logits, strict=True):
        np.testing.assert_array_equal(
            row, references.filtered(exact, setting.temperature, setting.top_k, setting.top_p)
        )


def test_filter_of_one_precision_keeps_as_many_as_asked():
    logits = jax.random.normal(jax.random.key(0), (5, 1000))
    kept = jnp.isfinite(sampling.filter(logits, Sampling(1.0, 37, 1.0))).sum(-1)
    np.testing.assert_array_equal(kept, 37)
    nucleus = jnp.isfinite(sampling.filter(logits, Sampling(1.0, 0, 0.9)))
    mass = (jnp.where(nucleus, jax.nn.softmax(logits), 0)).sum(-1)
    smallest = jnp.where(nucleus, jax.nn.softmax(logits), 1).min(-1)
    assert ((mass >= 0.9 - 1e-5) & (mass - smallest < 0.9 + 1e-5)).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_follow_the_exact_law(setting):
    n, logits = 200_000, np.random.default_rng(1).normal(size=8).astype(np.float32) * 1.5
    keys, positions = (
        jnp.asarray(sequence_keys(3, 0, 0, np.arange(n // 100))),
        jnp.arange(100, dtype=jnp.int32),
    )

    @jax.jit
    def tokens(keys):
        gumbel = noise.gumbel(keys, jnp.broadcast_to(positions, (len(keys), 100)), 8)
        return sampling.choose(
            sampling.filter(sampling.scale(jnp.asarray(logits), setting), setting) + gumbel
        )

    counts = np.bincount(np.asarray(tokens(keys)).ravel(), minlength=8)
    law = references.softmax(
        references.filtered(logits, setting.temperature, setting.top_k, setting.top_p)
    )
    assert counts[law == 0].sum() == 0
    expected = n * law[law > 0]
    statistic = ((counts[law > 0] - expected) ** 2 / expected).sum()
    # Chi-square, 10 tests at alpha 1e-5 each (45.3 for 7 degrees of freedom). With n = 200,000 a total-variation distance of
    # 0.01 gives a noncentrality of at least 4 n TV^2 = 80: it is found with probability 0.99; 0.005 would be missed.
    assert statistic < 45.3
    assert 0.5 * np.abs(counts / n - law).sum() < 0.01


def test_ties_go_to_the_lowest_id_whatever_the_sharding():
    values = np.random.default_rng(0).integers(0, 3, size=(64, 1, 32)).astype(np.float32)
    values[0, 0] = -np.inf
    values[0, 0, 9] = 0.0
    exact = values.argmax(-1)
    np.testing.assert_array_equal(sampling.choose(jnp.asarray(values)), exact)
    placed = jax.device_put(
        values, NamedSharding(meshes.make_mesh(1, 4), PartitionSpec(None, None, "model"))
    )
    choose = jax.jit(sampling.choose).lower(placed).compile()
    np.testing.assert_array_equal(choose(placed), exact)
    assert "all-gather" not in choose.as_text(), "only maxima cross the shards"


def test_sharded_filters_and_logprobs_equal_whole_ones():
    setting, logits = Sampling(0.7, 20, 0.9), jax.random.normal(jax.random.key(1), (6, 1, 64))
    tokens = jnp.arange(6, dtype=jnp.int32)[:, None] * 11

    def both(logits):
        scaled = sampling.scale(logits, setting)
        return jnp.isfinite(sampling.filter(scaled, setting)), sampling.logprob(scaled, tokens)

    placed = jax.device_put(
        logits, NamedSharding(meshes.make_mesh(1, 4), PartitionSpec(None, None, "model"))
    )
    compiled = jax.jit(both).lower(placed).compile()
    kept, logprobs = compiled(placed)
    np.testing.assert_array_equal(kept, both(logits)[0])
    np.testing.assert_allclose(logprobs, both(logits)[1], rtol=1e-6)
    assert "[6,1,64]" not in compiled.as_text(), "logits are never gathered"


def test_recorded_logprobs_ignore_the_filters():
    logits = np.random.default_rng(2).normal(size=(3, 9)).astype(np.float32)
    tokens = jnp.array([0, 4, 8], jnp.int32)
    for setting in (Sampling(0.0), Sampling(0.6, 2, 0.5)):
        found = sampling.logprob(sampling.scale(jnp.asarray(logits), setting), tokens)
        exact = np.log([references.softmax(row / (setting.temperature or 1)) for row in logits])
        np.testing.assert_allclose(found, exact[np.arange(3), tokens], rtol=1e-5)


def test_greedy_ignores_filters():
    logits = jnp.array([[0.1, 3.0, 3.0]])
    assert sampling.choose(sampling.filter(logits, Sampling(0.0, 1, 0.1)))[0] == 1


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_logits_that_no_token_can_be_drawn_from_are_noticed(temperature):
    low = np.finfo(np.float32).min
    rows = {
        (1.0, 2.0, low): False, (-50.0, 80.0, low): False, (-np.inf, 0.0, low): False, (-1e4, -1e4, low): False,
        (np.nan, 1.0, 2.0): True, (1.0, np.nan, low): True, (np.inf, 1.0, 2.0): True, (-np.inf, -np.inf, low): True,
        (-np.inf, -np.inf, -np.inf): True, (np.nan, np.nan, np.nan): True, (-np.nan, 1.0, 0.0): True,
    }  # fmt: skip
    setting = Sampling(temperature, 2, 0.9)
    scaled = sampling.scale(jnp.array(list(rows), jnp.float32), setting)
    tokens = sampling.choose(sampling.filter(scaled, setting))
    broken = sampling.is_broken(scaled, tokens, sampling.logprob(scaled, tokens))
    assert broken.tolist() == list(rows.values())
    assert all(
        token < 2 for token, bad in zip(tokens.tolist(), rows.values(), strict=True) if not bad
    )
