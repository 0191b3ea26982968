"""Seconds that compiling a program is expected to take, from those that others took; knows no device."""

from __future__ import annotations

from collections import deque
from statistics import median

from tlt_jax.rollout.executables.programs import Admit, CatchUp, Decode, Prefill, Resize, Start
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.spec_decode.strategy import PLAIN

# Seconds relative to a chunk of plain decoding, measured on policies of 1, 12 and 30 layers.
RELATIVE = {Start: 0.07, Prefill: 0.4, Admit: 0.3, Resize: 0.1, CatchUp: 0.5}
DRAFTS, LEVEL = 1.8, 0.05  # of a chunk that drafts, and more for each level
LOADING = 0.07  # of a program that another data group has
KEPT = 0.2  # of one that an earlier run compiled: it is lowered again, and loaded
FIRST = 3.0  # seconds of a chunk of plain decoding before anything was compiled
RECENT = 12  # compilations that the estimate is made from: later ones may come from a cache


class CompileCosts:
    """What compilations took, and what the next is expected to take."""

    def __init__(self) -> None:
        self.units: deque[float] = deque(maxlen=RECENT)
        self.alike: dict[tuple, float] = {}

    def note(self, program: Program, seconds: float) -> None:
        """A compilation took so long."""
        self.units.append(seconds / relative(program))
        self.alike[kind(program)] = seconds

    def of(self, program: Program) -> float:
        """Expected seconds: those of the last program of this kind, or in proportion to others."""
        unit = median(self.units) if self.units else FIRST
        return self.alike.get(kind(program), unit * relative(program))


def kind(program: Program) -> tuple:
    """Programs that take about as long to compile: sizes hardly matter."""
    return type(program), getattr(program, "strategy", None)


def relative(program: Program) -> float:
    """Expected seconds over those of a chunk of plain decoding; work beside the rollout says so itself."""
    if isinstance(program, Decode):
        strategy = program.strategy
        return 1.0 if strategy == PLAIN else DRAFTS + LEVEL * strategy.depth
    return RELATIVE.get(type(program), getattr(program, "relative_seconds", 1.0))
