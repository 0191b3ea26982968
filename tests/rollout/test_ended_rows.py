"""The features of an ended row equal those of a fresh forward until the row is reused."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds
import tiny_engine as tiny
import toys

from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.models import architecture, drafter as drafters, transformer
from tlt_jax.rollout.recorder import Emitted
from tlt_jax.rollout.scheduler import group as machine
from tlt_jax.spec_decode import decode
from tlt_jax.spec_decode.decode_state import RUNNING
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN

V, ROUNDS, SAMPLES = 12, 2, 3
TABLE = toys.table(V, scale=1.0)
RULES = DecodingParams(Sampling(1.0), eos_ids=(0,))
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9], [11, 10]]
LIMITS = (2, 24, 5, 11)  # tokens of the answers of neighbouring rows
TURNS = [(PLAIN,), (toys.TREE,), (toys.TREE, PLAIN, PLAIN)]  # strategies of chunk after chunk
pytestmark = pytest.mark.usefixtures("x64")


def late_dead_rows(advance_round, harm):
    """A planted mistake: rows that are not live commit to the slots before their length."""

    def advance(decoder, state, ahead, weights, host_context):
        keep = decoder.target.keep

        def commit(cache, scratch, path, lengths):
            return keep(cache, scratch, path, jnp.where(state.live, lengths, lengths - harm))

        target = decoder.target._replace(keep=commit)
        return advance_round(decoder._replace(target=target), state, ahead, weights, host_context)

    return advance


def spoil(monkeypatch, harm: int) -> None:
    monkeypatch.setattr(decode, "advance_round", late_dead_rows(decode.advance_round, harm))


# The cache of a real policy after every chunk


@cache
def policy() -> tuple:
    """A random policy and drafter: the decoder, and their weights."""
    return rounds.tiny(tiny.MODEL, "eagle3", "float64", RULES, toys.TREE)


def decoded(turn) -> list[tuple]:
    """(live rows, their texts, the cache) after every chunk of rows that end at different times."""
    decoder, weights = policy()
    decoders = {strategy: decoder._replace(strategy=strategy) for strategy in turn}
    keys = jnp.asarray(sequence_keys(0, 0, 0, np.arange(2 * len(PROMPTS))))
    begin = partial(rounds.begin, decoder, prompts=PROMPTS, limit=max(LIMITS))
    state, found = jax.jit(begin)(weights, keys=keys), []
    texts = [list(PROMPTS[row // 2]) for row in range(len(keys))]
    limits = [len(text) + limit for text, limit in zip(texts, itertools.cycle(LIMITS))]
    state = state.replace(limits=jnp.array(limits, jnp.int32))
    learn = jax.jit(partial(decode.catch_up, decoder.target, decoder.drafter))
    programs = {one: jax.jit(partial(decode.decode_chunk, decoders[one], ROUNDS)) for one in turn}
    while np.asarray(state.live).any():
        strategy = turn[len(found) % len(turn)]
        if strategy != PLAIN:
            state, _ = learn(state, weights, jnp.int32(strategy.path))
        state, report = programs[strategy](state, weights, (), jnp.array([1, ROUNDS], jnp.int32))
        texts = [text + new for text, new in zip(texts, rounds.answers(report), strict=True)]
        found.append((np.asarray(state.live), texts, jax.tree.map(np.asarray, state.cache)))
    return found


unspoiled = cache(decoded)


def slots(cache, row: int, count: int) -> dict[str, list[np.ndarray]]:
    """The first slots of a row's keys, values and features."""

    def of(name: str) -> list[np.ndarray]:
        axis = cache.slot_axis(name)
        leaves = jax.tree.leaves(getattr(cache, name))
        return [np.take(leaf[row], np.arange(count), axis=axis - 1) for leaf in leaves]

    return {name: of(name) for name in ("keys", "values", "features")}


def fresh(texts: list[list[int]]) -> np.ndarray:
    """The features of whole texts, by the training forward."""
    params = architecture.init(tiny.MODEL, meshes.make_mesh(1, 1), jax.random.key(0), "float64")
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    captures = drafters.for_policy(tiny.MODEL, "eagle3").captures
    rest = {"compute_dtype": "float64", "captures": captures}
    ones = jnp.ones_like(positions)
    _, features = transformer.hidden(
        params, tiny.MODEL, jnp.asarray(tokens), positions, ones, **rest
    )
    return np.asarray(features)


def checks(found: list[tuple]) -> tuple[bool, bool]:
    """Do ended rows hold a fresh forward's features, and do their slots stay unchanged?"""
    ended, are_true, are_kept = {}, True, True
    expected = fresh(found[-1][1])
    for live, texts, stored in found:
        for row in np.flatnonzero(~live):
            count = len(texts[row]) - 1
            held = slots(stored, row, count)
            are_true &= np.allclose(held["features"][0], expected[row, :count], atol=1e-9)
            before = ended.setdefault(row, held)
            same = jax.tree.map(np.array_equal, before, held)
            are_kept &= all(jax.tree.leaves(same))
    assert len(ended) == len(expected) and sum(~found[0][0]) < len(expected)
    assert len(found) >= 3, "some rows end well before the last chunk"
    return are_true, are_kept


@pytest.mark.parametrize("turn", TURNS)
def test_an_ended_row_keeps_its_features_while_others_decode(turn):
    found = unspoiled(turn)
    assert checks(found) == (True, True)
    assert np.ptp(fresh(found[-1][1])) > 1, "features differ"


def test_a_dead_row_that_writes_into_its_text_changes_no_token_and_is_detected(monkeypatch):
    before = unspoiled((toys.TREE,))
    spoil(monkeypatch, harm=1)
    found = decoded((toys.TREE,))
    assert found[-1][1] == before[-1][1] and checks(found) == (False, False)


# The state machine of a data group: rows move and are reused, and chunks are read late


@cache
def programs():
    """Executables shared by the tests."""
    return toys.executables(1, V, toys.table_drafter())


def watched(
    monkeypatch, registry, turn, capacity: int, batches: tuple[int, ...]
) -> tuple[list, dict[int, list[int]]]:
    """Answers, and for each sequence the number of looks in which its ended row was right, and wrong."""
    turns = itertools.count()
    texts = {uid: list(PROMPTS[uid // SAMPLES]) for uid in range(len(PROMPTS) * SAMPLES)}
    ended: dict[int, int] = {}  # row -> uid
    looks = defaultdict(lambda: [0, 0])
    retire, move, plain = machine.retire, machine.move, toys.bucketed(batches, (64,))

    def moved(group, state, decision):
        after = move(group, state, decision)
        if after is not state:
            ended.clear()
        return after

    def read(group, state):
        rows = {running.uid: row for row, running in enumerate(state.rows) if running}
        state, events = retire(group, state)
        for event in events:
            if isinstance(event, Emitted):
                texts[event.uid] += event.tokens.tolist()
                if event.finish != RUNNING:
                    ended[rows[event.uid]] = event.uid
        features = np.asarray(state.device.cache.features)
        for row, uid in list(ended.items()):
            if state.rows[row] is not None:
                del ended[row]
                continue
            text = texts[uid][:-1]
            expected = [toys.table_logits(TABLE, text[: at + 1]) for at in range(len(text))]
            is_right = np.allclose(features[row, : len(text)], expected, atol=1e-9)
            looks[uid][not is_right] += 1
        return state, events

    monkeypatch.setattr(machine, "retire", read)
    monkeypatch.setattr(machine, "move", moved)
    result = toys.play(
        registry, TABLE, PROMPTS, SAMPLES, RULES, rounds=ROUNDS, capacity=capacity,
        decide=lambda view: replace(plain(view), strategy=turn[next(turns) % len(turn)]),
    )  # fmt: skip
    assert len(looks) == len(texts), "every sequence ended in a checked row"
    return [one.tokens.tolist() for one in result.completions], dict(looks)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("capacity, batches, most", [(12, (12,), 3), (5, (2, 5), 1)])
def test_an_ended_row_is_right_until_it_is_reused(monkeypatch, turn, capacity, batches, most):
    _, looks = watched(monkeypatch, programs(), turn, capacity, batches)
    assert not any(wrong for _, wrong in looks.values())
    assert max(right for right, _ in looks.values()) >= most, "also while others decode"


def test_a_dead_row_that_writes_into_its_text_is_detected_in_the_state_machine_too(monkeypatch):
    with monkeypatch.context() as patched:
        answers, _ = watched(patched, programs(), (toys.TREE,), 12, (12,))
    spoil(monkeypatch, harm=1)
    registry = toys.executables(1, V, toys.table_drafter())
    spoiled, looks = watched(monkeypatch, registry, (toys.TREE,), 12, (12,))
    assert spoiled == answers and sum(wrong > 0 for _, wrong in looks.values()) > len(looks) // 2
