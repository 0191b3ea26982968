"""Idle work beside a rollout, in one loop with its polls; knows no kind of work and no program.

Work of a data group begins once the group has nothing left to decode, and is dispatched in short
pieces, one at a time: RL work waits for one of them at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tlt_jax.rollout.events import Dispatched, Event, Listener, Look, Retired
from tlt_jax.rollout.idle import coordinator
from tlt_jax.rollout.idle.coordinator import (
    Coordinator,
    Ended,
    Expected,
    Finished,
    GaveUp,
    Message,
    Start,
)

EXPECT_EVERY = 0.05  # seconds from one estimate of the idle time to the next


class Polled(Protocol):
    """A rollout in steps: driver.Rollout."""

    clock: Any
    listeners: Sequence[Listener]
    states: Mapping[int, Any]

    def is_idle(self, group: int) -> bool: ...

    def is_done(self) -> bool: ...


class IdleWork(Protocol):
    """What data groups do while they have nothing to decode; `kind` names it in the timeline."""

    kind: str

    def dispatch(self, group: int) -> bool:
        """Dispatches the group's next piece of work; False when there is none. Never waits for a device.

        Whatever it raises ends the group's work in this step.
        """

    def is_ready(self, group: int) -> bool:
        """Whether the piece that was dispatched last is done."""

    def done(self, group: int, least: float, most: float) -> None:
        """It is done, and took between so many seconds: until it was seen at work last, and until it was seen done."""

    def failed(self, group: int, error: Exception) -> None:
        """One of the above raised this."""


class IdleDriver:
    """Gives the rollout's idle groups work; the owner of the rollout's loop calls `poll` after each of its polls.

    `expected()`: seconds that the rollout will still take; `is_over()`: whether all its groups are
    done, those of other processes too. `delay`: seconds from the end of the rollout until the last
    piece of work was done; `used`: seconds of idle work by group.
    """

    def __init__(
        self,
        rollout: Polled,
        work: IdleWork,
        step: int,
        groups: int,
        least_seconds: float,
        expected: Callable[[], float],
        is_over: Callable[[], bool] | None = None,
    ):
        self.rollout, self.work, self.expected = rollout, work, expected
        self.is_over = is_over or rollout.is_done
        self.state: Coordinator = coordinator.begin(step, groups, least_seconds)
        self.is_shared = groups > len(rollout.states)  # others want to know what is expected here
        # group -> number and start of its piece, and when it was seen at work last
        self.running: dict[int, tuple[int, float, float]] = {}
        self.pieces = dict.fromkeys(rollout.states, 0)
        self.used = dict.fromkeys(rollout.states, 0.0)
        self.asked, self.over_at, self.delay = -math.inf, math.nan, 0.0

    def poll(self) -> bool:
        """Reads what is done, and dispatches what may be; whether anything happened. Never waits."""
        now, happened = self.rollout.clock.now(), False
        for group in self.rollout.states:
            if self.rollout.is_idle(group) and self.state.modes[group] is coordinator.Mode.BUSY:
                self.send(Finished(self.state.step, group))
        if self.is_over():
            self.end()
        elif now - self.asked >= EXPECT_EVERY and (self.idle() or self.is_shared):
            self.asked = now
            self.send(Expected(self.state.step, self.expected()))
        for group in self.rollout.states:
            happened |= self.advance(group)
        return happened

    def idle(self) -> bool:
        """Whether a group could begin to work."""
        return coordinator.Mode.IDLE in self.state.modes

    def send(self, message: Message) -> None:
        """The coordinator is told."""
        self.state, commands = coordinator.receive(self.state, message)
        for command in commands:
            if isinstance(command, Start) and command.group in self.pieces:
                self.advance(command.group)

    def advance(self, group: int) -> bool:
        """One look at a group: a piece that is done is read, and the next is dispatched while it may work."""
        began, events = self.rollout.clock.now(), []
        try:
            events += self.retire(group, began)
            if self.state.modes[group] is coordinator.Mode.TRAINING and group not in self.running:
                events += self.dispatch(group)
        except Exception as error:  # idle work never ends a run
            self.running.pop(group, None)
            self.work.failed(group, error)
            self.send(GaveUp(self.state.step, group))
        if events:
            look = Look(group, began, self.rollout.clock.now(), tuple(events))
            for listener in self.rollout.listeners:
                listener(look)
        return bool(events)

    def retire(self, group: int, now: float) -> list[Event]:
        """The piece that runs, if it is done."""
        if group not in self.running:
            return []
        number, start, seen = self.running[group]
        if not self.work.is_ready(group):
            self.running[group] = number, start, now
            return []
        del self.running[group]
        self.used[group] += now - start
        self.work.done(group, seen - start, now - start)
        if not math.isnan(self.over_at):
            self.delay = max(self.delay, now - self.over_at)
        return [Retired(number, self.work.kind)]

    def dispatch(self, group: int) -> list[Event]:
        """The next piece of work."""
        if not self.work.dispatch(group):
            self.send(GaveUp(self.state.step, group))
            return []
        number = self.rollout.states[group].dispatched + self.pieces[group]
        self.pieces[group] += 1
        now = self.rollout.clock.now()
        self.running[group] = number, now, now
        return [Dispatched(number, self.work.kind, 0, 0)]

    def end(self) -> None:
        """RL work needs the devices: nothing more is dispatched."""
        if math.isnan(self.over_at):
            self.over_at = self.rollout.clock.now()
            self.send(Ended(self.state.step))

    @property
    def is_done(self) -> bool:
        """Nothing runs, and nothing will."""
        return self.state.is_over and not self.running
