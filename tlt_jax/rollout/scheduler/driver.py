"""A rollout in steps: one thread polls its groups, as often as its owner likes; knows no network and no program."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tlt_jax.distributed.ending import INTERRUPTED, Ending
from tlt_jax.errors import Interrupted
from tlt_jax.rollout.events import Listener, Look
from tlt_jax.rollout.recorder import Completion, RolloutRecorder, RolloutResult
from tlt_jax.rollout.scheduler import group as machine
from tlt_jax.rollout.scheduler.state import GroupContext, GroupState

PAUSE = 2e-4, 5e-3  # seconds from one look at the devices to the next: at first, and at most
LATE = 0.02  # share of what they wait for that looks may come late: they take processors from devices that are such


class Clock(Protocol):
    """Tells and passes time, in seconds."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


WALL = WallClock()


class Rollout:
    """The groups of one process that decode a request together; the owner of its loop calls `poll`.

    Listeners are called in order, after the dispatches of each look. `on_finish` is called with every complete sequence.
    """

    def __init__(
        self,
        contexts: Sequence[GroupContext],
        listeners: Sequence[Listener] = (),
        on_finish: Callable[[Completion], None] | None = None,
        clock: Clock = WALL,
    ):
        samples = contexts[0].request.samples
        planners = {context.index: context.planner for context in contexts}
        self.contexts, self.clock, self.is_stopping = tuple(contexts), clock, False
        self.states = {context.index: GroupState() for context in contexts}
        self.recorder = RolloutRecorder(
            samples, clock.now(), on_finish, lambda seen: planners[seen.group].observe(seen)
        )
        self.listeners = (*listeners, self.recorder.record)

    def poll(self) -> list[Look]:
        """One look at each group: reads what is ready and dispatches what there is to do; never waits."""
        looks = []
        for context in self.contexts:
            began = self.clock.now()
            state, events = machine.advance(context, self.states[context.index], self.is_stopping)
            self.states[context.index] = state
            look = Look(context.index, began, self.clock.now(), tuple(events))
            for listener in self.listeners:
                listener(look)
            looks.append(look)
        return looks

    def is_idle(self, group: int) -> bool:
        """Nothing in flight, no live row, nothing left to take: its devices are free, its decoding state is released."""
        return self.states[group].is_released

    def is_done(self) -> bool:
        """All groups are idle; says nothing of other processes."""
        return all(state.is_released for state in self.states.values())

    def unawaited(self, group: int) -> int:
        """Programs of a group that were dispatched and may not be done; idle work adds its own."""
        return self.states[group].unawaited

    def stop(self) -> None:
        """No new decision is taken; a group goes idle when its chunks in flight are read."""
        self.is_stopping = True

    def result(self) -> RolloutResult:
        """Completions by uid; of a stopped rollout also what the other sequences have so far."""
        return self.recorder.result(self.clock.now())


def start(
    contexts: Sequence[GroupContext],
    listeners: Sequence[Listener] = (),
    on_finish: Callable[[Completion], None] | None = None,
    clock: Clock = WALL,
) -> Rollout:
    """A rollout of which nothing is dispatched yet."""
    return Rollout(contexts, listeners, on_finish, clock)


class BackgroundWork(Protocol):
    """What else is done in the loop of a rollout: rollout.idle.IdleDriver."""

    def poll(self) -> bool:
        """Whether anything happened; never waits."""

    @property
    def is_done(self) -> bool: ...


def run(
    rollout: Rollout,
    interrupted: Callable[[], bool] | None = None,
    background: BackgroundWork | None = None,
    ending: Ending | None = None,
) -> RolloutResult:
    """Polls until all groups of all processes are idle, and what is done `beside` it; pauses grow while nothing happens.

    The result is that of when all groups of this process were idle. Raises Interrupted, in every
    process, soon after `interrupted()` in one. Without an `ending` there is no other process.
    """
    ending = ending or Ending(len(rollout.states))
    pause, result = PAUSE[0], None
    while result is None or not (ending.how and (background is None or background.is_done)):
        if interrupted and not ending.how and interrupted():
            ending.interrupt()
        if ending.look(rollout.clock.now()) == INTERRUPTED:
            raise Interrupted("the rollout was interrupted")
        happened = result is None and any(look.events for look in rollout.poll())
        for group in filter(rollout.is_idle, rollout.states):
            ending.is_idle(group)
        happened |= background is not None and background.poll()
        if rollout.is_done() and result is None:
            result = rollout.result()
        elif not happened:
            rollout.clock.sleep(pause)
        pause = PAUSE[0] if happened else min((1 + LATE) * pause, PAUSE[1])
    return result
