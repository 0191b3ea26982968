"""The engine on a tiny policy: limits, rows that are not live, programs, weights, and what it refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import (
    CACHE,
    LIMIT,
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
    with_drafter,
)

from tlt_jax.config import Config
from tlt_jax.config.schema import Rollout, Speculation
from tlt_jax.config.task import Data
from tlt_jax.data.stop_rules import stop_tokens
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ConfigError, Interrupted
from tlt_jax.keys import EVAL_STREAM, TRAIN_STREAM
from tlt_jax.rollout import ngram_memory
from tlt_jax.rollout.bindings import SCRATCH_SLOTS
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Decode, Start, StateShape
from tlt_jax.rollout.ngram_memory import NGramMemory
from tlt_jax.rollout.request import doubling
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.train.run_state import resumed_tuner


def test_a_limit_per_prompt_cuts_the_answers_of_a_common_limit(x64):
    setting, limits = NUCLEUS, [3, LIMIT, 1, 7]
    whole = [
        (uid, tokens, finish, limits[uid // SAMPLES])
        for uid, tokens, finish in reference(setting)[0]
    ]
    assert {len(tokens) > limit for _, tokens, _, limit in whole} == {True, False}
    engine = engine_of(2, slots=5, batch_buckets=[5], cache_buckets=[32], chunk=3)
    result = play(engine, setting, limits=limits)
    assert answers(result) == [
        (uid, tokens[:limit], finish if len(tokens) <= limit else "length")
        for uid, tokens, finish, limit in whole
    ]
    for one, logp in zip(result.completions, reference(setting)[1], strict=True):
        np.testing.assert_allclose(one.logprobs, logp[: len(one.tokens)], atol=1e-9)


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
    return with_drafter(engine_of(batch_buckets=[12], cache_buckets=[32]), settings)


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
    monkeypatch.setattr(ngram_memory, "POOL", 64)
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
