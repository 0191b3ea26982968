"""Rollouts in virtual time: the real scheduler, tuner and recorder, on programs with a cost function."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import scenarios
import toys
from scenarios import Scenario, ScenarioCosts, ScenarioPrograms, in_scenario

from tlt_jax.config.schema import Speculation
from tlt_jax.rollout.executables.programs import (
    Admit,
    CatchUp,
    Decode,
    Harvest,
    Prefill,
    Resize,
    Start,
    StateShape,
)
from tlt_jax.rollout.recorder import Decided, Harvested
from tlt_jax.rollout.request import doubling
from tlt_jax.rollout.scheduler import driver, payback
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.state import GroupView
from tlt_jax.simulate import decoding, simulator
from tlt_jax.simulate.simulator import Marker, VirtualClock, noiseless_seconds
from tlt_jax.simulate.trees import Trees
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import baselines, goodput
from tlt_jax.tuner.baselines import parse_arms

SHIPPED = Speculation().strategies
ARMS = parse_arms(SHIPPED)
BATCHES, SLOTS = (1, 4, 16, 64), (256, 512, 1024, 2048)
TREE = Strategy(6, 4, 16)
LONGEST = 600
HAND = {Start: 0.25, Prefill: 2.0, Admit: 0.5}


def by_hand(program, rounds, at):
    """One second for each round, which is easy to sum."""
    return HAND.get(type(program), rounds)


def counted(*lengths, costs=by_hand):
    """Programs of sequences with these lengths, by uid."""
    return ScenarioPrograms(
        costs,
        scenarios.Scenario(scenarios.gpu, 0.5).trees,
        lambda key: lengths[key[1]],
        VirtualClock(),
    )


def run(
    programs,
    request,
    tuner=None,
    state=None,
    *,
    batches=BATCHES,
    slots=SLOTS,
    groups=1,
    listeners=(),
):
    """(result, state of the tuner) of a simulated rollout."""
    planner = Planner(batches, slots, tuner or baselines.fixed("off"), state)
    contexts = scenarios.contexts(programs, request, planner, groups)
    rollout = driver.LocalGroups(contexts, listeners, clock=programs.clock)
    return simulator.simulate(rollout, programs), planner.state


def long_tail(seed=0, rounds=16, in_flight=2, capacity=48):
    return scenarios.request(
        [64] * 12, 4, LONGEST, seed=seed, rounds=rounds, in_flight=in_flight, capacity=capacity
    )


def answers(result):
    return [(one.uid, one.tokens.tolist(), one.finish) for one in result.completions]


# Sequences


def test_every_sequence_ends_with_its_drawn_length_or_at_its_limit():
    lengths, request = scenarios.long_tailed(2000), long_tail()
    result, _ = run(
        in_scenario(Scenario(scenarios.gpu, 0.7), lengths), request, baselines.fixed(TREE)
    )
    drawn = [lengths(key) for key in request.keys]
    assert [len(one.tokens) for one in result.completions] == [
        min(length, LONGEST) for length in drawn
    ]
    assert [one.finish for one in result.completions] == [
        "stop" if n <= LONGEST else "length" for n in drawn
    ]
    assert min(drawn) < LONGEST < max(drawn) and not result.partial


def test_a_sequence_that_ends_at_its_limit_has_stopped_and_a_longer_one_is_cut():
    result, _ = run(counted(3, 4, 5), scenarios.request([5], 3, 4, seed=0, capacity=3))
    assert [(len(one.tokens), one.finish) for one in result.completions] == [
        (3, "stop"),
        (4, "stop"),
        (4, "length"),
    ]


SCHEDULES = [
    {}, {"tuner": baselines.fixed(TREE)}, {"tuner": goodput.goodput(SHIPPED)}, {"groups": 3},
    {"batches": (64,), "slots": (2048,)},
    {"groups": 2, "tuner": goodput.goodput(SHIPPED)},
]  # fmt: skip


def emitted(schedule):
    """The answers under a schedule: its groups hold fewer rows."""
    programs = in_scenario(Scenario(scenarios.cpu, 0.7), scenarios.long_tailed(LONGEST))
    request = long_tail(capacity=48 // (1 + schedule.get("groups", 1)), rounds=5 + len(schedule))
    return answers(run(programs, request, **schedule)[0])


def test_what_a_sequence_emits_depends_on_no_strategy_group_or_bucket(monkeypatch):
    first, *others = map(emitted, SCHEDULES)
    assert all(other == first for other in others)
    assert len({tuple(tokens[:8]) for _, tokens, _ in first}) == 48
    hashed = decoding.hashed  # planted mistake: a hash of the row's number, not of its key
    monkeypatch.setattr(
        decoding, "hashed", lambda a, b, n: hashed(np.arange(len(a)).reshape(a.shape), n)
    )
    assert emitted(SCHEDULES[3]) != emitted(SCHEDULES[0])


def test_rounds_accept_the_same_of_a_sequence_in_any_rows_and_groups():
    rounds = []
    for groups, batches in ((1, BATCHES), (1, (48,)), (3, BATCHES)):
        programs = in_scenario(Scenario(scenarios.gpu, 0.7), scenarios.long_tailed(LONGEST))
        result, _ = run(
            programs, long_tail(), baselines.fixed(TREE), batches=batches, groups=groups
        )
        rounds.append(sum(one.row_rounds for one in result.measurements))
    assert len(set(rounds)) == 1


def test_a_rollout_is_a_function_of_its_seeds():
    def rollout_of(seed, noise):
        programs = in_scenario(
            Scenario(scenarios.gpu, 0.6, seed=noise), scenarios.long_tailed(LONGEST)
        )
        result, state = run(programs, long_tail(seed), goodput.goodput(SHIPPED), groups=2)
        return answers(result), repr(result.spans), repr(result.decisions), state

    assert rollout_of(0, 0) == rollout_of(0, 0)
    assert rollout_of(0, 0)[0] == rollout_of(0, 1)[0] != rollout_of(1, 0)[0]
    assert rollout_of(0, 0)[1] != rollout_of(0, 1)[1]


def test_reports_count_what_verification_counts():
    result, _ = run(
        in_scenario(Scenario(scenarios.gpu, 0.7), scenarios.long_tailed(LONGEST)),
        long_tail(),
        baselines.fixed(TREE),
    )
    rows = sum(one.row_rounds for one in result.measurements)
    nodes, promised, accepted = result.reliability
    assert (
        accepted.sum()
        == sum(one.hits.sum() for one in result.measurements)
        == result.stats["tokens"] - rows
    )
    assert nodes.sum() == rows * (TREE.nodes - 1)
    tenths = np.arange(10) / 10
    assert (nodes * tenths <= promised).all() and (promised <= nodes * (tenths + 0.1)).all()
    np.testing.assert_allclose(accepted[1:] / nodes[1:], promised[1:] / nodes[1:], atol=0.1)
    assert result.measurements[0].hits.shape == (TREE.depth, TREE.nodes, TREE.topk)


# The same scheduler as on devices

V = 12
PROMPTS = [
    [3, 1, 4, 1, 5],
    [9, 8],
    [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3],
    [11, 10],
]


def certain(strategy):
    """Every round accepts a whole path."""
    levels = np.arange(strategy.depth)[None]
    return Trees(levels, 0 * levels, np.ones((1, strategy.nodes - 1)))


@pytest.mark.parametrize("strategy", [PLAIN, toys.TREE])
def test_decisions_and_counts_equal_those_of_real_programs_with_the_same_answers(strategy, x64):
    table, shape = toys.table(V, scale=1.0), {"capacity": 5, "rounds": 3, "in_flight": 1}
    drafter = toys.no_drafter if strategy == PLAIN else toys.table_drafter()
    rules, buckets = (
        DecodingParams(Sampling(1.0), eos_ids=(0,)),
        {"batches": (1, 2, 5), "slots": (32, 64)},
    )
    contexts = toys.contexts(
        toys.executables(1, V, drafter),
        table,
        PROMPTS,
        3,
        rules,
        strategy=strategy,
        **shape,
        **buckets,
    )
    real = driver.run(driver.LocalGroups(contexts))
    request = contexts[0].request
    ends = {
        tuple(request.keys[one.uid]): len(one.tokens) + (one.finish == "length")
        for one in real.completions
    }
    programs = ScenarioPrograms(by_hand, certain, lambda key: ends[tuple(key)], VirtualClock())
    result, _ = run(programs, request, baselines.fixed(strategy), **buckets)
    assert repr(result.decisions) == repr(real.decisions)  # nan != nan
    assert [(one.kind, one.batch) for one in result.spans] == [
        (one.kind, one.batch) for one in real.spans
    ]
    assert [(one.uid, len(one.tokens), one.finish) for one in result.completions] == [
        (one.uid, len(one.tokens), one.finish) for one in real.completions
    ]
    assert {one.finish for one in real.completions} == {"stop", "length"}
    for one, other in zip(result.measurements, real.measurements, strict=True):
        assert one.hits.shape == other.hits.shape
        assert one.hits.sum((1, 2)).tolist() == other.hits.sum((1, 2)).tolist()
        for field in ("rounds", "row_rounds", "tokens", "batch", "slots", "number", "is_moved"):
            assert getattr(one, field) == getattr(other, field)


# Seconds


def plain_seconds(programs):
    """Two rows, three sequences: chunks of 3 rounds (one ends, another waits), 2, and 4."""
    request = scenarios.request([5], 3, 20, seed=0, rounds=4, in_flight=1, capacity=2)
    return run(programs, request, batches=(2,), slots=(64,))[0]


def test_the_seconds_of_a_plain_rollout_are_the_sum_of_its_programs():
    result = plain_seconds(counted(3, 9, 2))
    assert result.stats["seconds"] == 0.25 + 2.0 + (0.5 + 3) + (0.5 + 2) + 4
    assert [(one.kind, one.start, one.end) for one in result.spans] == [
        ("prefill", 0.0, 2.25), ("decode", 2.25, 5.75), ("decode", 5.75, 8.25),
        ("decode", 8.25, 12.25),
    ]  # fmt: skip
    assert [(one.rounds, one.row_rounds, one.tokens) for one in result.measurements] == [
        (3, 6, 6),
        (2, 4, 4),
        (4, 4, 4),
    ]


def test_programs_that_do_not_wait_for_earlier_ones_are_detected(monkeypatch):
    def dispatch(self, program, rounds=0, held=0.0):
        start = self.clock.now()
        heapq.heappush(self.due, (start + self.costs(program, rounds, start), program.group))
        return Marker(self.clock, start + self.costs(program, rounds, start))

    monkeypatch.setattr(ScenarioPrograms, "dispatch", dispatch)
    assert plain_seconds(counted(3, 9, 2)).stats["seconds"] < 12.25


def test_two_groups_take_as_long_as_the_slower_one_which_steals():
    spent = {0: 0.0, 1: 0.0}

    def costs(program, rounds, at):
        spent[program.group] += by_hand(program, rounds, at)
        return by_hand(program, rounds, at)

    request = scenarios.request([5, 5], 4, 50, seed=0, rounds=4, in_flight=1, capacity=2)
    result, _ = run(
        counted(40, 40, 40, 40, 4, 4, 4, 4, costs=costs),
        request,
        batches=(2,),
        slots=(64,),
        groups=2,
    )
    joined = [(one.group, one.joining) for one in result.decisions if one.joining]
    assert joined == [(0, (0, 1)), (1, (4, 5)), (1, (6, 7)), (1, (2, 3))]
    assert spent == {0: 0.25 + 2 + 0.5 + 40, 1: 0.25 + 2 + 2 * (0.5 + 4) + (2 + 0.5 + 40)}
    assert result.stats["seconds"] == max(spent.values()) == 53.75
    for group in (0, 1):
        spans = [one for one in result.spans if one.group == group]
        assert spans[0].start == 0 and spans[-1].end == spent[group], (
            "a group that always has work is never idle"
        )
        assert all(one.end == other.start for one, other in zip(spans, spans[1:], strict=False))


def test_a_clock_that_jumps_gives_the_results_of_one_that_waits():
    def rollout_with(wait):
        programs = in_scenario(Scenario(scenarios.cpu, 0.8), scenarios.long_tailed(LONGEST))
        planner = Planner(BATCHES, SLOTS, baselines.fixed(TREE))
        rollout = driver.LocalGroups(
            scenarios.contexts(programs, long_tail(), planner, 2), clock=programs.clock
        )
        return driver.run(rollout) if wait else simulator.simulate(rollout, programs)

    jumped, waited = rollout_with(False), rollout_with(True)
    assert answers(jumped) == answers(waited)
    assert waited.stats["seconds"] == pytest.approx(jumped.stats["seconds"], rel=0.03)


def test_measurements_are_exact_when_every_event_is_polled(monkeypatch):
    def uncertainties():
        programs = in_scenario(Scenario(scenarios.gpu, 0.6), scenarios.long_tailed(LONGEST))
        run(programs, long_tail(), groups=2)
        return [one.uncertainty for one in run(programs, long_tail(), groups=2)[0].measurements]

    assert max(uncertainties()) < 3 * simulator.POLL_BEFORE_S
    monkeypatch.setattr(simulator, "POLL_BEFORE_S", math.inf)  # no poll before an end
    assert np.median(uncertainties()) > 0.1


def test_compiling_a_program_takes_the_host_its_seconds_once():
    programs = in_scenario(
        Scenario(scenarios.gpu, 0.6), scenarios.long_tailed(LONGEST), lambda program: 3.0
    )
    free = in_scenario(Scenario(scenarios.gpu, 0.6), scenarios.long_tailed(LONGEST))
    play = partial(run, groups=2, batches=(48,), slots=(1024,))
    (paid, _), (fast, _) = (play(one, long_tail()) for one in (programs, free))
    total, extra = sum(programs.compiled.values()), paid.stats["seconds"] - fast.stats["seconds"]
    assert answers(paid) == answers(fast) and total == 3.0 * len(programs.compiled)
    assert 0.5 * total < extra < total, (
        "one host compiles for both groups, whose devices run meanwhile"
    )
    assert not all(one.is_timed for one in paid.measurements)
    compiled = len(programs.compiled)
    again, _ = play(programs, long_tail())
    assert len(programs.compiled) == compiled and all(one.is_timed for one in again.measurements)
    assert again.stats["seconds"] == pytest.approx(fast.stats["seconds"], rel=0.1)


def test_programs_that_end_while_the_host_compiles_for_another_group_are_read_at_once():
    programs = counted(8, 4)
    programs.compiling = lambda program: 10.0 * (isinstance(program, Decode) and program.group == 1)
    request = scenarios.request([5, 5], 1, 50, seed=0, rounds=4, in_flight=1, capacity=1)
    result, _ = run(programs, request, batches=(1,), slots=(64,), groups=2)
    ends = [(one.group, one.kind, one.end) for one in result.spans if one.kind == "decode"]
    assert ends == [(0, "decode", 10.0), (0, "decode", 14.0), (1, "decode", 14.0)]


def round_cost(batch, slots, strategy):
    """Milliseconds of a round: one for each node, depth, and slot."""
    return batch * strategy.nodes + 1000 * strategy.depth + batch * slots


SHAPE, PROMPT = StateShape(0, 32, 100), Prefill(0, 4, 64)
EXPECTED = [
    (Decode(SHAPE, 16, TREE), 5, 5 * (32 * 16 + 6000 + 3200)),
    (Decode(SHAPE, 16), 0, 0.01 * (32 + 3200)),
    (PROMPT, 0, 4 * 64 + 4 * 64), (CatchUp(SHAPE), 640, (640 + 3200) / 20), (Start(SHAPE), 0, 3200),
    (Admit(SHAPE, PROMPT), 0, 16 * 64), (Resize(SHAPE, 8, 200), 0, 2 * 8 * 200),
    (Harvest(SHAPE, 4, 64), 0, 2 * 4 * 64),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "rounds", "milliseconds"), EXPECTED, ids=lambda one: type(one).__name__
)
def test_a_scenario_gives_the_cost_of_every_program(program, rounds, milliseconds):
    assert noiseless_seconds(round_cost, program, rounds) == pytest.approx(milliseconds / 1e3)
    quiet, loaded = (
        ScenarioCosts(Scenario(round_cost, 0.5, stalls=0.0, bursts=bursts))
        for bursts in (False, True)
    )
    spent = [[costs(program, rounds, 8.0) for _ in range(4)] for costs in (quiet, loaded)]
    assert np.array(spent[1]) == pytest.approx(2 * np.array(spent[0])), "noise of the seed alone"
    assert np.array(spent[0][1:]) == pytest.approx(np.full(3, milliseconds / 1e3), rel=0.2)
    assert len(set(spent[0])) == 4 and spent[0][0] < 2 * milliseconds / 1e3


# The predictions and gains of tuners


def predicted_over_measured(scenario, costs=None):
    """Predicted over measured speed of unmoved plain chunks, by a tuner that knows the costs."""
    programs = in_scenario(scenario, scenarios.long_tailed(LONGEST))
    programs.costs = costs or programs.costs
    result, _ = run(programs, long_tail(in_flight=1), scenarios.oracle(scenario, []), groups=2)
    joined = {(one.group, one.predicted) for one in result.decisions if one.joining}
    ratios = []
    for one in result.measurements:
        decided = one.predicted / scenario.speed(one.batch, one.slots, PLAIN)
        if one.live == pytest.approx(decided) and not (
            one.is_moved or (one.group, one.predicted) in joined
        ):
            ratios.append(one.predicted * one.seconds / one.tokens)
    assert len(ratios) > 8
    return np.array(ratios)


def test_predicted_speeds_are_exact_without_noise_and_wrong_with_another_buckets_costs():
    quiet = Scenario(scenarios.gpu, 0.6, noise=0.0, stalls=0.0)
    quiet.with_noise = lambda random, seconds, is_first: seconds
    np.testing.assert_allclose(predicted_over_measured(quiet), 1.0, atol=1e-6)

    def of_another_bucket(program, rounds, at):
        if isinstance(program, Decode):
            program = replace(program, state=replace(program.state, slots=2 * program.state.slots))
        return ScenarioCosts(quiet)(program, rounds, at)

    assert np.abs(predicted_over_measured(quiet, of_another_bucket) - 1).max() > 0.05


def decoded(scenario, tuner, rollouts, seed=0, state=None, in_flight=2):
    """(state, results) of some rollouts in two groups, with an update of the weights after each."""
    programs, results = in_scenario(scenario, scenarios.long_tailed(1200)), []
    state = tuner.init() if state is None else state
    for number in range(rollouts):
        request = scenarios.request(
            [64] * 12, 4, 1200, seed=100 * seed + number, capacity=32, in_flight=in_flight
        )
        result, state = run(programs, request, tuner, state, groups=2)
        results.append(result)
        state = tuner.update_prior(state)
    return state, results


def seconds(results):
    return sum(one.stats["seconds"] for one in results)


@pytest.mark.parametrize(
    ("round_cost", "node", "quality", "share", "gain"),
    [
        (scenarios.gpu, 1 / 200, 0.8, 0.93, 2.0),
        (scenarios.gpu, 1 / 200, 0.5, 0.93, 1.5),
        (scenarios.cpu, 1 / 10, 0.8, 0.95, 1.02),
    ],
)
def test_the_goodput_tuner_shortens_long_tails_and_comes_close_to_the_oracle(
    round_cost, node, quality, share, gain
):
    """Its share of the oracle's speed is the same as without a scheduler."""
    scenario, tuner = Scenario(round_cost, quality), goodput.goodput(SHIPPED, node_cost=node)
    state, _ = decoded(scenario, tuner, 4)
    _, results = decoded(scenario, tuner, 2, seed=1, state=state)
    _, best = decoded(scenario, scenarios.oracle(scenario, ARMS), 2, seed=1)
    _, plain = decoded(scenario, baselines.fixed("off"), 2, seed=1)
    assert seconds(best) / seconds(results) > share
    assert seconds(plain) / seconds(results) > gain


@pytest.mark.parametrize(
    ("round_cost", "node"), [(scenarios.gpu, 1 / 200), (scenarios.cpu, 1 / 10)]
)
def test_predictions_of_a_trained_tuner_are_accurate(round_cost, node):
    """One chunk in flight: with more, rows of a prediction may have ended before the chunk."""
    scenario, tuner = (
        Scenario(round_cost, 0.7, stalls=0.0),
        goodput.goodput(SHIPPED, node_cost=node),
    )
    state, _ = decoded(scenario, tuner, 4, in_flight=1)
    _, results = decoded(scenario, tuner, 2, seed=1, state=state, in_flight=1)
    chunks = [
        one
        for result in results
        for one in result.measurements
        if one.live == int(one.live) and not one.is_moved
    ]
    ratio = [one.predicted * one.seconds / one.tokens for one in chunks]
    assert len(ratio) > 30 and np.median(ratio) == pytest.approx(1.0, abs=0.1)


# The end of a rollout


def test_windows_of_ended_sequences_are_harvested_at_the_cost_of_a_copy():
    class Whole:
        width = 64

        def wanted(self, uid, length):
            return range(0, length, self.width)

    spent, found = [], []

    def costs(program, rounds, at):
        spent.extend([program] * isinstance(program, Harvest))
        return by_hand(program, rounds, at)

    programs = counted(3, 70, 5, costs=costs)
    request = scenarios.request([5], 3, 100, seed=0, capacity=2, in_flight=1)
    contexts = scenarios.contexts(programs, request, Planner((2,), SLOTS, baselines.fixed("off")))
    contexts = [replace(one, harvester=Whole()) for one in contexts]
    rollout = driver.LocalGroups(
        contexts, [lambda look: found.extend(look.events)], clock=programs.clock
    )
    simulator.simulate(rollout, programs)
    windows = [event.windows for event in found if isinstance(event, Harvested)]
    assert sorted(sum(windows, ())) == [(0, 0), (1, 0), (1, 64), (2, 0)]
    assert len(spent) == len(windows) == 4


def test_a_stopped_rollout_returns_its_partial_sequences():
    programs = in_scenario(Scenario(scenarios.gpu, 0.6), scenarios.long_tailed(LONGEST))
    contexts = scenarios.contexts(
        programs, long_tail(capacity=16), Planner(BATCHES, SLOTS, baselines.fixed(TREE)), 2
    )
    rollout = driver.LocalGroups(
        contexts, [lambda look: look.began > 1.5 and rollout.stop()], clock=programs.clock
    )
    result = simulator.simulate(rollout, programs)
    whole, _ = run(
        in_scenario(Scenario(scenarios.gpu, 0.6), scenarios.long_tailed(LONGEST)), long_tail()
    )
    full = {one.uid: one.tokens.tolist() for one in whole.completions}
    assert rollout.is_done() and result.stats["seconds"] < 5
    assert (
        result.partial and result.completions and len(result.partial) + len(result.completions) < 48
    )
    for uid, tokens in result.partial.items():
        assert 0 < len(tokens) < len(full[uid]) and tokens.tolist() == full[uid][: len(tokens)]


def test_a_chunk_that_overfills_its_cache_is_detected(monkeypatch):
    monkeypatch.setattr(GroupView, "need", lambda *_: 64)
    with pytest.raises(ValueError, match="in a cache of 64"):
        run(
            counted(100),
            scenarios.request([5], 1, 200, seed=0, capacity=1),
            batches=(1,),
            slots=(64, 256),
        )


def random_scenario(seed: int):
    """(request, planner's arguments, programs, groups): anything that a configuration allows."""
    draw = np.random.default_rng(seed)
    chunk, in_flight = int(draw.choice([1, 2, 4, 16])), int(draw.integers(1, 4))
    depth, topk = int(draw.integers(1, 25)), int(draw.integers(1, 9))
    most = topk + (depth - 1) * topk**2 + 1  # nodes of such a tree
    tree = Strategy(depth, topk, int(draw.integers(min(depth + 1, most), min(most, 48) + 1)))
    tuner = [
        baselines.fixed(tree),
        baselines.threshold([tree], int(draw.integers(1, 64))),
        goodput.goodput([tree, *ARMS[:1]]),
    ][seed % 3]
    first = int(draw.choice([32, 64, 256]))
    limit = int(draw.choice([16, 200, 900]))
    prompts = draw.integers(2, 60, int(draw.integers(1, 7))).tolist()
    slots = tuple(doubling(first, max(first, limit + max(prompts))))
    request = scenarios.request(
        prompts,
        int(draw.integers(1, 5)),
        limit,
        seed=seed,
        capacity=int(draw.choice([1, 4, 16])),
        rounds=chunk,
        in_flight=in_flight,
    )
    seconds = float(draw.choice([0.0, 0.01, 3.0]))  # of compiling
    programs = in_scenario(
        Scenario(scenarios.gpu, float(draw.uniform(0, 0.95)), seed=seed),
        scenarios.long_tailed(limit + 20),
        lambda _: seconds,
    )
    rest = payback.Payback()
    rest.begin(float(draw.choice([0.0, 3.0, 1e4])), len(request.keys))
    return request, (slots, tuner, rest), programs, int(draw.integers(1, 4))


@pytest.mark.parametrize("seed", range(60))
def test_every_chunk_has_rounds_and_every_rollout_ends(seed):
    """Random strategies, also with paths longer than a chunk; chunks, caches, tuners, groups and compile costs."""
    request, (slots, tuner, rest), programs, groups = random_scenario(seed)
    decided = []

    def watched(look):
        decided.extend(e.decision for e in look.events if isinstance(e, Decided))
        tokens = len(request.keys) * request.max_new_tokens[0]
        assert len(decided) < 200 + 2 * tokens, "the rollout never ends"
        assert all(one.rounds >= 1 for one in decided[-4:]), "a chunk without rounds"

    planner = Planner((1, 4, 16), slots, tuner, None, rest, groups=groups)
    contexts = scenarios.contexts(programs, request, planner, groups)
    rollout = driver.LocalGroups(contexts, [watched], clock=programs.clock)
    result = simulator.simulate(rollout, programs)
    assert len(result.completions) == len(request.keys)


def test_a_rollout_that_waits_without_a_running_program_is_detected():
    with pytest.raises(RuntimeError, match="no program runs"):
        run(counted(9, costs=lambda *_: math.inf), scenarios.request([5], 1, 9, seed=0, capacity=1))
