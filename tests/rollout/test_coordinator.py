"""The coordinator's state machine: which groups start and stop, and which messages are ignored."""

from __future__ import annotations

import itertools
import random

import pytest

from tlt_jax.rollout.idle import coordinator
from tlt_jax.rollout.idle.coordinator import (
    Ended,
    Expected,
    Finished,
    GaveUp,
    Mode,
    Resumed,
    Start,
    Stop,
    Waits,
)

BUSY, IDLE, TRAINING = Mode.BUSY, Mode.IDLE, Mode.TRAINING


def after(state, *messages):
    """The state after the messages, and all commands."""
    commands = []
    for message in messages:
        state, more = coordinator.receive(state, message)
        commands += more
    return state, commands


def test_a_group_trains_from_when_it_is_idle_until_the_last_group_is():
    state = coordinator.begin(7, 3, least_seconds=2.0)
    assert state.modes == (BUSY, BUSY, BUSY)
    state, commands = after(state, Expected(7, 9.0))
    assert not commands and state.modes == (BUSY, BUSY, BUSY)
    state, commands = after(state, Finished(7, 1), Expected(7, 9.0))
    assert commands == [Start(7, 1)] and state.modes == (BUSY, TRAINING, BUSY)
    state, commands = after(state, Finished(7, 0), Expected(7, 5.0))  # it joins
    assert commands == [Start(7, 0)] and state.training == (0, 1)
    state, commands = after(state, Finished(7, 2))
    assert set(commands) == {Stop(7, 0), Stop(7, 1)} and state.modes == (IDLE,) * 3
    state, commands = after(state, Expected(7, 9.0), Finished(7, 2))
    assert not commands and state.is_over


def test_no_work_starts_for_less_than_the_least_idle_time():
    state, _ = after(coordinator.begin(0, 2, least_seconds=2.0), Finished(0, 0))
    state, commands = after(state, Expected(0, 1.99))
    assert not commands and state.modes == (IDLE, BUSY)
    _, commands = after(state, Expected(0, 2.0))
    assert commands == [Start(0, 0)]


@pytest.mark.parametrize("step", [2, 4])
def test_messages_of_another_step_are_ignored(step):
    before = coordinator.begin(3, 2, least_seconds=0.0)
    for message in (Finished(step, 0), Expected(step, 9.0), GaveUp(step, 0), Ended(step)):
        assert coordinator.receive(before, message) == (before, [])
    idle, _ = after(before, Finished(3, 0))
    assert after(idle, Expected(step, 9.0), Ended(step)) == (idle, [])


def test_a_group_that_gave_up_does_not_restart_in_this_step():
    state = coordinator.begin(0, 2, least_seconds=0.0)
    state, _ = after(state, Finished(0, 0), Expected(0, 1.0), GaveUp(0, 0))
    assert state.modes == (IDLE, BUSY)
    assert after(state, Expected(0, 99.0)) == (state, [])


def test_an_interruption_stops_all_work_and_starts_none():
    state = coordinator.begin(0, 3, least_seconds=0.0)
    state, _ = after(state, Finished(0, 0), Finished(0, 1), Expected(0, 1.0))
    state, commands = after(state, Ended(0))
    assert set(commands) == {Stop(0, 0), Stop(0, 1)} and not state.training
    assert after(state, Expected(0, 9.0))[1] == []


def test_in_any_order_of_messages_no_busy_group_starts_and_every_start_is_stopped_once():
    for seed in range(300):
        draw = random.Random(seed)
        groups = draw.randint(1, 5)
        ends = [Finished(1, group) for group in range(groups)]
        noise = [
            draw.choice(
                [
                    Expected(1, draw.random()),
                    GaveUp(1, draw.randrange(groups)),
                    Finished(0, 0),
                    Ended(2),
                ]
            )
            for _ in range(12)
        ]
        messages = ends + noise
        draw.shuffle(messages)
        state, finished, training = coordinator.begin(1, groups, 0.4), set(), set()
        for message in messages:
            if isinstance(message, Finished) and message.step == 1:
                finished.add(message.group)
            state, commands = coordinator.receive(state, message)
            for command in commands:
                if isinstance(command, Start):
                    assert command.group in finished and command.group not in training
                    training.add(command.group)
                else:
                    assert command.group in training and len(finished) == groups
                    training.remove(command.group)
            if isinstance(message, GaveUp) and message.step == 1:
                training.discard(message.group)
            assert training == set(state.training)
        assert state.is_over and not training


def test_a_group_that_waits_for_prompts_trains_until_it_gets_some():
    state, commands = after(coordinator.begin(0, 2, 0.0), Waits(0, 0), Waits(0, 1))
    assert not commands and not state.is_over and state.modes == (IDLE, IDLE)
    state, commands = after(state, Expected(0, 1.0))
    assert commands == [Start(0, 0), Start(0, 1)]
    state, commands = after(state, Resumed(0, 0))
    assert commands == [Stop(0, 0)] and state.modes == (BUSY, TRAINING)
    state, commands = after(state, Expected(0, 1.0), Waits(0, 0), Expected(0, 1.0))
    assert commands == [Start(0, 0)], "not while it is busy"
    state, commands = after(state, Resumed(0, 0), Finished(0, 0))
    assert commands == [Stop(0, 0), Stop(0, 1)] and state.is_over


def test_every_command_carries_the_step():
    state = coordinator.begin(11, 2, 0.0)
    _, commands = after(state, Finished(11, 0), Expected(11, 1.0), Finished(11, 1))
    assert {command.step for command in commands} == {11} and len(commands) == 2
    assert list(itertools.chain(commands)) == [Start(11, 0), Stop(11, 0)]
