"""Tuners on simulated rollouts with known costs and hit rates: their choices, what they learn, and bounds on losses."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import scenarios
from tuner_rollouts import decode, measured

from tlt_jax.config import schema
from tlt_jax.config.schema import Speculation
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import acceptance, baselines, cost_model, goodput, make
from tlt_jax.tuner.baselines import bucketed, parse_arms, strategies_for
from tlt_jax.tuner.interface import Cell

# The paper's 8_4_8 is 7_4_8 here: 8 nodes, with the root, reach a depth of at most 7.
PAPER_ARMS = ("8_4_48", "8_4_32", "8_4_16", "7_4_8")
EXAMPLE_ARMS = ("2_2_4", "4_2_8", "6_4_16", "8_4_32", "8_4_48")
ARMS = parse_arms(EXAMPLE_ARMS)
MAKERS = {
    "fixed": lambda: baselines.fixed("6_4_16"),
    "threshold": lambda: baselines.threshold(PAPER_ARMS, 32),
    "beg_mab": lambda: baselines.beg_mab(ARMS),
    "goodput": lambda: goodput.goodput(ARMS),
}


# Strategies


def test_the_widest_trees_belong_to_the_smallest_batches():
    buckets = bucketed(parse_arms(PAPER_ARMS))
    nodes = [strategies_for(buckets, batch)[0].nodes for batch in (1, 2, 4, 5, 20, 21, 500)]
    assert nodes == [48, 32, 32, 16, 16, 8, 8]


@pytest.mark.parametrize("drafter", [schema.NONE, schema.NGRAM])
def test_strategies_are_checked_even_when_nothing_drafts(drafter):
    assert len(make.arms(Speculation(drafter=drafter, strategies=["3_1_4"]))) == (
        drafter == schema.NGRAM
    )
    with pytest.raises(ValueError, match="nodes is 0"):
        make.arms(Speculation(drafter=drafter, strategies=["6_4_0"]))


def test_an_empty_list_of_strategies_is_rejected():
    with pytest.raises(ValueError, match="no strategies"):
        goodput.goodput([])


# Counterfactuals: one tree's evidence about smaller ones


@pytest.mark.parametrize("nodes", [9, 13, 24, 31])
def test_fewer_nodes_of_the_same_candidates_accept_exactly_what_is_predicted(nodes):
    source, smaller = Strategy(8, 4, 32), Strategy(8, 4, nodes)
    hits = scenarios.table(*scenarios.drafts(3, 200, 0.6, 1.0, source)[:2], source)
    rank = scenarios.drafts(3, 200, 0.6, 1.0, smaller).rank
    assert acceptance.counterfactual(hits, smaller) == (rank >= 0).sum()


@pytest.mark.parametrize("quality", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("source, text", [
    ("8_4_48", "1_1_2"), ("8_4_48", "2_2_4"), ("8_4_48", "3_3_8"), ("8_4_48", "4_4_16"), ("8_4_48", "6_4_16"),
    ("6_4_16", "3_1_4"), ("6_4_16", "1_1_2"), ("7_1_8", "3_1_4"), ("3_1_4", "1_1_2"),
])  # fmt: skip
def test_smaller_trees_accept_what_is_predicted_within_four_per_cent(quality, source, text):
    source, smaller = strategies.parse(source), strategies.parse(text)
    rank, sibling, _ = scenarios.drafts(1, 4000, quality, 1.0, source)
    chunks = [
        scenarios.table(rank[i : i + 16], sibling[i : i + 16], source) for i in range(0, 4000, 16)
    ]
    predicted = sum(acceptance.counterfactual(hits, smaller) for hits in chunks) / 4000
    truth = (scenarios.drafts(2, 4000, quality, 1.0, smaller).rank >= 0).sum() / 4000
    assert abs((1 + predicted) / (1 + truth) - 1) < 0.04


def test_one_measurement_is_evidence_for_every_smaller_arm_and_no_larger_one():
    source = strategies.parse("6_4_16")
    hits = scenarios.table(*scenarios.drafts(1, 64, 0.6, 1.0, source)[:2], source)
    (entry,) = acceptance.add({}, 0, 4, source, 64, hits, (PLAIN, *ARMS))["4"].values()
    assert set(entry["accepted"]) == {"2_2_4", "4_2_8", "6_4_16"}


def test_hit_rates_follow_a_drafter_that_changes():
    source, evidence, means = strategies.parse("6_4_16"), {}, []
    for i, quality in enumerate([0.8] * 40 + [0.3] * 100):
        hits = scenarios.table(*scenarios.drafts(i, 32, quality, 1.0, source)[:2], source)
        evidence = acceptance.add(evidence, 16.0 * i, 4, source, 32, hits, ARMS)
        means.append(acceptance.estimate(evidence, 16.0 * i, 4, ARMS)[0][2])
    truth = [
        (scenarios.drafts(99, 4000, quality, 1.0, source).rank >= 0).sum() / 4000
        for quality in (0.8, 0.3)
    ]
    assert means[39] == pytest.approx(truth[0], rel=0.12) and means[-1] == pytest.approx(
        truth[1], rel=0.12
    )


# The cost of a round


@pytest.mark.parametrize("round_cost", [scenarios.cpu, scenarios.gpu])
def test_costs_of_small_batches_follow_from_plain_rounds_of_large_ones(round_cost):
    cells = {}
    for batch in (4, 16, 64):
        for _ in range(3):
            cells = cost_model.note(cells, batch, 512, PLAIN, round_cost(batch, 512, PLAIN), False)
    for batch, text in ((1, "2_2_4"), (1, "6_4_16"), (4, "4_2_8")):
        log, error = cost_model.predict(cells, [Cell(batch, 512, strategies.parse(text))])
        assert (
            abs(log[0] - math.log(round_cost(batch, 512, strategies.parse(text))))
            < 2 * error[0]
            < 0.8
        )


def test_a_measured_cell_overrides_the_model_and_a_stall_does_not():
    arm, cells = strategies.parse("4_2_8"), {}
    for number in range(9):
        cells = cost_model.note(cells, 4, 512, PLAIN, 1.0, False)
        cells = cost_model.note(cells, 4, 512, arm, 40.0 if number in (2, 5) else 4.0, False)
    log, error = cost_model.predict(cells, [Cell(4, 512, arm)])
    assert math.exp(log[0]) == pytest.approx(4.0, rel=0.03) and error[0] < 0.1


def test_one_slow_first_call_does_not_rule_out_an_arm():
    arm, cells = strategies.parse("4_2_8"), {}
    for _ in range(9):
        cells = cost_model.note(cells, 4, 512, PLAIN, 1.0, False)
    before, _ = cost_model.predict(cells, [Cell(4, 512, arm)])
    after, error = cost_model.predict(
        cost_model.note(cells, 4, 512, arm, 30.0, True), [Cell(4, 512, arm)]
    )
    assert after[0] - before[0] < 0.3 and error[0] > 0.15


def test_the_seconds_of_an_unused_cell_grow_uncertain_and_are_then_replaced():
    arm, cells, errors = strategies.parse("4_2_8"), {}, []
    for _ in range(9):
        cells = cost_model.note(
            cost_model.note(cells, 4, 512, PLAIN, 1.0, False), 4, 512, arm, 4.0, False
        )
    for _ in range(cost_model.LIFE + 1):
        errors.append(cost_model.predict(cells, [Cell(4, 512, arm)])[1][0])
        cells = cost_model.note(
            cost_model.note(cells, 4, 512, PLAIN, 1.0, False), 16, 512, arm, 16.0, False
        )
    assert errors[0] < 0.05 and errors[-1] > 0.08 and errors == sorted(errors)
    assert cells["16/512/4_2_8"]["age"] == 0 and cells["4/512/4_2_8"]["age"] == cost_model.LIFE + 1
    assert cost_model.note(cells, 4, 512, arm, 9.0, True)["4/512/4_2_8"]["warm"] == [4.0] * 9
    assert cost_model.note(cells, 4, 512, arm, 9.0, False)["4/512/4_2_8"]["warm"] == [4.0, 4.0, 9.0]


def test_cells_are_forgotten_oldest_first():
    cells = {}
    for slots in range(cost_model.CELLS + 5):
        cells = cost_model.note(cells, 1, slots + 1, PLAIN, 1.0, False)
    assert len(cells) == cost_model.CELLS and "1/1/off" not in cells


# The simple tuners


def test_fixed_always_chooses_its_strategy():
    tuner = baselines.fixed("4_2_8")
    state = tuner.observe(tuner.init(), measured(strategies.parse("4_2_8"), per_round=9.0))
    assert tuner.choose(state, 60, 64, 512)[1].strategy == Strategy(4, 2, 8)


@pytest.mark.parametrize(
    ("live", "batch", "text"),
    [(33, 64, "off"), (32, 64, "7_4_8"), (17, 64, "7_4_8"), (3, 4, "8_4_32"), (1, 1, "8_4_48")],
)
def test_threshold_speculates_when_few_are_live(live, batch, text):
    choice = baselines.threshold(PAPER_ARMS, 32).choose({}, live, batch, 512)[1]
    assert strategies.name(choice.strategy) == text


def test_beg_mab_tries_every_arm_once_before_values_decide():
    tuner, tried = baselines.beg_mab(["4_2_8", "2_4_8"], epsilon=0.0), []
    state = tuner.init()
    for _ in range(3):
        # No measurement yet: two chunks are in flight.
        state, choice = tuner.choose(state, 4, 4, 512)
        tried.append(choice.strategy)
    assert set(tried) == {PLAIN, Strategy(4, 2, 8), Strategy(2, 4, 8)}


def test_beg_mab_counts_the_first_pull_and_takes_the_best_median():
    tuner = baselines.beg_mab(["4_2_8", "2_4_8"], epsilon=0.0)
    state, gains = tuner.init(), {PLAIN: 0.0, Strategy(4, 2, 8): 0.5, Strategy(2, 4, 8): 1.0}
    for _ in range(3):
        state, choice = tuner.choose(state, 4, 4, 512)
        state = tuner.observe(state, measured(choice.strategy, accepted=gains[choice.strategy]))
    state, choice = tuner.choose(state, 3, 4, 512)
    assert (choice.strategy, choice.reason) == (Strategy(2, 4, 8), "best median")
    assert choice.predicted == pytest.approx(3 * 2 / 0.02)


def test_beg_mab_drops_rewards_outside_its_window_and_explores_with_epsilon():
    tuner = baselines.beg_mab(["4_2_8"], epsilon=0.3, window=5)
    state, taken = tuner.init(), []
    for number in range(600):
        state, choice = tuner.choose(state, 4, 4, 512)
        state = tuner.observe(
            state, measured(choice.strategy, accepted=1.0 if choice.strategy != PLAIN else 0.0)
        )
        taken += [choice.strategy == PLAIN] if number > 1 else []
    assert 0.1 < np.mean(taken) < 0.2 and max(map(len, state["rewards"].values())) == 5


# The goodput tuner


def test_goodput_drops_an_arm_that_measured_slower_than_plain():
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.init()
    for _ in range(6):
        state = tuner.observe(state, measured(PLAIN, per_round=0.020))
    state["incumbents"]["4"] = "2_2_4"
    for _ in range(2):
        state = tuner.observe(state, measured(arm, accepted=0.2, per_round=0.026))
    assert tuner.choose(state, 4, 4, 512)[1].strategy == PLAIN


def test_where_only_plain_decoding_is_compiled_nothing_is_predicted_and_the_state_is_the_same():
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.init()
    for _ in range(6):
        state = tuner.observe(state, measured(PLAIN, per_round=0.020))
        state = tuner.observe(state, measured(arm, accepted=0.9, per_round=0.022))
    state = tuner.choose(state, 4, 4, 512, (PLAIN, arm))[0]
    assert state["incumbents"]["4"] == "2_2_4" and state["gain"] > 1
    alone, choice = tuner.choose(state, 4, 4, 512, (PLAIN,))
    cells = [Cell(4, 512, one) for one in (PLAIN, arm)]
    view = goodput.Prediction((PLAIN, arm), *goodput.predict(state, cells, cost_model.DENSE))
    given = {**state, "choices": state["choices"] + 1}
    full, i, reason = goodput.decide(given, view, 4, np.array([True, False]))
    assert (alone, choice.strategy, choice.reason) == (full, view.arms[i], reason)
    assert math.isnan(choice.predicted) and not choice.is_exploring


@pytest.mark.parametrize(("faster", "text"), [(-0.025, "2_2_4"), (-0.1, "off")])
def test_hysteresis_keeps_the_arm_in_use_until_another_is_clearly_faster(faster, text):
    for held, plain in (("2_2_4", 0.02 * (1 + faster)), ("off", 0.02 / (1 + faster))):
        tuner = goodput.goodput(["2_2_4"])
        expected = text if held == "2_2_4" else {"2_2_4": "off", "off": "2_2_4"}[text]
        state = tuner.init()
        for _ in range(40):
            state = tuner.observe(state, measured(PLAIN, per_round=plain))
            state = tuner.observe(state, measured(Strategy(2, 2, 4), accepted=0.5, per_round=0.030))
        state["incumbents"]["4"], state["funds"] = held, -math.inf
        assert strategies.name(tuner.choose(state, 4, 4, 512)[1].strategy) == expected


def test_an_update_of_the_weights_discounts_hits_and_keeps_costs():
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.init()
    for _ in range(20):
        state = tuner.observe(state, measured(arm, accepted=0.9, per_round=0.03))
    updated = tuner.update_prior(state)
    assert updated["cells"] == state["cells"] and updated["incumbents"] == state["incumbents"]

    def known(state):
        accepted, error = acceptance.estimate(state["evidence"], state["clock"], 4, (PLAIN, arm))
        return accepted[1], error[1]

    assert known(updated)[1] > known(state)[1]
    after, without = (
        known(tuner.observe(one, measured(arm, accepted=0.3, per_round=0.03)))[0]
        for one in (updated, state)
    )
    assert 0.3 < after < without < known(state)[0]


def test_explorations_are_few_and_never_two_at_a_time():
    scenario = scenarios.Scenario(scenarios.cpu, 0.5)
    state, runs = decode(scenario, goodput.goodput(ARMS), rollouts=5, update_prior=False)
    reasons = [choice.reason.split()[0] for run in runs[2:] for choice, _ in run.chunks]
    assert reasons.count("exploring") < 0.15 * len(reasons)
    assert all(
        choice.is_exploring == (choice.rounds < 99) for run in runs for choice, _ in run.chunks
    )
    assert not any(
        pair == ("exploring", "exploring") for pair in zip(reasons, reasons[1:], strict=False)
    )


def test_the_nodes_of_large_batches_are_bounded():
    tuner, batch = goodput.goodput(ARMS), goodput.MOST_NODES // 4
    state = tuner.init()
    for arm in ARMS:
        state = tuner.observe(state, measured(arm, batch=batch, accepted=5.0, per_round=0.001))
    chosen = set()
    for _ in range(4):
        state, choice = tuner.choose(state, batch, batch, 512)
        chosen.add(choice.strategy)
    assert (
        chosen - {PLAIN}
        and max(one.nodes for one in chosen) == 4 == tuner.usable(state, batch, 1)[-1].nodes
    )


def test_an_arms_acceptance_is_shared_by_caches_of_all_sizes():
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.init()
    for _ in range(20):
        state = tuner.observe(state, measured(PLAIN))
        state = tuner.observe(state, measured(arm, accepted=0.9))
    speed, error = tuner.predict(state, [Cell(4, slots, arm) for slots in (256, 512, 1024)])
    assert np.ptp(speed) < 0.1 and error.max() < 0.3


def test_goodput_notices_a_machine_that_is_faster_than_its_stored_plain_rounds():
    tuner, arm, taken = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4), []
    state = tuner.init()
    for _ in range(20):
        state = tuner.observe(state, measured(PLAIN, per_round=0.028))
        state = tuner.observe(state, measured(arm, accepted=0.5, per_round=0.036))
    for _ in range(500):
        state, choice = tuner.choose(state, 4, 4, 512)
        seen = {PLAIN: (0.0, 0.020), arm: (0.15, 0.0255)}[choice.strategy]
        rounds = min(choice.rounds, 16)
        state = tuner.observe(
            state, measured(choice.strategy, accepted=seen[0], per_round=seen[1], rounds=rounds)
        )
        taken.append(choice.strategy == PLAIN)
    assert np.mean(taken[:50]) < 0.5 and np.mean(taken[-100:]) > 0.8


@pytest.mark.parametrize(
    ("per_round", "text"), [(0.020, "2_2_4"), (0.021, "2_2_4"), (0.040, "off")]
)
def test_an_incumbent_is_replaced_when_it_keeps_measuring_worse_than_predicted(per_round, text):
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.init()
    for _ in range(20):
        state = tuner.observe(state, measured(PLAIN, per_round=0.018))
        state = tuner.observe(state, measured(arm, accepted=0.9, per_round=0.020))
    state, choice = tuner.choose(state, 4, 4, 512)
    assert choice.strategy == arm
    for _ in range(7):
        state = tuner.observe(state, measured(arm, accepted=0.9, per_round=per_round))
    assert strategies.name(tuner.choose(state, 4, 4, 512)[1].strategy) == text


def test_a_chunk_without_rounds_changes_nothing():
    for new in MAKERS.values():
        tuner = new()
        state = tuner.init()
        assert tuner.observe(state, measured(Strategy(2, 2, 4), rounds=0)) == state


def test_an_untimed_chunk_is_evidence_of_acceptance_and_not_of_costs():
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.observe(tuner.init(), measured(PLAIN))
    late = measured(arm, accepted=1.0, per_round=9.0)
    sharp, doubted = (
        tuner.observe(state, late._replace(uncertainty=share * late.seconds))
        for share in (0.4, 0.9)
    )
    assert sharp["evidence"] == doubted["evidence"] != state["evidence"]
    again, moved = (
        tuner.observe(sharp, late._replace(is_moved=is_moved))["cells"]
        for is_moved in (False, True)
    )
    assert [len(cells["4/512/2_2_4"]["warm"]) for cells in (again, moved)] == [1, 0], (
        "cold seconds of what moved its rows"
    )
    assert "4/512/2_2_4" in sharp["cells"] and doubted["cells"] == state["cells"]
    assert doubted["funds"] == state["funds"] < sharp["funds"]


def test_an_exploration_also_pays_for_the_drafters_catch_up():
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.observe(tuner.init(), measured(PLAIN))
    trial = {"batch": 4, "arm": "2_2_4", "speed": -math.log(0.02), "since": 0, "open": True}
    seen = measured(arm, accepted=1.0, rounds=4)
    paid = [
        tuner.observe({**state, "trial": trial}, seen._replace(catch_up=c))["funds"]
        for c in (0.0, 0.3)
    ]
    assert paid[0] - paid[1] == pytest.approx(0.3)
    kept = [tuner.observe(state, seen._replace(catch_up=c))["funds"] for c in (0.0, 0.3)]
    assert kept[0] == kept[1], "an arm that is not an exploration pays nothing"


@pytest.mark.parametrize(
    "rounds, per_round, is_warm", [(1, 0.2, True), (3, 0.02, False), (4, 0.02, True)]
)
def test_few_long_rounds_are_a_warm_sample(rounds, per_round, is_warm):
    tuner, arm = goodput.goodput(["2_2_4"]), Strategy(2, 2, 4)
    state = tuner.observe(tuner.init(), measured(arm))
    before = len(state["cells"]["4/512/2_2_4"]["warm"])
    state = tuner.observe(state, measured(arm, rounds=rounds, per_round=per_round))
    assert len(state["cells"]["4/512/2_2_4"]["warm"]) - before == is_warm


def test_an_untimed_chunk_is_charged_as_an_exploration_however_long_it_was():
    tuner, funds = goodput.goodput(["2_2_4"]), {}
    for rounds in (2, 4, 16, 64):
        state = tuner.observe(tuner.init(), measured(PLAIN))
        state["trial"] = {
            "batch": 4,
            "arm": "2_2_4",
            "speed": -math.log(0.02),
            "since": 0,
            "open": True,
        }
        seen = measured(Strategy(2, 2, 4), accepted=1.0, rounds=rounds)._replace(
            uncertainty=9.0 * rounds
        )
        funds[rounds] = tuner.observe(state, seen)["funds"] - state["funds"]
    assert funds[4] == pytest.approx(-4 * 2 * 0.02), (
        "two tokens a row and round, at plain decoding's 0.02 s"
    )
    assert [funds[rounds] for rounds in (2, 16, 64)] == pytest.approx(
        [funds[4] / 2, funds[4], funds[4]]
    )
    first = tuner.observe(state, seen._replace(uncertainty=math.inf))
    assert first["funds"] == state["funds"] and not first["trial"]["open"], (
        "the first run of a program is let pass"
    )


@pytest.mark.parametrize(
    ("seconds", "uncertainty", "is_timed"),
    [(1.0, 0.4, True), (1.0, 0.6, False), (0.002, 0.01, True), (0.002, 0.03, False)],
)
def test_normal_host_delays_leave_a_chunk_timed_but_compilations_do_not(
    seconds, uncertainty, is_timed
):
    seen = measured(PLAIN, per_round=seconds / 16)._replace(uncertainty=uncertainty)
    assert seen.seconds == pytest.approx(seconds) and seen.is_timed is is_timed


def test_explorations_that_are_never_timed_stay_within_the_budget():
    tuner, rounds = goodput.goodput(["2_2_4", "4_2_8"]), {False: 0, True: 0}
    state = tuner.init()
    for _ in range(400):
        state, choice = tuner.choose(state, 4, 4, 512)
        drafts, number = choice.strategy != PLAIN, min(choice.rounds, 16)
        seen = measured(choice.strategy, accepted=0.2 * drafts, rounds=number)._replace(
            uncertainty=9.0 * drafts
        )
        state, rounds[drafts] = tuner.observe(state, seen), rounds[drafts] + number
    assert 0 < rounds[True] < 0.015 * rounds[False]


def test_beg_mab_tries_an_untimed_arm_again():
    tuner = baselines.beg_mab(["4_2_8"], epsilon=0.0)
    state, first = tuner.choose(tuner.init(), 4, 4, 512)
    state = tuner.observe(state, measured(first.strategy)._replace(uncertainty=1.0))
    assert state["rewards"] == {} and tuner.choose(state, 4, 4, 512)[1].strategy == first.strategy


# State


@pytest.mark.parametrize("kind", MAKERS)
def test_decisions_replay_from_the_calls_also_through_json_and_states_are_immutable(kind):
    tuner = MAKERS[kind]()
    _, (run,) = decode(scenarios.Scenario(scenarios.gpu, 0.6), tuner, rollouts=1)
    state = MAKERS[kind]().init()
    for what, given, choice in run.calls:
        state, before = json.loads(json.dumps(state)), copy.deepcopy(state)
        if what == "observe":
            tuner.observe(state, given)
            after = tuner.observe(state, given)
        else:
            after, again = tuner.choose(state, *given)
            assert (again.strategy, again.reason) == (choice.strategy, choice.reason)
            assert (
                again.predicted == choice.predicted
                or math.isnan(again.predicted)
                and math.isnan(choice.predicted)
            )
        assert state == before
        state = after


def test_a_state_of_other_strategies_is_still_usable():
    scenario = scenarios.Scenario(scenarios.gpu, 0.6)
    state, _ = decode(scenario, goodput.goodput(["4_2_8", "8_4_48"]), rollouts=1)
    state, runs = decode(
        scenario,
        goodput.goodput(["2_2_4", "4_2_8"]),
        rollouts=1,
        state=json.loads(json.dumps(state)),
    )
    assert {strategies.name(choice.strategy) for choice, _ in runs[0].chunks} <= {
        "off",
        "2_2_4",
        "4_2_8",
    }


def test_the_state_stays_small():
    state, _ = decode(scenarios.Scenario(scenarios.cpu, 0.5), goodput.goodput(ARMS), rollouts=4)
    assert len(json.dumps(state)) < 32_000
