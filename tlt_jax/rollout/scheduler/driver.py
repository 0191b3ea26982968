"""A rollout in steps: one thread polls its data groups."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tlt_jax.distributed.board import INTERRUPTED, Ending
from tlt_jax.distributed.process import processors
from tlt_jax.errors import Interrupted
from tlt_jax.rollout.recorder import Completion, Listener, Poll, RolloutRecorder, RolloutResult
from tlt_jax.rollout.scheduler import group as machine
from tlt_jax.rollout.scheduler.state import GroupContext, GroupState
from tlt_jax.rollout.selection import Selecting

if TYPE_CHECKING:
    from tlt_jax.rollout.idle import IdleDriver

PAUSE = 2e-4, 5e-3  # seconds between two polls of the devices: at first, and at most
# Seconds between two counts of the processors, and over which others' share is counted: a count has steps of 10 ms.
COUNTED = 0.05, 0.25
SPARE = 0.2  # of a processor: when more of it is idle, nobody waits for one
PAUSED = 1.5  # times the clock's seconds above which a count includes some in which this process was stopped
LATE = 0.02  # growth of the pause: a poll is late by at most this share of the wait; polls take cores from CPU devices


class Clock:
    """Real time, in seconds; simulations have another one.

    `taken`: the share of the processors that others took lately. It is 0 where rounds take no processors of the host, as
    on accelerators, where some processor was idle, and where the system does not count.
    """

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def taken(self) -> float:
        return 0.0


class SharedClock(Clock):
    """The clock of devices that compute on the host's processors, of which other work takes some."""

    def __init__(self) -> None:
        self.counts: deque[ProcessorCount] = deque()

    def taken(self) -> float:
        counts, now = self.counts, self.now()
        if not counts or now - counts[-1].at >= COUNTED[0]:
            counts.append(counted(now))
        while len(counts) > 1 and now - counts[1].at >= COUNTED[1]:
            counts.popleft()
        return taken(counts[0], counts[-1])


class ProcessorCount(NamedTuple):
    """Seconds so far, summed over the processors that this process may use, and those of its own threads."""

    at: float
    whole: float
    idle: float
    own: float


def counted(now: float, path: Path = Path("/proc/stat")) -> ProcessorCount:
    """The count now; of 0 seconds where the system has none."""
    columns = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        label, *ticks = line.split()
        if label.removeprefix("cpu").isdecimal():
            columns[int(label.removeprefix("cpu"))] = [float(one) for one in ticks[:8]]
    rows = [columns[core] for core in processors() if core in columns]
    # user, nice, system, idle, waiting for disks (idle too), interrupts, soft interrupts, stolen by a hypervisor
    whole, idle = sum(map(sum, rows)), sum(row[3] + row[4] for row in rows)
    unit = os.sysconf("SC_CLK_TCK") if rows else 1.0
    return ProcessorCount(now, whole / unit, idle / unit, time.process_time())


def taken(before: ProcessorCount, after: ProcessorCount) -> float:
    """The share of the processors that others took between two counts; 0 where one of them was idle, or they show nothing.

    Where more time went by than on the clock, as of a process that was stopped, they show nothing.
    """
    whole, cores = after.whole - before.whole, len(processors())
    most = PAUSED * cores * (after.at - before.at)
    idle, own = after.idle - before.idle, after.own - before.own
    if not 0 < whole < most or idle > SPARE * whole / cores:
        return 0.0
    return min(max(1 - (idle + own) / whole, 0.0), 1.0)


WALL = Clock()


class LocalGroups:
    """The data groups of one process that decode a request; the caller's loop calls `poll`.

    Listeners are called in order, after the dispatches of each poll. `on_finish` is called with every complete sequence.
    `awaited`: seconds, summed over groups, in which all that a group could decode waited for replies.
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
        self.awaited, self.polled = 0.0, dict.fromkeys(self.states, clock.now())
        self.recorder = RolloutRecorder(
            samples, clock.now(), on_finish, lambda seen: planners[seen.group].observe(seen)
        )
        self.listeners = (*listeners, self.recorder.record)

    def poll(self, groups: Collection[int] | None = None) -> list[Poll]:
        """Polls each group once, or these: reads finished programs and dispatches new ones; never waits."""
        polls = []
        for context in self.contexts.values() if groups is None else map(self.contexts.get, groups):
            began = self.clock.now()
            if self.states[context.index].awaits_replies:
                self.awaited += began - self.polled[context.index]
            state, events = machine.advance(context, self.states[context.index], self.is_stopping)
            self.states[context.index], self.polled[context.index] = state, began
            taken = self.clock.taken() if events else 0.0
            poll = Poll(context.index, began, self.clock.now(), tuple(events), taken)
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
