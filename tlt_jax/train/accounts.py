"""Where the seconds of the loop go: to which phase, and how many of them were compiling; knows no device and no phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from jax import monitoring

OTHER = "other"
# What JAX reports of each program: tracing, lowering, and compilation by XLA or reading it from the persistent cache.
COMPILATION = "/jax/core/compile/backend_compile_duration"
COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILATION,
)


class Span(NamedTuple):
    """From `begin` to `end`, in seconds of one clock."""

    begin: float
    end: float


class Stopwatch:
    """Context in which every second belongs to one phase, and every compilation of the process is noticed.

    A phase inside another one takes its seconds out of that; what is in none is `other`. A lap is
    the time since the lap before. `tell` hears of every phase that begins.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        tell: Callable[[str], None] = lambda name: None,
    ):
        self.tell = tell
        self.clock, self.phase_name, self.since = clock, OTHER, clock()
        self.phases: list[tuple[str, Span]] = []
        self.compiling: list[Span] = []
        self.programs = 0

    def __enter__(self) -> Stopwatch:
        monitoring.register_event_duration_secs_listener(self.hear)
        return self

    def __exit__(self, *_) -> None:
        monitoring.unregister_event_duration_listener(self.hear)

    def hear(self, event: str, seconds: float, **_) -> None:
        """Notes what JAX reports: something that took these seconds has just ended."""
        if event in COMPILING:
            now = self.clock()
            self.compiling.append(Span(now - seconds, now))
            self.programs += event == COMPILATION

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose seconds belong to timing_s/name; one that raises stays the phase that `tell` heard of last."""
        outer = self.turn_to(name)
        try:
            yield
        except BaseException:
            self.turn_to(outer, is_told=False)
            raise
        self.turn_to(outer)

    def turn_to(self, name: str, is_told: bool = True) -> str:
        """Ends the phase, and begins the named one; the name of the ended one."""
        before, now = self.phase_name, self.clock()
        self.phases.append((before, Span(self.since, now)))
        self.phase_name, self.since = name, now
        if is_told:
            self.tell(name)
        return before

    def lap(self) -> dict[str, float]:
        """The accounts of the time since the last lap, as metrics; begins the next one.

        timing_s/* of the phases add up to timing_s/step. Compiling counts each second once, however
        many programs were compiled in it, and belongs to the phase that it happened in.
        """
        self.turn_to(self.phase_name)
        phases, compiling, programs = self.phases, merged(self.compiling), self.programs
        self.phases, self.compiling, self.programs = [], [], 0

        seconds: dict[str, float] = defaultdict(float)
        spent: dict[str, float] = defaultdict(float)
        for name, span in phases:
            seconds[f"timing_s/{name}"] += span.end - span.begin
            spent[f"perf/compile_s/{name}"] += overlap(span, compiling)
        step = {"timing_s/step": sum(seconds.values()), "perf/compiles": programs}
        step["perf/compile_s"] = sum(spent.values())
        return {**seconds, **{name: value for name, value in spent.items() if value}, **step}


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(span.end, found[-1].end))
        else:
            found.append(span)
    return found


def overlap(span: Span, others: Sequence[Span]) -> float:
    """Seconds of a span that disjoint others cover."""
    return sum(max(0.0, min(span.end, one.end) - max(span.begin, one.begin)) for one in others)
