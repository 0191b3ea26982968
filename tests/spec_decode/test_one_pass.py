"""Reductions in one pass: their tokens, log-probs and largest values against the forms that read a vocabulary several times."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pairwise import marked

from tlt_jax.distributed import mesh as meshes
from tlt_jax.spec_decode import decode, one_pass, sampling, tree_drafter
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import parse
from tlt_jax.spec_decode.tree_drafter import Coupling

PADDING = np.finfo(np.float32).min


def values(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Logits with ties, padding, and rows that have infinities, NaN, or nothing but padding or -inf."""
    rng = np.random.default_rng(seed)
    found = np.round(rng.normal(size=(rows, 3, vocab)), 1).astype(np.float32)
    found[..., vocab - 7 :] = PADDING
    found[0, 0], found[0, 0, 5] = -np.inf, 1.0
    found[1, 1, 3], found[2, 2, 9] = np.nan, np.inf
    found[3, 0], found[4, 1], found[5, 2] = -np.inf, PADDING, 0.5
    found[6, :, vocab // 2 :] = -np.inf
    return found


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("vocab", [40, 512, 640, 1536])
def test_a_choice_is_that_of_several_passes(vocab, is_sharded):
    scaled = jnp.asarray(values(40, vocab))
    noise = jnp.asarray(np.round(np.random.default_rng(1).gumbel(size=scaled.shape), 1), "float32")
    for perturbed in (scaled, scaled + noise, jnp.where(scaled > 0, scaled + noise, -jnp.inf)):
        choose = jax.jit(one_pass.choose, static_argnums=2)
        tokens, chosen, total = choose(scaled, perturbed, is_sharded)
        exact = sampling.choose(perturbed)
        logprobs, is_broken = sampling.logprob(scaled, exact)
        found_broken = ~jnp.isfinite(chosen - total) | (chosen < sampling.LEAST)
        np.testing.assert_array_equal(found_broken, is_broken)
        assert 4 <= is_broken.sum() <= 10 and ((tokens >= 0) & (tokens < vocab)).all()
        kept = ~is_broken
        np.testing.assert_array_equal(tokens[kept], exact[kept])
        np.testing.assert_allclose((chosen - total)[kept], logprobs[kept], rtol=0, atol=4e-6)


def test_a_choice_from_shards_reduces_over_them_and_gathers_nothing():
    scaled = jnp.asarray(values(8, 2048, seed=2))
    placed = jax.device_put(
        scaled, NamedSharding(meshes.make_mesh(1, 4), PartitionSpec(None, None, "model"))
    )
    choose = jax.jit(partial(one_pass.choose, is_sharded=True))
    compiled = choose.lower(placed, placed).compile()
    for one, whole in zip(compiled(placed, placed), choose(scaled, scaled), strict=True):
        np.testing.assert_allclose(one, whole, rtol=1e-6)
    text = compiled.as_text()
    assert "all-gather" not in text and "all-reduce" in text


@pytest.mark.parametrize("vocab", [8, 100, 512, 1536])
@pytest.mark.parametrize("k", marked([([k], k in (1, 3, 8)) for k in (1, 2, 3, 4, 5, 8)]))
def test_the_largest_values_are_those_of_top_k(vocab, k):
    array = jnp.asarray(values(20, vocab, seed=3)) if vocab > 8 else jnp.ones((2, 3, 8))
    best, places, total = jax.jit(one_pass.top_k, static_argnums=1)(array, k)
    exact, wanted = jax.lax.top_k(array, k)
    is_number = ~jnp.isnan(array).any(axis=-1)
    np.testing.assert_array_equal(best[is_number], exact[is_number])
    np.testing.assert_array_equal(places[is_number], wanted[is_number])
    sums = jax.nn.logsumexp(array, axis=-1)
    np.testing.assert_array_equal(jnp.isnan(total), jnp.isnan(sums))
    np.testing.assert_allclose(total[is_number], sums[is_number], rtol=0, atol=4e-6)
    assert ((places >= 0) & (places < vocab)).all()


def test_largest_values_of_shards_are_those_of_the_whole():
    array, mesh = jnp.asarray(values(8, 2048, seed=4)), meshes.make_mesh(1, 4)
    placed = jax.device_put(array, NamedSharding(mesh, PartitionSpec(None, None, "model")))

    def whole(found):
        everywhere = NamedSharding(mesh, PartitionSpec())
        return [jax.lax.with_sharding_constraint(one, everywhere) for one in found]

    compiled = jax.jit(lambda x: one_pass.top_k(x, 4, whole)).lower(placed).compile()
    best, places, total = compiled(placed)
    exact = one_pass.top_k(array, 4)
    is_number = np.asarray(~jnp.isnan(array).any(axis=-1))
    np.testing.assert_array_equal(np.asarray(best)[is_number], exact[0][is_number])
    np.testing.assert_array_equal(np.asarray(places)[is_number], exact[1][is_number])
    np.testing.assert_allclose(np.asarray(total)[is_number], exact[2][is_number], rtol=1e-6)
    assert "f32[8,3,2048]" not in compiled.as_text(), "values are never gathered"


@pytest.mark.parametrize("with_noise", [False, True])
def test_children_in_one_pass_are_those_of_two_softmaxes(with_noise):
    rng = np.random.default_rng(5)
    logits = jnp.asarray(values(12, 512, seed=5) + rng.normal(size=(12, 3, 512)), "float32")
    noise = jnp.asarray(rng.gumbel(size=(12, 1, 512)), "float32") if with_noise else None
    ids = jnp.asarray(rng.permutation(2000)[:512].astype(np.int32))
    rule = {"coupling": Coupling(0.75, 1.5), "temperature": 0.8, "k": 4}
    tokens, scores = tree_drafter.score_children(logits, noise, ids, **rule, in_one_pass=True)
    exact, wanted = tree_drafter.score_children(logits, noise, ids, **rule)
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)
    counted = np.asarray(wanted > -np.inf)
    assert 100 < counted.sum() < counted.size
    np.testing.assert_array_equal(np.asarray(tokens)[counted], np.asarray(exact)[counted])


def test_nodes_choose_at_once_up_to_the_batch_of_the_page():
    """8_4_48 of a 7B policy: 2 (N - M) rows against 100 MB a level; with a filter 5 (N - M) against 150."""

    def most(rule: Sampling) -> int:
        params, target = DecodingParams(rule), SimpleNamespace(choose=one_pass.choose, vocab=152064)
        decoder = decode.Decoder(target, None, params, parse("8_4_48"))
        states = [SimpleNamespace(roots=np.zeros(batch)) for batch in range(1, 40)]
        return sum(decode.chooses_at_once(decoder, state) for state in states)

    assert most(Sampling()) == 16 and most(Sampling(top_p=0.9)) == 10 == most(Sampling(top_k=5))
