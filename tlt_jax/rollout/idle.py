"""Work for idle data groups during a rollout: when it starts and stops, and the idle time that is expected.

The worker coordinator of TLT (arXiv 2511.16665, section 4.2). The idle work of a data group starts once the group has
nothing left to decode, and is dispatched in short pieces, one at a time: RL work waits for at most one of them. Groups work
independently, so none waits for others: any number may work, and join at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tlt_jax.rollout.recorder import Dispatched, Event, Poll, Retired
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.tuner.interface import Measurement

if TYPE_CHECKING:
    from tlt_jax.rollout.scheduler.driver import LocalGroups
    from tlt_jax.rollout.scheduler.state import GroupState, Running

EXPECT_EVERY = 0.05  # seconds between two estimates of the idle time


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

    Work starts only with at least `least_seconds` of expected idle time, and never again in a group whose work ended early:
    it had no piece, or an error. A group that waits for replies works once it has waited so long, for it is then expected to
    wait as long again; without a piece it tries again later. `groups`: those of all processes. `expected()`: seconds that
    the rollout is expected to take still; `is_over()`: whether the groups of all processes are done. `delay`: seconds from
    the end of the rollout until the last piece of work was done; `used`: seconds of idle work by group.
    """

    def __init__(
        self,
        rollout: LocalGroups,
        work: IdleWork,
        groups: int,
        least_seconds: float,
        expected: Callable[[], float],
        is_over: Callable[[], bool] | None = None,
    ):
        self.rollout, self.work, self.expected = rollout, work, expected
        self.is_over, self.least_seconds = is_over or rollout.is_done, least_seconds
        # Other processes have groups too: they read this one's expected time, and may still decode when its groups are idle.
        self.is_shared = groups > len(rollout.states)
        self.working: set[int] = set()  # groups that get one piece after the other
        self.gave_up: set[int] = set()
        self.waits: dict[int, float] = {}  # group that waits for replies -> since when
        self.has_ended = False  # RL work needs all groups: no work starts
        # group -> number and start of its piece, and the last poll that saw it running
        self.running: dict[int, tuple[int, float, float]] = {}
        self.pieces = dict.fromkeys(rollout.states, 0)
        self.used = dict.fromkeys(rollout.states, 0.0)
        self.estimated_at, self.over_at, self.delay = -math.inf, math.nan, 0.0

    def poll(self) -> bool:
        """Reads finished pieces and dispatches new ones; whether anything happened. Never waits."""
        rollout, now = self.rollout, self.rollout.clock.now()
        idle = {one for one in rollout.states if rollout.is_idle(one) or rollout.is_waiting(one)}
        waits = {one for one, state in rollout.states.items() if state.awaits_replies}
        self.waits = {one: self.waits.get(one, now) for one in waits}
        idle -= {one for one, since in self.waits.items() if now - since < self.least_seconds}
        self.working &= idle - self.gave_up
        is_over = self.is_over()
        if is_over and math.isnan(self.over_at):
            self.over_at = rollout.clock.now()
        self.has_ended = is_over or (rollout.is_done() and not self.is_shared)
        if self.has_ended:
            self.working.clear()
        elif now - self.estimated_at >= EXPECT_EVERY and (idle - self.working or self.is_shared):
            self.estimated_at = now
            if self.expected() >= self.least_seconds:
                self.working |= idle - self.gave_up
        if not self.has_ended:
            self.working |= idle & waits - self.gave_up
        active = [one for one in rollout.states if one in self.working or one in self.running]
        return any([self.advance(group) for group in active])

    def advance(self, group: int) -> bool:
        """Polls one group: reads its finished piece, and dispatches the next while the group may train."""
        began, events = self.rollout.clock.now(), []
        try:
            events += self.retire(group, began)
            if group in self.working and group not in self.running:
                events += self.dispatch(group)
        except Exception as error:  # an error of idle work never ends the run
            self.running.pop(group, None)
            self.work.failed(group, error)
            self.gave_up.add(group)
        if events:
            self.rollout.tell(Poll(group, began, self.rollout.clock.now(), tuple(events)))
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
            if self.waits.pop(group, None) is None:
                self.gave_up.add(group)
            return []
        self.pieces[group] += 1
        number = -self.pieces[group]  # the group's own programs count from 0, also after it
        now = self.rollout.clock.now()
        self.running[group] = number, now, now
        return [Dispatched(number, self.work.kind, 0, 0)]

    @property
    def is_done(self) -> bool:
        """The rollout is over, and no piece runs."""
        return self.has_ended and not self.running


class Lengths:
    """A histogram of answer lengths; `expected_tokens` costs no pass over the answers."""

    def __init__(self, lengths: Sequence[int] = ()):
        self.counts = np.zeros(1, np.int64)
        self.add(lengths)

    def add(self, lengths: Sequence[int]) -> None:
        """Adds the lengths of more answers."""
        new = np.bincount(np.asarray(lengths, np.int64), minlength=len(self.counts))
        new[: len(self.counts)] += self.counts
        self.counts = new
        tokens = new * np.arange(len(new))
        # The number of answers that are longer than the index, and the sum of their tokens.
        self.longer = np.append(np.cumsum(new[:0:-1])[::-1], 0)
        self.tokens = np.append(np.cumsum(tokens[:0:-1])[::-1], 0)

    def expected_tokens(self, so_far: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Expected further tokens of answers that have `so_far` tokens, at most `most`.

        The mean of the tokens that longer answers had left at that length; `so_far` where none was longer.
        """
        at = np.minimum(so_far, len(self.counts) - 1)
        longer = self.longer[at]
        left = self.tokens[at] / np.maximum(longer, 1) - so_far
        return np.minimum(np.where(longer, left, np.maximum(so_far, 1)), most)


class ExpectedTime:
    """The expected time that one rollout still takes. `earlier`: lengths of similar answers, in tokens.

    `seconds` is called again and again while groups decode: each call reads only new answers and
    measurements, and only changed rows.
    """

    def __init__(self, request: RolloutRequest, earlier: Sequence[int] = ()):
        self.request, self.lengths = request, Lengths(earlier)
        self.ended = self.measured = 0  # numbers of answers and measurements that were read
        self.speeds: dict[int, float] = {}  # tokens per second of one live row, by group
        self.rows: dict[int, tuple[tuple[Running | None, ...], np.ndarray]] = {}

    def seconds(
        self,
        states: Mapping[int, GroupState],
        measurements: Sequence[Measurement],
        ended: Sequence[int],
    ) -> float:
        """Expected seconds until the last live row ends; 0 before the first measurement.

        `measurements` and the lengths of `ended` answers grow from call to call. The result is the
        largest expectation of a row, a little less than the expectation of the largest.
        """
        self.learn(measurements, ended)
        groups = [group for group in states if group in self.speeds]
        if not groups:
            return 0.0
        found = [self.live(group, states[group].rows) for group in groups]
        speeds = np.repeat([self.speeds[group] for group in groups], [len(one) for one in found])
        so_far, most = np.concatenate(found).T
        return float(np.max(self.lengths.expected_tokens(so_far, most) / speeds, initial=0.0))

    def learn(self, measurements: Sequence[Measurement], ended: Sequence[int]) -> None:
        """Reads new answer lengths, and each group's speed in its latest chunk."""
        if len(ended) > self.ended:
            self.lengths.add(ended[self.ended :])
            self.ended = len(ended)
        for one in measurements[self.measured :]:
            if min(one.tokens, one.row_rounds, one.seconds) > 0:
                self.speeds[one.group] = one.tokens / one.row_rounds * one.rounds / one.seconds
        self.measured = len(measurements)

    def live(self, group: int, rows: tuple[Running | None, ...]) -> np.ndarray:
        """int64[live rows, 2]: tokens of each answer so far, and how many more it may get."""
        cached = self.rows.get(group)
        if cached is None or cached[0] is not rows:
            found = [(self.answered(row), row.limit - row.tokens) for row in rows if row]
            cached = self.rows[group] = rows, np.array(found, np.int64).reshape(-1, 2)
        return cached[1]

    def answered(self, row: Running) -> int:
        """Tokens of the row's answer so far."""
        return row.tokens - len(self.request.prompts[row.uid // self.request.samples])
