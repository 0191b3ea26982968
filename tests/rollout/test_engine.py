"""The engine on a tiny policy: its rollouts are exact in float64; the costs of its programs."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace

import identity
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import marked
from tiny_engine import (
    CACHE,
    COLD,
    GREEDY,
    LIMIT,
    LONG,
    LONG_LIMIT,
    LONG_PROMPTS,
    LONG_STOPS,
    MODEL,
    NUCLEUS,
    PLAIN,
    PROMPTS,
    SAMPLES,
    STOPS,
    answers,
    engine_of,
    params_of,
    play,
    reference,
    roll_out,
)

from tlt_jax.config import Config
from tlt_jax.config.schema import Data, Rollout, Speculation
from tlt_jax.data.stop_rules import stop_tokens
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ConfigError, Interrupted
from tlt_jax.keys import EVAL_STREAM, TRAIN_STREAM, sequence_keys
from tlt_jax.models import architecture, transformer
from tlt_jax.rollout import ngram_memory
from tlt_jax.rollout.bindings import SCRATCH_SLOTS
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Decode, Start, StateShape
from tlt_jax.rollout.ngram_memory import NGramMemory
from tlt_jax.rollout.request import doubling
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.train.run_state import resumed_tuner

FACTORS = ("data", "model", "slots", "batches", "chunk", "setting")
CASES = [  # every pair of values of these factors occurs; cache buckets and look-ahead come along
    (1, 1, 0, "one", 16, PLAIN, [], 2), (1, 2, 1, "one", 3, COLD, [32], 2), (1, 1, 5, "two", 1, NUCLEUS, [20, 32], 1),
    (1, 2, 5, "one", 16, GREEDY, [21, 32], 2), (2, 1, 1, "all", 1, PLAIN, [32], 1), (2, 2, 0, "two", 16, COLD, [32], 2),
    (2, 1, 5, "all", 3, NUCLEUS, [20, 25, 32], 2), (2, 2, 0, "one", 1, GREEDY, [32], 1), (4, 2, 5, "one", 3, PLAIN, [32], 2),
    (4, 1, 1, "one", 16, NUCLEUS, [32], 1), (4, 1, 5, "all", 1, COLD, [32], 2), (4, 2, 0, "two", 3, GREEDY, [32], 1),
    (1, 2, 0, "all", 16, NUCLEUS, [32], 1), (1, 1, 1, "two", 3, PLAIN, [32], 1), (1, 1, 1, "all", 3, GREEDY, [32], 2),
]  # fmt: skip


def test_the_cases_cover_every_pair_of_factors():
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        seen = {(case[a], case[b]) for case in CASES}
        wanted = set(itertools.product({case[a] for case in CASES}, {case[b] for case in CASES}))
        assert seen == wanted, f"{FACTORS[a]}, {FACTORS[b]}: {wanted - seen}"


# Every mesh, every value of every factor and three of four pairs; the rest is `-m matrix`.
GATE = (2, 4, 5, 7, 8, 9, 12, 14)


def test_the_gate_has_every_mesh_and_every_value_of_every_factor():
    assert {CASES[place][:2] for place in GATE} == {case[:2] for case in CASES}
    values = [[case[place] for case in CASES] for place in range(len(FACTORS))]
    for name, all_values in zip(FACTORS, values, strict=True):
        assert {all_values[place] for place in GATE} == set(all_values), name


@pytest.mark.parametrize(
    "data, model, slots, batches, chunk, setting, caches, in_flight",
    marked([(case, place in GATE) for place, case in enumerate(CASES)]),
)
def test_tokens_depend_only_on_weights_prompt_and_seed(
    x64, data, model, slots, batches, chunk, setting, caches, in_flight
):
    most = slots or -(-len(PROMPTS) // data) * SAMPLES
    buckets = {"one": [most], "two": [min(2, most), most], "all": []}[batches]
    engine = engine_of(
        data,
        model,
        slots=slots,
        batch_buckets=sorted(set(buckets)),
        cache_buckets=caches,
        chunk=chunk,
    )
    result = play(engine, setting, in_flight=in_flight)
    expected, logprobs = reference(setting)
    assert answers(result) == expected
    for one, logp in zip(result.completions, logprobs, strict=True):
        np.testing.assert_allclose(one.logprobs, logp, atol=1e-9)
    assert {one.finish for one in result.completions} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("setting", "shape"),
    [
        (PLAIN, {"slots": 0, "batch_buckets": [12], "chunk": 16}),
        (
            NUCLEUS,
            {"data": 2, "slots": 5, "batch_buckets": [], "cache_buckets": [20, 25, 32], "chunk": 3},
        ),
    ],
)
def test_a_limit_per_prompt_cuts_the_answers_of_a_common_limit(x64, setting, shape):
    limits = [3, LIMIT, 1, 7]
    whole = [
        (uid, tokens, finish, limits[uid // SAMPLES])
        for uid, tokens, finish in reference(setting)[0]
    ]
    assert {len(tokens) > limit for _, tokens, _, limit in whole} == {True, False}
    result = play(engine_of(**shape), setting, limits=limits)
    assert answers(result) == [
        (uid, tokens[:limit], finish if len(tokens) <= limit else "length")
        for uid, tokens, finish, limit in whole
    ]
    for one, logp in zip(result.completions, reference(setting)[1], strict=True):
        np.testing.assert_allclose(one.logprobs, logp[: len(one.tokens)], atol=1e-9)


SHAPES = [  # they differ in all that may not matter; the first refills rows and moves a nearly full cache to a longer one
    {"slots": 48, "batch_buckets": [48], "cache_buckets": [64, 220], "chunk": 3},
    {
        "data": 2,
        "model": 2,
        "slots": 64,
        "batch_buckets": [64],
        "cache_buckets": [220],
        "chunk": 16,
    },
]


def placed(params: architecture.Params, engine: Engine) -> architecture.Params:
    """The same weights on another mesh, where the vocabulary may be padded; cheaper than drawing them anew."""

    def place(leaf: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        more = [(0, wanted - size) for wanted, size in zip(target.shape, leaf.shape, strict=True)]
        return jax.device_put(np.pad(leaf, more), target.sharding)

    return jax.tree.map(
        place, params, architecture.abstract(engine.model_config, engine.mesh, "train", "float32")
    )


@pytest.fixture(scope="module")
def long_rollouts():
    """setting -> reference of many long answers in float32, and their rollouts by engines of different shapes."""
    engines = [
        engine_of(dtype="float32", policy=LONG, max_new_tokens=LONG_LIMIT, **shape)
        for shape in SHAPES
    ]
    params = params_of(engines[0])
    weights = [engine.publish(placed(params, engine)) for engine in engines]
    score = identity.policy(params, LONG)
    keys = sequence_keys(0, TRAIN_STREAM, 0, np.arange(2 * len(LONG_PROMPTS)))

    def rollouts(setting: Sampling):
        law = identity.Law(
            score,
            LONG_PROMPTS,
            [LONG_LIMIT] * len(LONG_PROMPTS),
            keys,
            setting,
            LONG.eos_ids,
            LONG_STOPS,
        )
        return law, [
            roll_out(
                engine,
                parts,
                LONG_PROMPTS,
                2,
                setting,
                LONG_LIMIT,
                stream=TRAIN_STREAM,
                step=0,
                stops=LONG_STOPS,
                in_flight=in_flight,
            ).completions
            for engine, parts, in_flight in zip(engines, weights, (1, 2), strict=True)
        ]

    return rollouts


@pytest.mark.parametrize(
    "setting", [PLAIN, pytest.param(COLD, marks=pytest.mark.matrix), NUCLEUS, GREEDY]
)
def test_float32_rollouts_of_any_shape_are_equal_except_for_rare_near_ties(setting, long_rollouts):
    law, rollouts = long_rollouts(setting)
    verdict = identity.compare(law, *rollouts)
    assert verdict.is_same, str(verdict)
    assert verdict.tokens >= identity.RARE, "fewer tokens would not show how rare the near ties are"


def test_float32_logprobs_equal_a_fresh_forward():
    engine = engine_of(dtype="float32")
    params = params_of(engine)
    result = roll_out(
        engine,
        engine.publish(params),
        PROMPTS,
        SAMPLES,
        Sampling(0.8, 9, 0.9),
        LIMIT,
        stream=TRAIN_STREAM,
        step=1,
    )
    rows, segments = np.zeros((2, len(result.completions), 32), np.int32)
    for row, segment, one in zip(rows, segments, result.completions, strict=True):
        whole = np.concatenate([np.asarray(PROMPTS[one.prompt]), one.tokens])
        row[: len(whole)], segment[: len(whole)] = whole, 1
    positions = np.broadcast_to(np.arange(32), rows.shape)
    x, _ = transformer.hidden(
        params, MODEL, *map(jnp.asarray, (rows, positions, segments)), compute_dtype="float32"
    )
    logp = np.asarray(jax.nn.log_softmax(transformer.logits(params, MODEL, x) / 0.8))
    for row, one in zip(logp, result.completions, strict=True):
        at = len(PROMPTS[one.prompt]) - 1 + np.arange(len(one.tokens))
        np.testing.assert_allclose(one.logprobs, row[at, one.tokens], atol=1e-4)


def test_rows_that_are_not_live_change_nothing(x64):
    engine = engine_of(data=1, chunk=4)
    weights = engine.publish(params_of(engine))
    full = roll_out(engine, weights, PROMPTS, SAMPLES, PLAIN, LIMIT, stream=TRAIN_STREAM, step=0)
    shape = StateShape(0, 12, 32)
    chunk = Decode(shape, 4, params=DecodingParams(PLAIN, MODEL.eos_ids, stop_tokens(STOPS)))
    program, like = engine.programs.get(chunk), engine.programs.shapes[0].state(shape)
    assert full.stats["programs"] == len(engine.programs.executables), (
        "the chunk that the rollout used"
    )
    rng = np.random.default_rng(0)

    def junk(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=leaf.shape) * 100)
        return jnp.asarray(rng.integers(1, 20, size=leaf.shape).astype(leaf.dtype))

    def run(live, rows):
        state = jax.tree.map(junk, like).replace(
            live=jnp.arange(12) == live,
            limits=jnp.full(12, 30, jnp.int32),
            stop_state=jnp.zeros(12, jnp.int32),
        )
        if rows is not None:  # the same live row; new junk in all others
            state = jax.tree.map(lambda new, old: new.at[live].set(old[live]), state, rows)
        before = jax.tree.map(jnp.copy, state)

        after, report = program(state, weights[0], (), np.array([1, 99], np.int32))
        return before, after, report

    before, after, report = run(3, None)
    others = np.arange(12) != 3
    for name in ("roots", "lengths", "limits", "keys"):
        np.testing.assert_array_equal(getattr(after, name)[others], getattr(before, name)[others])
    assert not np.asarray(report.counts)[others].any() and not np.asarray(after.live)[others].any()
    for old, new in zip(jax.tree.leaves(before.cache), jax.tree.leaves(after.cache), strict=True):
        axis = old.shape.index(32 + SCRATCH_SLOTS)
        same = np.moveaxis(np.asarray(old == new), axis, -1)
        for row in np.flatnonzero(others):
            assert same[row, ..., : before.lengths[row]].all(), "committed slots stay unchanged"
    again = run(3, before)[2]
    np.testing.assert_array_equal(report.tokens[3], again.tokens[3])
    np.testing.assert_array_equal(report.logprobs[3], again.logprobs[3])
    assert report.counts[3] > 0


def test_the_cache_is_updated_in_place():
    model = replace(MODEL, hidden_size=64, num_layers=3, head_dim=16)
    config = Config(rollout=Rollout(compile_cache=CACHE), speculation=Speculation("none"))
    engine = Engine(config, model, meshes.make_mesh(1, 1))
    chunk = Decode(StateShape(0, 16, 512), 16, params=DecodingParams(PLAIN, (0,)))
    engine.programs.get(chunk)
    compiled = engine.programs.compiles[-1]
    cache = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(engine.programs.shapes[0].state(chunk.state).cache)
    )
    assert compiled.aliased >= cache
    assert compiled.temporary < cache / 4, (
        f"{compiled.temporary} bytes of temporaries with a cache of {cache}"
    )


def test_steps_compile_once_and_streams_differ():
    engine = engine_of(data=2, dtype="float32", batch_buckets=[6])
    first = play(engine, PLAIN)
    assert first.stats["compiles"] == len(engine.programs.compiles) > 0
    waits = first.compile_waits[0]
    assert waits == first.compile_waits[1], "the groups of a process wait together"
    assert all(0 <= start <= end <= first.stats["seconds"] for start, end in waits)
    waited = sum(end - start for start, end in waits)
    assert waited >= first.stats["compile_seconds"] > 0, (
        "on a CPU the rollout waits for every compilation"
    )
    others = [
        play(engine, PLAIN, seed=1, step=1),
        play(engine, PLAIN, stream=EVAL_STREAM),
        play(engine, PLAIN),
    ]
    assert {result.stats["compiles"] for result in others} == {0}
    assert not any(result.compile_waits[0] for result in others)
    assert len({str(answers(result)) for result in (first, *others)}) == 3
    assert answers(others[-1]) == answers(first)


def test_executables_are_cached_on_disk_also_after_earlier_compilations(tmp_path):
    jax.jit(lambda x: x + 1)(jnp.ones(3))
    for folder in (tmp_path / "a", tmp_path / "b"):
        engine = engine_of(dtype="float32", compile_cache=str(folder))
        engine.programs.get(Start(StateShape(0, 2, 32)))
        assert any(folder.iterdir())


def drafting(**speculation) -> Engine:
    """An engine that may draft from n-grams, with a tuner that learns."""
    settings = Speculation(**{"drafter": "ngram", "strategies": ["2_2_4"]} | speculation)
    return Engine(replace(engine_of().config, speculation=settings), MODEL, meshes.make_mesh(1, 1))


def test_sequences_that_n_grams_cannot_search_are_refused():
    longest = 2**24 // 13 - 2048 - 256
    ngram_memory.check_longest(longest)
    refused = f"a sequence can have {longest + 1} tokens, and n-grams search {longest} at most"
    with pytest.raises(ConfigError, match=refused):
        ngram_memory.check_longest(longest + 1)
    config = replace(drafting().config, data=Data(max_prompt_tokens=longest))
    with pytest.raises(ConfigError, match="n-grams search"):
        Engine(config, MODEL, meshes.make_mesh(1, 1))


def test_earlier_texts_are_gathered_only_for_chunks_that_draft(monkeypatch, x64):
    gather, gathered = NGramMemory.siblings, []
    monkeypatch.setattr(
        NGramMemory, "siblings", lambda texts, rows: gathered.append(rows) or gather(texts, rows)
    )
    plain, drafted = (drafting(tuner="fixed", strategies=[text]) for text in ("off", "2_2_4"))
    expected = answers(play(plain, PLAIN))
    assert not gathered and plain.ngram_memory.size > 0, (
        "what was decoded plainly is remembered too"
    )
    assert answers(play(drafted, PLAIN)) == expected
    assert gathered and drafted.ngram_memory.size == plain.ngram_memory.size


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"strategies": ["2_2_4", "1_1_2"]}, "of another speculation.strategies"),
        (
            {"tuner": "beg_mab"},
            "of another speculation.tuner",
        ),
        ("devices", "of another devices"),
        ("version", "of another version"),
        ("absence", "not in the checkpoint"),
        (None, ""),
    ],
)
def test_a_tuner_resumes_only_a_state_learned_with_the_same_settings(change, reason, caplog):
    engine = drafting()
    saved = {"basis": engine.basis, "state": {**engine.tuner.init(), "clock": 99}}
    saved = json.loads(json.dumps(saved))
    if change == "devices":
        saved["basis"]["devices"] = "another"
    elif change == "version":
        del saved["state"]["evidence"]
    engine = drafting(**change if isinstance(change, dict) else {})
    with caplog.at_level(logging.INFO, "tlt_jax"):
        state = resumed_tuner(None if change == "absence" else saved, engine.tuner, engine.basis)
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [f"the tuner starts from scratch: its saved state is {reason}"] if reason else []
    )
    assert state == (engine.tuner.init() if reason else saved["state"])


def test_published_weights_are_views():
    engine = engine_of(data=2, model=2, dtype="float32")
    weights = engine.reshard(params_of(engine))
    parts = [meshes.view(weights, group) for group in engine.groups]
    whole = {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(weights)
        for shard in leaf.addressable_shards
    }
    for part in parts:
        shards = [shard for leaf in jax.tree.leaves(part) for shard in leaf.addressable_shards]
        assert {shard.data.unsafe_buffer_pointer() for shard in shards} <= whole
        assert {shard.device for shard in shards} in [
            set(group.devices.flat) for group in engine.groups
        ]


def test_answers_are_reported_as_they_finish_and_a_rollout_can_be_interrupted():
    engine, seen = engine_of(dtype="float32", chunk=1, slots=2, batch_buckets=[2]), []
    result = play(engine, PLAIN, on_finish=seen.append)
    assert (
        sorted(one.uid for one in seen)
        == [one.uid for one in result.completions]
        == list(range(12))
    )
    assert [one.prompt * SAMPLES + one.sample for one in seen] == [one.uid for one in seen]
    some = []
    with pytest.raises(Interrupted):
        play(engine, PLAIN, on_finish=some.append, interrupted=lambda: len(some) > 3)
    assert 3 < len(some) < 12
    assert answers(play(engine, PLAIN)) == answers(result)


def test_prompts_that_do_not_fit_are_rejected():
    engine = engine_of(dtype="float32")
    for prompts, limits, words in (
        ([], 4, "at least one prompt"), ([[1], []], 4, "at least one token"), ([[1] * 60], 8, "at most 4 new tokens"),
        ([[1, 37]], 4, "token 37 is outside the vocabulary of 37"), ([[1]], 0, "at most 0 tokens"),
        ([[1], [2]], [4, -1], "at most -1 tokens"), ([[1], [2], [3]], [4, 4], "2 answer limits for 3 prompts"),
        ([[1], [2, -3, 36, 5]], 4, "token -3 is outside the vocabulary of 37"),
        ([[1] * 60, [1]], [3, 64], "prompt of 1 tokens and an answer of 64 exceed the model's 64 .* at most 63 new"),
        ([[1], [1] * 100], 4, "prompt 1 has 100 tokens, and the model 64 positions, .* drop it, or shorten it by 37 tokens"),
        ([[1] * 64], 1, "prompt 0 has 64 tokens, .* shorten it by 1 tokens"), ([[1] * 63], 2, "at most 1 new tokens"),
        ([[1] * 60, [1]], [5, 62], "prompt of 60 tokens and an answer of 5 exceed the model's 64 .* at most 4 new"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            engine.request(
                [np.asarray(prompt, np.int32) for prompt in prompts],
                1,
                PLAIN,
                limits,
                stream=0,
                step=0,
            )
    with pytest.raises(ValueError, match="add 12"):
        engine_of(batch_buckets=[2, 4])


def test_buckets_are_powers_of_two_and_the_slots():
    assert doubling(1, 8) == [1, 2, 4, 8] and doubling(1, 6) == [1, 2, 4, 6]
    assert doubling(1, 1) == [1]
    assert doubling(256, 192) == [192] and doubling(256, 1100) == [256, 512, 1024, 1100]
    engine = engine_of(dtype="float32")
    assert engine.cache_buckets([np.zeros(40)], 200) == [220, 240]
