"""What a rollout asks of its programs: protocols of what is named, compiled and read; knows no shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax

T = TypeVar("T")


class Program(Protocol):
    """Names one executable of one data group: frozen and hashable."""

    @property
    def group(self) -> int: ...

    def lower(self, shapes: Any, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        """The program for the devices, or descriptions of devices, of its group, of GroupShapes.

        `get` gives the executable of another program that this one reads the shardings of.
        """


class Programs(Protocol):
    """What runs programs: rollout.executables compiles them, rollout.simulated pretends to."""

    def get(self, program: Program) -> Callable[..., Any]:
        """The executable; compiled now when it is not there."""

    def has(self, program: Program) -> bool:
        """Whether `get` returns at once."""

    def is_ready(self, program: Program) -> bool:
        """False: it is being compiled, or will be when asked again; use another one meanwhile."""

    def is_first_run(self, program: Program) -> bool:
        """Whether it had not run before it was asked for now."""

    def read(self, report: T) -> T:
        """The report of a chunk that is done, as NumPy arrays."""
