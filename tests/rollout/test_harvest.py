"""Harvested features of ended sequences are correct, complete and in time, however their rows are reused."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import toys

from tlt_jax.data.stop_rules import stop_tokens
from tlt_jax.rollout.executables.programs import Harvest
from tlt_jax.rollout.recorder import (
    Decided,
    Dispatched,
    Emitted,
    Ended,
    Event,
    Harvested,
    Poll,
    Retired,
    RolloutResult,
    WentIdle,
)
from tlt_jax.rollout.scheduler import driver, group as machine
from tlt_jax.rollout.scheduler.state import InFlight, Running
from tlt_jax.spec_decode.decode_state import BROKEN, RUNNING, STOPPED, TRUNCATED
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN

V, SAMPLES, WIDTH = 12, 3, 7
TABLE = toys.table(V, scale=1.0)
RULES = DecodingParams(Sampling(1.0), eos_ids=(0,), stops=stop_tokens(((5, 2), (7, 7, 3))))
PROMPTS = [
    [3, 1, 4, 1, 5],
    [9],
    [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3],
    [11, 10],
]
pytestmark = pytest.mark.usefixtures("x64")


@cache
def programs(groups: int):
    """Executables shared by the tests."""
    return toys.executables(groups, V, toys.table_drafter())


@dataclass
class Reaper:
    """Wants the whole text in consecutive windows; for every second sequence only its end."""

    width: int = WIDTH
    calls: list[tuple[int, int]] = field(default_factory=list)

    def wanted(self, uid: int, length: int) -> list[int]:
        self.calls.append((uid, length))
        return self.starts(uid, length)

    def starts(self, uid: int, length: int) -> list[int]:
        starts = list(range(0, length - 1, self.width))
        return starts if uid % 2 == 0 else starts[-1:]


@dataclass
class Played:
    """A rollout: its events with their groups, and the rows of each ended sequence, at dispatch and when read."""

    result: RolloutResult
    events: list[tuple[int, Event]]
    harvester: Reaper | None
    rows: list[tuple[int, int]]
    prompts: list[list[int]]
    samples: int

    def of(self, kind: type, group: int | None = None) -> list:
        return [
            event for at, event in self.events if isinstance(event, kind) and group in (None, at)
        ]

    def texts(self) -> dict[int, list[int]]:
        """The finished sequences, with their prompts."""
        return {
            one.uid: [*self.prompts[one.prompt], *one.tokens.tolist()]
            for one in self.result.completions
        }


def play(
    monkeypatch, prompts=PROMPTS, samples=SAMPLES, *, groups=1, harvester=None, registry=None,
    until: Callable[[driver.LocalGroups], bool] = lambda rollout: False, **shape,
) -> Played:  # fmt: skip
    """A rollout of the toy model, stopped once `until` is true."""
    events, rows = [], []
    retire = machine.retire

    def read(context, state):
        flight = state.flights[0]
        after, news = retire(context, state)
        rows.extend((flight.rows.index(one.uid), one.row) for one in news if isinstance(one, Ended))
        return after, news

    def listen(poll: Poll) -> None:
        events.extend((poll.group, event) for event in poll.events)

    contexts = toys.contexts(registry or programs(groups), TABLE, prompts, samples, RULES, **shape)
    contexts = [replace(context, harvester=harvester) for context in contexts]
    with monkeypatch.context() as patched:
        patched.setattr(machine, "retire", read)
        rollout = driver.LocalGroups(contexts, [listen])
        while not rollout.is_done():
            if until(rollout):
                rollout.stop()
            rollout.poll()
    return Played(rollout.result(), events, harvester, rows, prompts, samples)


def check(played: Played) -> None:
    """Checks that each wanted window of each finished sequence was harvested once, correctly, and in time."""
    texts, width = played.texts(), played.harvester.width
    wanted = Counter(
        (uid, start)
        for uid, text in texts.items()
        for start in played.harvester.starts(uid, len(text))
    )
    found = Counter()
    for event in played.of(Harvested):
        assert event.values.features.shape[1:] == (width, V) and event.values.states is None
        for (uid, start), features in zip(
            event.windows, np.asarray(event.values.features), strict=False
        ):
            found[uid, start] += 1
            text = texts[uid][:-1]
            ends = range(start + 1, min(start + width, len(text)) + 1)
            expected = [toys.table_logits(TABLE, text[:end]) for end in ends]
            np.testing.assert_allclose(features[: len(ends)], expected, atol=1e-9)
    assert sorted(played.harvester.calls) == sorted((uid, len(text)) for uid, text in texts.items())
    assert {(end.uid, end.length) for end in played.of(Ended)} == set(played.harvester.calls)
    assert found == wanted
    sizes, waiting = defaultdict(list), Counter()
    for group, event in played.events:
        if isinstance(event, Harvested):
            sizes[group].append(len(event.windows))
    for group, event in played.events:
        match event:
            case Ended(uid, _, length):
                waiting[group] += len(played.harvester.starts(uid, length))
            case Dispatched(kind="harvest"):
                waiting[group] -= sizes[group].pop(0)
            case Decided() | WentIdle():
                assert not waiting[group], "no decision is taken while windows wait"


class Held:
    """A marker that is ready once it is released."""

    def __init__(self):
        self.is_released = False

    def is_ready(self) -> bool:
        return self.is_released


@pytest.fixture
def late(monkeypatch) -> None:
    """Chunks are read late: the oldest program is done only when its group is blocked."""
    advance = machine.advance

    def flight(number, kind, marker, **rest) -> InFlight:
        return InFlight(number, kind, Held(), **rest)

    def held(context, state, is_stopping):
        after, events = advance(context, state, is_stopping)
        if after.flights and not events:
            after.flights[0].marker.is_released = True
        return after, events

    monkeypatch.setattr(machine, "InFlight", flight)
    monkeypatch.setattr(machine, "advance", held)


def restless():
    """Decisions with other numbers of rows and slots each time."""
    plain, turn = toys.bucketed((14,), (72,)), itertools.count()

    def decide(view):
        number = next(turn)
        sizes = {"batch": 12 + 2 * (number % 2), "slots": 64 + 8 * (number % 2)}
        return replace(plain(view), strategy=(PLAIN, toys.TREE)[number % 3 == 2], **sizes)

    return decide


MOVES = {"capacity": 12, "rounds": 2}
SHRINKS = {"capacity": 12, "batches": (2, 12), "slots": (40, 64), "rounds": 2}
REFILLS = {"capacity": 3, "batches": (3,), "rounds": 3}


# Every way in which a row is freed


@pytest.mark.parametrize("strategy", [PLAIN, toys.TREE])
def test_rows_that_end_before_others_and_the_last_ones(monkeypatch, strategy):
    shape = {"capacity": 12, "batches": (12,), "rounds": 2, "strategy": strategy}
    played = play(monkeypatch, harvester=Reaper(), **shape)
    check(played)
    assert len(played.of(Harvested)) > 1, "some ended before others"
    *_, last = played.events
    assert last == (0, WentIdle()) and played.events[-2][1].marker.is_ready()
    spans = Counter(span.kind for span in played.result.spans)
    assert spans["harvest"] == len(played.of(Harvested))
    assert {one.width for one in programs(1).executables if isinstance(one, Harvest)} == {WIDTH}


@pytest.mark.parametrize("in_flight", [2, 3])
def test_rows_that_move_between_their_end_and_its_reading(monkeypatch, late, in_flight):
    """More and fewer rows and slots: sequences whose end was not read yet move along."""
    played = play(monkeypatch, harvester=Reaper(), decide=restless(), in_flight=in_flight, **MOVES)
    check(played)
    assert any(before != now for before, now in played.rows), "a row moved in between"
    sizes = {(one.batch, one.slots) for one in played.of(Dispatched) if one.kind == "harvest"}
    assert len({batch for batch, _ in sizes}) == len({slots for _, slots in sizes}) == 2


def test_a_shrinking_batch(monkeypatch):
    played = play(monkeypatch, harvester=Reaper(), strategy=toys.TREE, **SHRINKS)
    check(played)
    assert len({decision.batch for decision in played.result.decisions}) > 1


@pytest.mark.parametrize("strategy, in_flight", [(PLAIN, 2), (toys.TREE, 1)])
def test_rows_that_are_refilled_at_once(monkeypatch, strategy, in_flight):
    played = play(
        monkeypatch, harvester=Reaper(), strategy=strategy, in_flight=in_flight, **REFILLS
    )
    check(played)
    rows = Counter(end.row for end in played.of(Ended))
    assert max(rows.values()) > 1, "several sequences ended in one row"


def test_chunks_that_end_early_because_a_row_is_free(monkeypatch):
    shape = {"capacity": 4, "batches": (1, 2, 4), "rounds": 64, "in_flight": 1}
    played = play(monkeypatch, harvester=Reaper(), **shape)
    check(played)
    assert any(decision.min_live > 1 for decision in played.result.decisions)
    assert max(measured.rounds for measured in played.result.measurements) < 24


def test_samples_that_another_group_started(monkeypatch, late):
    played = play(
        monkeypatch, PROMPTS[:3], 4, groups=2, harvester=Reaper(), capacity=2, batches=(2,)
    )
    check(played)
    prompts = [{end.uid // 4 for end in played.of(Ended, group)} for group in range(2)]
    assert prompts[0] & prompts[1], "a prompt has answers of both groups"
    for group in range(2):
        own = {uid for event in played.of(Harvested, group) for uid, _ in event.windows}
        assert own == {end.uid for end in played.of(Ended, group)}, (
            "each harvests its own sequences"
        )


def test_a_group_that_restarts_without_a_live_row(monkeypatch):
    """All its answers have one token: the next ones get a new state, also of another size."""
    shape = {"capacity": 3, "batches": (1, 3), "max_new_tokens": 1, "in_flight": 1}
    played = play(monkeypatch, samples=1, harvester=Reaper(), **shape)
    check(played)
    assert [decision.batch for decision in played.result.decisions] == [3, 1]


@pytest.mark.parametrize("width", [1, 200])
def test_many_narrow_windows_and_windows_wider_than_the_cache(monkeypatch, width):
    shape = {"capacity": 12, "batches": (12,), "rounds": 64, "in_flight": 1}
    played = play(monkeypatch, harvester=Reaper(width), **shape)
    check(played)
    sizes = {one.rows for one in programs(1).executables if isinstance(one, Harvest)}
    assert sizes <= {1, 4, 16}, "few programs"


@pytest.mark.parametrize("groups, strategy", [(1, PLAIN), (2, toys.TREE)])
def test_a_full_queue_makes_the_harvest_wait_and_is_never_overfull(
    monkeypatch, late, groups, strategy
):
    most = Counter()

    def watch(rollout: driver.LocalGroups) -> bool:
        for group in range(groups):
            most[group] = max(most[group], rollout.states[group].unawaited)
        return False

    shape = {"capacity": 3, "batches": (3,), "rounds": 1, "max_new_tokens": 40}
    played = play(
        monkeypatch, groups=groups, harvester=Reaper(1), until=watch, strategy=strategy,
        in_flight=40, **shape,
    )  # fmt: skip
    check(played)
    assert machine.MAX_UNAWAITED - machine.MOST_PER_STEP < min(most.values())
    assert max(most.values()) <= machine.MAX_UNAWAITED
    waits = [len(event.windows) for event in played.of(Harvested)]
    assert len(waits) > machine.MAX_UNAWAITED, "more than fit"


def test_a_stopped_rollout_harvests_ended_sequences_and_drops_the_rest(monkeypatch):
    def some_ended(rollout: driver.LocalGroups) -> bool:
        return len(rollout.recorder.completions) > 2

    played = play(monkeypatch, harvester=Reaper(), until=some_ended, **REFILLS)
    check(played)
    assert played.result.partial, "some did not finish"
    assert 2 < len(played.result.completions) < len(PROMPTS) * SAMPLES


@pytest.mark.parametrize("shape", [SHRINKS, REFILLS])
def test_a_harvester_changes_no_answer_and_no_other_program(monkeypatch, shape):
    plain, harvested = toys.executables(1, V), toys.executables(1, V)
    off = play(monkeypatch, registry=plain, **shape, in_flight=1)
    on = play(monkeypatch, registry=harvested, **shape, in_flight=1, harvester=Reaper())
    check(on)
    assert off.texts() == on.texts()
    assert not off.of(Ended) and not off.of(Harvested)
    kinds = {event.kind for event in (*off.of(Dispatched), *off.of(Retired))}
    assert kinds == {"prefill", "decode"}
    more = set(harvested.executables) - set(plain.executables)
    assert set(plain.executables) <= set(harvested.executables)
    assert {type(program) for program in more} == {Harvest}


def test_nothing_is_harvested_of_a_sequence_whose_logits_were_not_finite():
    rows, nothing = [Running(uid, 9, 20) for uid in range(4)], np.zeros(1)
    finishes = RUNNING, STOPPED, BROKEN, TRUNCATED
    news = {uid: Emitted(uid, nothing, nothing, finish) for uid, finish in enumerate(finishes)}
    assert [end.uid for end in machine.ended(rows, news)] == [1, 3]
