"""Idle work during a rollout in virtual time: RL work waits for at most one piece, and gives the same results."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import scenarios
from scenarios import Scenario, in_scenario

from tlt_jax.rollout.idle import IdleDriver
from tlt_jax.rollout.recorder import Retired, WentIdle
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.state import GroupState
from tlt_jax.simulate import simulator
from tlt_jax.tuner import baselines

PIECE = 0.013  # seconds
GROUPS = 3


@dataclass
class Work:
    """Pieces of PIECE seconds; group `fails` raises at its third piece."""

    programs: simulator.SimulatedPrograms
    fails: int | None = None
    kind: str = "train"
    markers: dict[int, simulator.Marker] = field(default_factory=dict)
    dispatched: list[tuple[float, int]] = field(default_factory=list)
    finished: list[tuple[float, int]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)

    def dispatch(self, group: int) -> bool:
        self.dispatched.append((self.programs.clock.now(), group))
        if group == self.fails and sum(one == group for _, one in self.dispatched) == 3:
            raise OSError("no such luck")
        self.markers[group] = simulator.Marker(
            self.programs.clock, self.programs.clock.now() + PIECE
        )
        heapq.heappush(self.programs.due, (self.markers[group].at, group))
        return True

    def is_ready(self, group: int) -> bool:
        return self.markers[group].is_ready()

    def done(self, group: int, least: float, most: float) -> None:
        self.finished.append((least, most, group))

    def failed(self, group: int, error: Exception) -> None:
        self.errors.append((group, str(error)))


class Groups:
    """Data groups that decode, are idle or wait for prompts as a test says."""

    def __init__(self, count, clock=None):
        self.clock = clock or simulator.VirtualClock()
        self.states = dict.fromkeys(range(count), GroupState())
        self.idle, self.waiting = set(), set()
        self.is_idle, self.is_waiting = self.idle.__contains__, self.waiting.__contains__
        self.is_done = lambda: self.idle == self.states.keys()
        self.tell = lambda poll: None


class Endless:
    """Pieces that are done at the next poll, of groups that have some."""

    kind = "train"

    def __init__(self):
        self.empty, self.began = set(), []

    def dispatch(self, group):
        self.began += [] if group in self.empty else [group]
        return group not in self.empty

    def is_ready(self, group):
        return True

    def done(self, *_):
        """Nothing is kept."""


def polled(count, least=0.0):
    """Groups, their work, and a poll after which it returns the groups that began a piece."""
    groups, work = Groups(count), Endless()
    background, expected = IdleDriver(groups, work, count, least, lambda: poll.expected), 9.0

    def poll(seconds=expected):
        poll.expected = seconds
        groups.clock.sleep(1.0)
        work.began.clear()
        background.poll()
        return set(work.began)

    return groups, work, background, poll


def test_a_group_works_from_when_it_is_idle_or_waits_until_it_decodes_or_the_last_one_is_idle():
    groups, work, background, poll = polled(3, least=2.0)
    assert poll() == set(), "all decode"
    groups.idle.add(1)
    assert poll(1.99) == set() and poll(2.0) == {1}
    groups.waiting.add(0)
    assert poll(1.0) == {1} and poll() == {0, 1}, "it joins"
    groups.waiting.discard(0)
    assert poll() == {1}, "it got prompts"
    work.empty.add(1)
    assert poll() == set()
    work.empty.clear()
    assert poll() == set(), "what gave up does not start again"
    groups.idle.update((0, 2))
    assert poll() == poll() == set() and background.is_done


def test_a_group_whose_sequences_all_wait_for_replies_works_once_it_has_waited():
    groups, work, background, poll = polled(2, least=2.0)
    groups.states[0] = GroupState(is_exhausted=True, away={5: 9})
    groups.waiting.add(0)
    assert [poll(0.0) for _ in range(4)] == [set(), set(), {0}, {0}], "however little is left"
    work.empty.add(0)
    assert poll(0.0) == set()
    work.empty.clear()
    assert [poll(0.0) for _ in range(4)] == [set(), set(), {0}, {0}], "it tries again"
    groups.waiting.clear()
    groups.states[0] = GroupState()
    assert poll() == set(), "a reply has come"
    groups.states[0] = GroupState(is_exhausted=True, away={5: 9})
    groups.waiting.add(0)
    assert poll() == set(), "it waits anew, and may soon go on"


def test_in_any_order_no_busy_group_works_and_none_does_after_the_end():
    for seed in range(100):
        draw = random.Random(seed)
        groups, work, background, poll = polled(draw.randint(1, 5), least=0.4)
        for _ in range(12):
            one = draw.randrange(len(groups.states))
            draw.choice([groups.idle.add, groups.waiting.add, groups.waiting.discard, work.empty.add])(one)  # fmt: skip
            groups.waiting -= groups.idle
            began = poll(draw.random())
            assert began <= groups.idle | groups.waiting and not began & work.empty
            assert not began or not groups.is_done()
        groups.idle.update(groups.states)
        assert poll() == set() and background.is_done


def request(seed=0):
    return scenarios.request([64] * 12, 4, 1200, seed=seed, rounds=16, in_flight=2, capacity=16)


def play(work=None, seed=0, **rest):
    """A rollout with or without idle work: result, driver, work, polls."""
    programs = in_scenario(Scenario(scenarios.gpu, 0.7), scenarios.long_tailed(1200))
    work = work and work(programs, **rest)
    planner, polls = Planner((1, 2, 4, 8, 16), (2048,), baselines.fixed("off")), []
    contexts = scenarios.contexts(programs, request(seed), planner, GROUPS)
    rollout = driver.LocalGroups(contexts, [polls.append], clock=programs.clock)
    background = IdleDriver(rollout, work, GROUPS, 0.0, lambda: math.inf) if work else None
    result = simulator.simulate(rollout, programs, background)
    return result, background, work, polls


def answers(result):
    return [(one.uid, one.tokens.tolist(), one.finish) for one in result.completions]


def idle_from(polls):
    """When each group went idle."""
    return {
        poll.group: poll.ended
        for poll in polls
        for event in poll.events
        if isinstance(event, WentIdle)
    }


@pytest.mark.parametrize("seed", range(6))
def test_rl_work_waits_for_one_piece_at_most_and_nothing_is_dispatched_after_it_needs_the_devices(
    seed,
):
    plain, *_ = play(seed=seed)
    result, background, work, polls = play(Work, seed=seed)
    went = idle_from(polls)
    assert len(went) == GROUPS and work.dispatched
    assert 0 <= background.delay <= PIECE + 1e-9 and background.is_done
    read = [
        poll.ended
        for poll in polls
        for event in poll.events
        if isinstance(event, Retired) and event.kind == "train"
    ]
    waited = max(read) - max(went.values())
    assert background.delay == pytest.approx(waited, abs=1e-9) and waited > 0
    assert max(at for at, _ in work.dispatched) <= max(went.values())
    assert all(at >= went[group] for at, group in work.dispatched)
    assert len(work.finished) == len(work.dispatched)
    assert answers(result) == answers(plain)
    assert [repr(one) for one in result.decisions] == [repr(one) for one in plain.decisions]
    assert result.stats["seconds"] == pytest.approx(plain.stats["seconds"], abs=1e-3)


def test_all_idle_time_is_used_and_is_in_the_timeline():
    result, background, _, polls = play(Work)
    went = idle_from(polls)
    end = max(went.values())
    idle = {group: end - at for group, at in went.items()}
    assert sum(idle.values()) > 20 * PIECE
    for group, seconds in idle.items():
        assert abs(background.used[group] - seconds) <= 2 * PIECE
    spans = [one for one in result.spans if one.kind == "train"]
    assert sum(one.end - one.start for one in spans) == pytest.approx(
        sum(background.used.values()), rel=0.05
    )
    numbers = [(one.group, one.number) for one in result.spans]
    assert len(set(numbers)) == len(numbers)
    assert {one.kind for one in result.spans} >= {"decode", "train"}


def test_an_error_ends_the_work_of_its_group_only():
    plain, *_ = play()
    result, background, work, polls = play(Work, fails=next(iter(idle_from(play()[3]))))
    assert work.errors == [(work.fails, "no such luck")]
    assert sum(group == work.fails for _, group in work.dispatched) == 3
    others = {group for _, group in work.dispatched} - {work.fails}
    assert others and answers(result) == answers(plain) and background.is_done


def test_a_pieces_seconds_are_bounded_by_two_polls_and_the_lower_bound_excludes_a_stall_of_the_host():
    """The clock jumps to just before each piece is done; then the host is busy for seconds, lowering a program."""
    programs = in_scenario(Scenario(scenarios.gpu, 0.7), scenarios.long_tailed(1200))
    work, clock = Work(programs), programs.clock
    idle = Groups(1, clock)
    idle.idle.add(0)
    background = IdleDriver(idle, work, 2, 0.0, lambda: math.inf, lambda: False)
    background.poll()
    for away in (0.0, 0.0, 3.0, 0.0):
        clock.sleep(PIECE / 2)
        background.poll()
        clock.sleep(PIECE / 2 + 1e-6 + away)
        background.poll()
    least, most = np.array([one[:2] for one in work.finished]).T
    np.testing.assert_allclose(least, PIECE / 2)
    np.testing.assert_allclose(most, PIECE + np.array([0, 0, 3, 0]), atol=1e-5)
