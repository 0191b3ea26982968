"""What a drafter's catching up costs is expected: measured once, by the tokens that it lacks."""

from __future__ import annotations

import numpy as np
import pytest
from tuner_rollouts import measured

from tlt_jax.spec_decode.strategy import PLAIN, parse
from tlt_jax.tuner import catching_up, goodput
from tlt_jax.tuner.exploration import CREDIT, HORIZON, Outlook, worth_trying
from tlt_jax.tuner.interface import EXPLORATION_ROUNDS

LEARNED, MERGED, NGRAM = (parse(text) for text in ("learned:2_2_4", "merged:2_2_4", "ngram:2_1_3"))
ARMS = (PLAIN, LEARNED, MERGED, NGRAM)


def chunk(arm, seconds=0.0, group=0, rounds=16, is_exploring=False):
    """A chunk of 4 rows and 512 slots whose drafter caught up for so long before it."""
    seen = measured(arm, rounds=rounds)
    return seen._replace(catch_up=seconds, group=group, is_exploring=is_exploring)


def seen(*chunks):
    """What is known after these chunks, whose rounds the clock counts."""
    known, clock = catching_up.begin(), 0
    for one in chunks:
        clock += one.rounds
        known = catching_up.measured(known, clock, one)
    return known, clock


def test_a_new_rollout_is_expected_to_cost_what_its_tokens_cost_before():
    known, clock = seen(chunk(LEARNED, 2.0))
    again = catching_up.renewed(known)
    found = catching_up.expected(again, clock, ARMS, batch=4, slots=512)
    np.testing.assert_allclose(found, [0, 2.0, 2.0, 0]), "n-grams have nothing to catch up with"
    found = catching_up.expected(again, clock, ARMS, batch=2, slots=2048)
    np.testing.assert_allclose(found, [0, 4.0, 4.0, 0])


def test_a_drafter_that_was_just_used_lacks_the_rounds_since():
    known, clock = seen(chunk(LEARNED, 2.0), *[chunk(PLAIN)] * 4)
    found = catching_up.expected(known, clock, ARMS, batch=4, slots=512)
    np.testing.assert_allclose(found, [0, 2.0 * 64 / 512, 2.0 * 64 / 512, 0])
    known, clock = seen(chunk(LEARNED, 2.0), chunk(PLAIN, group=1), *[chunk(PLAIN)] * 3)
    found = catching_up.expected(known, clock, ARMS, batch=4, slots=512)
    np.testing.assert_allclose(found[1], 2.0 * 32 / 512), "the rounds are those of two groups"


def test_the_share_of_a_whole_rollout_counts_until_it_is_paid():
    known, _ = seen(
        chunk(LEARNED, 2.0), *[chunk(LEARNED)] * 3, chunk(MERGED, 1.0, is_exploring=True)
    )
    spent = 4 * chunk(LEARNED).seconds
    assert catching_up.overhead(known, ARMS).tolist() == [0, 0, 0, 0], "it is paid"
    found = catching_up.overhead(catching_up.renewed(known), ARMS)
    np.testing.assert_allclose(found, [0, *[np.log1p(2.0 / spent)] * 2, 0])


def outlook(catch_up: float) -> Outlook:
    """Plain decoding, and an arm that is probably twice as fast but not surely so."""
    zeros = np.zeros(2)
    return Outlook(
        (PLAIN, LEARNED),
        np.array([0.0, 0.7]),
        np.array([0.0, 0.5]),
        zeros,
        np.array([0.0, catch_up]),
        zeros,
    )


@pytest.mark.parametrize("chunk_rounds", [4, 16, 64])
def test_an_exploration_is_worth_it_only_while_it_gains_more_than_the_catching_up(chunk_rounds):
    state = {**goodput.goodput(["2_2_4"]).init(), "chunk": chunk_rounds, "funds": 1e9}
    there = np.ones(2, bool)
    most = chunk_rounds * HORIZON  # seconds of plain rounds over the horizon: no gain exceeds them
    assert worth_trying(state, outlook(0.0), 0, there) == 1
    assert worth_trying(state, outlook(most), 0, there) == 0
    paid = [worth_trying(state, outlook(one), 0, there) for one in np.linspace(0, most, 50)]
    assert paid == sorted(paid, reverse=True)


def test_an_exploration_waits_until_the_budget_covers_the_catching_up():
    state, there = {**goodput.goodput(["2_2_4"]).init(), "funds": 0.0}, np.ones(2, bool)
    assert worth_trying(state, outlook(CREDIT + EXPLORATION_ROUNDS), 0, there) == 0
    state["funds"] = CREDIT + 2 * EXPLORATION_ROUNDS
    assert worth_trying(state, outlook(CREDIT + EXPLORATION_ROUNDS), 0, there) == 1
