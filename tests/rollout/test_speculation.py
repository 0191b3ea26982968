"""Rollouts of a tiny policy: no drafter, strategy, mesh, shape or switch changes a token, exactly in float64.

In float32 tokens are equal except for rare near-ties. Policies with unusual layers: test_unusual_policies.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import identity
import jax
import numpy as np
import pytest
import tiny_engine as tiny

from tlt_jax.config.schema import Speculation
from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.drafter import (
    recipe as drafter_recipe,
    update as drafter_update,
)
from tlt_jax.drafter.recipe import DrafterRecipe
from tlt_jax.errors import ConfigError
from tlt_jax.keys import TRAIN_STREAM, sequence_keys
from tlt_jax.models import (
    architecture,
    drafter as drafters,
    params as trees,
)
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.optimizer import Adam
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name
from tlt_jax.tuner import interface
from tlt_jax.tuner.interface import Choice, Tuner

small_pool = tiny.small_pool
pytestmark = pytest.mark.usefixtures("small_pool")
IDS = np.array([0, 1, 2, 3, 5, 7, 8, 11, 13, 14, 20, 21, 30, 36])
KINDS = {
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3"},
    "some ids": {
        "kind": "eagle3",
        "draft_vocab_size": len(IDS),
        "fc_norm": False,
        "norm_output": False,
    },
    "dflash": {"kind": "dflash", "block_size": 4},
    "causal": {"kind": "dflash", "block_size": 5, "causal": True, "captures": (0, 2)},
    "dflash2": {"kind": "dflash2", "block_size": 5, "selector_top_k": 6},
    "dspark": {"kind": "dspark", "block_size": 3},
    "embedding": {"kind": "dspark", "block_size": 3, "captures": (0, 1)},
    "block of some ids": {"kind": "dspark", "block_size": 4, "draft_vocab_size": len(IDS)},
    "long": {"kind": "dspark", "block_size": 8},
    "trained": {"kind": "eagle3"},
    "adversary": {"kind": "eagle3"},
}
UPDATES, CERTAIN = 60, 20.0


@cache
def trained() -> drafters.DrafterParams:
    """A drafter after a few dozen updates towards the policy's distribution on random texts; on the host."""
    mesh, own = make_mesh(1, 1), drafters.for_policy(tiny.MODEL, **KINDS["trained"])
    recipe = DrafterRecipe(
        tiny.MODEL, own, mesh, Adam(2e-2, UPDATES), 3, param_dtype="float64", compute_dtype="float64",
        logits_chunk=128, attention_block=32,
    )  # fmt: skip
    policy = architecture.init(tiny.MODEL, mesh, jax.random.key(0), "float64")
    state = drafter_recipe.create(drafter_of("eagle3", mesh), recipe)
    random = np.random.default_rng(0)
    ones = np.ones((8, 32), np.int32)
    for _ in range(UPDATES):
        texts = random.integers(0, tiny.MODEL.vocab_size, ones.shape, np.int32)
        positions = np.arange(32, dtype=np.int32) * ones
        rows = PackedRows(texts, positions, ones, is_answer=ones > 0)
        state, _ = drafter_update.program(recipe)(state, policy, drafter_update.on_mesh(rows, mesh))
    return jax.device_get(state.params)


def filled(dtype, path, leaf):
    """What of block drafters changes nothing at first is random too; the same on every mesh."""
    if not any(part in jax.tree_util.keystr(path) for part in ("markov", "confidence", "conv")):
        return leaf
    random = np.random.RandomState(3)
    rows = random.randn(64, *leaf.shape[1:])[: leaf.shape[0]] if leaf.ndim else random.randn()
    return jax.device_put(np.asarray(rows, dtype), leaf.sharding)


def drafter_of(
    drafter: str, mesh: jax.sharding.Mesh, policy: ModelConfig = tiny.MODEL, dtype: str = "float64"
):
    """The weights of a drafter: random; trained; or trained, but preferring the policy's least likely tokens."""
    own = drafters.for_policy(policy, **KINDS[drafter])
    if drafter not in ("trained", "adversary"):
        ids = None if own.has_full_vocab else IDS
        params = drafters.init(own, make_mesh(1, 1), jax.random.key(7), dtype, ids)
        params = jax.tree_util.tree_map_with_path(partial(filled, dtype), params)
    else:
        params = trained()
    if drafter == "adversary":
        params = params.replace(final_norm=-CERTAIN * params.final_norm)
    return tiny.placed(params, drafters.abstract(own, mesh, "train", dtype))


def speculating(
    drafter: str, strategies: list[str], data: int = 1, model: int = 1, dtype: str = "float64",
    policy: ModelConfig = tiny.MODEL, captures_states: bool = False, adaptive: bool = False, **rollout,
) -> tuple[Engine, list]:  # fmt: skip
    """An engine with a drafter (or "none") that uses the strategies in turn, and the published weights."""
    plain, own, params = tiny.engine_of(data, model, dtype, policy, **rollout), None, None
    if drafter == "none":
        return plain, plain.publish(tiny.params_of(plain))
    source = "adaptive" if adaptive else drafter if drafter == "ngram" else "a directory"
    if drafter != "ngram":
        own = drafters.for_policy(policy, **KINDS[drafter])
        params = drafter_of(drafter, plain.mesh, policy, dtype)
    settings = Speculation(drafter=source, strategies=strategies)
    engine = tiny.with_drafter(plain, settings, own, captures_states)
    engine.tuner = in_turn([*engine.arms, *[PLAIN] * (len(engine.arms) > 1)])
    return engine, engine.publish(tiny.params_of(engine), params)


MILD = Sampling(0.6)
NO, ONE, WIDE, MANY = [], ["2_1_3"], ["3_3_9"], ["1_2_2", "3_2_7"]
# Drafter, strategies, data groups, devices of one, slots, rounds of a chunk, sampling.
GATE = [  # every mesh, kind of drafter and sampling
    ("none", NO, 1, 1, 5, 1, tiny.NUCLEUS), ("none", NO, 1, 2, 5, 16, tiny.GREEDY), ("none", NO, 2, 1, 1, 1, tiny.PLAIN),
    ("none", NO, 2, 2, 0, 16, tiny.COLD), ("none", NO, 4, 1, 1, 16, tiny.NUCLEUS), ("none", NO, 4, 2, 5, 3, tiny.PLAIN),
    ("eagle", WIDE, 1, 1, 5, 16, tiny.COLD), ("eagle3", MANY, 1, 2, 5, 3, tiny.PLAIN),
    ("some ids", ONE, 1, 2, 0, 16, MILD), ("ngram", ONE, 2, 1, 0, 3, tiny.PLAIN), ("ngram", WIDE, 1, 2, 0, 1, tiny.GREEDY),
    ("causal", ONE, 2, 1, 5, 3, tiny.PLAIN), ("dspark", WIDE, 2, 2, 5, 3, tiny.GREEDY), ("dflash2", MANY, 2, 2, 5, 3, MILD),
    ("block of some ids", ["4_4_16"], 1, 2, 5, 3, tiny.NUCLEUS),
]  # fmt: skip
MATRIX = [
    ("none", NO, 1, 2, 1, 3, tiny.COLD), ("none", NO, 2, 1, 5, 3, tiny.NUCLEUS), ("none", NO, 2, 2, 0, 1, tiny.GREEDY),
    ("none", NO, 4, 1, 5, 1, tiny.COLD), ("none", NO, 1, 1, 1, 3, tiny.GREEDY),
    ("eagle", MANY, 2, 1, 0, 1, tiny.COLD), ("eagle", ONE, 1, 1, 0, 3, tiny.PLAIN), ("eagle", ONE, 1, 1, 0, 16, tiny.GREEDY),
    ("eagle", ONE, 1, 2, 0, 3, tiny.NUCLEUS), ("eagle", WIDE, 2, 1, 0, 3, MILD),
    ("eagle3", ONE, 1, 1, 5, 1, tiny.NUCLEUS), ("eagle3", ONE, 1, 2, 0, 3, tiny.COLD), ("eagle3", MANY, 1, 1, 5, 1, MILD),
    ("eagle3", ONE, 2, 2, 0, 16, tiny.GREEDY), ("eagle3", WIDE, 1, 1, 0, 16, tiny.PLAIN),
    ("some ids", MANY, 1, 1, 5, 3, tiny.GREEDY), ("some ids", ONE, 1, 1, 0, 1, tiny.PLAIN),
    ("some ids", ONE, 1, 2, 5, 16, tiny.COLD), ("some ids", WIDE, 2, 1, 5, 3, tiny.NUCLEUS),
    ("ngram", MANY, 1, 1, 0, 16, tiny.NUCLEUS), ("ngram", ONE, 1, 2, 5, 3, tiny.COLD), ("ngram", MANY, 1, 1, 5, 3, MILD),
    ("dflash", WIDE, 1, 1, 5, 3, tiny.PLAIN), ("dflash", ONE, 2, 1, 5, 3, tiny.GREEDY), ("dflash", MANY, 1, 2, 5, 3, tiny.COLD),
    ("causal", MANY, 2, 1, 5, 3, tiny.PLAIN), ("causal", ["4_1_5"], 1, 1, 5, 3, tiny.NUCLEUS),
    ("dspark", MANY, 1, 1, 5, 3, tiny.GREEDY), ("dflash2", WIDE, 1, 1, 5, 3, tiny.GREEDY),
    ("dflash2", ["4_1_5"], 1, 2, 5, 3, tiny.NUCLEUS), ("dflash2", ONE, 2, 1, 5, 3, tiny.PLAIN),
    ("dspark", WIDE, 2, 2, 5, 3, tiny.PLAIN), ("dspark", ONE, 1, 1, 5, 3, MILD),
    ("block of some ids", WIDE, 1, 1, 5, 3, tiny.PLAIN), ("block of some ids", ONE, 2, 1, 5, 3, tiny.COLD),
]  # fmt: skip


@pytest.mark.parametrize(
    "drafter, strategies, data, model, slots, chunk, setting",
    [*GATE, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX)],
)
def test_tokens_depend_only_on_weights_prompt_and_seed(
    x64, drafter, strategies, data, model, slots, chunk, setting
):
    # With few slots a batch is also compacted to one row, and without a drafter the cache grows.
    buckets = sorted({1, slots}) if slots else [len(tiny.PROMPTS) * tiny.SAMPLES // data]
    caches = [20, 25, 32] if slots and drafter == "none" else [32]
    engine, weights = speculating(
        drafter, strategies, data, model, slots=slots, chunk=chunk, batch_buckets=buckets, cache_buckets=caches
    )  # fmt: skip
    found = {drafter: accepted(engine, weights, setting)}
    if drafter == "eagle3":  # the same programs with other weights
        for taught in ("trained", "adversary"):
            weights = engine.publish(tiny.params_of(engine), drafter_of(taught, engine.mesh))
            found[taught] = accepted(engine, weights, setting)
        assert found["trained"] > 2 * found["adversary"], found


@pytest.mark.parametrize(
    "drafter, strategies", [("none", NO), ("eagle3", WIDE), ("block of some ids", ONE)]
)
def test_tokens_are_the_same_where_a_cpu_tiles_the_matrices(x64, monkeypatch, drafter, strategies):
    for knob, value in {"TILE": 4, "GROUP": 3, "FEWEST": 64, "COLUMNS": 20}.items():
        monkeypatch.setattr(trees, knob, value)
    engine, weights = speculating(
        drafter, strategies, slots=5, batch_buckets=[1, 5], cache_buckets=[32]
    )
    policy = weights[0].target
    for matrix in (
        policy.layers[0].qkv,
        policy.layers[1].gate_up,
        policy.layers[0].down,
        policy.head,
    ):
        assert isinstance(matrix, trees.Tiles)
    accepted(engine, weights, tiny.NUCLEUS)


def accepted(
    engine: Engine, weights: list, setting: Sampling, policy: ModelConfig = tiny.MODEL
) -> float:
    """Accepted tokens per row and speculating round, after checking the rollout's tokens against the reference."""
    shape = tiny.PROMPTS, tiny.SAMPLES, setting, tiny.LIMIT
    result = tiny.roll_out(engine, weights, *shape, stream=TRAIN_STREAM, step=0)
    expected, logprobs = tiny.reference(setting, policy)
    assert tiny.answers(result) == expected
    for one, logp in zip(result.completions, logprobs, strict=True):
        np.testing.assert_allclose(one.logprobs, logp, atol=1e-9)
    speculated = [measured for measured in result.measurements if measured.strategy != PLAIN]
    assert bool(speculated) == bool(engine.arms), "the drafter was used"
    for measured in speculated:
        hits = int(measured.hits.sum())
        assert measured.tokens == hits + measured.row_rounds, (
            "accept length = (accepted + rounds) / rounds"
        )
    rounds = sum(one.row_rounds for one in speculated)
    return sum(int(one.hits.sum()) for one in speculated) / max(rounds, 1)


def in_turn(arms: Sequence[Strategy]) -> Tuner:
    """A tuner that takes the arms in turn, so that in time each follows each other one."""

    def choose(state, live, batch, slots, compiled=()):
        turn = state["turn"]
        place = turn * (1 + turn // len(arms) % max(len(arms) - 1, 1)) % len(arms)
        return {"turn": turn + 1}, Choice(arms[place], math.nan, "in turn")

    return Tuner(
        lambda: {"turn": 0},
        choose,
        interface.unchanged,
        interface.unchanged,
        lambda state, batch, fewest: arms,
        lambda state, cells: np.zeros((2, len(cells))),
        has_fixed_policy=True,
    )


@cache
def long_engines() -> tuple[identity.Law, list[tuple[Engine, list]]]:
    """The law of many long answers in float32, and engines that differ in all that may not matter."""
    shape = {"dtype": "float32", "policy": tiny.LONG, "max_new_tokens": tiny.LONG_LIMIT}
    rest = shape | {"chunk": 6, "slots": 64, "batch_buckets": [64], "cache_buckets": [220]}
    # The first refills rows, and moves a nearly full cache to a longer one.
    refilled = shape | {"chunk": 3, "slots": 24, "batch_buckets": [24], "cache_buckets": [64, 220]}
    plain, weights = speculating("none", [], **refilled)
    params = tiny.params_of(plain)
    sharded, _ = speculating("embedding", ["3_2_7", "2_1_3"], 2, 2, **rest)
    abstract = architecture.abstract(tiny.LONG, sharded.mesh, "train", "float32")
    drafter = drafter_of("embedding", sharded.mesh, tiny.LONG, "float32")
    pairs = [
        (plain, weights),
        speculating("eagle", ["2_1_3", "3_2_7"], adaptive=True, **rest),
        (sharded, sharded.publish(tiny.placed(params, abstract), drafter)),
    ]
    prompts = tiny.LONG_PROMPTS[:32]
    keys = sequence_keys(0, TRAIN_STREAM, 0, np.arange(2 * len(prompts)))
    limits = [tiny.LONG_LIMIT] * len(prompts)
    score = identity.policy(params, tiny.LONG)
    return identity.Law(score, prompts, limits, keys, tiny.PLAIN), pairs


@pytest.mark.parametrize(
    "setting",
    [tiny.PLAIN, *(pytest.param(one, marks=pytest.mark.matrix) for one in (tiny.COLD, tiny.NUCLEUS, tiny.GREEDY))],
)  # fmt: skip
def test_float32_rollouts_of_any_shape_and_drafter_are_equal_except_for_rare_near_ties(setting):
    law, pairs = long_engines()
    results = [
        tiny.roll_out(
            engine, weights, law.prompts, 2, setting, tiny.LONG_LIMIT, stream=TRAIN_STREAM, step=0, eos_ids=(), stops=()
        )
        for engine, weights in pairs
    ]  # fmt: skip
    for (engine, _), result in zip(pairs[1:], results[1:], strict=True):
        used = [decision.strategy for decision in result.decisions]
        assert {*used} == {*engine.arms, PLAIN} and len(used) > 12
        assert sum(int(measured.hits.sum()) for measured in result.measurements) > 100
    law = replace(law, sampling=setting)
    verdict = identity.compare(law, *(result.completions for result in results))
    assert verdict.is_same, str(verdict)
    assert verdict.tokens == 3 * len(law.keys) * tiny.LONG_LIMIT >= 3 * identity.RARE


def test_answers_that_end_with_the_positions_of_the_model_are_those_of_plain_decoding(x64):
    """The blocks of their last rounds reach beyond the last position, and beyond the bucket."""
    most = tiny.MODEL.max_positions
    prompts, limits = tiny.PROMPTS[:3], [most - len(prompt) for prompt in tiny.PROMPTS[:3]]
    shape = {"max_new_tokens": most, "slots": 3, "batch_buckets": [3], "cache_buckets": [most]}
    pairs = (
        speculating("none", [], chunk=8, **shape),
        speculating("long", ["8_1_9"], chunk=2, **shape),
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
        engine, _ = speculating("dspark", ["3_1_4", "7_1_8", "6_4_16"], dtype="float32")
    assert [*map(name, engine.arms)] == ["3_1_4"]
    assert "7_1_8, 6_4_16: deeper" in caplog.text
    engine, _ = speculating("dspark", ["3_1_4", "7_1_8"], adaptive=True, dtype="float32")
    assert [*map(name, engine.arms)] == ["ngram:3_1_4", "ngram:7_1_8", "learned:3_1_4"]
    with pytest.raises(ConfigError, match="7_1_8: the drafter drafts at most 3 tokens a round"):
        speculating("dspark", ["7_1_8"], dtype="float32")
