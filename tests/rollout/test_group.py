"""The rollout on a target without a network: no choice of the scheduler, and no drafter, changes a token."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import references
import toys
from pairwise import marked

from tlt_jax.data.stop_rules import stop_tokens
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.keys import sequence_keys
from tlt_jax.rollout.recorder import Decision, Dispatched, Poll, Retired, RolloutRecorder
from tlt_jax.rollout.request import admission_size, block_size, bucket_width
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.group import prefill_sources
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.rollout.scheduler.state import GroupState, GroupView
from tlt_jax.spec_decode import noise
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.verify import BINS, Stats

V = 12
TABLE = toys.table(V, scale=1.0)
PROMPTS = [
    [3, 1, 4, 1, 5],
    [9],
    [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3],
    [11, 10],
]
SAMPLES = 3
STOPS = ((5, 2), (7, 7, 3))
RULES = DecodingParams(Sampling(1.0), eos_ids=(0,), stops=stop_tokens(STOPS))
LIMIT = 24
BIN = np.ones(BINS)
CHUNK = Decision(0, 0, 4, 64, PLAIN)
STATS = Stats(
    row_rounds=np.ones(1, np.int32),
    declined=np.int32(1),
    hits=np.ones((1, 2, 1)),
    nodes=BIN,
    promised=BIN,
    accepted=BIN,
)
pytestmark = pytest.mark.usefixtures("x64")


@cache
def programs(groups: int = 1, drafter: str = "none"):
    """Executables shared by the tests, so that each shape compiles once."""
    drafters = {
        "none": toys.no_drafter,
        "some ids": toys.table_drafter(knows_some=True),
    }
    return toys.executables(groups, V, drafters.get(drafter, toys.table_drafter()))


GUESSES = {
    "exact": TABLE,
    "wrong": -TABLE,
    "noisy": toys.table(V, seed=9, scale=0.5) + TABLE,
    "broken": TABLE * np.nan,
}


def drafted(drafter: str, *args, groups: int = 1, **rest):
    """A rollout with a drafter: its guess of the table, or the n-grams of known tokens."""
    guess = GUESSES.get(drafter, TABLE)
    return toys.play(
        programs(groups, "some ids" if drafter == "some ids" else "table"),
        *args,
        guess=guess,
        **rest,
    )


def answers(result) -> list[tuple[int, list[int], str]]:
    return [(one.uid, one.tokens.tolist(), one.finish) for one in result.completions]


@cache
def reference(rules: DecodingParams) -> tuple[list[tuple[int, list[int], str]], list]:
    """The same rollout by plain decoding, sequence by sequence."""
    keys = jnp.asarray(sequence_keys(0, 0, 0, np.arange(len(PROMPTS) * SAMPLES)))
    longest = max(map(len, PROMPTS)) + LIMIT
    ahead = noise.gumbel(
        keys, jnp.tile(jnp.arange(longest, dtype=jnp.int32), (len(keys), 1)), V, jnp.float64
    )
    logits_of = partial(toys.table_logits, TABLE)
    found, logprobs = [], []
    for uid, noise_of in enumerate(np.asarray(ahead)):
        tokens, logp, finish = references.decode(
            logits_of, noise_of.__getitem__, PROMPTS[uid // SAMPLES], rules.sampling, rules.eos_ids, STOPS, LIMIT
        )  # fmt: skip
        found.append((uid, tokens, finish))
        logprobs.append(logp)
    return found, logprobs


DRAFTED = [
    (Sampling(0.6, 5, 1.0), "noisy"), (Sampling(1.3, 0, 0.8), "wrong"), (Sampling(1.0, 4, 0.9), "some ids"),
    (Sampling(1.0), "broken"), (Sampling(0.0), "noisy"),
]  # fmt: skip
MORE_DRAFTED = [
    (Sampling(1.0), "none"), (Sampling(1.0), "exact"), (Sampling(1.0), "wrong"),
    (Sampling(0.0), "none"), (Sampling(0.0), "exact"), (Sampling(0.6), "some ids"),
]  # fmt: skip


@pytest.mark.parametrize(
    "setting, drafter",
    marked([(one, True) for one in DRAFTED] + [(one, False) for one in MORE_DRAFTED]),
)
def test_any_drafter_gives_the_tokens_of_plain_decoding(setting, drafter):
    rules = DecodingParams(setting, RULES.eos_ids, RULES.stops)
    if drafter == "none":
        result = toys.play(programs(), TABLE, PROMPTS, SAMPLES, rules)
    else:
        result = drafted(drafter, TABLE, PROMPTS, SAMPLES, rules, strategy=toys.TREE)
    expected, logprobs = reference(rules)
    assert answers(result) == expected
    for one, logp in zip(result.completions, logprobs, strict=True):
        np.testing.assert_allclose(one.logprobs, logp, atol=1e-9)
    row_rounds = sum(measured.row_rounds for measured in result.measurements)
    # The first round of a prompt of one token has nothing to draft from.
    alone = 0 if drafter == "none" else SAMPLES
    assert result.stats["declined"] == (row_rounds if drafter == "broken" else alone)
    assert accepted(result) == result.stats["tokens"] - row_rounds
    assert accepted(result) == sum(one.accepted for one in result.completions)
    assert ("speculate" in {span.kind for span in result.spans}) == (drafter != "none")


def accepted(result) -> int:
    """Drafted tokens that the target accepted."""
    return sum(int(measured.hits.sum()) for measured in result.measurements)


@pytest.mark.parametrize(
    "strategy, temperature",
    marked([
        ((Strategy(1, 1, 2), 1.0), False), ((Strategy(3, 1, 4), 0.0), False), ((toys.TREE, 0.0), False),
        ((toys.TREE, 1.0), True), ((Strategy(4, 3, 12), 1.0), True), ((Strategy(2, 4, 9), 0.0), True),
    ]),
)  # fmt: skip
def test_a_drafter_that_knows_the_policy_and_the_noise_is_always_right(strategy, temperature):
    rules = DecodingParams(Sampling(temperature), RULES.eos_ids, RULES.stops)
    result = drafted("exact", TABLE, PROMPTS, SAMPLES, rules, strategy=strategy)
    expected = reference(rules)[0]
    assert answers(result) == expected
    rounds = 0
    for uid, tokens, _ in expected:
        alone = len(PROMPTS[uid // SAMPLES]) == 1  # as above
        rounds += alone + -(-(len(tokens) - alone) // strategy.path)
    assert sum(measured.row_rounds for measured in result.measurements) == rounds
    assert max(len(tokens) for _, tokens, _ in expected) == LIMIT
    joined = sum(bool(decision.joining) for decision in result.decisions)
    assert sum(span.kind == "catch_up" for span in result.spans) == joined < len(result.decisions)
    nodes, promised, held = result.reliability
    # Every round emits the accepted tokens and one more.
    assert held.sum() == result.stats["tokens"] - rounds
    tenths = np.arange(10) / 10
    assert (nodes * tenths - 1e-3 <= promised).all() and (
        promised <= nodes * (tenths + 0.1) + 1e-3
    ).all()
    assert (held <= nodes).all() and promised.sum() > 0.8 * held.sum()


def test_the_reference_has_every_finish_reason():
    ends = {(finish, tokens[-1] == 0) for _, tokens, finish in reference(RULES)[0]}
    assert ends == {("stop", True), ("stop", False), ("length", False)}, (
        "EOS, a stop sequence, the limit"
    )


# groups, capacity, batch buckets, cache buckets, rounds of a chunk, in flight: pairwise; the gate has some
SHAPES = [
    ((1, 12, (3, 12), (33, 40, 64), 3, 2), True), ((2, 2, (1, 2), (40, 64), 3, 1), True), ((2, 3, (3,), (64,), 1, 2), True),
    ((4, 1, (1,), (64,), 16, 2), True), ((1, 1, (1,), (64,), 1, 1), False), ((1, 5, (2, 5), (32, 64), 16, 2), False),
    ((2, 6, (6,), (64,), 16, 1), False), ((4, 3, (3,), (33, 64), 3, 2), False), ((4, 2, (1, 2), (64,), 1, 1), False),
]  # fmt: skip


@pytest.mark.parametrize("groups, capacity, batches, slots, rounds, in_flight", marked(SHAPES))
def test_no_shape_of_the_rollout_changes_a_token(
    groups, capacity, batches, slots, rounds, in_flight
):
    shape = {
        "capacity": capacity,
        "batches": batches,
        "slots": slots,
        "rounds": rounds,
        "in_flight": in_flight,
    }
    result = toys.play(programs(groups), TABLE, PROMPTS, SAMPLES, RULES, **shape)
    assert answers(result) == reference(RULES)[0]
    joined = [uid for decision in result.decisions for uid in decision.joining]
    assert sorted(joined) == list(range(len(PROMPTS) * SAMPLES)), "every sample is decoded once"
    spans = [(span.group, span.start, span.end) for span in result.spans]
    for group in range(groups):
        own = sorted(span[1:] for span in spans if span[0] == group)
        assert all(before[1] <= after[0] for before, after in zip(own, own[1:], strict=False)), (
            "spans do not overlap"
        )
    assert all(measured.seconds > 0 for measured in result.measurements)


def test_more_sequences_join_than_one_admission_holds():
    assert admission_size(40) == 16
    few, many = (
        toys.play(programs(), TABLE, PROMPTS, 10, RULES, capacity=capacity, batches=(capacity,))
        for capacity in (8, 40)
    )
    assert len(many.decisions[0].joining) == 40 and answers(few) == answers(many)


@pytest.mark.parametrize(
    "second, share", [((16, PLAIN, 4), 1 / 2), ((8, PLAIN, 4), 1 / 3), ((16, toys.TREE, 4), 0.6)]
)
def test_chunks_read_in_one_look_share_its_time_in_proportion_to_their_work(second, share):
    rounds, strategy, batch = second
    other = replace(CHUNK, strategy=strategy)
    ledger = recorded(
        (0.0, [Dispatched(0, "prefill", 1, 64)], 1.0),
        (
            1.0,
            [Dispatched(1, "decode", 4, 64, CHUNK), Dispatched(2, "decode", batch, 64, other)],
            2.0,
        ),
        (5.0, [Retired(0, "prefill"), Dispatched(3, "decode", 4, 64, CHUNK)], 5.0),
        (7.0, [Retired(1, "decode", 16, 64, STATS), Retired(2, "decode", rounds, 32, STATS)], 7.0),
        (8.0, [Retired(3, "decode", 16, 64, STATS)], 8.0),
    )
    first, other, alone = (measured.seconds for measured in ledger.measurements)
    assert first + other == pytest.approx(2.0) and alone == pytest.approx(1.0)
    assert other / 2 == pytest.approx(share, abs=0.05)
    assert [(span.start, span.end) for span in ledger.spans][::3] == [(1.0, 5.0), (7.0, 8.0)]


def test_a_prefill_read_together_with_a_chunk_leaves_the_chunk_its_time():
    ledger = recorded(
        (0.0, [Dispatched(0, "prefill", 1, 64), Dispatched(1, "decode", 4, 64, CHUNK)], 1.0),
        (3.0, [Retired(0, "prefill"), Retired(1, "decode", 16, 64, STATS)], 3.0),
    )
    (chunk,) = ledger.measurements
    assert 1.0 < chunk.seconds < 2.0


def test_a_chunk_that_ended_while_the_host_was_compiling_is_not_timed():
    """Chunks of two seconds, read at the next poll; from 3.1 to 9.0 the host compiled, before or after it queued the third."""
    ledger = recorded(
        (0.9, [Dispatched(0, "decode", 4, 64, CHUNK), Dispatched(1, "decode", 4, 64, CHUNK)], 1.0),
        (2.9, [], 2.9),
        (3.0, [Retired(0, "decode", 16, 64, STATS)], 3.0),
        (3.1, [Dispatched(2, "decode", 4, 64, CHUNK)], 9.0),
        (9.1, [Retired(1, "decode", 16, 64, STATS)], 9.1),
        (10.9, [Dispatched(3, "decode", 4, 64, CHUNK)], 10.9),
        (11.0, [Retired(2, "decode", 16, 64, STATS)], 11.0),
        (12.9, [], 12.9),
        (13.0, [Retired(3, "decode", 16, 64, STATS)], 13.0),
    )
    assert [measured.is_timed for measured in ledger.measurements] == [True, False, False, True]
    assert [measured.uncertainty for measured in ledger.measurements] == pytest.approx(
        [0.2, 6.1, 6.1, 0.2]
    )
    assert [measured.seconds for measured in ledger.measurements] == pytest.approx(
        [2.0, 6.1, 1.9, 2.0]
    )


@pytest.mark.parametrize(
    "before, polled, seconds", [((2.9, [], 2.9), 3.0, 2.0), ((2.1, [], 9.0), 9.0, 0.0)]
)
def test_a_catch_up_that_ended_while_the_host_was_compiling_is_not_timed(before, polled, seconds):
    """It takes two seconds, and is read at the next poll, or after the host compiled from 2.1 to 9.0; then a chunk."""
    (chunk,) = recorded(
        (0.9, [Dispatched(0, "catch_up", 4, 64), Dispatched(1, "decode", 4, 64, CHUNK)], 1.0),
        before,
        (polled, [Retired(0, "catch_up")], polled),
        (10.0, [Retired(1, "decode", 16, 64, STATS)], 10.0),
    ).measurements
    assert chunk.catch_up == pytest.approx(seconds)


def test_pauses_between_polls_grow_stay_short_relative_to_the_wait_and_restart_after_an_event(
    monkeypatch,
):
    clock, waits = [0.0], []
    due = iter([0.001, 0.05, 0.8])  # seconds until the next event

    def sleep(seconds):
        waits[-1].append(seconds)
        clock[0] += seconds

    def advance(context, state, is_stopping):
        if waits and clock[0] < ready[0]:
            return state, []
        wait = next(due, None)
        waits.append([])
        ready[0] = clock[0] + (wait or 0)
        return SimpleNamespace(is_released=wait is None, awaits_replies=False), ["something"]

    ready = [0.0]
    monkeypatch.setattr(driver.machine, "advance", advance)
    planner = SimpleNamespace(observe=None)
    context = SimpleNamespace(index=0, request=SimpleNamespace(samples=1), planner=planner)
    time = SimpleNamespace(now=lambda: clock[0], taken=lambda: 0.0, sleep=sleep)
    driver.run(driver.LocalGroups([context], clock=time))
    *waits, last = waits
    assert last == []
    for parts, wait, most in zip(waits, (0.001, 0.05, 0.8), (6, 92, 320), strict=True):
        assert (
            wait <= sum(parts) < 1.03 * wait + 2e-4
            and len(parts) <= most
            and parts[0] == 2e-4
            and max(parts) <= 5e-3
        )


def test_the_first_round_that_a_program_runs_is_not_timed():
    registry, seen = toys.executables(1, V, toys.no_drafter), set()
    for measured in toys.play(
        registry, TABLE, PROMPTS, SAMPLES, RULES, capacity=5, batches=(2, 5)
    ).measurements:
        shape = measured.batch, measured.slots, measured.strategy
        assert math.isinf(measured.uncertainty) == (shape not in seen)
        seen.add(shape)
    again = toys.play(registry, TABLE, PROMPTS, SAMPLES, RULES, capacity=5, batches=(2, 5))
    assert len(seen) > 1 and all(
        math.isfinite(measured.uncertainty) for measured in again.measurements
    )


def recorded(*polls):
    """A recorder after these polls of one group: (begin, events, end)."""
    recorder = RolloutRecorder(1, begin=0.0)
    for began, events, ended in polls:
        recorder.record(Poll(0, began, ended, tuple(events)))
    return recorder


def test_strategies_may_change_every_chunk_and_every_measurement_records_its_choice():
    plain, turn = toys.bucketed((6,), (64,)), itertools.count()
    arms = PLAIN, toys.TREE, Strategy(2, 3, 8)

    def restless(view):
        number = next(turn)
        changes = {"strategy": arms[number % 3], "rounds": 1 + number % 3}
        return replace(plain(view), **changes, predicted=float(number), reason=str(number))

    shape = {"capacity": 6, "rounds": 2, "decide": restless, "groups": 2}
    result = drafted("noisy", TABLE, PROMPTS, SAMPLES, RULES, **shape)
    assert answers(result) == reference(RULES)[0]
    assert {decision.strategy for decision in result.decisions} == {*arms}
    taken = {decision.reason: decision for decision in result.decisions}
    for measured in result.measurements:
        decision = taken.pop(measured.reason)
        for name in ("group", "strategy", "predicted"):
            assert getattr(measured, name) == getattr(decision, name)
        assert measured.rounds <= decision.rounds


def test_no_row_idles_while_a_sample_waits_and_unneeded_rows_are_released():
    batches, started, views = (1, 2, 4), 0, []
    pilot = toys.bucketed(batches, (64,), toys.TREE)

    def watch(view):
        views.append(view)
        return pilot(view)

    shape = {"capacity": 4, "in_flight": 1, "rounds": 64}
    result = drafted("noisy", TABLE, PROMPTS, SAMPLES, RULES, decide=watch, **shape)
    assert answers(result) == reference(RULES)[0]
    ended = len(PROMPTS) * SAMPLES
    assert len(views) == len(result.measurements), "every decision is one chunk, which runs"
    for view, decision, measured in zip(views, result.decisions, result.measurements, strict=True):
        started += len(decision.joining)
        assert view.waiting or started == ended
        smaller = max((size for size in batches if size < decision.batch), default=0)
        assert decision.min_live == (view.live if view.waiting else smaller + 1)
        assert measured.row_rounds >= measured.rounds * decision.min_live
        if view.waiting:
            assert measured.row_rounds == measured.rounds * view.live
    assert {decision.batch for decision in result.decisions} > {4}


def test_the_cache_has_room_for_every_chunk_in_flight():
    plain, views = toys.bucketed((12,), (64,)), []

    def watch(view):
        views.append(view)
        return plain(view)

    toys.play(programs(), TABLE, PROMPTS, SAMPLES, RULES, capacity=12, rounds=3, decide=watch)
    longest = max(map(len, PROMPTS))
    assert [view.need(PLAIN) for view in views[:2]] == [bucket_width(longest), longest + 6], (
        "decided before any is read"
    )
    assert (
        views[1].need(toys.TREE) == longest + 3 + 3 * toys.TREE.path
        and views[1].need(toys.TREE, 1) < longest + 6 + 3
    )
    assert views[0].retired == views[1].retired == 0


@pytest.mark.parametrize(
    ("strategy", "view", "slots"),
    [(PLAIN, {}, 24), (Strategy(3, 1, 4), {}, 40), (Strategy(3, 1, 4), {"limit": 23}, 24), (PLAIN, {"widest": 32}, 40),
     (PLAIN, {"batch": 4, "slots": 40}, 40), (PLAIN, {"batch": 8, "slots": 40}, 24)],
)  # fmt: skip
def test_a_chunk_has_slots_for_all_tokens_it_may_emit_and_an_unchanged_batch_keeps_its_cache(
    strategy, view, slots
):
    """Sequences of 20 tokens, chunks of 3 rounds: 23 slots for plain decoding, 32 for rounds of up to 4 tokens."""
    seen = {"tokens": 20, "limit": 100, "widest": 16, "rounds": 3, "batch": 0, "slots": 0} | view
    assert toys.bucketed((4, 8), (24, 40, 64), strategy)(GroupView(0, 0, 4, **seen)).slots == slots


@pytest.mark.parametrize("tokens, limit, slots, rounds", [
    (20, 500, 64, 11), (44, 500, 64, 5), (48, 500, 64, 4), (49, 500, 128, 16), (44, 64, 64, 16), (20, 84, 64, 11),
])  # fmt: skip
def test_the_cache_grows_only_once_few_rounds_fit_the_one_for_plain_decoding(
    tokens, limit, slots, rounds
):
    """Chunks of 16 rounds, and at most 4 tokens in each."""
    view = GroupView(0, 0, 4, tokens=tokens, limit=limit, widest=16, rounds=16, batch=0, slots=0)
    decision = toys.bucketed((4,), (64, 128), Strategy(3, 1, 4))(view)
    assert (decision.slots, min(decision.rounds, view.rounds)) == (slots, rounds)


def test_recorded_decisions_replay_the_rollout():
    play = partial(
        toys.play, programs(), TABLE, PROMPTS, SAMPLES, RULES, capacity=5, rounds=3, in_flight=1
    )
    first = play(decide=toys.bucketed((1, 2, 5), (32, 64)))
    recorded = iter(first.decisions)

    def replay(view):
        decision = next(recorded)
        assert (decision.group, decision.retired) == (view.group, view.retired)
        return decision

    second = play(decide=replay)
    assert second.decisions == first.decisions
    assert [(s.kind, s.batch) for s in second.spans] == [(s.kind, s.batch) for s in first.spans]
    assert answers(second) == answers(first)


def test_the_queue_gives_every_sample_once_and_lets_groups_steal_single_ones():
    board = LocalBoard()
    one, two = (WorkQueue(board, "s", prompts=2, samples=3) for _ in range(2))
    assert one.take(2)[:3] == ([(0, 0), (0, 1)], set(), False), (
        "a whole prompt, of which a sample waits"
    )
    assert two.take(3)[:3] == ([(1, 0), (1, 1), (1, 2)], {1}, False), "the whole next prompt"
    assert two.take(2, prefilled=[1])[:3] == ([(0, 2)], {1}, True), (
        "what the other group has not started"
    )
    assert one.take(2, prefilled=[0])[:3] == ([], {0}, True)


def test_the_samples_of_prefilled_prompts_go_before_new_prompts():
    queue = WorkQueue(LocalBoard(), "s", prompts=3, samples=2)
    assert queue.take(1).samples == [(0, 0)]
    assert queue.take(2, prefilled=[0])[:3] == ([(0, 1), (1, 0)], {0}, False)
    assert queue.take(9, prefilled=[1])[:3] == ([(1, 1), (2, 0), (2, 1)], {1, 2}, True)


def test_prefills_come_in_few_shapes():
    assert [bucket_width(tokens) for tokens in (1, 2, 17, 18, 33, 34)] == [16, 16, 16, 32, 32, 64]
    assert [block_size(count, 32) for count in (1, 2, 3, 4, 8, 9, 16, 40)] == [
        1,
        1,
        4,
        4,
        4,
        16,
        16,
        16,
    ]
    assert [block_size(count, 8192) for count in (1, 16)] == [1, 1]


def sources_of(lengths) -> list:
    """The prefills of prompts of these lengths, of one sample each."""
    prompts = tuple(np.zeros(length, np.int32) for length in lengths)
    context = SimpleNamespace(tokens=prompts.__getitem__)
    return prefill_sources(context, GroupState(), range(len(prompts)))


@pytest.mark.parametrize("seed", range(4))
def test_prompts_are_prefilled_with_others_of_about_their_length(seed):
    random = np.random.default_rng(seed)
    lengths = random.permutation([20] * 3 + [200] + [7] * 60 + [*random.integers(2, 300, 30)])
    sources = sources_of(lengths)
    prompts = [prompt for source in sources for prompt in source.rows]
    assert sorted(prompts) == list(range(len(lengths)))
    for source in sources:
        assert all(lengths[prompt] - 1 <= source.sizes[1] for prompt in source.rows)
        assert len(source.rows) <= source.sizes[0]
    as_dealt, left = 0, lengths.tolist()
    while left:
        width = bucket_width(max(left))
        size = block_size(len(left), width)
        as_dealt, left = as_dealt + size * width, left[size:]
    assert sum(size * width for size, width in (source.sizes for source in sources)) < as_dealt


def test_a_wide_prefill_holds_the_longest_prompts():
    sources = sources_of([7] * 30 + [26] + [9] * 30 + [21])
    assert [source.sizes for source in sources] == [(16, 32), (16, 16), (16, 16), (16, 16)]
    assert {30, 61} < set(sources[0].rows)
