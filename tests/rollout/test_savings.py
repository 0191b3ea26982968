"""What is worth compiling: the arithmetic of expected savings, and whole runs in virtual time, compilations included."""

from __future__ import annotations

import numpy as np
import pytest

from tlt_jax.config.schema import Speculation
from tlt_jax.rollout import driver, simulated
from tlt_jax.rollout.planner import Planner
from tlt_jax.rollout.prices import relative
from tlt_jax.rollout.programs import Decode
from tlt_jax.rollout.savings import LEAST, Savings
from tlt_jax.rollout.simulated import in_world
from tlt_jax.rollout.state import GroupView
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import fixed, goodput, worlds
from tlt_jax.tuner.exploration import saving
from tlt_jax.tuner.interface import Cell
from tlt_jax.tuner.worlds import World

TREE = Strategy(3, 1, 4)
SHIPPED = Speculation().strategies
BATCHES, SLOTS = (1, 2, 4, 8, 16, 32, 48), (256, 512, 1024)


def known(speeds, errors=None):
    """Outlook of cells whose tokens per second are known."""

    def outlook(cells):
        values = np.log([float(speeds[cell]) for cell in cells])
        return values, np.array([(errors or {}).get(cell, 0.0) for cell in cells])

    return outlook


LARGE, SMALL, DRAFT = Cell(8, 64, PLAIN), Cell(2, 64, PLAIN), Cell(2, 64, TREE)
SPEEDS = known({LARGE: 10, SMALL: 20, DRAFT: 40})


def after(rollouts, left, tokens, ended=8):
    """Savings in the last of so many rollouts, each of which decoded these tokens; MEMORY is 1."""
    savings = Savings()
    for number in range(rollouts):
        savings.begin(left + rollouts - 1 - number, 8)
        savings.progress(0, ended if number == rollouts - 1 else 8)
        for where, count in tokens.items():
            savings.add(where, count)
    return savings


def test_a_saving_is_the_rest_of_the_run_times_what_a_program_takes_less(monkeypatch):
    monkeypatch.setattr("tlt_jax.rollout.savings.MEMORY", 1.0)
    savings = after(rollouts=4, left=6, tokens={(2, 64): 100, (8, 64): 50})
    # 100 tokens of 2 rows in each of 6 rollouts, 10 a second where only 8 rows are compiled.
    saved, rest, _ = savings.expected([SMALL, DRAFT], [LARGE], SPEEDS)
    np.testing.assert_allclose(saved, [600 / 10 - 600 / 20, 600 / 10 - 600 / 40], rtol=1e-6)
    # Of 8 live rows the smaller programs hold none; what is there already, or slower, saves nothing.
    np.testing.assert_allclose(savings.expected([LARGE], [SMALL, LARGE], SPEEDS)[0], [0], atol=1e-6)


def test_a_rollout_that_is_half_done_counts_half_and_a_beginning_is_not_extrapolated():
    savings = after(rollouts=1, left=3, tokens={(2, 64): 100}, ended=6)
    assert savings.horizon == pytest.approx((3 + 1 - 0.75) / 0.75)
    assert after(1, 3, {}, ended=0).horizon == pytest.approx(4 / LEAST)
    assert after(1, 0, {}, ended=8).horizon == 0


def test_what_is_not_known_of_a_program_is_an_option_and_no_risk():
    errors = {SMALL: 0.4}
    savings = after(rollouts=1, left=1, tokens={(2, 64): 10})
    speeds = known({LARGE: 10, SMALL: 9}, errors)
    drawn = np.log(9) + 0.4 * np.random.default_rng(0).normal(size=200_000)  # +- 0.001 of a share
    share = np.maximum(0, 1 - np.exp(np.log(10) - drawn)).mean()
    assert savings.expected([SMALL], [LARGE], speeds)[0][0] == pytest.approx(share, abs=0.003)
    assert saving(np.array([-0.1]), np.array([0.0]))[0] == pytest.approx(0, abs=1e-9)


def seconds_of(unit):
    """Compiling a chunk of plain decoding takes `unit` seconds, other programs in proportion."""
    return lambda program: unit * relative(program)


def whole_run(tuner, rollouts, unit, world=None, groups=1, batches=BATCHES, drafters=True):
    """(seconds of a run of so many rollouts with its compilations, its chunks that were compiled)."""
    world = world or World(worlds.cpu, 0.75)
    programs = in_world(world, simulated.long_tailed(600), seconds_of(unit))
    savings, state = Savings(), None
    for step in range(rollouts):
        request = simulated.request(
            [64] * 12, 4, 600, seed=step, capacity=48 // groups, rounds=16, in_flight=2
        )
        savings.begin(rollouts - step - 1, len(request.keys))
        planner = Planner(batches, SLOTS, tuner, state, savings, 664, groups)
        contexts = simulated.contexts(programs, request, planner, groups, catches_up=drafters)
        rollout = driver.start(contexts, clock=programs.clock)
        simulated.simulate(rollout, programs)
        state = tuner.renew(planner.state)
    chunks = [one for one in programs.compiled if isinstance(one, Decode)]
    return programs.clock.now(), chunks


LAWS = [
    (rollouts, unit, quality)
    for rollouts, unit in ((1, 3.0), (6, 0.3), (6, 3.0), (6, 30.0))
    for quality in (0.45, 0.8)
]


@pytest.mark.parametrize("rollouts, unit, quality", LAWS)
def test_drafting_makes_no_run_slower_whatever_compiling_costs(rollouts, unit, quality):
    world = World(worlds.cpu, quality)
    plain, _ = whole_run(fixed.fixed(PLAIN), rollouts, unit, world)
    taken, _ = whole_run(goodput.goodput(SHIPPED, node_cost=1 / 8), rollouts, unit, world)
    assert taken < 1.03 * plain


def test_drafting_is_compiled_for_a_long_run_and_not_for_a_short_one():
    tuner = goodput.goodput(SHIPPED, node_cost=1 / 8)
    world = World(worlds.cpu, 0.8)
    short, few = whole_run(tuner, 1, 30.0, world)
    _, many = whole_run(tuner, 12, 0.05, world)
    assert {one.strategy for one in few} == {PLAIN} and len(few) == 1
    assert len(many) > 6 and any(one.strategy != PLAIN for one in many)


def test_a_long_run_gains_what_drafting_and_small_batches_are_worth():
    world, tuner = World(worlds.cpu, 0.8), goodput.goodput(SHIPPED, node_cost=1 / 8)
    one_size, _ = whole_run(fixed.fixed(PLAIN), 12, 0.2, world, batches=(48,))
    plain, _ = whole_run(fixed.fixed(PLAIN), 12, 0.2, world)
    drafting, _ = whole_run(tuner, 12, 0.2, world)
    assert plain < 0.9 * one_size and drafting < 0.8 * plain


def test_a_rule_gets_its_strategy_whatever_it_costs():
    _, chunks = whole_run(fixed.fixed(TREE), 1, 30.0)
    assert {one.strategy for one in chunks} == {TREE}


def test_without_a_price_every_bucket_is_the_smallest_that_fits():
    programs = in_world(World(worlds.cpu, 0.7), simulated.long_tailed(600))
    request = simulated.request([64] * 12, 4, 600, seed=0, capacity=48)
    planner = Planner(BATCHES, SLOTS, fixed.fixed(PLAIN))
    rollout = driver.start(simulated.contexts(programs, request, planner), clock=programs.clock)
    result = simulated.simulate(rollout, programs)
    assert {one.batch for one in result.measurements} == set(BATCHES)


def test_the_first_program_has_room_for_all_sequences_unless_a_long_run_can_use_a_shorter_one():
    def first(left):
        savings = Savings()
        savings.begin(left, 48)
        seen = {"tokens": 64, "limit": 664, "widest": 64, "rounds": 16, "batch": 0, "slots": 0}
        view = GroupView(0, 0, 48, **seen)
        return Planner(BATCHES, SLOTS, fixed.fixed(PLAIN), None, savings, 664).first(view)

    assert first(2) == Cell(48, 1024, PLAIN) and first(1e6) == Cell(48, 256, PLAIN)
