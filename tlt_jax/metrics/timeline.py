"""The trace of a step for Perfetto, and the busy and idle seconds of its data groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

ROLLOUT, STEP = 0, 1  # processes of the trace: the data groups, and the phases of the step
DECODING = ("prefill", "decode", "speculate", "catch_up")
MOST_GROUPS = 16  # with more data groups metrics are summed up over them


Interval = tuple[float, float]  # start and end
Waits = Mapping[int, Sequence[Interval]]  # by data group


class Span(Protocol):
    """The activity of one data group from start to end, in seconds of any clock.

    `number`: index of the program within its group, which a chunk has too.
    """

    group: int
    kind: str
    start: float
    end: float
    number: int


@dataclass(frozen=True)
class ChunkRecord:
    """A decoding chunk of a step, a line of the speculation file.

    `predicted` (None: no prediction) and `measured` are tokens per second; `reason`: why the tuner
    chose the strategy. accepted[i]: row rounds of drafting that accepted i drafted tokens.
    `is_timed`: `seconds` is reliable, because the host did nothing else, such as compiling. `taken`: see driver.Clock.
    """

    group: int
    number: int
    batch: int
    live: float
    slots: int
    strategy: str
    reason: str
    predicted: float | None
    measured: float
    tokens: int
    rounds: int
    seconds: float
    accepted: Sequence[int] = ()
    is_timed: bool = True
    taken: float = 0.0


class Phase(NamedTuple):
    """A phase of the step, on the clock of the spans."""

    name: str
    start: float
    end: float


class GroupSeconds(NamedTuple):
    """How a data group spent a window of time, in seconds; their sum is the window."""

    busy: float
    compile_wait: float
    idle: float


def group_seconds(
    spans: Iterable[Span], waits: Waits, groups: int, window: Interval
) -> list[GroupSeconds]:
    """How each group spent the window; `waits` are the intervals in which its host waited for a compilation.

    A waiting host dispatches no work and sees no program end, so that this time is neither busy nor
    idle.
    """
    first, last = window
    work: list[list[Interval]] = [[] for _ in range(groups)]
    for one in spans:
        if one.kind != "wait":
            work[one.group].append((one.start, one.end))
    found = []
    for group in range(groups):
        waited, both = (
            covered([(max(first, start), min(last, end)) for start, end in intervals])
            for intervals in (waits.get(group, ()), [*work[group], *waits.get(group, ())])
        )
        found.append(GroupSeconds(both - waited, waited, last - first - both))
    return found


def idle_share(spans: Sequence[Span], groups: int, waits: Waits) -> float:
    """Share of the groups' time during which a group has no span other than "wait".

    Measured from the first start to the last end. A group is not idle while its host waits for a
    compilation.
    """
    if not spans:
        return 0.0
    window = min(span.start for span in spans), max(span.end for span in spans)
    idle = sum(one.idle for one in group_seconds(spans, waits, groups, window))
    return idle / (groups * (window[1] - window[0])) if idle else 0.0


def latest(spans: Iterable[Span], groups: int) -> list[int]:
    """All groups, ordered by the end of their decoding, latest first."""
    until = [-np.inf] * groups
    for one in spans:
        if one.kind in DECODING:
            until[one.group] = max(until[one.group], one.end)
    return sorted(range(groups), key=lambda group: -until[group])


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one interval covers."""
    total, until = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(until, start))
        until = max(until, end)
    return total


def trace(
    spans: Sequence[Span], chunks: Iterable[ChunkRecord] = (), phases: Sequence[Phase] = ()
) -> dict[str, list[dict]]:
    """A step in Chrome's trace event format, as Perfetto reads it; times are microseconds since its first event.

    Each data group is a row, whose chunks have their strategy and accept length as arguments; the phases of the step
    are one more row. The accept length is tokens per live row and round.
    """
    first = min((one.start for one in (*spans, *phases)), default=0.0)
    arguments = {
        (one.group, one.number): {
            "strategy": one.strategy,
            "accept_length": round(one.tokens / max(one.live * one.rounds, 1), 3),
            **{
                name: getattr(one, name) for name in ("tokens", "rounds", "batch", "live", "reason")
            },
        }
        for one in chunks
    }
    groups = sorted({one.group for one in spans})
    rows = [("process_name", ROLLOUT, 0, "rollout")]
    rows += [("thread_name", ROLLOUT, group, f"data group {group}") for group in groups]
    rows += [("process_name", STEP, 0, "step"), ("thread_name", STEP, 0, "phases")]
    events = [
        {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
        for kind, process, row, name in rows
    ]
    for one in spans:
        found = event(one.kind, ROLLOUT, one.group, one.start - first, one.end - first)
        more = arguments.get((one.group, one.number))
        events.append(found | {"args": more} if more and one.kind in DECODING else found)
    events += [
        event(one.name, STEP, 0, one.start - first, one.end - first)
        for one in phases
        if one.end > one.start
    ]
    return {"traceEvents": events}


def event(name: str, process: int, row: int, start: float, end: float) -> dict:
    """A complete event, from seconds."""
    begin = round(1e6 * start)
    length = round(1e6 * end) - begin
    return {"name": name, "ph": "X", "pid": process, "tid": row, "ts": begin, "dur": length}
