"""Block drafters on a tiny policy: no kind, strategy or mesh changes a token, exactly in float64; rare near-ties in float32."""

from __future__ import annotations

import logging

import identity
import jax
import numpy as np
import pytest
import test_speculation as speculation
import tiny_engine as tiny

from tlt_jax.config.schema import Speculation
from tlt_jax.errors import ConfigError
from tlt_jax.keys import TRAIN_STREAM, sequence_keys
from tlt_jax.models import drafter as drafters
from tlt_jax.spec_decode.strategy import PLAIN, name

small_pool = tiny.small_pool
pytestmark = pytest.mark.usefixtures("small_pool")
IDS = speculation.IDS
KINDS = {
    "dflash": {"kind": "dflash", "block_size": 4},
    "causal": {"kind": "dflash", "block_size": 5, "causal": True, "captures": (0, 2)},
    "dspark": {"kind": "dspark", "block_size": 3},
    "embedding": {"kind": "dspark", "block_size": 3, "captures": (0, 1)},
    "some ids": {"kind": "dspark", "block_size": 4, "draft_vocab_size": len(IDS)},
    "long": {"kind": "dspark", "block_size": 8},
}


def drafter_of(kind, mesh, policy=tiny.MODEL, dtype="float64"):
    """A random drafter, whose heads of zeros are random too; the same on every mesh."""
    own = drafters.for_policy(policy, **KINDS[kind])
    params = drafters.init(own, mesh, jax.random.key(7), dtype, None if own.has_full_vocab else IDS)

    def filled(path, leaf):
        if not any(part in jax.tree_util.keystr(path) for part in ("markov", "confidence")):
            return leaf
        rows = (
            np.random.RandomState(3).randn(64, *leaf.shape[1:])
            if leaf.ndim
            else np.random.RandomState(3).randn()
        )
        return jax.device_put(
            np.asarray(rows[: leaf.shape[0]] if leaf.ndim else rows, dtype), leaf.sharding
        )

    return own, jax.tree_util.tree_map_with_path(filled, params)


def drafting(
    kind,
    strategies,
    data=1,
    model=1,
    dtype="float64",
    policy=tiny.MODEL,
    drafter="a directory",
    **rollout,
):
    """An engine with a block drafter that uses the strategies in turn, and the published weights."""
    plain = tiny.engine_of(data, model, dtype, policy, **rollout)
    own, params = drafter_of(kind, plain.mesh, policy, dtype)
    engine = tiny.with_drafter(plain, Speculation(drafter=drafter, strategies=strategies), own)
    engine.tuner = speculation.in_turn(
        [*map(name, engine.arms)] if drafter == "adaptive" else strategies
    )
    return engine, engine.publish(tiny.params_of(engine), params)


ONE, WIDE, MANY = ["2_1_3"], ["3_3_9"], ["1_2_2", "3_2_7"]
CASES = [
    ("dflash", WIDE, 1, 1, tiny.PLAIN), ("causal", MANY, 2, 1, tiny.PLAIN),
    ("dspark", WIDE, 2, 2, tiny.GREEDY), ("some ids", ["4_4_16"], 1, 2, tiny.NUCLEUS),
]  # fmt: skip
MORE = [
    ("dflash", ONE, 2, 1, tiny.GREEDY), ("dflash", MANY, 1, 2, tiny.COLD), ("causal", ["4_1_5"], 1, 1, tiny.NUCLEUS),
    ("dspark", MANY, 1, 1, tiny.GREEDY), ("dspark", WIDE, 2, 2, tiny.PLAIN),
    ("dspark", ONE, 1, 1, speculation.MILD), ("some ids", WIDE, 1, 1, tiny.PLAIN), ("some ids", ONE, 2, 1, tiny.COLD),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, strategies, data, model, setting",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)],
)
def test_block_drafts_change_no_token(x64, kind, strategies, data, model, setting):
    buckets = {"batch_buckets": [1, 5], "slots": 5, "cache_buckets": [32]}
    engine, weights = drafting(kind, strategies, data, model, chunk=3, **buckets)
    speculation.accepted(engine, weights, setting)


@pytest.mark.parametrize("kind", ["some ids", pytest.param("dflash", marks=pytest.mark.matrix)])
def test_trees_of_blocks_and_ngrams_change_no_token(x64, kind):
    engine, weights = drafting(
        kind,
        ["2_1_3", "3_2_7"],
        chunk=3,
        drafter="adaptive",
        batch_buckets=[12],
        cache_buckets=[32],
    )
    speculation.accepted(engine, weights, tiny.PLAIN)
    assert {arm.drafter for arm in engine.arms} == {"ngram", "learned", "merged"}


def test_float32_block_drafts_equal_plain_decoding_except_for_rare_near_ties():
    prompts, limit, samples = tiny.LONG_PROMPTS, tiny.LONG_LIMIT, 2
    keys = sequence_keys(0, TRAIN_STREAM, 0, np.arange(samples * len(prompts)))
    shape = {
        "dtype": "float32", "policy": tiny.LONG, "max_new_tokens": limit, "slots": len(keys), "batch_buckets": [len(keys)],
        "cache_buckets": [220],
    }  # fmt: skip
    plain = tiny.engine_of(chunk=32, **shape)
    params = tiny.params_of(plain)
    pairs = [(plain, plain.publish(params))]
    pairs.append(drafting("embedding", ["3_2_7", "2_1_3"], chunk=6, **shape))
    results = [
        tiny.roll_out(
            engine, weights, prompts, samples, tiny.PLAIN, limit, stream=TRAIN_STREAM, step=0, eos_ids=(), stops=()
        )
        for engine, weights in pairs
    ]  # fmt: skip
    used = [decision.strategy for decision in results[1].decisions]
    assert len(set(used)) == 3 and PLAIN in used
    assert sum(int(measured.hits.sum()) for measured in results[1].measurements) > 200
    law = identity.Law(
        identity.policy(params, tiny.LONG), prompts, [limit] * len(prompts), keys, tiny.PLAIN
    )
    verdict = identity.compare(law, *(result.completions for result in results))
    assert verdict.is_same, str(verdict)


def test_answers_that_end_with_the_positions_of_the_model_are_those_of_plain_decoding(x64):
    """The blocks of their last rounds reach beyond the last position, and beyond the bucket."""
    most = tiny.MODEL.max_positions
    prompts, limits = tiny.PROMPTS[:3], [most - len(prompt) for prompt in tiny.PROMPTS[:3]]
    shape = {"max_new_tokens": most, "slots": 3, "batch_buckets": [3], "cache_buckets": [most]}
    plain = tiny.engine_of(chunk=8, **shape)
    pairs = (
        (plain, plain.publish(tiny.params_of(plain))),
        drafting("long", ["8_1_9", "5_2_9"], chunk=2, **shape),
    )
    texts = [
        tiny.answers(tiny.roll_out(
            *pair, prompts, 1, tiny.PLAIN, limits, stream=TRAIN_STREAM, step=0, eos_ids=(), stops=()
        ))
        for pair in pairs
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert [len(tokens) for _, tokens, _ in texts[0]] == limits


def test_strategies_deeper_than_a_block_are_left_out_or_refused(caplog):
    with caplog.at_level(logging.WARNING):
        engine, _ = drafting("dspark", ["3_1_4", "7_1_8", "6_4_16"], dtype="float32")
    assert [*map(name, engine.arms)] == ["3_1_4"]
    assert "7_1_8, 6_4_16: deeper than the drafter drafts in a round, so left out" in caplog.text
    engine, _ = drafting("dspark", ["3_1_4", "7_1_8"], drafter="adaptive", dtype="float32")
    assert [*map(name, engine.arms)] == ["ngram:3_1_4", "ngram:7_1_8", "learned:3_1_4"]
    with pytest.raises(
        ConfigError, match="7_1_8: the drafter drafts at most 3 tokens a round: use depth 3 or less"
    ):
        drafting("dspark", ["7_1_8"], dtype="float32")
