"""A polled rollout: listeners see every poll, idle groups hold no state, and it can be stopped."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import toys

from tlt_jax.rollout.recorder import Decided, Dispatched, Poll, Retired, RolloutRecorder, WentIdle
from tlt_jax.rollout.scheduler import driver
from tlt_jax.spec_decode.interface import DecodingParams, Sampling

V = 12
TABLE = toys.table(V, scale=1.0)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [11, 10]]
PARAMS = DecodingParams(Sampling(1.0), eos_ids=(0,))
SHAPE = {"capacity": 6, "batches": (2, 6), "slots": (128,), "rounds": 2, "max_new_tokens": 30}
pytestmark = pytest.mark.usefixtures("x64")


@cache
def executables(groups: int):
    """Executables shared by the tests."""
    return toys.executables(groups, V)


class Patient(driver.Clock):
    """A clock that counts its sleeps and never sleeps."""

    def __init__(self):
        self.time, self.sleeps = 0.0, 0

    def now(self) -> float:
        self.time += 1e-3
        return self.time

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1


def begun(
    groups: int = 1, *listeners, prompts=PROMPTS, clock=driver.WALL, **rest
) -> driver.LocalGroups:
    """A rollout before its first dispatch."""
    contexts = toys.contexts(executables(groups), TABLE, prompts, 3, PARAMS, **SHAPE | rest)
    return driver.LocalGroups(contexts, listeners, clock=clock)


def answers(result) -> dict[int, list[int]]:
    return {one.uid: one.tokens.tolist() for one in result.completions}


def finished(rollout: driver.LocalGroups) -> dict[int, list[int]]:
    """Polls the rollout to its end; its answers."""
    while not rollout.is_done():
        rollout.poll()
    return answers(rollout.result())


def test_polling_to_the_end_gives_the_answers_of_run():
    whole = driver.run(begun(1))
    assert finished(begun(2)) == answers(whole) == answers(driver.run(begun(2)))
    assert whole.partial == {}


def test_polling_never_waits_and_looks_without_events_are_reported():
    clock, seen = Patient(), []
    rollout = begun(1, seen.append, clock=clock)
    polls = [poll for _ in range(400) for poll in rollout.poll()]
    assert clock.sleeps == 0 and seen == polls
    assert any(not poll.events for poll in polls) and any(poll.events for poll in polls)
    assert all(poll.began < poll.ended for poll in polls)
    ends = [poll.ended for poll in polls]
    assert ends == sorted(ends)
    finished(rollout)


def test_listeners_are_called_in_order_and_events_come_once():
    order, events = [], []

    def first(poll: Poll) -> None:
        order.append("first")
        events.extend(poll.events)

    rollout = begun(2, first, lambda poll: order.append("second"))
    finished(rollout)
    assert order == ["first", "second"] * (len(order) // 2)
    dispatched = [event for event in events if isinstance(event, Dispatched)]
    retired = [event for event in events if isinstance(event, Retired)]
    assert len(dispatched) == len(retired) > 4
    assert sum(isinstance(event, WentIdle) for event in events) == 2


def test_an_idle_group_holds_no_decoding_state_while_another_decodes():
    """Two prompts for two groups; the answers to one of them end at once."""
    expected = answers(driver.run(begun(1, prompts=PROMPTS[:2], max_new_tokens=60)))
    contexts = toys.contexts(
        executables(2), TABLE, PROMPTS[:2], 3, PARAMS, **SHAPE | {"max_new_tokens": 60}
    )
    rollout = driver.LocalGroups(contexts)
    alone = 0
    while not rollout.is_done():
        rollout.poll()
        for group, state in rollout.states.items():
            assert rollout.is_idle(group) == state.is_released
            if rollout.is_idle(group):
                assert (
                    state.device is None
                    and not state.prefills
                    and rollout.states[group].unawaited == 0
                )
        alone += sum(map(rollout.is_idle, rollout.states)) == 1
    assert alone > 0 and answers(rollout.result()) == expected


def test_a_stopped_rollout_takes_no_more_decisions_and_returns_partial_answers():
    whole, decided = answers(driver.run(begun(1, max_new_tokens=60))), []
    rollout = begun(1, lambda poll: decided.extend(poll.events), max_new_tokens=60)
    while sum(isinstance(event, Retired) for event in decided) < 4:
        rollout.poll()
    rollout.stop()
    before = sum(isinstance(event, Decided) for event in decided)
    some = finished(rollout)
    assert sum(isinstance(event, Decided) for event in decided) == before
    partial = rollout.result().partial
    assert partial and not some.keys() & partial.keys()
    for uid, tokens in partial.items():
        assert 0 < len(tokens) < len(whole[uid])
        assert tokens.tolist() == whole[uid][: len(tokens)]
    assert all(tokens == whole[uid] for uid, tokens in some.items())
    assert rollout.is_idle(0) and rollout.states[0].device is None


def test_the_recorder_takes_spans_of_unknown_kinds():
    recorder = RolloutRecorder(samples=1, begin=10.0)
    recorder.record(Poll(0, 10.5, 11.0, (Dispatched(0, "train", 4, 64),)))
    recorder.record(Poll(0, 13.0, 13.0, (Retired(0, "train"),)))
    (span,) = recorder.result(14.0).spans
    assert (span.kind, span.start, span.end) == ("train", 1.0, 3.0)
    assert not recorder.measurements and np.isclose(recorder.result(14.0).stats["seconds"], 4.0)


# Other work on the machine


def counts(*ticks, at=0.0, own=0.0, path):
    """A count of processors with these ticks each: of others, of this process and idle."""
    lines = [
        f"cpu{i} {others} 0 {mine} {idle} 0 0 0 0" for i, (others, mine, idle) in enumerate(ticks)
    ]
    path.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8", *lines, "intr 5", "ctxt 7"]))
    return driver.counted(at, path)._replace(own=own)


@pytest.mark.parametrize(
    ("ticks", "own", "seconds", "expected"),
    [
        ([(50, 50, 0), (0, 100, 0)], 1.5, 1.0, 0.25),
        ([(50, 50, 0), (100, 0, 0)], 0.5, 1.0, 0.75),
        ([(0, 100, 0), (0, 100, 0)], 2.0, 1.0, 0.0),
        ([(50, 0, 50), (100, 0, 0)], 0.0, 1.0, 0.0),  # idle processors: nobody waits
        ([(100, 0, 0), (100, 0, 0)], 0.0, 0.1, 0.0),  # this process was stopped meanwhile
    ],
)  # fmt: skip
def test_others_take_what_is_neither_idle_nor_our_own(
    ticks, own, seconds, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(driver, "processors", lambda: {0, 1})
    monkeypatch.setattr(driver.os, "sysconf", lambda name: 100)
    first = counts((0, 0, 0), (0, 0, 0), path=tmp_path / "stat")
    after = counts(*ticks, (900, 0, 0), at=seconds, own=own, path=tmp_path / "stat")
    assert driver.taken(first, after) == pytest.approx(expected)


def test_nothing_is_taken_where_nothing_is_counted(tmp_path):
    first, after = (driver.counted(at, tmp_path / "none") for at in (0.0, 1.0))
    assert driver.taken(first, after) == 0.0 == driver.taken(first, first) == driver.WALL.taken()


def test_a_shared_clock_counts_seldom_and_over_a_short_while(monkeypatch):
    clock, now, made = driver.SharedClock(), [0.0], []

    def counted(at):
        made.append(driver.ProcessorCount(at, 2 * at, 0.0, at if at < 1 else 1.0))
        return made[-1]

    monkeypatch.setattr(driver, "counted", counted)
    monkeypatch.setattr(driver, "processors", lambda: {0, 1})
    monkeypatch.setattr(clock, "now", lambda: now[0])
    taken = []
    for now[0] in np.arange(0, 2, 0.01):
        taken.append(clock.taken())
    assert 30 < len(made) < 45 and len(clock.counts) < 10
    assert taken[90] == pytest.approx(0.5) and taken[-1] == pytest.approx(1.0)
