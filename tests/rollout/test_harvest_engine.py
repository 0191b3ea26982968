"""The harvest of a tiny policy, and what a replay buffer draws from it: the features and states of a fresh forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_speculation as drafting
import tiny_engine as tiny

from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter.replay import Replay, ReplayConfig
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.models import architecture, drafter as drafters, transformer
from tlt_jax.plan import programs as planned_programs
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import (
    Admit,
    CatchUp,
    Decode,
    Harvest,
    Prefill,
    Resize,
    Start,
    StateShape,
)
from tlt_jax.rollout.recorder import Harvested
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import Strategy

WIDTH, SIZE = 8, 48
SHAPE = {"slots": 5, "chunk": 3, "batch_buckets": [5], "cache_buckets": [32]}


@dataclass
class Ends:
    """Wants the last positions of every sequence."""

    width: int = WIDTH

    def wanted(self, uid: int, length: int) -> list[int]:
        return [max(length - 1 - self.width, 0)]


def engine_of(kind: str, data: int, model: int, captures_states: bool) -> tuple[Engine, list]:
    """An engine with a drafter of this kind, and the published weights."""
    if kind != "none":
        return drafting.speculating(
            kind, ["2_1_3"], data, model, captures_states=captures_states, **SHAPE
        )
    plain = tiny.engine_of(data, model, **SHAPE)
    engine = tiny.with_drafter(plain, plain.config.speculation, None, captures_states)
    return engine, engine.publish(tiny.params_of(engine))


def roll_out(engine: Engine, weights: list, harvesters: list, replays: list):
    """A rollout and its events, which the replay buffers hear too."""
    prompts = [np.asarray(prompt, np.int32) for prompt in tiny.PROMPTS]
    shape = tiny.SAMPLES, tiny.PLAIN, tiny.LIMIT
    request = engine.request(prompts, *shape, stream=TRAIN_STREAM, step=0)
    for replay in replays:
        replay.begin(0, request)
    events = []
    listeners = [lambda poll: events.extend(poll.events), *(replay.listen for replay in replays)]
    return engine.run(request, weights, harvesters=harvesters, listeners=listeners)[0], events


@cache
def fresh(texts: tuple[tuple[int, ...], ...], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """States and features of the texts by the training forward."""
    params = architecture.init(tiny.MODEL, meshes.make_mesh(1, 1), jax.random.key(0), "float64")
    tokens = np.zeros((len(texts), SIZE), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    positions = jnp.broadcast_to(jnp.arange(SIZE), tokens.shape)
    found = transformer.hidden(
        params, tiny.MODEL, jnp.asarray(tokens), positions, jnp.ones_like(positions),
        compute_dtype="float64", captures=captures(kind),
    )  # fmt: skip
    states, features = map(np.asarray, found)
    return states, features


def captures(kind: str) -> tuple[int, ...]:
    """The layers that a drafter of this kind reads."""
    return () if kind == "none" else drafters.for_policy(tiny.MODEL, kind).captures


@pytest.mark.parametrize("kind, data, model", [
    ("eagle3", 1, 2), ("eagle", 2, 1), ("none", 2, 1),
])  # fmt: skip
def test_harvested_and_drawn_features_and_states_are_those_of_a_fresh_forward(
    x64, kind, data, model
):
    engine, weights = engine_of(kind, data, model, captures_states=True)
    config, groups = ReplayConfig(WIDTH, 10**6), engine.groups if kind != "none" else []
    replays = [Replay(config, group, mesh) for group, mesh in enumerate(groups)]
    result, events = roll_out(engine, weights, replays or [Ends()] * data, replays)
    texts = {
        one.uid: (*tiny.PROMPTS[one.prompt], *one.tokens.tolist()) for one in result.completions
    }
    states, features = fresh(tuple(texts.values()), kind)
    seen, width = set(), len(captures(kind)) * tiny.MODEL.hidden_size
    for event in events:
        if not isinstance(event, Harvested):
            continue
        assert event.values.features.shape[1:] == (WIDTH, width)
        assert (event.values.states is None) == (kind == "eagle"), "its features are the states"
        assert event.values.features.sharding.spec == jax.sharding.PartitionSpec(
            "data", None, "model"
        )
        for row, (uid, start) in enumerate(event.windows):
            stop = min(start + WIDTH, len(texts[uid]) - 1)
            seen.add(uid)
            found = event.values.features[row, : stop - start]
            np.testing.assert_allclose(found, features[uid, start:stop], atol=1e-9)
            found = (event.values.features if kind == "eagle" else event.values.states)[row]
            np.testing.assert_allclose(found[: stop - start], states[uid, start:stop], atol=1e-9)
    assert seen == set(texts) and np.ptp(states) > 1
    uids = [uid for replay in replays for uid in {window.uid for window in replay.held}]
    assert sorted(uids) == (sorted(texts) if replays else []), "each in its own group"
    for replay in replays:
        assert not replay.awaited
        check_drawn(replay.sample(0, 32), replay.mesh, texts, states, features)


def check_drawn(batch: PackedRows, mesh: jax.sharding.Mesh, texts: dict, states, features) -> None:
    """Checks that drawn parts of texts have the features and states of a fresh forward, on this mesh."""
    assert batch.features.sharding.device_set == set(mesh.devices.flat)
    for row, segments in enumerate(np.asarray(batch.segments)):
        for segment in range(1, segments.max() + 1):
            here = row, segments == segment
            positions = np.asarray(batch.positions[here])
            tokens = tuple(np.asarray(batch.tokens[here]).tolist())
            matches = [
                uid
                for uid, text in texts.items()
                if text[positions[0] : positions[-1] + 1] == tokens
                and np.allclose(batch.features[here], features[uid, positions], atol=1e-9)
            ]
            assert matches, "the tokens and their features"
            np.testing.assert_allclose(batch.states[here], states[matches[0], positions], atol=1e-9)


def texts_of(kind: str, captures_states: bool) -> dict[str, str]:
    """The lowered programs of an engine, as text."""
    engine, _ = engine_of(kind, 1, 1, captures_states)
    state, prefill = StateShape(0, 5, 32), Prefill(0, 4, 16)
    programs = [
        Start(state),
        prefill,
        Admit(state, prefill),
        Resize(state, 2, 64),
        Decode(state, 4),
    ]
    if kind != "none":
        programs += [CatchUp(state), Decode(state, 4, Strategy(2, 1, 3))]
    return {str(program): engine.programs.lower(program).as_text() for program in programs}


@pytest.mark.parametrize(
    "kind", ["eagle", "eagle3", pytest.param("none", marks=pytest.mark.matrix)]
)
def test_only_an_engine_that_captures_states_has_them_in_its_programs(x64, kind):
    """For EAGLE-1 the programs do not change: its features are the states."""
    off, on = texts_of(kind, False), texts_of(kind, True)
    if kind == "eagle":
        assert off == on
        return
    leaf = f"tensor<5x40x{tiny.MODEL.hidden_size}xf64>"
    assert not any(leaf in text for text in off.values())
    assert all(leaf in text for name, text in on.items() if not name.startswith("prefill"))


def test_the_largest_harvest_is_planned_when_there_is_a_harvester(x64):
    engine, _ = engine_of("eagle3", 1, 1, captures_states=True)
    sizes = DecodingParams(tiny.PLAIN), 20, 4, 32
    assert "harvest" not in planned_programs.largest_programs(engine, *sizes)
    program = planned_programs.largest_programs(engine, *sizes, window=WIDTH)["harvest"]
    assert program == Harvest(StateShape(0, engine.capacity, 32), 4, WIDTH)
    memory = engine.programs.lower(program).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 0, "the state is not donated"
