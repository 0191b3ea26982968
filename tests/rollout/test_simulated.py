"""Rollouts in virtual time: the real scheduler, tuner and recorder, on programs with a cost function."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import scenarios
import toys
from pairwise import marked
from scenarios import Scenario, ScenarioPrograms, in_scenario

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
from tlt_jax.rollout.recorder import Decided
from tlt_jax.rollout.request import doubling
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.payback import Payback
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.state import GroupView
from tlt_jax.simulate import decoding, simulator
from tlt_jax.simulate.simulator import VirtualClock, noiseless_seconds
from tlt_jax.simulate.trees import Trees
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, PLAIN, Strategy
from tlt_jax.tuner import baselines, goodput, make
from tlt_jax.tuner.baselines import parse_arms

SHIPPED = Speculation().strategies
ARMS = parse_arms(SHIPPED)
BATCHES, SLOTS = (1, 4, 16, 64), (256, 512, 1024, 2048)
TREE = Strategy(6, 4, 16)
LONGEST = 600


def by_hand(program, rounds, at):
    """One second for each round, which is easy to sum."""
    return {Start: 0.25, Prefill: 2.0, Admit: 0.5}.get(type(program), rounds)


def counted(*lengths, costs=by_hand):
    """Programs of sequences with these lengths, by uid."""
    trees = Scenario(scenarios.gpu, 0.5).trees
    return ScenarioPrograms(costs, trees, lambda key: lengths[key[1]], VirtualClock())


def run(programs, request, tuner=None, state=None, *, batches=BATCHES, slots=SLOTS, groups=1):
    """(result, state of the tuner) of a simulated rollout."""
    planner = Planner(batches, slots, tuner or baselines.fixed("off"), state)
    contexts = scenarios.contexts(programs, request, planner, groups)
    rollout = driver.LocalGroups(contexts, clock=programs.clock)
    return simulator.simulate(rollout, programs), planner.state


def long_tail(seed=0, rounds=16, in_flight=2, capacity=48):
    return scenarios.request(
        [64] * 12, 4, LONGEST, seed=seed, rounds=rounds, in_flight=in_flight, capacity=capacity
    )


def tailed(round_cost, quality, seed=0):
    """Programs of answers with a long tail, at the costs and with the drafts of a scenario."""
    return in_scenario(Scenario(round_cost, quality, seed=seed), scenarios.long_tailed(LONGEST))


def answers(result):
    return [(one.uid, one.tokens.tolist(), one.finish) for one in result.completions]


# Sequences


def test_a_sequence_that_ends_at_its_limit_has_stopped_and_a_longer_one_is_cut():
    result, _ = run(counted(3, 4, 5), scenarios.request([5], 3, 4, seed=0, capacity=3))
    ends = [(len(one.tokens), one.finish) for one in result.completions]
    assert ends == [(3, "stop"), (4, "stop"), (4, "length")]


SCHEDULES = [
    {}, {"tuner": baselines.fixed(TREE)}, {"tuner": goodput.goodput(SHIPPED)}, {"groups": 3},
    {"batches": (64,), "slots": (2048,)},
    {"groups": 2, "tuner": goodput.goodput(SHIPPED)},
]  # fmt: skip


def emitted(schedule):
    """The answers under a schedule: its groups hold fewer rows."""
    programs = tailed(scenarios.cpu, 0.7)
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
        given = {"batches": batches, "groups": groups}
        result, _ = run(tailed(scenarios.gpu, 0.7), long_tail(), baselines.fixed(TREE), **given)
        rounds.append(sum(one.row_rounds for one in result.measurements))
    assert len(set(rounds)) == 1


def test_a_rollout_is_a_function_of_its_seeds():
    def rollout_of(seed, noise):
        programs, tuner = tailed(scenarios.gpu, 0.6, noise), goodput.goodput(SHIPPED)
        result, state = run(programs, long_tail(seed), tuner, groups=2)
        return answers(result), repr(result.spans), repr(result.decisions), state

    assert rollout_of(0, 0) == rollout_of(0, 0)
    assert rollout_of(0, 0)[0] == rollout_of(0, 1)[0] != rollout_of(1, 0)[0]
    assert rollout_of(0, 0)[1] != rollout_of(0, 1)[1]


def test_reports_count_what_verification_counts():
    result, _ = run(tailed(scenarios.gpu, 0.7), long_tail(), baselines.fixed(TREE))
    rows = sum(one.row_rounds for one in result.measurements)
    nodes, promised, accepted = result.reliability
    hits = sum(one.hits.sum() for one in result.measurements)
    assert accepted.sum() == hits == result.stats["tokens"] - rows
    assert nodes.sum() == rows * (TREE.nodes - 1)
    tenths = np.arange(10) / 10
    assert (nodes * tenths <= promised).all() and (promised <= nodes * (tenths + 0.1)).all()
    np.testing.assert_allclose(accepted[1:] / nodes[1:], promised[1:] / nodes[1:], atol=0.1)
    assert result.measurements[0].hits.shape == (TREE.depth, TREE.nodes, TREE.topk)


# The same scheduler as on devices

V = 12
LONG = [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]
PROMPTS = [[3, 1, 4, 1, 5], [9, 8], LONG, [11, 10]]


def certain(strategy):
    """Every round accepts a whole path."""
    levels = np.arange(strategy.depth)[None]
    return Trees(levels, 0 * levels, np.ones((1, strategy.nodes - 1)))


@pytest.mark.parametrize(
    ("strategy", "batches", "slots"), [(PLAIN, (1, 5), (32, 64)), (toys.TREE, (5,), (64,))]
)
def test_decisions_and_counts_equal_those_of_real_programs_with_the_same_answers(
    strategy, batches, slots, x64
):
    table, shape = toys.table(V, scale=1.0), {"capacity": 5, "rounds": 3, "in_flight": 1}
    drafter = toys.no_drafter if strategy == PLAIN else toys.table_drafter()
    rules = DecodingParams(Sampling(1.0), eos_ids=(0,))
    buckets = {"batches": batches, "slots": slots}
    given = {"strategy": strategy, **shape, **buckets}
    contexts = toys.contexts(toys.executables(1, V, drafter), table, PROMPTS, 3, rules, **given)
    real = driver.run(driver.LocalGroups(contexts))
    request = contexts[0].request
    ends = {
        tuple(request.keys[one.uid]): len(one.tokens) + (one.finish == "length")
        for one in real.completions
    }
    programs = ScenarioPrograms(by_hand, certain, lambda key: ends[tuple(key)], VirtualClock())
    result, _ = run(programs, request, baselines.fixed(strategy), **buckets)
    assert repr(result.decisions) == repr(real.decisions)  # nan != nan
    spans, ended = (
        [[(one.kind, one.batch) for one in each.spans] for each in (result, real)],
        [[(one.uid, len(one.tokens), one.finish) for one in each.completions] for each in (result, real)],
    )  # fmt: skip
    assert spans[0] == spans[1] and ended[0] == ended[1]
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
    found = [(one.rounds, one.row_rounds, one.tokens) for one in result.measurements]
    assert found == [(3, 6, 6), (2, 4, 4), (4, 4, 4)]


def test_two_groups_take_as_long_as_the_slower_one_which_steals():
    spent = {0: 0.0, 1: 0.0}

    def costs(program, rounds, at):
        spent[program.group] += by_hand(program, rounds, at)
        return by_hand(program, rounds, at)

    request = scenarios.request([5, 5], 4, 50, seed=0, rounds=4, in_flight=1, capacity=2)
    programs = counted(40, 40, 40, 40, 4, 4, 4, 4, costs=costs)
    result, _ = run(programs, request, batches=(2,), slots=(64,), groups=2)
    joined = [(one.group, one.joining) for one in result.decisions if one.joining]
    assert joined == [(0, (0, 1)), (1, (4, 5)), (1, (6, 7)), (1, (2, 3))]
    assert spent == {0: 0.25 + 2 + 0.5 + 40, 1: 0.25 + 2 + 2 * (0.5 + 4) + (2 + 0.5 + 40)}
    assert result.stats["seconds"] == max(spent.values()) == 53.75
    for group in (0, 1):
        spans = [one for one in result.spans if one.group == group]
        assert spans[0].start == 0 and spans[-1].end == spent[group], "it is never idle"
        assert all(one.end == other.start for one, other in zip(spans, spans[1:], strict=False))


def test_a_clock_that_jumps_gives_the_results_of_one_that_waits():
    def rollout_with(wait):
        programs = tailed(scenarios.cpu, 0.8)
        planner = Planner(BATCHES, SLOTS, baselines.fixed(TREE))
        contexts = scenarios.contexts(programs, long_tail(), planner, 2)
        rollout = driver.LocalGroups(contexts, clock=programs.clock)
        return driver.run(rollout) if wait else simulator.simulate(rollout, programs)

    jumped, waited = rollout_with(False), rollout_with(True)
    assert answers(jumped) == answers(waited)
    assert waited.stats["seconds"] == pytest.approx(jumped.stats["seconds"], rel=0.03)


def test_measurements_are_exact_when_every_event_is_polled(monkeypatch):
    def uncertainties():
        programs = tailed(scenarios.gpu, 0.6)
        run(programs, long_tail(), groups=2)
        return [one.uncertainty for one in run(programs, long_tail(), groups=2)[0].measurements]

    assert max(uncertainties()) < 3 * simulator.POLL_BEFORE_S
    monkeypatch.setattr(simulator, "POLL_BEFORE_S", math.inf)  # no poll before an end
    assert np.median(uncertainties()) > 0.1


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


def test_every_program_has_the_cost_of_the_rounds_that_it_is_like():
    for program, rounds, milliseconds in EXPECTED:
        found = noiseless_seconds(round_cost, program, rounds)
        assert found == pytest.approx(milliseconds / 1e3), program


# The predictions and gains of tuners


def test_predicted_speeds_are_exact_without_noise():
    """Of unmoved plain chunks whose rows did not just join."""
    scenario = Scenario(scenarios.gpu, 0.6, noise=0.0, stalls=0.0)
    scenario.with_noise = lambda random, seconds, is_first: seconds
    programs = in_scenario(scenario, scenarios.long_tailed(LONGEST))
    result, _ = run(programs, long_tail(in_flight=1), scenarios.oracle(scenario, []), groups=2)
    joined = {(one.group, one.predicted) for one in result.decisions if one.joining}
    ratios = []
    for one in result.measurements:
        decided = one.predicted / scenario.speed(one.batch, one.slots, PLAIN)
        is_usual = not one.is_moved and (one.group, one.predicted) not in joined
        if one.live == pytest.approx(decided) and is_usual:
            ratios.append(one.predicted * one.seconds / one.tokens)
    assert len(ratios) > 8
    np.testing.assert_allclose(ratios, 1.0, atol=1e-6)


def decoded(
    scenario, tuner, rollouts, *, seed=0, state=None, in_flight=2, groups=2, estimates=None
):
    """(state, results) of some rollouts, with an update of the weights and held-out estimates after each."""
    programs, results = in_scenario(scenario, scenarios.long_tailed(1200)), []
    state = tuner.update_prior(tuner.init(), estimates or {}) if state is None else state
    for number in range(rollouts):
        rest = {"seed": 100 * seed + number, "capacity": 64 // groups, "in_flight": in_flight}
        request = scenarios.request([64] * 12, 4, 1200, **rest)
        result, state = run(programs, request, tuner, state, groups=groups)
        results.append(result)
        state = tuner.update_prior(state, estimates or {})
    return state, results


def seconds(results):
    return sum(one.stats["seconds"] for one in results)


@pytest.mark.parametrize(
    ("round_cost", "node", "quality", "share", "gain"),
    marked([
        ((scenarios.gpu, 1 / 200, 0.8, 0.93, 2.0), False), ((scenarios.gpu, 1 / 200, 0.5, 0.93, 1.5), True),
        ((scenarios.cpu, 1 / 10, 0.8, 0.95, 1.02), True),
    ]),
)  # fmt: skip
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


@pytest.mark.parametrize(("round_cost", "node"), [(scenarios.gpu, 1 / 200), (scenarios.cpu, 1 / 10)])  # fmt: skip
def test_predictions_of_a_trained_tuner_are_accurate(round_cost, node):
    """One chunk in flight: with more, rows of a prediction may have ended before the chunk."""
    tuner = goodput.goodput(SHIPPED, node_cost=node)
    scenario = Scenario(round_cost, 0.7, stalls=0.0)
    state, _ = decoded(scenario, tuner, 4, in_flight=1)
    _, results = decoded(scenario, tuner, 2, seed=1, state=state, in_flight=1)
    chunks = [one for result in results for one in result.measurements]
    whole = [one for one in chunks if one.live == int(one.live) and not one.is_moved]
    ratio = [one.predicted * one.seconds / one.tokens for one in whole]
    assert len(ratio) > 30 and np.median(ratio) == pytest.approx(1.0, abs=0.1)


# The end of a rollout


def test_a_chunk_that_overfills_its_cache_is_detected(monkeypatch):
    monkeypatch.setattr(GroupView, "need", lambda *_: 64)
    with pytest.raises(ValueError, match="in a cache of 64"):
        request = scenarios.request([5], 1, 200, seed=0, capacity=1)
        run(counted(100), request, batches=(1,), slots=(64, 256))


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
    samples, rest = int(draw.integers(1, 5)), {"rounds": chunk, "in_flight": in_flight}
    capacity = int(draw.choice([1, 4, 16]))
    request = scenarios.request(prompts, samples, limit, seed=seed, capacity=capacity, **rest)
    seconds = float(draw.choice([0.0, 0.01, 3.0]))  # of compiling
    programs = in_scenario(
        Scenario(scenarios.gpu, float(draw.uniform(0, 0.95)), seed=seed),
        scenarios.long_tailed(limit + 20),
        lambda _: seconds,
    )
    rest = Payback()
    rest.begin(float(draw.choice([0.0, 3.0, 1e4])), len(request.keys))
    return request, (slots, tuner, rest), programs, int(draw.integers(1, 4))


@pytest.mark.parametrize("seed", range(36))
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


# With several drafters the tuner converges to the better one, and a bad one costs little

DRAFTING = make.arms(Speculation(drafter="adaptive"))
NGRAMS = tuple(arm for arm in DRAFTING if arm.drafter == NGRAM)
NODE = {scenarios.cpu: 1 / 8, scenarios.gpu: 1 / 200}
BAD = (0.3, 0.2)  # quality and agreement: one token in twelve is accepted


def scenario_of(round_cost, ngram, learned, merged, **rest) -> Scenario:
    """A scenario with these qualities (or BAD) of the drafters."""
    given = dict(zip((NGRAM, LEARNED, MERGED), (ngram, learned, merged), strict=True))
    known = {drafter: one if one is BAD else (one, 1.0) for drafter, one in given.items()}
    return Scenario(round_cost, 0.0, drafters=known, **rest)


def drafted(scenario, arms, rollouts, estimates=None, state=None, seed=0):
    """`decoded` by one group, by a tuner whose learned drafter gets better in training."""
    tuner = goodput.goodput(arms, NODE[scenario.cost], learning=(LEARNED, MERGED))
    given = {"seed": seed, "state": state, "estimates": estimates, "groups": 1}
    return decoded(scenario, tuner, rollouts, **given)


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
    assert {scenario.best(batch, 512, DRAFTING).drafter for batch in (1, 4, 16)} == {better}
    _, results = drafted(scenario, DRAFTING, 5, {LEARNED: scenario.levels(LEARNED)})
    rounds = used(results[-1])
    assert rounds[better] > 0.8 * sum(rounds.values()), rounds


@pytest.mark.parametrize(("round_cost", "wrong"), [(scenarios.gpu, 0.4), (scenarios.cpu, 0.0)])
def test_a_bad_learned_drafter_costs_little_compared_with_ngrams_alone(round_cost, wrong):
    """Also when the held-out estimate is `wrong`: higher than its acceptance."""
    alone = taken = 0.0
    for seed in range(2):
        scenario = scenario_of(round_cost, 0.6, BAD, 0.55, seed=seed)
        estimates = {LEARNED: [min(level + wrong, 0.95) for level in scenario.levels(LEARNED)]}
        alone += seconds(drafted(scenario, NGRAMS, 4, seed=seed)[1])
        taken += seconds(drafted(scenario, DRAFTING, 4, estimates, seed=seed)[1])
    assert taken < 1.03 * alone


@pytest.mark.parametrize("round_cost", [scenarios.gpu, scenarios.cpu])
def test_a_drafter_without_an_estimate_is_not_tried(round_cost):
    scenario = scenario_of(round_cost, 0.6, 0.9, 0.9)
    state, results = drafted(scenario, DRAFTING, 3)
    assert not sum(used(result)[LEARNED] + used(result)[MERGED] for result in results)
    _, alone = drafted(scenario, NGRAMS, 3)
    assert seconds(results) == seconds(alone), "its arms make no difference"


def test_a_learned_drafter_is_used_once_it_is_good_and_dropped_when_it_gets_bad():
    scenario = scenario_of(scenarios.gpu, 0.6, BAD, BAD)
    state, results = drafted(scenario, DRAFTING, 3, {LEARNED: scenario.levels(LEARNED)})
    assert used(results[-1])[NGRAM] > 0.7 * sum(used(results[-1]).values())
    scenario.drafters |= {LEARNED: (0.8, 1.0), MERGED: (0.8, 1.0)}
    estimates = {LEARNED: scenario.levels(LEARNED)}
    state, results = drafted(scenario, DRAFTING, 5, estimates, state, seed=1)
    rounds = used(results[-1])
    assert rounds[LEARNED] + rounds[MERGED] > 0.8 * sum(rounds.values())
    scenario.drafters |= {LEARNED: BAD, MERGED: BAD}
    estimates = {LEARNED: scenario.levels(LEARNED)}
    _, results = drafted(scenario, DRAFTING, 4, estimates, state, seed=2)
    assert used(results[-1])[NGRAM] > 0.7 * sum(used(results[-1]).values())


def compiled(estimates) -> Counter:
    """The number of chunks that a run of 12 rollouts compiles, by drafter."""
    scenario, rest = scenario_of(scenarios.gpu, 0.5, 0.85, 0.85), Payback()
    programs = in_scenario(
        scenario, scenarios.long_tailed(600), lambda program: 0.2 * program.relative_seconds
    )
    tuner = goodput.goodput(DRAFTING, NODE[scenarios.gpu], learning=(LEARNED, MERGED))
    state = tuner.init()
    for step in range(12):
        request = scenarios.request([64] * 12, 4, 600, seed=step, capacity=48)
        rest.begin(11 - step, len(request.keys))
        planner = Planner((1, 4, 16, 48), (256, 512, 1024), tuner, state, rest, 664)
        contexts = scenarios.contexts(programs, request, planner)
        simulator.simulate(driver.LocalGroups(contexts, clock=programs.clock), programs)
        state = tuner.update_prior(planner.state, estimates if step >= 3 else {})
    chunks = [one.strategy for one in programs.compiled if isinstance(one, Decode)]
    return Counter(one.drafter for one in chunks if one != PLAIN)


def test_nothing_is_compiled_for_a_drafter_without_an_estimate():
    assert compiled({}).keys() == {NGRAM}
    assert compiled({LEARNED: np.full(5, 0.85)})[LEARNED] > 0
