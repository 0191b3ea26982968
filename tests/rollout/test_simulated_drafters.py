"""Rollouts in virtual time with several drafters: the tuner converges to the better one, and a bad one costs little."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import scenarios
import test_simulated as simulation
from scenarios import Scenario, in_scenario

from tlt_jax.config.schema import Speculation
from tlt_jax.rollout.executables.programs import Decode
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.payback import Payback
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.simulate import simulator
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, PLAIN
from tlt_jax.tuner import goodput, make

ARMS = make.arms(Speculation(drafter="adaptive"))
NGRAMS = tuple(arm for arm in ARMS if arm.drafter == NGRAM)
NODE = {scenarios.cpu: 1 / 8, scenarios.gpu: 1 / 200}


BAD = (0.3, 0.2)  # quality and agreement: one token in twelve is accepted


def scenario_of(round_cost, ngram, learned, merged, **rest) -> Scenario:
    """A scenario with these qualities (or BAD) of the drafters."""
    given = dict(zip((NGRAM, LEARNED, MERGED), (ngram, learned, merged), strict=True))
    known = {drafter: one if one is BAD else (one, 1.0) for drafter, one in given.items()}
    return Scenario(round_cost, 0.0, drafters=known, **rest)


def decoded(scenario, arms, rollouts, estimates=None, state=None, seed=0):
    """(state, results) of some rollouts, with an update of the weights and held-out estimates after each."""
    tuner = goodput.goodput(arms, NODE[scenario.cost], learning=(LEARNED, MERGED))
    programs, results = in_scenario(scenario, scenarios.long_tailed(1200)), []
    state = state or tuner.update_prior(tuner.init(), estimates or {})
    for number in range(rollouts):
        request = scenarios.request(
            [64] * 12, 4, 1200, seed=100 * seed + number, capacity=48, in_flight=2
        )
        result, state = simulation.run(programs, request, tuner, state)
        results.append(result)
        state = tuner.update_prior(state, estimates or {})
    return state, results


def seconds(results) -> float:
    return sum(one.stats["seconds"] for one in results)


def used(result) -> Counter:
    """Rounds of small batches by drafter."""
    rounds = Counter()
    for one in result.measurements:
        if one.batch <= 16:
            rounds["off" if one.strategy == PLAIN else one.strategy.drafter] += one.rounds
    return rounds


@pytest.mark.parametrize("round_cost, better, qualities", [
    (scenarios.gpu, NGRAM, (0.75, 0.3, 0.3)), (scenarios.gpu, LEARNED, (0.3, 0.8, 0.3)),
    (scenarios.gpu, MERGED, (0.4, 0.5, 0.85)), (scenarios.cpu, NGRAM, (0.75, 0.3, 0.3)),
    (scenarios.cpu, LEARNED, (0.3, 0.85, 0.3)),
])  # fmt: skip
def test_the_tuner_converges_to_the_better_drafter(round_cost, better, qualities):
    """It gets an estimate for the learned drafter alone; it measures merged trees itself."""
    scenario = scenario_of(round_cost, *qualities)
    assert {scenario.best(batch, 512, ARMS).drafter for batch in (1, 4, 16)} == {better}
    _, results = decoded(scenario, ARMS, 5, {LEARNED: scenario.levels(LEARNED)})
    rounds = used(results[-1])
    assert rounds[better] > 0.8 * sum(rounds.values()), rounds


@pytest.mark.parametrize("round_cost", [scenarios.gpu, scenarios.cpu])
@pytest.mark.parametrize("wrong", [0.0, 0.4], ids=["true estimate", "estimate too high"])
def test_a_bad_learned_drafter_costs_little_compared_with_ngrams_alone(round_cost, wrong):
    """Also when the held-out estimate is higher than its acceptance."""
    alone = taken = 0.0
    for seed in range(3):
        scenario = scenario_of(round_cost, 0.6, BAD, 0.55, seed=seed)
        estimates = {LEARNED: [min(level + wrong, 0.95) for level in scenario.levels(LEARNED)]}
        alone += seconds(decoded(scenario, NGRAMS, 4, seed=seed)[1])
        taken += seconds(decoded(scenario, ARMS, 4, estimates, seed=seed)[1])
    assert taken < 1.03 * alone


@pytest.mark.parametrize("round_cost", [scenarios.gpu, scenarios.cpu])
def test_a_drafter_without_an_estimate_is_not_tried(round_cost):
    scenario = scenario_of(round_cost, 0.6, 0.9, 0.9)
    state, results = decoded(scenario, ARMS, 3)
    assert not sum(used(result)[LEARNED] + used(result)[MERGED] for result in results)
    _, alone = decoded(scenario, NGRAMS, 3)
    assert seconds(results) == seconds(alone), "its arms make no difference"


def test_a_learned_drafter_is_used_once_it_is_good_and_dropped_when_it_gets_bad():
    scenario = scenario_of(scenarios.gpu, 0.6, BAD, BAD)
    state, results = decoded(scenario, ARMS, 3, {LEARNED: scenario.levels(LEARNED)})
    assert used(results[-1])[NGRAM] > 0.7 * sum(used(results[-1]).values())
    scenario.drafters |= {LEARNED: (0.8, 1.0), MERGED: (0.8, 1.0)}
    estimates = {LEARNED: scenario.levels(LEARNED)}
    state, results = decoded(scenario, ARMS, 5, estimates, state, seed=1)
    rounds = used(results[-1])
    assert rounds[LEARNED] + rounds[MERGED] > 0.8 * sum(rounds.values())
    scenario.drafters |= {LEARNED: BAD, MERGED: BAD}
    estimates = {LEARNED: scenario.levels(LEARNED)}
    _, results = decoded(scenario, ARMS, 4, estimates, state, seed=2)
    assert used(results[-1])[NGRAM] > 0.7 * sum(used(results[-1]).values())


def compiled(estimates) -> Counter:
    """The number of chunks that a run of 12 rollouts compiles, by drafter."""
    scenario, payback, state = scenario_of(scenarios.gpu, 0.5, 0.85, 0.85), Payback(), None
    programs = in_scenario(
        scenario, scenarios.long_tailed(600), lambda program: 0.2 * program.relative_seconds
    )
    tuner = goodput.goodput(ARMS, NODE[scenarios.gpu], learning=(LEARNED, MERGED))
    state = tuner.init()
    for step in range(12):
        request = scenarios.request([64] * 12, 4, 600, seed=step, capacity=48)
        payback.begin(11 - step, len(request.keys))
        planner = Planner((1, 4, 16, 48), (256, 512, 1024), tuner, state, payback, 664)
        contexts = scenarios.contexts(programs, request, planner)
        simulator.simulate(driver.LocalGroups(contexts, clock=programs.clock), programs)
        state = tuner.update_prior(planner.state, estimates if step >= 3 else {})
    chunks = [one.strategy for one in programs.compiled if isinstance(one, Decode)]
    return Counter(one.drafter for one in chunks if one != PLAIN)


def test_nothing_is_compiled_for_a_drafter_without_an_estimate():
    assert compiled({}).keys() == {NGRAM}
    assert compiled({LEARNED: np.full(5, 0.85)})[LEARNED] > 0
