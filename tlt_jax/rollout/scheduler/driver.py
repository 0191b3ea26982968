"""A rollout in steps: one thread polls its data groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from tlt_jax.distributed.board import INTERRUPTED, Ending
from tlt_jax.errors import Interrupted
from tlt_jax.rollout.recorder import Completion, Listener, Poll, RolloutRecorder, RolloutResult
from tlt_jax.rollout.scheduler import group as machine
from tlt_jax.rollout.scheduler.state import GroupContext, GroupState
from tlt_jax.rollout.selection import Selecting

if TYPE_CHECKING:
    from tlt_jax.rollout.idle import IdleDriver

PAUSE = 2e-4, 5e-3  # seconds between two polls of the devices: at first, and at most
LATE = 0.02  # growth of the pause: a poll is late by at most this share of the wait; polls take cores from CPU devices


class Clock:
    """Real time, in seconds; simulations have another one."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


WALL = Clock()


class LocalGroups:
    """The data groups of one process that decode a request; the caller's loop calls `poll`.

    Listeners are called in order, after the dispatches of each poll. `on_finish` is called with every complete sequence.
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
        self.contexts = {context.index: context for context in contexts}
        self.clock, self.is_stopping = clock, False
        self.states = {context.index: GroupState() for context in contexts}
        self.recorder = RolloutRecorder(
            samples, clock.now(), on_finish, lambda seen: planners[seen.group].observe(seen)
        )
        self.listeners = (*listeners, self.recorder.record)

    def poll(self, groups: Collection[int] | None = None) -> list[Poll]:
        """Polls each group once, or these: reads finished programs and dispatches new ones; never waits."""
        polls = []
        for context in self.contexts.values() if groups is None else map(self.contexts.get, groups):
            began = self.clock.now()
            state, events = machine.advance(context, self.states[context.index], self.is_stopping)
            self.states[context.index] = state
            poll = Poll(context.index, began, self.clock.now(), tuple(events))
            self.tell(poll)
            polls.append(poll)
        return polls

    def tell(self, poll: Poll) -> None:
        """Tells the listeners of a poll."""
        for listener in self.listeners:
            listener(poll)

    def is_idle(self, group: int) -> bool:
        """The group has finished: nothing in flight, no live row, an empty queue; its decoding state is released."""
        return self.states[group].is_released

    def is_waiting(self, group: int) -> bool:
        """As `is_idle`, but the queue may give the group more later."""
        return self.states[group].is_waiting

    def is_decoding(self) -> bool:
        """A group of this process decodes."""
        return not all(state.is_released or state.is_waiting for state in self.states.values())

    def is_done(self) -> bool:
        """All groups of this process are idle."""
        return all(state.is_released for state in self.states.values())

    def stop(self) -> None:
        """Takes no new decisions; a group goes idle once its chunks in flight are read."""
        self.is_stopping = True

    def result(self) -> RolloutResult:
        """Completions by uid; for a stopped rollout also the partial sequences."""
        return self.recorder.result(self.clock.now())


def run(
    rollout: LocalGroups,
    interrupted: Callable[[], bool] | None = None,
    background: IdleDriver | None = None,
    ending: Ending | None = None,
    selecting: Selecting | None = None,
) -> RolloutResult:
    """Polls the rollout and the `background` work until all groups of all processes are idle; pauses grow between events.

    The result is taken when all groups of this process are idle. Raises Interrupted in every process
    soon after `interrupted()` is true in one. Without an `ending` this is the only process. With `selecting` the rollout
    stops as soon as the choice of its prompts is known, and not before.
    """
    ending = ending or Ending(len(rollout.states))
    pause, result = PAUSE[0], None
    while result is None or not (ending.how and (background is None or background.is_done)):
        if interrupted and not ending.how and interrupted():
            ending.interrupt()
        if ending.poll(rollout.clock.now()) == INTERRUPTED:
            raise Interrupted("the rollout was interrupted")
        happened = result is None and any(poll.events for poll in rollout.poll())
        if selecting and not selecting.is_over:
            happened |= selecting.poll(rollout.clock.now(), rollout.is_decoding())
        is_chosen = selecting is None or selecting.is_over
        if selecting and is_chosen:
            rollout.stop()
        for group in filter(rollout.is_idle, rollout.states) if is_chosen else ():
            ending.is_idle(group)
        happened |= background is not None and background.poll()
        if rollout.is_done() and is_chosen and result is None:
            result = rollout.result()
        elif not happened:
            rollout.clock.sleep(pause)
        pause = PAUSE[0] if happened else min((1 + LATE) * pause, PAUSE[1])
    return result
