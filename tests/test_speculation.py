"""Speculation on a tiny policy: no drafter, strategy, mesh or switch changes a token, exactly, in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
import test_engine as tiny

from tlt_jax.config import Speculation
from tlt_jax.engine import TRAIN_STREAM, Engine
from tlt_jax.models import eagle
from tlt_jax.spec_decode.tree import PLAIN

compile_cache = tiny.compile_cache
IDS = np.array([0, 1, 2, 3, 5, 7, 8, 11, 13, 14, 20, 21, 30, 36])
KINDS = {
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3"},
    "some ids": {"kind": "eagle3", "draft_vocab_size": len(IDS), "fc_norm": False, "norm_output": False},
}


def speculating(drafter: str, strategies: list[str], tuner: str, data: int, model: int, **rollout) -> tuple[Engine, list]:
    """An engine with a random drafter (or n-grams), and the published weights."""
    plain = tiny.engine_of(data, model, **rollout)
    name = drafter if drafter == "ngram" else "a directory"
    settings = Speculation(drafter=name, strategies=strategies, tuner=tuner, pool=64)
    config = replace(plain.config, speculation=settings)
    mesh, own, params = plain.mesh, None, None
    if drafter != "ngram":
        own = eagle.for_policy(tiny.MODEL, **KINDS[drafter])
        ids = None if own.whole else IDS
        params = eagle.init(own, mesh, jax.random.key(7), "float64", ids)
    engine = Engine(config, tiny.MODEL, mesh, tiny.STOPS, own)
    return engine, engine.publish(tiny.params_of(engine), params)


FACTORS = ("drafter", "strategies", "data", "model", "slots", "chunk", "setting")
ONE, WIDE, MANY = ["2_1_3"], ["3_3_9"], ["1_2_2", "3_1_4", "3_2_7"]
CASES = [  # every pair of values of these factors occurs
    ("eagle", ONE, 1, 1, 0, 1, tiny.PLAIN), ("eagle", WIDE, 2, 2, 5, 3, tiny.COLD), ("eagle", MANY, 1, 2, 5, 16, tiny.NUCLEUS),
    ("eagle", MANY, 2, 1, 0, 3, tiny.GREEDY), ("eagle", MANY, 1, 1, 0, 1, tiny.COLD),
    ("eagle3", ONE, 2, 2, 5, 16, tiny.GREEDY), ("eagle3", WIDE, 1, 1, 0, 3, tiny.NUCLEUS),
    ("eagle3", MANY, 2, 1, 5, 1, tiny.COLD), ("eagle3", MANY, 1, 2, 0, 3, tiny.PLAIN),
    ("some ids", ONE, 1, 2, 0, 3, tiny.COLD), ("some ids", WIDE, 2, 1, 5, 16, tiny.PLAIN),
    ("some ids", MANY, 1, 1, 5, 1, tiny.GREEDY), ("some ids", ONE, 2, 2, 0, 1, tiny.NUCLEUS),
    ("ngram", ONE, 2, 1, 5, 3, tiny.NUCLEUS), ("ngram", WIDE, 1, 2, 0, 1, tiny.GREEDY), ("ngram", MANY, 2, 2, 0, 16, tiny.COLD),
    ("ngram", MANY, 1, 1, 5, 1, tiny.PLAIN), ("ngram", WIDE, 1, 2, 0, 16, tiny.PLAIN),
]  # fmt: skip


def test_the_cases_cover_every_pair_of_factors():
    def key(value):
        return tuple(value) if isinstance(value, list) else value

    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        seen = {(key(case[a]), key(case[b])) for case in CASES}
        wanted = set(itertools.product({key(case[a]) for case in CASES}, {key(case[b]) for case in CASES}))
        assert seen == wanted, f"{FACTORS[a]}, {FACTORS[b]}: {wanted - seen}"


@pytest.mark.parametrize("drafter, strategies, data, model, slots, chunk, setting", CASES)
def test_speculation_changes_no_token(x64, drafter, strategies, data, model, slots, chunk, setting):
    tuner = "beg_mab" if strategies is MANY else "fixed"  # the bandit tries every arm, plain decoding too, chunk by chunk
    engine, weights = speculating(drafter, strategies, tuner, data, model, slots=slots, chunk=chunk, cache_buckets=[32])
    result = engine.rollout(
        weights, tiny.prompts_of(), tiny.SAMPLES, setting, tiny.LIMIT, stream=TRAIN_STREAM, step=0
    )
    expected, logprobs = tiny.reference(setting)
    assert tiny.answers(result) == expected
    for one, logp in zip(result.completions, logprobs, strict=True):
        np.testing.assert_allclose(one.logprobs, logp, atol=1e-9)
    speculated = [measured for measured in result.measurements if measured.strategy != PLAIN]
    assert speculated, "the drafter was used"
    for measured in speculated:
        accepted = int(measured.hits.sum())
        assert measured.tokens == accepted + measured.row_rounds, "accept length = (accepted + rounds) / rounds"
