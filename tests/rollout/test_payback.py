"""The payback of programs: its arithmetic, and whole runs in virtual time with their compilations."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scenarios
from pairwise import marked
from scenarios import Scenario, ScenarioCosts, in_scenario

from tlt_jax.config.schema import Speculation
from tlt_jax.rollout.executables.programs import Append, Decode, Resize, StateShape
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.payback import CAUTION, LEAST, SOON, Payback
from tlt_jax.rollout.scheduler.planner import GroupCandidates, Planner
from tlt_jax.rollout.scheduler.state import GroupView
from tlt_jax.simulate import simulator
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import baselines, cost_model, goodput
from tlt_jax.tuner.interface import Cell

TREE = Strategy(3, 1, 4)
SHIPPED = Speculation().strategies
BATCHES, SLOTS = (1, 2, 4, 8, 16, 32, 48), (256, 512, 1024)


def known(speeds, errors=None):
    """A prediction for cells with known tokens per second."""

    def predict(cells):
        values = np.log([float(speeds[cell]) for cell in cells])
        return values, np.array([(errors or {}).get(cell, 0.0) for cell in cells])

    return predict


def expected(payback, *cells_and_speeds):
    """The seconds that each cell saves, and the seconds that are left without these cells."""
    seconds, shares, _ = payback.shares(*cells_and_speeds)
    return seconds @ shares, seconds.sum()


LARGE, SMALL, DRAFT = Cell(8, 64, PLAIN), Cell(2, 64, PLAIN), Cell(2, 64, TREE)
SPEEDS = known({LARGE: 10, SMALL: 20, DRAFT: 40})


def after(rollouts, left, tokens, ended=8, ahead=math.inf):
    """The payback in the last of `rollouts` rollouts that each decoded these tokens."""
    payback = Payback(ahead)
    for number in range(rollouts):
        payback.begin(left + rollouts - 1 - number, 8)
        payback.progress(0, ended if number == rollouts - 1 else 8)
        for where, count in tokens.items():
            payback.add(where, count)
    return payback


def test_a_payback_is_the_rest_of_the_run_times_the_relative_gain_of_a_program(monkeypatch):
    monkeypatch.setattr("tlt_jax.rollout.scheduler.payback.MEMORY", 1.0)
    payback = after(rollouts=4, left=6, tokens={(2, 64): 100, (8, 64): 50})
    # 100 tokens of 2 rows in each of 6 rollouts, 10 a second where only 8 rows are compiled.
    saved, _ = expected(payback, [SMALL, DRAFT], [LARGE], SPEEDS)
    np.testing.assert_allclose(saved, [600 / 10 - 600 / 20, 600 / 10 - 600 / 40], rtol=1e-6)
    # The smaller programs do not hold 8 live rows; a compiled or slower program saves nothing.
    np.testing.assert_allclose(
        expected(payback, [LARGE], [SMALL, LARGE], SPEEDS)[0], [0], atol=1e-9
    )


def test_a_half_done_rollout_counts_half_and_the_start_of_one_is_not_extrapolated():
    payback = after(rollouts=1, left=3, tokens={(2, 64): 100}, ended=6)
    assert payback.horizon == pytest.approx((3 + 1 - 0.75) / 0.75)
    assert after(1, 3, {}, ended=0).horizon == pytest.approx(4 / LEAST)
    assert after(1, 0, {}, ended=8).horizon == 0


def outcome(error, speed=20):
    """Seconds saved of 100 by a cell with this speed, where the compiled one has 10 a second."""
    payback = after(rollouts=1, left=1, tokens={(2, 64): 1000})
    speeds = known({LARGE: 10, SMALL: speed}, {SMALL: error})
    saved, seconds_left = expected(payback, [SMALL], [LARGE], speeds)
    assert seconds_left == pytest.approx(100)

    def bought(compile_cost):
        return payback.best([SMALL], [LARGE], np.array([compile_cost]), speeds) is SMALL

    return saved[0], bought


def test_uncertainty_lowers_the_payback_of_a_program():
    saved, bought = outcome(error=0.2)
    assert saved == pytest.approx(100 * (1 - 0.5 * np.exp(CAUTION * 0.2)))
    assert bought(saved / 1.51) and not bought(saved / 1.49)
    assert outcome(error=0.2, speed=9)[0] == 0


def test_the_payback_of_a_guess_is_an_expectation_and_guesses_cost_a_small_share_of_the_run():
    saved, bought = outcome(error=0.5, speed=9)
    drawn = np.log(9) + 0.5 * np.random.default_rng(0).normal(size=200_000)  # +- 0.001 of a share
    share = np.maximum(0, 1 - np.exp(np.log(10) - drawn)).mean()
    assert saved == pytest.approx(100 * share, abs=0.3) and saved > 10
    assert bought(2.9) and not bought(3.1)  # RISK of 100 seconds


def test_where_compiling_slows_decoding_guesses_cost_a_share_of_ten_rollouts_and_each_counts_once():
    """Of 99 rollouts of 100 seconds; without that limit of 9,900 seconds."""
    speeds = known({LARGE: 10, SMALL: 9, DRAFT: 9}, {SMALL: 0.5, DRAFT: 0.5})

    def best(payback, cell, compile_cost):
        return payback.best([cell], [LARGE], np.array([compile_cost]), speeds) is cell

    for ahead, most in ((SOON, 30), (math.inf, 297)):
        payback = after(rollouts=1, left=99, tokens={(2, 64): 1000}, ahead=ahead)
        assert not best(payback, SMALL, most + 1) and best(payback, SMALL, most - 10)
        assert best(payback, SMALL, most - 10), "it may be found again until it is compiled"
        assert not best(payback, DRAFT, 11) and best(payback, DRAFT, 9)
        payback.add((2, 64), 0, 100.0)  # seconds that were measured
        assert best(payback, DRAFT, 12)


def seconds_of(unit):
    """Compiling a chunk of plain decoding takes `unit` seconds, other programs in proportion."""
    return lambda program: unit * (program).relative_seconds


class Loading(ScenarioCosts):
    """The first run of a program loads it, which takes `seconds` more."""

    def __init__(self, scenario, seconds):
        super().__init__(scenario)
        self.seconds = seconds

    def __call__(self, program, rounds, at):
        loading = 0.0 if program in self.seen else self.seconds
        return loading + super().__call__(program, rounds, at)


def whole_run(
    tuner, rollouts, unit, scenario=None, groups=1, batches=BATCHES, drafters=True, loading=0.0
):
    """(seconds of a run of `rollouts` rollouts with its compilations, its compiled chunks)."""
    rest = scenario, groups, batches, drafters, loading
    programs = programs_of(tuner, rollouts, unit, *rest)
    chunks = [one for one in programs.compiled if isinstance(one, Decode)]
    return programs.clock.now(), chunks


def programs_of(
    tuner, rollouts, unit, scenario=None, groups=1, batches=BATCHES, drafters=True, loading=0.0
):
    """The programs of a run of `rollouts` rollouts, as `whole_run`."""
    scenario = scenario or Scenario(scenarios.cpu, 0.75)
    programs = in_scenario(scenario, scenarios.long_tailed(600), seconds_of(unit))
    programs.costs = Loading(scenario, loading)
    payback, state = Payback(), None
    for step in range(rollouts):
        request = scenarios.request(
            [64] * 12, 4, 600, seed=step, capacity=48 // groups, rounds=16, in_flight=2
        )
        payback.begin(rollouts - step - 1, len(request.keys))
        planner = Planner(batches, SLOTS, tuner, state, payback, 664, groups)
        contexts = scenarios.contexts(programs, request, planner, groups, catches_up=drafters)
        rollout = driver.LocalGroups(contexts, clock=programs.clock)
        simulator.simulate(rollout, programs)
        state = tuner.update_prior(planner.state)
    return programs


CASES = [
    (rollouts, unit, quality)
    for rollouts, unit in ((1, 3.0), (6, 0.3), (6, 3.0), (6, 30.0))
    for quality in (0.45, 0.8)
]


@pytest.mark.parametrize("rollouts, unit, quality", CASES)
def test_drafting_makes_no_run_slower_at_any_compile_cost(rollouts, unit, quality):
    scenario = Scenario(scenarios.cpu, quality)
    plain, _ = whole_run(baselines.fixed(PLAIN), rollouts, unit, scenario)
    taken, _ = whole_run(goodput.goodput(SHIPPED, node_cost=1 / 8), rollouts, unit, scenario)
    assert taken < 1.05 * plain


SCALES = [
    (scale, rollouts, groups)
    for scale, rollouts in ((1e-3, 2), (1e-3, 30), (1.0, 2), (1.0, 8), (1e3, 30))
    for groups in (1, 2)
]


def slowdown(scale, rollouts, groups):
    """Seconds of a run that may draft over those of a plain run, where rounds take `scale` times as long.

    Compile costs and the extra seconds of first runs are not scaled.
    """
    scenario = Scenario(lambda *cell: scale * scenarios.cpu(*cell), 0.2)
    rest = {"unit": 1.0, "groups": groups, "loading": 0.3, "scenario": scenario}
    plain, _ = whole_run(baselines.fixed(PLAIN), rollouts, **rest)
    taken, _ = whole_run(goodput.goodput(SHIPPED, node_cost=1 / 8), rollouts, **rest)
    return taken / plain


@pytest.mark.parametrize(
    "scale, rollouts, groups",  # two groups in the shortest runs, where a compilation weighs most
    marked([(one, one[2] == 1 or one[1] == 2) for one in SCALES]),
)
def test_no_run_is_slower_when_seconds_are_known_only_from_measurements(scale, rollouts, groups):
    # Where compiling costs nothing, only the tuner's explorations lose time.
    assert slowdown(scale, rollouts, groups) < (1.03 if scale <= 1 else 1.05)


def test_drafting_is_compiled_for_a_long_run_and_not_for_a_short_one():
    tuner, scenario = goodput.goodput(SHIPPED, node_cost=1 / 200), Scenario(scenarios.gpu, 0.8)
    _, few = whole_run(tuner, 1, 300.0, scenario)
    _, many = whole_run(tuner, 12, 1.0, scenario)
    assert {one.strategy for one in few} == {PLAIN} and len(few) == 1
    assert len(many) > 3 and any(one.strategy != PLAIN for one in many)


def test_a_long_run_gets_the_gain_of_small_batches_and_drafting():
    def seconds(round_cost, node, tuner=None, **rest):
        tuner = tuner or goodput.goodput(SHIPPED, node_cost=node)
        return whole_run(tuner, 12, 0.2, Scenario(round_cost, 0.8), **rest)[0]

    plain = baselines.fixed(PLAIN)
    one_size = seconds(scenarios.cpu, 1 / 8, plain, batches=(48,))
    assert seconds(scenarios.cpu, 1 / 8, plain) < 0.8 * one_size
    assert seconds(scenarios.gpu, 1 / 200) < 0.7 * seconds(scenarios.gpu, 1 / 200, plain)


def test_no_chunk_waits_for_fewer_rows_than_are_live():
    """The rows would never move, nor the chunk run a round."""
    view = GroupView(0, 0, 3, 64, 664, 64, 16, batch=8, slots=1024)
    compiled = {
        Cell(8, 1024, PLAIN),
        Cell(4, 1024, PLAIN),
        Cell(2, 1024, PLAIN),
        Cell(1, 256, PLAIN),
    }
    planner = Planner(BATCHES, SLOTS, baselines.fixed(PLAIN))
    for kept in (compiled, compiled - {Cell(4, 1024, PLAIN)}):
        decision = planner.decide(view, Some(kept))
        assert decision.batch == min(cell.batch for cell in kept if cell.batch >= 3)
        assert decision.min_live == 3, "with 2 live the rows fit a smaller compiled batch"


def test_rows_get_a_reply_where_appending_it_is_compiled_or_else_where_their_chunk_is():
    sizes = [StateShape(0, batch, 1024) for batch in (8, 16)]
    compiled = {Decode(one, 16) for one in sizes} | {Resize(sizes[1], 8, 1024)}
    programs = SimpleNamespace(version=0, compile_cost=lambda one: float(one not in compiled))
    request = SimpleNamespace(rounds=16, params=DecodingParams())
    context = SimpleNamespace(index=0, programs=programs, request=request)
    planner, seen = Planner(BATCHES, SLOTS, baselines.fixed(PLAIN)), (3, 64, 664, 64, 16, 16, 1024)

    def batch(*replies):
        programs.version += 1
        view = GroupView(0, 0, *seen, replies=replies)
        return planner.decide(view, GroupCandidates(context, view)).batch

    assert batch() == batch((1, 16)) == 8, "only the chunks are compiled"
    compiled.add(Append(sizes[1], 1, 16))
    assert batch() == batch((1, 64)) == 8 and batch((1, 16)) == 16
    compiled.add(Append(sizes[0], 1, 16))
    assert batch((1, 16)) == batch((1, 16), (4, 16)) == 8


class Some:
    """Only the programs of these cells are compiled."""

    def __init__(self, cells):
        self.cells, self.version = cells, len(cells)

    def compile_cost(self, cell):
        return 0.0 if cell in self.cells else 1.0

    chunk_compile_cost = compile_cost


def test_a_fixed_policy_gets_its_strategy_at_any_compile_cost():
    _, chunks = whole_run(baselines.fixed(TREE), 1, 30.0)
    assert {one.strategy for one in chunks} == {TREE}


def test_without_compile_costs_every_bucket_is_the_smallest_that_fits():
    programs = in_scenario(Scenario(scenarios.cpu, 0.7), scenarios.long_tailed(600))
    request = scenarios.request([64] * 12, 4, 600, seed=0, capacity=48)
    planner = Planner(BATCHES, SLOTS, baselines.fixed(PLAIN))
    rollout = driver.LocalGroups(
        scenarios.contexts(programs, request, planner), clock=programs.clock
    )
    result = simulator.simulate(rollout, programs)
    assert {one.batch for one in result.measurements} == set(BATCHES)


def test_the_first_cache_holds_all_sequences_unless_a_long_run_can_use_a_shorter_one():
    def first(left):
        payback = Payback()
        payback.begin(left, 48)
        seen = {"tokens": 64, "limit": 664, "widest": 64, "rounds": 16, "batch": 0, "slots": 0}
        view = GroupView(0, 0, 48, **seen)
        return Planner(BATCHES, SLOTS, baselines.fixed(PLAIN), None, payback, 664).first(view)

    assert first(2) == Cell(48, 1024, PLAIN) and first(1e6) == Cell(48, 256, PLAIN)


def under(load, tuner):
    """The programs of a run of 12 rollouts whose compilations take 0.2 s and more, and their scenario."""
    scenario = Scenario(scenarios.cpu, 0.3, **load)
    return programs_of(tuner, 12, 0.2, scenario), scenario


@pytest.mark.parametrize("load", [{"disturbed": 0.3}, {"phases": 3.0}], ids=str)
def test_other_work_buys_nothing_that_loses(load):
    def spent(tuner):
        programs, _ = under(load, tuner)
        return programs.costs.quiet + sum(programs.compiled.values())

    assert spent(goodput.goodput(SHIPPED, node_cost=1 / 8)) < 1.06 * spent(baselines.fixed(PLAIN))


def test_nothing_that_can_wait_is_compiled_when_other_work_begins(monkeypatch):
    def optional():
        programs, scenario = under({"phases": 8.0}, goodput.goodput(SHIPPED, node_cost=1 / 8))
        began = [at for one, at in programs.began.items() if isinstance(one, Decode)][1:]
        return [scenario.taken(at) > 0 for at in began]

    waits = optional()
    assert len(waits) > 3 and not any(waits)
    monkeypatch.setattr(cost_model, "is_disturbed", lambda costs: False)
    assert any(optional())
