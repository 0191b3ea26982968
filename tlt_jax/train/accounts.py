"""Seconds of the training loop by phase, and how many of them it waited for compiling."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from jax import monitoring

from tlt_jax.rollout.executables.background import WAIT

OTHER = "other"
# Events that JAX reports for each program: tracing, lowering, and compilation by XLA or a read from the persistent cache; and
# a wait for one of these in another thread.
COMPILATION = "/jax/core/compile/backend_compile_duration"
COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILATION,
    WAIT,
)


class Span(NamedTuple):
    """The time from `begin` to `end`, in seconds of one clock."""

    begin: float
    end: float


class Stopwatch:
    """Context that counts every second for one phase, and records every compilation of the process.

    Seconds of an inner phase do not count for the outer one; seconds outside of all phases count for
    `other`. Seconds of compiling are those of the thread that made it, and its waits for other threads. A lap is the time
    since the previous lap; `lapped` has the phases of the last one that ended, in order of time. `tell` is called with every
    phase that starts.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        tell: Callable[[str], None] = lambda name: None,
    ):
        self.tell = tell
        self.clock, self.phase_name, self.since = clock, OTHER, clock()
        self.phases: list[tuple[str, Span]] = []
        self.lapped: list[tuple[str, Span]] = []
        self.compiling: list[Span] = []
        self.programs, self.thread = 0, threading.get_ident()

    def __enter__(self) -> Stopwatch:
        monitoring.register_event_duration_secs_listener(self.on_event)
        return self

    def __exit__(self, *_) -> None:
        monitoring.unregister_event_duration_listener(self.on_event)

    def on_event(self, event: str, seconds: float, **_) -> None:
        """JAX's listener: an event that took `seconds` has just ended."""
        self.programs += event == COMPILATION
        if event in COMPILING and threading.get_ident() == self.thread:
            now = self.clock()
            self.compiling.append(Span(now - seconds, now))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose seconds count for timing_s/name. On an error `tell` is not called: its last call names the phase."""
        outer = self.switch_to(name)
        try:
            yield
        except BaseException:
            self.switch_to(outer, reports=False)
            raise
        self.switch_to(outer)

    def switch_to(self, name: str, reports: bool = True) -> str:
        """Ends the current phase and starts the named one; returns the name of the ended one."""
        before, now = self.phase_name, self.clock()
        self.phases.append((before, Span(self.since, now)))
        self.phase_name, self.since = name, now
        if reports:
            self.tell(name)
        return before

    def lap(self) -> dict[str, float]:
        """Ends the lap and returns its seconds as metrics.

        timing_s/* of the phases add up to timing_s/step. A second in which several programs compiled
        counts once, for the phase that it was in.
        """
        self.switch_to(self.phase_name)
        phases, compiling, programs = self.phases, merged(self.compiling), self.programs
        self.phases, self.compiling, self.programs = [], [], 0
        self.lapped = phases

        seconds: dict[str, float] = defaultdict(float)
        spent: dict[str, float] = defaultdict(float)
        for name, span in phases:
            seconds[f"timing_s/{name}"] += span.end - span.begin
            spent[f"perf/compile_s/{name}"] += overlap(span, compiling)
        step = {"timing_s/step": sum(seconds.values()), "perf/compiles": programs}
        step["perf/compile_s"] = sum(spent.values())
        return {**seconds, **{name: value for name, value in spent.items() if value}, **step}


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, as disjoint spans in order of time."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(span.end, found[-1].end))
        else:
            found.append(span)
    return found


def overlap(span: Span, others: Sequence[Span]) -> float:
    """Seconds of a span that the others, which are disjoint, cover."""
    return sum(max(0.0, min(span.end, one.end) - max(span.begin, one.begin)) for one in others)
