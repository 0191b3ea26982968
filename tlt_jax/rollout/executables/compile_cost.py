"""Expected seconds of a compilation, estimated from earlier ones; knows no device."""

from __future__ import annotations

from collections import deque
from statistics import median

from tlt_jax.rollout.executables.programs import Admit, CatchUp, Decode, Prefill, Resize, Start
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.spec_decode.strategy import PLAIN

# Seconds relative to a chunk of plain decoding, measured on policies of 1, 12 and 30 layers.
RELATIVE = {Start: 0.07, Prefill: 0.4, Admit: 0.3, Resize: 0.1, CatchUp: 0.5}
DRAFTS, LEVEL = 1.8, 0.05  # of a chunk that drafts, plus this for each level
LOADING = 0.07  # of a program that another data group has compiled
CACHED = 0.2  # of one that an earlier run compiled: it is lowered again, and loaded
BACKGROUND = 0.3  # cost of a background compilation to a rollout, relative to one that it waits for
FIRST = 3.0  # expected seconds of a chunk of plain decoding before the first compilation
RECENT = 12  # compilations that the estimate uses: newer ones may come from a cache


class CompileCosts:
    """Measured seconds of compilations, and the expected seconds of the next."""

    def __init__(self) -> None:
        self.units: deque[float] = deque(maxlen=RECENT)
        self.alike: dict[tuple, float] = {}

    def note(self, program: Program, seconds: float) -> None:
        """Adds the measured seconds of a compilation."""
        self.units.append(seconds / relative(program))
        self.alike[kind(program)] = seconds

    def of(self, program: Program) -> float:
        """Expected seconds: those of the last program of this kind, or scaled from other kinds."""
        unit = median(self.units) if self.units else FIRST
        return self.alike.get(kind(program), unit * relative(program))


def kind(program: Program) -> tuple:
    """The key of programs that compile in about the same time: sizes hardly matter."""
    return type(program), getattr(program, "strategy", None)


def relative(program: Program) -> float:
    """Expected seconds relative to a chunk of plain decoding; programs of idle work define `relative_seconds`."""
    if isinstance(program, Decode):
        strategy = program.strategy
        return 1.0 if strategy == PLAIN else DRAFTS + LEVEL * strategy.depth
    return RELATIVE.get(type(program), getattr(program, "relative_seconds", 1.0))
