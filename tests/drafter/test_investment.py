"""Training in the policy update is repaid, or costs little: simulated runs, whose acceptance rises with the tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tlt_jax.drafter.investment import (
    EARLY,
    FALL,
    LONG,
    PATIENCE,
    RECENT,
    RISE,
    Budget,
    Investment,
)

# Seconds of a step, of a piece; tokens of it.
STEP, PIECE, TOKENS, COMPILING = (10.0, 0.5, 400.0, 8.0)
ROLLOUT = 0.6  # of a step's seconds


def log_curve(start, doubling):
    """Acceptance that rises by `doubling` with each doubling of the tokens, from `start` at 400 of them, to 0.85."""
    return lambda tokens: float(
        np.clip(start + doubling * math.log2((400 + tokens) / 400), 0.01, 0.85)
    )


def saved_share(acceptance):
    """Share of a rollout that drafting saves: a chain of three drafts, in rounds 1.3 times as long."""
    accepted = acceptance + acceptance**2 + acceptance**3
    return max(1 - 1.3 / (1 + accepted), 0.0)


def whole_run(steps, curve, start_cost=20.0, noise=0.01, seed=0):
    """(seconds of a run over those of a run that never trains, seconds of training by step, step in which drafting started)."""
    random, known, spent, began, total = np.random.default_rng(seed), Investment(), [], None, 0.0
    for step in range(steps):
        left = steps - step - 1
        acceptance = curve(known.tokens) + random.normal(0, noise)
        drafts, has_learned = began is not None, known.pieces > 0

        def worth(depths, left=left):
            return saved_share(depths[0]) * ROLLOUT * STEP * left, 1.5 * start_cost

        known = known.earned(worth, step, left, 0.0 if has_learned else COMPILING, drafts)
        pieces, seconds = min(known.affords(not has_learned), 12), 0.0
        if pieces:
            seconds = pieces * PIECE + (0.0 if has_learned else COMPILING)
            known = known.measured([acceptance], pieces * TOKENS)
            known = known.learned(pieces * TOKENS, pieces, seconds, not has_learned)
        gain = saved_share(acceptance) * ROLLOUT * STEP if drafts else 0.0
        total += STEP - gain + seconds
        saved, compile_cost = worth([acceptance])
        if not drafts and pieces and saved > compile_cost:
            began, total = step, total + start_cost
        known = known.after_step(STEP - gain)
        known = Investment.of(json.loads(json.dumps(known.saved())))  # as from a checkpoint
        spent.append(seconds)
    return total / (steps * STEP), spent, began


CURVES = {
    "learns": log_curve(0.05, 0.07),
    "fast": log_curve(0.3, 0.1),
    "hardly": log_curve(0.02, 0.004),
    "never": lambda tokens: 0.02,
}


@pytest.mark.parametrize("steps", [2, 10, 60, 400])
@pytest.mark.parametrize("curve", CURVES)
def test_no_run_is_longer_by_more_than_the_long_share(steps, curve):
    for seed in range(5):
        taken, spent, _ = whole_run(steps, CURVES[curve], seed=seed)
        assert taken <= 1 + LONG + 0.005
        assert max(spent, default=0) <= EARLY * STEP + PIECE + COMPILING


def test_a_long_run_with_a_drafter_that_learns_is_faster():
    learns, _, began = whole_run(400, CURVES["learns"])
    fast, _, sooner = whole_run(400, CURVES["fast"])
    assert learns < 0.9 and fast < 0.75 and sooner < began < 200


def test_a_run_that_is_too_short_trains_nothing():
    assert not any(whole_run(8, CURVES["fast"], start_cost=60.0)[1])


def test_a_drafter_that_never_learns_costs_only_the_trial():
    _, spent, began = whole_run(400, CURVES["never"])
    assert 0 < sum(spent) <= 0.5 * LONG * 400 * STEP and began is None


def drafting(recent, best, **rest):
    """An investment while the rollout drafts, with these measurements of acceptance."""
    return Investment(step_seconds=STEP, piece_seconds=PIECE, recent=recent, best=best, **rest)


def test_while_drafting_the_credit_is_small_less_when_stalled_and_more_when_acceptance_falls():
    def credit(known):
        return known.earned(None, 100, 100, 0.0, drafts=True).credit

    rising = drafting(np.linspace(0.3, 0.5, RECENT).tolist(), 0.5)
    stalled = drafting([0.5] * RECENT, 0.5, reserve=5.0)
    fallen = drafting([0.5 - 2 * FALL] * RECENT, 0.5, reserve=5.0)
    assert credit(rising) == pytest.approx(LONG * STEP)
    assert credit(stalled) == pytest.approx(LONG * STEP / 3)
    assert credit(fallen) == pytest.approx(LONG * STEP + EARLY * STEP)
    assert credit(replace(fallen, reserve=0.0)) == pytest.approx(LONG * STEP)

    left, most = (
        40,
        LONG * STEP * 40,
    )  # a run that begins with a drafter compiles its training first
    assert rising.earned(None, 0, left, 1.01 * most, drafts=True).credit == 0
    assert rising.earned(None, 0, left, 0.99 * most, drafts=True).credit > 0

    random, known, spent = np.random.default_rng(0), drafting([], 0.0), 0.0
    for step in range(500):
        known = known.earned(None, step, 500 - step, 0.0, drafts=True)
        pieces = known.affords(False)
        spent += pieces * PIECE
        depth = 0.5 + 0.1 * math.sin(step / 30) + random.normal(0, 0.01)
        known = known.measured([depth], 400).learned(400, pieces, pieces * PIECE, False)
    assert 0.8 * LONG < spent / (500 * STEP) <= LONG


def test_the_prediction_follows_the_measured_curve_and_never_falls():
    known = Investment()
    for tokens in (0, 400, 800, 1600, 3200, 6400):
        known = replace(known, tokens=float(tokens))
        known = known.measured([0.1 + 0.05 * math.log2(1 + tokens), 0.5], 400)
    for more in (6400, 5 * 6400):
        first, second = known.expected(more)
        wanted = min(0.1 + 0.05 * math.log2(1 + 6400 + more), 0.9)
        assert first == pytest.approx(wanted, abs=0.02) and second == pytest.approx(0.5)
    falling = Investment(bins={"0": [1, 0.5], "4": [1, 0.4], "8": [1, 0.3]}, tokens=20.0)
    assert falling.expected(1e6) == [pytest.approx(0.3)]
    assert Investment(bins={"0": [1, 0.5], "4": [1, 0.4]}).expected(10) is None


def test_a_checkpoint_of_another_version_starts_from_zero():
    known = Investment(pieces=3, bins={"0": [1.0, 0.5]}, recent=[0.5])
    assert Investment.of(json.loads(json.dumps(known.saved()))) == known
    assert Investment.of({**known.saved(), "other": 1}) == Investment() == Investment.of(None)


QUARTER = PATIENCE // 4  # micro-steps of an RL step


@pytest.mark.parametrize(("steps", "is_paused"), [
    ([(0.2 + 2 * RISE * i, QUARTER) for i in range(30)], False),  # acceptance rises
    ([(0.6, QUARTER)] * 4, False),  # the first of them is the best so far
    ([(0.6, QUARTER)] * 5, True),
    ([(0.6, QUARTER)] * 5 + [(0.6 - FALL / 2, 0)], True),
    ([(0.6, QUARTER)] * 5 + [(0.6 - 1.1 * FALL, 0)], False),  # it falls: training resumes
    ([(0.6, QUARTER)] * 5 + [(0.6 - 1.1 * FALL, 0)] + [(0.57, QUARTER)] * 3, False),
    ([(0.6, QUARTER)] + [(0.6 + 0.9 * RISE, QUARTER)] * 4, True),  # noise is no improvement
    ([(0.6 - 0.4 * RISE * step, QUARTER) for step in range(20)], False),  # the policy moves away
    ([(0.6, 0)] * 50, False),  # nothing was trained: no evidence against training
    *(
        ([(0.6, QUARTER)] + [(0.6, count)] * (PATIENCE // count - 1 + late), bool(late))
        for count in (1, 8, PATIENCE) for late in (0, 1)
    ),
])  # fmt: skip
def test_training_pauses_while_acceptance_stays_and_resumes_when_it_falls(steps, is_paused):
    """However the micro-steps are spread over RL steps."""
    budget = Budget()
    for acceptance, count in steps:
        budget = budget.after(acceptance, count)
    assert budget.is_paused == is_paused
