"""Arms of several drafters: evidence of one drafter does not count for another, and untrained ones are not used."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scenarios
import test_tuner as tuners

from tlt_jax.config.schema import Speculation
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, PLAIN, Strategy, name, parse
from tlt_jax.tuner import acceptance, cost_model, goodput, make
from tlt_jax.tuner.interface import Cell

SETTINGS = Speculation(drafter="adaptive")
ARMS = make.arms(SETTINGS)
LEVELS = (0.8, 0.7, 0.6, 0.5)


def make_tuner() -> goodput.Tuner:
    return make.make_tuner(SETTINGS, ARMS, is_cpu=False)


def named(drafter: str, *texts: str) -> tuple[Strategy, ...]:
    return tuple(parse(f"{drafter}:{text}") for text in texts)


# Arms


def test_every_strategy_is_an_arm_of_the_drafters_that_can_use_it():
    assert [name(arm) for arm in ARMS] == [
        *("ngram:3_1_4", "ngram:7_1_8", "ngram:1_1_2"),
        *("learned:3_1_4", "learned:7_1_8", "learned:6_4_16", "learned:1_1_2"),
        "merged:6_4_16",
    ]  # fmt: skip


def test_a_strategy_that_names_its_drafter_is_an_arm_of_only_this_one():
    texts = ["merged:3_1_4", "off", "3_1_4", "ngram:6_4_16"]
    found = make.arms(Speculation(drafter="adaptive", strategies=texts))
    assert [name(arm) for arm in found] == [
        "ngram:3_1_4", "ngram:6_4_16", "learned:3_1_4", "merged:3_1_4",
    ]  # fmt: skip


@pytest.mark.parametrize("drafter", ["none", "ngram", "a directory"])
def test_with_one_drafter_no_strategy_can_name_another(drafter):
    with pytest.raises(ValueError, match="learned:3_1_4.*write 3_1_4, or set the drafter to adap"):
        make.arms(Speculation(drafter=drafter, strategies=["1_1_2", "learned:3_1_4"]))


# Evidence


@pytest.mark.parametrize("drafter", ["", NGRAM, LEARNED, MERGED])
def test_a_tree_covers_smaller_ones_of_only_its_drafter(drafter):
    source = Strategy(6, 4, 16, drafter)
    covered = [other for other in ("", NGRAM, LEARNED, MERGED)
               if acceptance.covers(source, Strategy(3, 1, 4, other))]  # fmt: skip
    assert covered == [drafter]


@pytest.mark.parametrize("has_estimate", [False, True])
def test_a_measurement_of_one_drafter_does_not_change_the_estimates_of_another(has_estimate):
    evidence, estimates = {}, {LEARNED: acceptance.estimated(90.0, LEVELS)} if has_estimate else {}
    (chain,) = named(LEARNED, "3_1_4")
    evidence = acceptance.add(evidence, 100.0, 4, chain, 64, tuners.measured(chain, accepted=0.3).hits, ARMS)  # fmt: skip
    before = acceptance.estimate(evidence, 900.0, 4, ARMS, estimates)
    for source in (*named(NGRAM, "7_1_8"), *named(MERGED, "6_4_16")):
        for clock in (200.0, 800.0):
            hits = tuners.measured(source, accepted=0.9).hits
            evidence = acceptance.add(evidence, clock, 4, source, 64, hits, ARMS)
    after = acceptance.estimate(evidence, 900.0, 4, ARMS, estimates)
    for old, new in zip(before, after, strict=True):
        for arm, one, other in zip(ARMS, old, new, strict=True):
            assert (one == other) == (arm.drafter == LEARNED), name(arm)


def test_the_name_of_the_only_drafter_makes_no_difference():
    """A learned drafter's arms, with and without names: the same choices, speeds and uncertainties."""
    runs = []
    for drafter in ("", LEARNED):
        arms = [Strategy(*parse(text).__dict__.values()) for text in SETTINGS.strategies]
        arms = [Strategy(arm.depth, arm.topk, arm.nodes, drafter) for arm in arms]
        scenario = scenarios.Scenario(scenarios.gpu, 0.6)
        state, found = tuners.decode(scenario, goodput.goodput(arms), rollouts=2)
        cells = [Cell(4, 512, arm) for arm in (PLAIN, *arms)]
        runs.append(
            (
                [
                    (choice.strategy.nodes, choice.predicted, choice.reason.split(":")[0][:9])
                    for run in found
                    for choice, _ in run.chunks
                ],
                np.array(goodput.goodput(arms).predict(state, cells)).tolist(),
            )
        )
    assert str(runs[0]) == str(runs[1])


# Estimates


def expected(drafter: str, text: str, estimates: dict) -> tuple[float, float]:
    """The tuner's expectation for an arm before any measurement, and its uncertainty."""
    state = make_tuner().update_prior(make_tuner().init(), estimates)
    arms = named(drafter, text)
    mean, error = acceptance.estimate({}, state["clock"], 4, arms, state["estimates"])
    return float(mean[0]), float(error[0])


@pytest.mark.parametrize("levels", [(0.8, 0.7, 0.6, 0.5), (0.5,), (0.3, 0.6), (0.9, 0.9, 0.2)])
@pytest.mark.parametrize("text", ["1_1_2", "3_1_4", "7_1_8"])
def test_a_chains_expected_acceptance_is_the_sum_of_the_estimates_products(levels, text):
    depth = parse(text).depth
    every = [*levels, *levels[-1:] * depth][:depth]
    mean, error = expected(LEARNED, text, {LEARNED: levels})
    assert 1 + mean == pytest.approx(1 + np.cumprod(every).sum())
    assert error < 0.15


def test_a_wide_tree_is_expected_to_accept_more_by_the_power_law_of_widths():
    levels = (0.5, 0.4, 0.4, 0.3, 0.3, 0.3)
    every = np.cumprod(np.array(levels) ** 2.5**-0.9).sum()
    for drafter in (LEARNED, MERGED):
        mean, _ = expected(drafter, "6_4_16", {LEARNED: levels})
        assert 1 + mean == pytest.approx(1 + every)


def test_merged_trees_have_the_learned_drafters_estimate_or_their_own():
    worse = {LEARNED: (0.9,), MERGED: (0.2,)}
    assert expected(MERGED, "6_4_16", worse) < expected(MERGED, "6_4_16", {LEARNED: (0.9,)})
    assert expected(LEARNED, "6_4_16", worse) == expected(LEARNED, "6_4_16", {LEARNED: (0.9,)})
    assert expected(NGRAM, "3_1_4", worse) == expected(NGRAM, "3_1_4", {})


def test_measurements_replace_an_estimate_and_a_new_estimate_replaces_old_measurements():
    tuner, (arm,) = make_tuner(), named(LEARNED, "1_1_2")
    state, seen = tuner.update_prior(tuner.init(), {LEARNED: (0.9,)}), []

    def known():
        mean, _ = acceptance.estimate(
            state["evidence"], state["clock"], 4, [arm], state["estimates"]
        )
        seen.append(float(mean[0]))

    known()
    for _ in range(20):
        state = tuner.observe(state, tuners.measured(arm, accepted=0.2))
    known()
    for _ in range(4):
        state = tuner.update_prior(state, {LEARNED: (0.9,)})
    known()
    assert seen[0] > 0.85 and seen[1] < 0.3 and seen[2] > 0.7


def test_an_estimate_loses_weight_as_weights_change():
    tuner, (arm,) = make_tuner(), named(LEARNED, "3_1_4")
    state, uncertainties = tuner.update_prior(tuner.init(), {LEARNED: LEVELS}), []
    for _ in range(4):
        uncertainties.append(
            acceptance.estimate({}, state["clock"], 4, [arm], state["estimates"])[1][0]
        )
        state = tuner.update_prior(state)
    assert (
        uncertainties == sorted(uncertainties)
        and uncertainties[0] < 0.15
        and uncertainties[-1] > 0.3
    )


def test_an_estimate_that_is_not_finite_counts_as_zero_acceptance():
    for levels in ((math.nan,), (math.inf, 0.5), (0.0,)):
        mean, error = expected(LEARNED, "3_1_4", {LEARNED: levels})
        assert 0 <= mean < 0.01 and math.isfinite(error)
    assert expected(LEARNED, "3_1_4", {LEARNED: (0.6, math.nan)})[0] == pytest.approx(0.6, abs=1e-3)


def test_an_estimate_without_a_level_is_rejected():
    with pytest.raises(ValueError, match="no level"):
        make_tuner().update_prior(make_tuner().init(), {LEARNED: ()})


# Usable arms


def drafters(state) -> set[str]:
    return {arm.drafter for arm in make_tuner().usable(state, 4, 1)}


def test_an_arm_is_usable_once_its_drafter_was_estimated_or_measured():
    tuner = make_tuner()
    state = tuner.init()
    assert drafters(state) == {NGRAM}
    assert drafters(tuner.update_prior(state)) == {NGRAM}
    estimates = tuner.update_prior(state, {LEARNED: LEVELS})
    assert drafters(estimates) == {NGRAM, LEARNED, MERGED}
    assert drafters(tuner.update_prior(estimates)) == {NGRAM, LEARNED, MERGED}
    assert drafters(tuner.update_prior(state, {MERGED: LEVELS})) == {NGRAM, MERGED}
    seen = tuner.observe(state, tuners.measured(named(LEARNED, "3_1_4")[0], accepted=0.1))
    assert drafters(seen) == {NGRAM, LEARNED}
    assert drafters(json.loads(json.dumps(estimates))) == drafters(estimates)


def test_an_arm_that_is_not_usable_is_not_chosen_however_fast_it_seems():
    tuner = make_tuner()
    for estimates, chosen in (
        ({}, {"", NGRAM}),
        ({LEARNED: (0.98,)}, {"", NGRAM, LEARNED, MERGED}),
    ):
        state, taken = tuner.update_prior(tuner.init(), estimates), set()
        for _ in range(200):
            state, choice = tuner.choose(state, 1, 1, 512)
            taken.add(choice.strategy.drafter)
            seen = tuners.measured(choice.strategy, 1, accepted=0.05, rounds=min(choice.rounds, 16))
            state = tuner.observe(state, seen)
        assert taken <= chosen and (LEARNED in taken or MERGED in taken) == bool(estimates)


def test_largest_batches_include_only_trained_drafters():
    batches = [1, 64, 256]
    assert {arm.drafter for arm in make.largest_batches(make_tuner(), batches)} == {NGRAM}
    assert make.largest_batches(make_tuner(), batches, [NGRAM, LEARNED, MERGED]) == {
        arm: max(batch for batch in batches if batch * arm.nodes <= goodput.MOST_NODES)
        for arm in ARMS
    }


# Costs


def seconds(cells, *texts: str) -> list[float]:
    log, _ = cost_model.predict(cells, [Cell(4, 512, parse(text)) for text in texts])
    return np.exp(log).tolist()


def test_before_measurements_levels_of_ngrams_cost_nothing_and_those_of_a_network_do():
    cells = {}
    for batch in (1, 4, 16):
        for _ in range(3):
            cells = cost_model.note(
                cells, batch, 512, PLAIN, scenarios.gpu(batch, 512, PLAIN), False
            )
    for known in ({}, cells):
        ngram, learned, merged, only = seconds(
            known, "ngram:7_1_8", "learned:7_1_8", "merged:7_1_8", "7_1_8"
        )
        assert ngram < 0.9 * learned and learned == merged == only


def test_the_seconds_of_drafters_are_learned_separately():
    cells, texts = {}, ("ngram:7_1_8", "learned:7_1_8", "merged:7_1_8")
    truth = dict(zip(texts, (1.3, 2.5, 2.8), strict=True))
    for _ in range(9):
        cells = cost_model.note(cells, 4, 512, PLAIN, 1.0, False)
        for text in texts:
            cells = cost_model.note(cells, 4, 512, parse(text), truth[text], False)
    assert len(cells) == 4
    for text, found in zip(texts, seconds(cells, *texts), strict=True):
        assert found == pytest.approx(truth[text], rel=0.04)
    _, (known, other) = cost_model.predict(
        {key: cell for key, cell in cells.items() if "learned" not in key},
        [Cell(4, 512, parse(text)) for text in ("ngram:7_1_8", "learned:7_1_8")],
    )
    assert known < 0.05 < other and not math.isnan(other)


def test_a_block_drafter_costs_its_layers_whatever_the_depth():
    """By hand: the round 1, a node 1/10, a layer 0.06, a drafted node of a layer 1/400, a cache slot 1/131072."""
    block, rows = cost_model.Networks((2, 8)), 4
    for text, nodes in (("3_1_4", 4), ("7_1_8", 8), ("merged:6_4_16", 16)):
        found = cost_model.prior_rounds(Cell(rows, 512, parse(text)), 1 / 10, block)
        slots = rows * 512 / 131072
        assert found == pytest.approx(1 + rows * nodes / 10 + 2 * 0.06 + rows * 2 * 8 / 400 + slots)
    for text in ("ngram:7_1_8", "off"):
        cell = Cell(rows, 512, parse(text))
        assert cost_model.prior_rounds(cell, 1 / 10, block) == cost_model.prior_rounds(cell, 1 / 10)


def test_what_a_shallow_block_costs_is_what_a_deep_one_does():
    """With the cost of verification known, one measured depth tells the others; levels would be charged by depth."""
    block, cells = cost_model.Networks((2, 8)), {}
    truth = {
        text: 1 + 0.01 * parse(text).nodes + 0.3 * (text != "off")
        for text in ("off", "2_1_3", "7_1_8")
    }
    for text in ("off", "2_1_3"):
        for _ in range(6):
            cells = cost_model.note(cells, 1, 512, parse(text), truth[text], False)
    target = [Cell(1, 512, parse("7_1_8"))]
    speeds = [
        float(goodput.goodput(["2_1_3", "7_1_8"], 0.01, networks=one).predict(
            goodput.begin() | {"cells": cells, "seen": 12}, target)[0][0])
        for one in (block, cost_model.DENSE)
    ]  # fmt: skip
    one_pass, by_level = (
        cost_model.predict(cells, target, None, one)[0][0] for one in (block, cost_model.DENSE)
    )
    assert abs(one_pass - np.log(truth["7_1_8"])) < 0.1 < by_level - np.log(truth["7_1_8"])
    assert speeds[0] > speeds[1] + 0.1
