"""Three drafters that share a group's decoding state: neither they nor switches between them change a token."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds
import test_group as toy
import toys
from pairwise import marked
from test_group import PROMPTS, RULES, SAMPLES, TABLE, V

from tlt_jax.keys import sequence_keys
from tlt_jax.rollout.executables.programs import CatchUp, Decode, Start, StateShape
from tlt_jax.rollout.scheduler.planner import GroupCandidates
from tlt_jax.rollout.scheduler.state import GroupView
from tlt_jax.spec_decode import decode
from tlt_jax.spec_decode.decode import Decoder
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, parse
from tlt_jax.tuner.interface import Cell

pytestmark = pytest.mark.usefixtures("x64")
TEXTS = ["ngram:3_1_4", "learned:3_2_6", "merged:3_2_7", "learned:2_1_3", "ngram:2_1_3"]
NGRAM, LEARNED, MERGED, SHORT, SHORT_NGRAM = ARMS = tuple(map(parse, TEXTS))
EXTENDING = (LEARNED, MERGED, SHORT)  # the state of the learned drafter
ORDER = (NGRAM, LEARNED, SHORT_NGRAM, PLAIN, MERGED, NGRAM, SHORT, PLAIN, LEARNED, NGRAM, MERGED)


@cache
def programs(groups: int = 1):
    return toys.executables(groups, V, toys.table_drafter(), toys.with_ngrams)


def play(order, guess="exact", groups=1, in_flight=1, ngram_rounds=0, rules=RULES, **rest):
    """A rollout whose chunks take these strategies in turn, for 1 to 3 rounds, n-grams for `ngram_rounds` when given.

    With one chunk in flight in one group, the strategies do not depend on the machine's speed.
    """
    batches = (2, 6) if groups > 1 else (6,)
    plain, turn = toys.bucketed(batches, (64,)), itertools.count()

    def decide(view):
        strategy = order[next(turn) % len(order)]
        is_long = ngram_rounds and strategy.drafter == "ngram"
        rounds = ngram_rounds if is_long else 1 + view.retired % 3
        return replace(plain(view), strategy=strategy, rounds=rounds)

    return toys.play(
        programs(groups), TABLE, PROMPTS, SAMPLES, rules, guess=toy.GUESSES[guess],
        capacity=6, rounds=ngram_rounds or 3, decide=decide, in_flight=in_flight, **rest,
    )  # fmt: skip


# One arm of n-grams and one of both; the gate has the others in turn.
SOME = marked([([arm], arm in (NGRAM, MERGED)) for arm in ARMS])


@pytest.mark.parametrize(
    "guess, groups, in_flight",
    marked(
        [
            (("exact", 1, 1), True),
            (("noisy", 2, 2), True),
            (("wrong", 1, 1), False),
            (("noisy", 1, 3), False),
        ]
    ),
)
def test_drafters_that_change_every_chunk_give_the_tokens_of_plain_decoding(
    guess, groups, in_flight
):
    order = ORDER if groups == 1 else (NGRAM, LEARNED, PLAIN, MERGED)
    result = play(order, guess, groups, in_flight)
    assert toy.answers(result) == toy.reference(RULES)[0]
    assert (groups, in_flight) != (1, 1) or {one.strategy for one in result.measurements} == {
        *ARMS,
        PLAIN,
    }


def test_the_learned_drafter_catches_up_with_ngram_chunks_just_before_it_drafts():
    result = play(ORDER, max_new_tokens=40)
    lag = due = 0
    for one in result.decisions:
        lag = 99 if one.joining else lag
        if one.strategy in EXTENDING:
            due, lag = due + (lag > one.strategy.path), one.strategy.path
        else:
            lag += min(one.rounds, 3) * one.strategy.path
    assert sum(span.kind == "catch_up" for span in result.spans) == due > 4


def test_the_learned_drafter_processes_every_token_that_ngrams_decoded():
    """Its drafts are then exact, and rejected only where a sequence ends."""
    order, endless = [NGRAM, LEARNED, NGRAM, SHORT, NGRAM, MERGED], DecodingParams(Sampling(1.0))
    result = play(order, ngram_rounds=7, rules=endless, max_new_tokens=40)
    drafted = [one for one in result.measurements if one.strategy in EXTENDING]
    missed = sum(one.strategy.depth * one.row_rounds - int(one.hits.sum()) for one in drafted)
    levels = sum(one.strategy.depth * one.row_rounds for one in drafted)
    ended = len(result.completions)
    assert missed <= 3 * ended < levels / 2


@pytest.mark.parametrize("arm", (PLAIN, *ARMS), ids=["off", *TEXTS])
def test_the_programs_of_a_chunk_catch_up_only_where_the_learned_drafter_drafts(arm):
    (context,) = toys.contexts(programs(), TABLE, PROMPTS, SAMPLES, RULES)
    view = GroupView(0, 0, 2, 20, 44, 16, 3, batch=2, slots=64)
    needed = GroupCandidates(context, view).needed(Cell(2, 64, arm))
    assert any(isinstance(one, CatchUp) for one in needed) == (arm in EXTENDING)


@pytest.mark.parametrize("arm", SOME, ids=TEXTS)
def test_a_chunk_of_ngrams_leaves_the_state_of_the_learned_drafter_as_it_is(arm):
    shape, key = StateShape(0, 2, 64), jax.random.key(0)
    state, text = programs().get(Start(shape))(), jax.random.randint(key, (2, 70), 1, V, jnp.int32)
    state = state.replace(
        roots=text[:, 9], lengths=jnp.full(2, 9, jnp.int32), limits=jnp.full(2, 60, jnp.int32),
        live=jnp.ones(2, bool), history=text,
        drafter=jax.tree.map(
            lambda leaf: jax.random.uniform(key, leaf.shape, maxval=8).astype(leaf.dtype), state.drafter
        ),
    )  # fmt: skip
    before = jax.device_get(state.drafter)
    weights = toys.placed(programs(), 0, TABLE, None)
    drafter = programs().shapes[0].drafter_of(arm)
    host = toys.pool((0, 1)) if jax.tree.leaves(drafter.host_context(2)) else ()
    chunk = Decode(shape, 3, arm, DecodingParams(Sampling(1.0)))
    state = jax.device_put(state, programs().shapes[0].replicated)
    after, report = chunk(programs(), state, weights, host, np.array([1, 3], np.int32))
    assert int(report.rounds) == 3
    same = [
        np.array_equal(old, new)
        for old, new in zip(*map(jax.tree.leaves, (before, after.drafter)), strict=True)
    ]
    assert all(same) == (arm not in EXTENDING)


REPEATING = [
    [3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1],
    [2, 6, 2, 6, 2, 6, 2],
    [7, 8, 9, 9, 7, 8, 9, 9, 7],
]


def test_merged_trees_with_nodes_enough_accept_what_either_drafter_alone_accepts():
    """For the same states: a learned tree of two levels has 2 + 4 candidates, and n-grams may have as many."""
    shapes = programs().shapes[0]
    deep, gained = {"learned": Strategy(2, 2, 7, "learned")}, Counter()
    deep |= {name: Strategy(2, 2, 13, name) for name in ("ngram", "merged")}
    decoders = {
        name: Decoder(shapes.target, shapes.drafters[name], RULES, arm)
        for name, arm in deep.items()
    }
    keys = jnp.asarray(sequence_keys(0, 0, 0, np.arange(24)))
    weights = toys.weights(TABLE, TABLE + toys.table(V, seed=9, scale=2.0))
    host = jnp.asarray(toys.pool(range(24)))

    @jax.jit
    def step(state):
        state, _ = decode.catch_up(
            shapes.target, shapes.drafter, state, weights, jnp.int32(deep["merged"].path)
        )
        found = {
            name: decode.advance_round(decoder, state, None, weights, host)
            for name, decoder in decoders.items()
        }
        return found["ngram"][0], {name: report for name, (_, _, report) in found.items()}

    state = rounds.begin(decoders["learned"], weights, REPEATING, keys, 20)
    for _ in range(6):
        state, found = step(state)
        counts = {name: np.asarray(emitted.counts) for name, emitted in found.items()}
        best = np.maximum(counts["learned"], counts["ngram"])
        assert (counts["merged"] >= best).all()
        gained.update({name: int(count.sum()) for name, count in counts.items()})
        for name, emitted in found.items():
            drafted = int(counts[name].sum() - (counts[name] > 0).sum())
            assert int(emitted.stats.hits.sum()) == drafted, "every accepted node is counted"
            assert emitted.stats.hits.shape == (2, deep[name].nodes, 2)
    assert gained["merged"] > max(gained["learned"], gained["ngram"])
