"""Idle work during a rollout, polled in the rollout's loop; knows no kind of work and no program.

The idle work of a data group starts once the group has nothing left to decode, and is dispatched in
short pieces, one at a time: RL work waits for at most one of them.
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
    Resumed,
    Start,
    Waits,
)

EXPECT_EVERY = 0.05  # seconds between two estimates of the idle time


class Polled(Protocol):
    """A rollout in steps: scheduler.driver.Rollout."""

    clock: Any
    listeners: Sequence[Listener]
    states: Mapping[int, Any]

    def is_idle(self, group: int) -> bool: ...

    def is_waiting(self, group: int) -> bool: ...

    def is_done(self) -> bool: ...


class IdleWork(Protocol):
    """The work of idle data groups; `kind` names it in the timeline."""

    kind: str

    def dispatch(self, group: int) -> bool:
        """Dispatches the group's next piece of work; False when there is none. Never waits for a device.

        An exception ends the group's work in this step.
        """

    def is_ready(self, group: int) -> bool:
        """Whether the last dispatched piece is done."""

    def done(self, group: int, least: float, most: float) -> None:
        """The piece is done; it took `least` (last poll that saw it running) to `most` (poll that saw it done) seconds."""

    def failed(self, group: int, error: Exception) -> None:
        """One of the methods above raised `error`."""


class IdleDriver:
    """Gives the rollout's idle groups work; the rollout's loop calls `poll` after each poll of the rollout.

    `expected()`: seconds that the rollout is expected to take still; `is_over()`: whether the groups of all
    processes are done. `delay`: seconds from the end of the rollout until the last piece of work was
    done; `used`: seconds of idle work by group.
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
        self.is_shared = groups > len(
            rollout.states
        )  # other processes read this one's expected time
        # group -> number and start of its piece, and the last poll that saw it running
        self.running: dict[int, tuple[int, float, float]] = {}
        self.waiting: set[int] = set()  # groups that may get more to decode
        self.pieces = dict.fromkeys(rollout.states, 0)
        self.used = dict.fromkeys(rollout.states, 0.0)
        self.estimated_at, self.over_at, self.delay = -math.inf, math.nan, 0.0

    def poll(self) -> bool:
        """Reads finished pieces and dispatches new ones; whether anything happened. Never waits."""
        now, happened = self.rollout.clock.now(), False
        for group in self.rollout.states:
            self.look(group)
        if self.is_over():
            self.end()
        elif now - self.estimated_at >= EXPECT_EVERY and (self.idle() or self.is_shared):
            self.estimated_at = now
            self.send(Expected(self.state.step, self.expected()))
        for group in self.rollout.states:
            if group in self.running or self.state.modes[group] is coordinator.Mode.TRAINING:
                happened |= self.advance(group)
        return happened

    def look(self, group: int) -> None:
        """Tells the coordinator when the group has nothing to decode, and when it gets more."""
        is_busy = self.state.modes[group] is coordinator.Mode.BUSY
        if self.rollout.is_idle(group):
            self.waiting.discard(group)
            if is_busy:
                self.send(Finished(self.state.step, group))
        elif self.rollout.is_waiting(group):
            if is_busy:
                self.waiting.add(group)
                self.send(Waits(self.state.step, group))
        elif group in self.waiting:
            self.waiting.discard(group)
            self.send(Resumed(self.state.step, group))

    def idle(self) -> bool:
        """Whether a group is idle without work."""
        return coordinator.Mode.IDLE in self.state.modes

    def send(self, message: Message) -> None:
        """Sends a message to the coordinator, and starts the groups that it commands."""
        self.state, commands = coordinator.receive(self.state, message)
        for command in commands:
            if isinstance(command, Start) and command.group in self.pieces:
                self.advance(command.group)

    def advance(self, group: int) -> bool:
        """Polls one group: reads its finished piece, and dispatches the next while the group may train."""
        began, events = self.rollout.clock.now(), []
        try:
            events += self.retire(group, began)
            if self.state.modes[group] is coordinator.Mode.TRAINING and group not in self.running:
                events += self.dispatch(group)
        except Exception as error:  # an error of idle work never ends the run
            self.running.pop(group, None)
            self.work.failed(group, error)
            self.send(GaveUp(self.state.step, group))
        if events:
            look = Look(group, began, self.rollout.clock.now(), tuple(events))
            for listener in self.rollout.listeners:
                listener(look)
        return bool(events)

    def retire(self, group: int, now: float) -> list[Event]:
        """Reads the running piece, if it is done."""
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
        """Dispatches the next piece of work."""
        if not self.work.dispatch(group):
            self.send(GaveUp(self.state.step, group))
            return []
        self.pieces[group] += 1
        number = -self.pieces[group]  # the group's own programs count from 0, also after it
        now = self.rollout.clock.now()
        self.running[group] = number, now, now
        return [Dispatched(number, self.work.kind, 0, 0)]

    def end(self) -> None:
        """RL work needs the devices: stops dispatching."""
        if math.isnan(self.over_at):
            self.over_at = self.rollout.clock.now()
            self.send(Ended(self.state.step))

    @property
    def is_done(self) -> bool:
        """The rollout is over, and no piece runs."""
        return self.state.is_over and not self.running
