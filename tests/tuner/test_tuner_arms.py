"""The goodput tuner on the shipped arms: its speed, losses, explorations and predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scenarios
from tuner_rollouts import decode, measured, seconds

from tlt_jax.config.schema import Speculation
from tlt_jax.spec_decode.strategy import PLAIN, parse
from tlt_jax.tuner import acceptance, baselines, cost_model, goodput
from tlt_jax.tuner.baselines import parse_arms
from tlt_jax.tuner.interface import Cell

SHIPPED = Speculation().strategies
ARMS = parse_arms(SHIPPED)
# The prior cost of a node.
NODE = {scenarios.cpu: 1 / 10, scenarios.gpu: 1 / 200}


def tuner_for(round_cost):
    return goodput.goodput(SHIPPED, node_cost=NODE[round_cost])


@pytest.mark.parametrize(
    ("round_cost", "quality", "share"),
    [(scenarios.gpu, 0.8, 0.93), (scenarios.gpu, 0.5, 0.93), (scenarios.cpu, 0.8, 0.95),
     (scenarios.cpu, 0.5, 0.96), (scenarios.cpu, 0.3, 0.96)],
)  # fmt: skip
def test_the_shipped_arms_come_close_to_the_oracle(round_cost, quality, share):
    scenario = scenarios.Scenario(round_cost, quality)
    state, _ = decode(scenario, tuner_for(round_cost), rollouts=4)
    _, runs = decode(scenario, tuner_for(round_cost), rollouts=2, seed=1, state=state)
    _, best = decode(scenario, scenarios.oracle(scenario, ARMS), rollouts=2, seed=1)
    assert seconds(best) / seconds(runs) > share


def learning(round_cost, quality: float) -> float:
    """The oracle's seconds over those of first rollouts of a fresh tuner."""
    spent, least = 0.0, 0.0
    for seed in range(4):
        scenario = scenarios.Scenario(round_cost, quality, seed=seed)
        spent += seconds(decode(scenario, tuner_for(round_cost), rollouts=4, seed=seed)[1])
        least += seconds(
            decode(scenario, scenarios.oracle(scenario, ARMS), rollouts=4, seed=seed)[1]
        )
    return least / spent


LEARNED = {0.8: 0.87, 0.5: 0.9, 0.3: 0.92}  # quality -> share


@pytest.mark.parametrize("quality", LEARNED)
def test_little_is_lost_while_the_shipped_arms_are_learned(quality):
    assert learning(scenarios.gpu, quality) > LEARNED[quality]


def is_tried(gap: float, error: float) -> bool:
    """Whether an arm with this predicted gain in log speed is explored, with a large budget."""
    arms = (PLAIN, parse("3_1_4"))
    speed, errors = np.array([0.0, gap]), np.array([0.0, error])
    view = goodput.Prediction(arms, speed, errors, np.zeros(2))
    return (
        goodput.worth_trying(
            {"chunk": 16, "funds": math.inf}, view, 0, np.array([True] * len(view.arms))
        )
        == 1
    )


def is_worth_it(gap: float, error: float, horizon: float) -> bool:
    """Whether it saves more over `horizon` chunks of 16 rounds than 4 rounds lose, and at least 1 %."""
    faster = gap + error * np.linspace(-12, 12, 10_001)
    weight = np.exp(-(((faster - gap) / error) ** 2) / 2)
    saved, lost = (np.maximum(0, 1 - np.exp(-x)) @ weight / weight.sum() for x in (faster, -faster))
    return bool(saved > 0.01 and 16 * horizon * saved > 4 * lost)


@pytest.mark.parametrize("error", [0.2, 0.4, 0.8])
def test_an_exploration_is_worthwhile_when_six_chunks_pay_for_it(error):
    gaps = np.linspace(-3, 1, 41) * error
    tried = [is_tried(gap, error) for gap in gaps]
    assert tried == [is_worth_it(gap, error, 6.0) for gap in gaps]
    assert tried != [is_worth_it(gap, error, 1.0) for gap in gaps]
    if error == 0.8:  # with smaller errors, the limit of 1 % decides
        assert tried != [is_worth_it(gap, error, 100.0) for gap in gaps]


@pytest.mark.parametrize("round_cost", [scenarios.cpu, scenarios.gpu])
@pytest.mark.parametrize("agreement", [0.0, 0.3])
def test_a_useless_drafter_costs_at_most_two_per_cent_with_the_shipped_arms(round_cost, agreement):
    scenario = scenarios.Scenario(round_cost, 0.3, agreement)
    _, plain = decode(scenario, baselines.fixed("off"), rollouts=4)
    _, runs = decode(scenario, goodput.goodput(SHIPPED), rollouts=4)
    assert seconds(plain) / seconds(runs) > 0.98


def test_a_useless_drafter_costs_little_on_a_noisy_clock():
    spent, plain = 0.0, 0.0
    for seed in range(6):
        scenario = scenarios.Scenario(scenarios.gpu, 0.3, agreement=0.0, seed=seed, noise=0.2)
        spent += seconds(decode(scenario, tuner_for(scenarios.gpu), rollouts=1, seed=seed)[1])
        plain += seconds(decode(scenario, baselines.fixed("off"), rollouts=1, seed=seed)[1])
    assert spent / plain < 1.03


@pytest.mark.parametrize(("round_cost", "quality"), [(scenarios.cpu, 0.6), (scenarios.gpu, 0.8)])
def test_the_shipped_arms_beat_the_threshold_and_the_bandit(round_cost, quality):
    scenario = scenarios.Scenario(round_cost, quality)
    tuner = (
        tuner_for(round_cost),
        baselines.threshold(SHIPPED, 32),
        baselines.beg_mab(SHIPPED),
        baselines.fixed("off"),
    )
    taken, *others = (seconds(decode(scenario, one)[1]) for one in tuner)
    assert taken < 0.97 * min(others[:2]) and taken < 1.001 * others[2]


def test_the_shipped_arms_are_used_while_the_drafter_is_good():
    scenario, tuner = scenarios.Scenario(scenarios.gpu, 0.3, 0.0), tuner_for(scenarios.gpu)

    def speculating(runs):
        small = [seen for _, seen in runs[-1].chunks if seen.batch <= 16]
        return np.average(
            [one.strategy != PLAIN for one in small], weights=[one.rounds for one in small]
        )

    state, runs = decode(scenario, tuner)
    assert speculating(runs) < 0.2
    scenario.quality, scenario.agreement = 0.8, 1.0
    state, runs = decode(scenario, tuner, rollouts=4, seed=1, state=state)
    assert speculating(runs) > 0.9
    scenario.quality, scenario.agreement = 0.3, 0.0
    assert speculating(decode(scenario, tuner, rollouts=2, seed=2, state=state)[1]) < 0.2


@pytest.mark.parametrize("round_cost", [scenarios.cpu, scenarios.gpu])
def test_predictions_of_the_shipped_arms_are_accurate_and_explorations_few(round_cost):
    scenario = scenarios.Scenario(round_cost, 0.7, stalls=0.0)
    _, runs = decode(scenario, tuner_for(round_cost), rollouts=5)
    chunks = [pair for run in runs[2:] for pair in run.chunks]
    told = [choice.predicted * seen.seconds / seen.tokens for choice, seen in chunks]
    assert np.median(told) == pytest.approx(1.0, abs=0.12)
    assert np.mean([choice.is_exploring for choice, _ in chunks]) < 0.15


@pytest.mark.parametrize("round_cost", [scenarios.cpu, scenarios.gpu])
@pytest.mark.parametrize("quality", [0.5, 0.8])
def test_a_rollout_switches_strategies_for_explorations_and_little_else(round_cost, quality):
    """An exploration is two switches; a batch bucket may have a strategy of its own, and change it once."""
    scenario = scenarios.Scenario(round_cost, quality)
    state, _ = decode(scenario, tuner_for(round_cost), rollouts=6)
    _, runs = decode(scenario, tuner_for(round_cost), rollouts=3, seed=1, state=state)
    for run in runs:
        used = [seen.strategy for _, seen in run.chunks]
        switches = sum(a != b for a, b in zip(used, used[1:], strict=False))
        explored = sum(choice.is_exploring for choice, _ in run.chunks)
        batches = len({seen.batch for _, seen in run.chunks})
        assert switches <= 2 * explored + 2 * batches


# Drafters that get worse in a run: (quality, agreement with the policy) before and after 8 of its 24 rollouts.
ADVERSARIES = {
    "accepts nothing": ((0.05, 0.0), (0.05, 0.0)),
    "weights of another policy": ((0.8, 1.0), (0.3, 0.0)),
    "the policy moves far": ((0.8, 1.0), (0.3, 0.3)),
}


def least_of_ten(round_cost, before, after, seed=0, **load) -> float:
    """The least speed over plain decoding's of any 10 successive rollouts, in seconds without noise."""
    scenario, tuner = (
        scenarios.Scenario(round_cost, *before, seed=seed, **load),
        tuner_for(round_cost),
    )
    state, pairs = None, []
    for step in range(24):
        if step == 8:
            scenario.quality, scenario.agreement = after
        state, runs = decode(scenario, tuner, 1, 1000 * seed + step, state)
        plain = decode(scenario, baselines.fixed("off"), 1, 1000 * seed + step)[1]
        pairs.append((quiet(plain), quiet(runs)))
    sums = (np.sum(pairs[i : i + 10], axis=0) for i in range(len(pairs) - 9))
    return min(plain / tuned for plain, tuned in sums)


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("round_cost", [scenarios.cpu, scenarios.gpu])
def test_no_drafter_makes_any_ten_rollouts_slower_than_plain_decoding(round_cost, kind):
    assert least_of_ten(round_cost, *ADVERSARIES[kind]) > 0.97


def test_no_drafter_makes_any_ten_rollouts_much_slower_beside_other_work():
    for kind in ADVERSARIES.values():
        assert least_of_ten(scenarios.cpu, *kind, disturbed=0.3) > 0.95


def test_a_tuner_that_trusts_old_drafts_loses_more(monkeypatch):
    """A planted mistake, which the tests above would find."""
    monkeypatch.setattr(acceptance, "CHANGED", 1e6)
    monkeypatch.setattr(acceptance, "OTHERS_CHANGED", 1e6)
    monkeypatch.setattr(acceptance, "HALF_LIFE", 1e6)
    assert least_of_ten(scenarios.gpu, *ADVERSARIES["weights of another policy"]) < 0.95


def test_plain_decoding_that_was_measured_only_in_a_slow_first_run_is_measured_again():
    """A tree that accepts nothing is in use; the budget is spent."""
    tuner, tree = goodput.goodput(["3_1_4"]), parse("3_1_4")
    state = tuner.init()
    for _ in range(9):
        state = tuner.observe(state, measured(tree, accepted=0.01, per_round=0.027))
    state = tuner.observe(state, measured(PLAIN, per_round=0.031, rounds=4))
    state["incumbents"]["4"], state["funds"] = "3_1_4", -1.0
    taken = []
    for _ in range(30):
        state, choice = tuner.choose(state, 4, 4, 512)
        per_round = 0.022 if choice.strategy == PLAIN else 0.027
        accepted = 0.0 if choice.strategy == PLAIN else 0.01
        rounds = min(choice.rounds, 16)
        seen = measured(choice.strategy, accepted=accepted, per_round=per_round, rounds=rounds)
        state = tuner.observe(state, seen)
        taken.append(choice.strategy)
    assert taken[0] in (tree, PLAIN) and taken[-10:] == [PLAIN] * 10


# Other work on the machine


LOADS = [{"disturbed": 0.3}, {"phases": 1.5}, {"phases": 0.3}]


def quiet(runs) -> float:
    """Seconds of the decided chunks on a machine without other work."""
    return sum(run.quiet for run in runs)


def lost(quality, agreement, load) -> float:
    """The largest share of plain decoding's seconds, all without noise, by which a run that other work disturbs is slower."""
    worst = 0.0
    for seed in range(4):
        scenario = scenarios.Scenario(scenarios.cpu, quality, agreement, seed=seed, **load)
        runs = decode(scenario, tuner_for(scenarios.cpu), rollouts=4, seed=seed)[1]
        plain = decode(scenario, baselines.fixed("off"), rollouts=4, seed=seed)[1]
        worst = max(worst, quiet(runs) / quiet(plain) - 1)
    return worst


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize(("quality", "agreement"), [(0.3, 0.0), (0.3, 1.0), (0.5, 1.0)])
def test_other_work_makes_no_tuner_draft_where_that_loses(quality, agreement, load):
    assert lost(quality, agreement, load) < 0.025


def test_rounds_of_several_loads_in_one_cell_and_their_median_lose_more(monkeypatch):
    """Planted mistakes, which the test above would find."""
    monkeypatch.setattr(scenarios.Scenario, "taken", lambda self, at: 0.0)
    assert lost(0.3, 1.0, {"phases": 1.5}) > 0.05
    middle = lambda cell, noise=0.08: (  # noqa: E731
        np.log(np.median(cell["warm"] or cell["cold"])),
        0.08 / np.sqrt(len(cell["warm"] or cell["cold"])),
    )
    monkeypatch.setattr(cost_model, "settled", middle)
    assert lost(0.3, 1.0, {"disturbed": 0.3}) > 0.05


def test_gains_stay_where_other_work_disturbs():
    for load in ({}, *LOADS):
        scenario = scenarios.Scenario(scenarios.cpu, 0.8, **load)
        runs = decode(scenario, tuner_for(scenarios.cpu), rollouts=4)[1]
        plain = decode(scenario, baselines.fixed("off"), rollouts=4)[1]
        assert quiet(plain) / quiet(runs) > 1.03


def test_plain_decoding_that_was_measured_under_load_is_used_again_in_bounded_turns():
    """Its nine samples are three times too slow, as of a machine that shows nobody its load; the tree in use is slower."""
    tuner, tree = goodput.goodput(["3_1_4"]), parse("3_1_4")
    state = tuner.init()
    for _ in range(9):
        state = tuner.observe(state, measured(PLAIN, per_round=0.060))
        state = tuner.observe(state, measured(tree, accepted=0.1, per_round=0.030))
    taken = []
    for _ in range(cost_model.LIFE + 40):
        state, choice = tuner.choose(state, 4, 4, 512)
        accepted, per_round = (0.0, 0.020) if choice.strategy == PLAIN else (0.1, 0.030)
        rounds = min(choice.rounds, 16)
        seen = measured(choice.strategy, accepted=accepted, per_round=per_round, rounds=rounds)
        state = tuner.observe(state, seen)
        taken.append(choice.strategy)
    assert taken[:30] == [tree] * 30 and taken[-20:] == [PLAIN] * 20


@pytest.mark.parametrize("level", [1, 2, 3])
def test_each_level_of_other_work_has_its_own_seconds_and_begins_with_the_comparisons_of_the_last(
    level,
):
    tuner, tree = goodput.goodput(["3_1_4"]), parse("3_1_4")
    cells = [Cell(4, 512, PLAIN), Cell(4, 512, tree)]
    state = tuner.init()
    for _ in range(9):
        state = tuner.observe(state, measured(PLAIN, per_round=0.020))
        state = tuner.observe(state, measured(tree, accepted=0.5, per_round=0.025))
    before, _ = tuner.predict(state, cells)
    slow = measured(PLAIN, per_round=0.020 * 4 / (4 - level))._replace(taken=level / 4)
    loaded = tuner.observe(state, slow)
    speed, error = tuner.predict(loaded, cells)
    assert np.ptp(speed - before) < 0.1 and error.max() < 0.2
    assert np.exp(before - speed) == pytest.approx(4 / (4 - level), rel=0.1)
    assert tuner.is_disturbed(loaded) and not tuner.is_disturbed(state)
    for _ in range(20):
        loaded = tuner.observe(loaded, slow)
    assert not tuner.is_disturbed(loaded), "it is usual now"
    back = tuner.observe(loaded, measured(tree, accepted=0.5, per_round=0.025))
    np.testing.assert_allclose(tuner.predict(back, cells)[0], before, atol=0.05)
