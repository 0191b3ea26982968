"""Answers have the policy's distribution, which is enumerated: a G-test in float64, and one in bfloat16.

A G-test of n answers over c possible ones rejects at probability 1e-3 when they are right. Its power is stated as the
effect size w, w^2 = sum (q - p)^2 / p, and the total variation of an error of this size in a random direction: nine of
ten such errors are rejected, as `power` measures. Keys are fixed, so every run has the same answers.
"""

from __future__ import annotations

from collections import Counter

import identity
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import rounds
import toys

from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.models import architecture
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.spec_decode.decode import Decoder
from tlt_jax.spec_decode.interface import NO_DRAFTER, DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.tree_drafter import Coupling

ALPHA = 1e-3


def g_test(counts: np.ndarray, probs: np.ndarray) -> float:
    """Probability of a G as large or larger when the counts are draws from these probabilities; rows at once."""
    expected, cells = counts.sum(axis=-1, keepdims=True) * probs, probs > 0
    assert not counts[..., ~cells].any(), "an answer that is impossible"
    assert expected[..., cells].min() > 5, "too few answers for the test's own distribution"
    terms = counts * np.log(np.where(counts > 0, counts / np.where(cells, expected, 1), 1))
    return np.asarray(jax.scipy.stats.chi2.sf(2 * terms.sum(axis=-1), cells.sum() - 1))


def power(probs: np.ndarray, n: int, effect: float, draws: int = 400) -> tuple[float, float]:
    """Share of wrong distributions of this effect size that n answers give away, and their mean total variation."""
    random, probs = np.random.default_rng(0), probs[probs > 0]
    way = random.normal(size=(draws, len(probs)))
    way -= (way * probs).sum(axis=1, keepdims=True)
    way /= np.sqrt((way**2 * probs).sum(axis=1, keepdims=True))
    wrong = probs * (1 + effect * way)
    assert wrong.min() > 0
    found = (
        g_test(np.array([random.multinomial(n, one / one.sum()) for one in wrong]), probs) < ALPHA
    )
    return float(found.mean()), float(np.abs(wrong - probs).sum(axis=1).mean() / 2)


def counted(answers: list[list[int]], possible: list[tuple[int, ...]]) -> np.ndarray:
    """How often each possible answer occurred."""
    counts = Counter(map(tuple, answers))
    assert counts.keys() <= set(possible)
    return np.array([counts[answer] for answer in possible])


def keys_of(count: int, step: int = 0) -> jax.Array:
    return jnp.asarray(sequence_keys(5, 0, step, np.arange(count)))


V, PROMPT, LIMIT, EOS, MANY = 4, [2, 1], 3, 0, 2**17
TABLE = toys.table(V, seed=1, scale=0.7)
GUESSES = {"noisy": TABLE + toys.table(V, seed=2, scale=0.5), "wrong": -TABLE}
TREE = Strategy(depth=2, topk=2, nodes=6)


def enumerated(
    sampling: Sampling, answer: tuple[int, ...] = (), prob: float = 1.0
) -> dict[tuple[int, ...], float]:
    """Probability of every answer with this prefix: the product of its tokens' probabilities."""
    if len(answer) == LIMIT or EOS in answer:
        return {answer: prob}
    logits = toys.table_logits(TABLE, [*PROMPT, *answer])
    probs = references.softmax(
        references.filtered(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    )
    return {
        whole: p
        for v in range(V)
        for whole, p in enumerated(sampling, (*answer, v), prob * float(probs[v])).items()
    }


@pytest.mark.parametrize(
    "sampling, coupling, effect",
    [
        (Sampling(1.0), Coupling(0.75), 0.021),
        pytest.param(Sampling(0.7, 3, 0.9), Coupling(0.0), 0.019, marks=pytest.mark.matrix),
    ],
)
def test_speculation_has_the_exact_distribution_of_answers(x64, sampling, coupling, effect):
    """n = 131,072 answers, 40 possible ones: w = 0.021, a total variation of 0.8 %. With top-k and top-p w = 0.019."""
    exact = enumerated(sampling)
    probs = np.array(list(exact.values()))
    assert len(exact) == 40 and abs(probs.sum() - 1) < 1e-12
    seen, distance = power(probs, MANY, effect)
    assert seen >= 0.9 and distance < 0.0085, f"{seen} of the errors, {distance} of total variation"
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    target, rules = toys.table_target(group, V), DecodingParams(sampling, (EOS,))
    plain = rounds.program(Decoder(target, NO_DRAFTER, rules, PLAIN), [PROMPT], LIMIT)
    drafting = rounds.program(
        Decoder(target, toys.table_drafter(coupling)(group, V), rules, TREE), [PROMPT], LIMIT
    )
    expected = plain(toys.weights(TABLE, None), keys_of(MANY))[1]
    hits = 0
    for guess in GUESSES.values():
        report = drafting(toys.weights(TABLE, guess), keys_of(MANY))[1]
        np.testing.assert_array_equal(report.counts, expected.counts)
        np.testing.assert_array_equal(report.tokens[:, :LIMIT], expected.tokens, "key by key")
        hits += np.asarray(report.stats.hits).sum(axis=1)
    assert (hits.sum(axis=1) > MANY / 10).all() and hits[:, 1].all(), (
        f"every depth, and second children too: {hits}"
    )
    assert g_test(counted(rounds.answers(expected), list(exact)), probs) > ALPHA


POLICY = ModelConfig("qwen2", 8, 16, 2, 4, 2, 4, 32, 64, qkv_bias=True, tied=True, init_std=0.2)
BFLOAT_PROMPT = [3, 1, 4, 1]  # short, so that no drafter has to catch up row by row
BATCH, BATCHES = 2**13, 5


def test_in_bfloat16_speculation_has_the_distribution_of_one_forward():
    """n = 40,960 answers of two tokens, 64 possible ones: w = 0.043, a total variation of 1.7 %.

    In bfloat16, programs of other shapes round differently, so tokens may differ from plain decoding's; this tests the
    distribution. The probabilities are those of the training forward in bfloat16, which rounds differently too.
    """
    params = architecture.init(POLICY, meshes.make_mesh(1, 1), jax.random.key(0), "bfloat16")
    rows = np.array([[*BFLOAT_PROMPT, v] for v in range(8)], np.int32)
    logits = np.asarray(identity.forward(params, rows, POLICY, "bfloat16"), np.float64)
    first, second = (
        references.softmax(logits[0, -2]),
        [references.softmax(row) for row in logits[:, -1]],
    )
    probs = (first[:, None] * np.array(second)).ravel()
    seen, distance = power(probs, BATCH * BATCHES, 0.043)
    assert seen >= 0.9 and distance < 0.0177, f"{seen} of the errors, {distance} of total variation"
    decoder, weights = rounds.tiny(
        POLICY, "eagle", "bfloat16", DecodingParams(Sampling(1.0)), Strategy(2, 2, 5)
    )
    run = rounds.program(decoder, [BFLOAT_PROMPT], 2)
    counts, accepted = np.zeros(64, int), 0
    for batch in range(BATCHES):
        _, report = run(weights, keys_of(BATCH, step=batch))
        counts += counted(rounds.answers(report), [(a, b) for a in range(8) for b in range(8)])
        accepted += int(report.stats.hits.sum())
    assert accepted > BATCH * BATCHES / 10, "drafted tokens are among the answers"
    assert g_test(counts, probs) > ALPHA
