"""Rounds of a mixture of experts: the term of the cost model, and decisions in a world whose tokens choose their experts."""

from __future__ import annotations

import json
from functools import cache, partial

import numpy as np
import pytest
import scenarios
from tuner_rollouts import Run, chunk, clocked, decode, measured

from tlt_jax.config.schema import Speculation
from tlt_jax.rollout.scheduler import planner
from tlt_jax.rollout.scheduler.payback import Payback
from tlt_jax.spec_decode.strategy import DRAFTERS, PLAIN, parse
from tlt_jax.tuner import cost_model, goodput, make
from tlt_jax.tuner.baselines import parse_arms
from tlt_jax.tuner.cost_model import DENSE, Networks
from tlt_jax.tuner.interface import Cell

ARMS = parse_arms(Speculation().strategies)
EXPERTS, CHOSEN = 128, 8
MIXED = Networks(None, EXPERTS, CHOSEN)
BATCHES, SLOTS, CYCLES = (256, 64, 16, 4, 1), 1024, 6


@cache
def touched(rows: int, nodes: int, layers: int = 8) -> float:
    """Mean experts of a layer that these tokens read: drawn, with popular experts, and others that a row's tokens share.

    Each token has the CHOSEN largest of a sum of normal scores of the expert, of the expert in this row, and its own.
    """
    random = np.random.default_rng([rows, nodes])
    sizes = EXPERTS, (rows, 1, EXPERTS), (rows, nodes, EXPERTS)
    found = 0
    for _ in range(layers):
        popular, alike, own = map(random.standard_normal, sizes)
        scores = 0.5 * popular + alike + own
        found += len(np.unique(np.argpartition(scores, -CHOSEN)[..., -CHOSEN:]))
    return found / layers


def mixed(batch: int, slots: int, arm) -> float:
    """Milliseconds of a round of about Qwen3-30B-A3B on an H200: 13.5 for all experts, 2 for the rest, then compute."""
    levels, draft = arm.drafted_levels, 0.1 if arm.depth else 0.0
    rest = 2.0 + 8.4e-3 * batch * arm.nodes + 2.3e-5 * batch * slots
    drafted = draft + levels * (0.1 + 3e-4 * batch * arm.topk)
    return 13.5 * touched(batch, arm.nodes) / EXPERTS + rest + drafted


# The term


def test_the_prior_of_a_round_counts_the_experts_that_its_tokens_touch():
    """By hand: the round 1, a node 1/200, a slot 1/131072, all experts 10."""
    for rows, text, nodes in ((1, "off", 1), (4, "off", 1), (2, "ngram:7_1_8", 8)):
        cell, share = Cell(rows, 512, parse(text)), 1 - (15 / 16) ** (rows * nodes)
        known = 1 + rows * nodes / 200 + rows * 512 / 131072 + 10 * share
        assert cost_model.prior_rounds(cell, 1 / 200, MIXED) == pytest.approx(known)
    assert MIXED.touched(1) == pytest.approx(CHOSEN / EXPERTS)


def test_nodes_cost_reads_where_few_experts_are_touched_and_none_where_all_are():
    tree = parse("ngram:7_1_8")
    for rows, least, most in ((1, 2.5, 3.5), (8, 1.5, 2.2), (64, 1.0, 1.3)):
        ratio = np.divide(
            *(cost_model.prior_rounds(Cell(rows, 1, arm), 1 / 200, MIXED) for arm in (tree, PLAIN))
        )
        assert least < ratio < most, rows


def test_the_seconds_of_a_deterministic_rollout_are_those_of_its_prior_with_experts():
    with_seconds = planner.cost_table(1 / 200, MIXED)
    small, large = (with_seconds(measured(PLAIN, batch, 1)).seconds for batch in (1, 64))
    known = [cost_model.prior_rounds(Cell(batch, 1, PLAIN), 1 / 200, MIXED) for batch in (1, 64)]
    assert large / small == pytest.approx(known[1] / known[0])


def before(batch, slots, arm, networks=DENSE):
    """The columns of a cell as they were before there were experts."""
    levels, drafter = arm.drafted_levels, ("", *DRAFTERS).index(arm.drafter)
    levels, nodes = networks.one_pass if levels and networks.one_pass else (levels, arm.topk)
    which = (drafter << 48) + (arm.depth << 40) + (arm.topk << 20) + arm.nodes
    return 1.0, batch * arm.nodes, levels, batch * levels * nodes, batch * slots, batch, slots, which  # fmt: skip


@pytest.mark.parametrize("networks", [DENSE, Networks((2, 8))])
def test_a_dense_models_decisions_and_state_are_bit_for_bit_those_without_the_term(
    networks, monkeypatch
):
    def found():
        tuner = goodput.goodput(ARMS, 1 / 200, networks=networks)
        state, runs = decode(scenarios.Scenario(scenarios.gpu, 0.6), tuner, rollouts=2)
        assert len(state["law"]["weights"]) == 5
        return json.dumps(state), [str(made) for run in runs for made, _ in run.chunks]

    after = found()
    units = np.array([1.0, 1 / 200, 0.06, 1 / 400, 1 / 131072])
    monkeypatch.setattr(cost_model, "units_of", lambda node, networks: units)
    monkeypatch.setattr(cost_model, "described", before)
    monkeypatch.setattr(cost_model, "row", cost_model.row.__wrapped__)
    assert found() == after


# Decisions


def speeds(networks: Networks, quality: float, agreement: float, seed: int = 0) -> np.ndarray:
    """Speed over that of the best arm of each batch, for each cycle of 12 chunks at each of BATCHES [CYCLES, batches]."""
    scenario = scenarios.Scenario(mixed, quality, agreement, seed=seed)
    tuner, random = goodput.goodput(ARMS, 1 / 200, networks=networks), np.random.default_rng(seed)
    state, run, seen, last = tuner.init(), Run(), set(), None
    found = np.zeros((CYCLES, len(BATCHES)))
    for cycle, at in np.ndindex(found.shape):
        batch = BATCHES[at]
        fits = [arm for arm in ARMS if batch * arm.nodes <= goodput.MOST_NODES]
        fastest = scenario.speed(batch, SLOTS, scenario.best(batch, SLOTS, fits))
        left, done, ideal, taken = np.full(batch, 1 << 30), np.zeros(batch, int), 0.0, 0.0
        for _ in range(12):
            state, choice = tuner.choose(state, batch, batch, SLOTS)
            made = chunk(scenario, random, choice, left, done, batch, SLOTS)
            seconds = clocked(scenario, random, made, run, last, seen)
            run.seconds, last = run.seconds + seconds, choice.strategy
            state = tuner.observe(state, made._replace(seconds=seconds))
            ideal += made.rounds * (1 + scenario.accepted(choice.strategy)) / fastest
            taken += made.seconds
        found[cycle, at] = ideal / taken
    return found


def lost(networks: Networks, quality: float, agreement: float) -> tuple[float, float]:
    """The share of the best speed that is lost, a mean over the batches and three seeds: in the first cycle, and settled."""
    every = 1 - np.mean([speeds(networks, quality, agreement, seed) for seed in range(3)], (0, 2))
    return float(every[0]), float(every[-3:].mean())


# Quality and agreement of drafters: with the first one drafting pays from 64 rows on, up to 1.15 times; with the second most
# at 64 rows, 1.3 times, and little with 4; with the third everywhere, 1.3 to 2 times.
WORLDS = (0.5, 0.5), (0.5, 0.7), (0.7, 0.9)


@pytest.mark.parametrize("world", WORLDS)
def test_with_the_term_settled_decisions_lose_little_and_without_it_they_lose_more(world):
    first, settled = lost(MIXED, *world)
    first_without, settled_without = lost(DENSE, *world)
    assert settled < 0.03
    assert settled_without > 2 * settled and first_without > 2 * first


def pays(networks: Networks, batch: int) -> bool:
    """Whether compiling any tree pays back after plain rounds of this batch alone, where a chain of 3 accepts 0.5 tokens."""
    tuner = goodput.goodput(ARMS, 1 / 200, networks=networks)
    state, plain = tuner.update_prior(tuner.init(), {"": (0.35, 0.3, 0.3)}), Cell(batch, SLOTS, PLAIN)  # fmt: skip
    for _ in range(9):
        seen = measured(PLAIN, batch, SLOTS, per_round=mixed(*plain) / 1e3)
        state = tuner.observe(state, seen)
    payback, cells = Payback(), [Cell(batch, SLOTS, arm) for arm in ARMS]
    payback.begin(50, 8)
    payback.progress(0, 8)
    payback.add((batch, SLOTS), 1e4)
    costs = np.full(len(cells), 20.0)
    speed = partial(tuner.predict, state)
    return payback.best(cells, [plain], costs, speed) is not None


def test_the_first_programs_are_those_that_can_pay():
    """The best tree is 1.06 times as fast as plain decoding with one row, and 1.5 times with 64."""
    assert [pays(MIXED, batch) for batch in (1, 64)] == [False, True]
    assert [pays(DENSE, batch) for batch in (1, 64)] == [True, False]


@pytest.mark.parametrize("tuner", ["", "fixed", "threshold", "beg_mab"])
def test_tuners_that_learn_costs_alone_expect_fewer_rows_to_touch_fewer_experts(tuner):
    """After plain rounds of 4 rows: one of one row is 1.8 times as fast, and without the term expected to be 1.1 times."""
    given, found = Speculation(drafter="ngram", tuner=tuner or "goodput"), []
    plain = [Cell(batch, SLOTS, PLAIN) for batch in (1, 4)]
    truth = mixed(*plain[1]) / mixed(*plain[0])
    for networks in (MIXED, DENSE):
        made = make.make_tuner(given, ARMS if tuner else (), False, networks)
        state = made.init()
        for _ in range(9):
            state = made.observe(state, measured(PLAIN, 4, SLOTS, per_round=mixed(*plain[1]) / 1e3))
        speed, _ = made.predict(state, plain)
        found.append(np.exp(speed[0] - speed[1]))
    assert found[0] == pytest.approx(truth, rel=0.2) and found[1] < 0.7 * truth
