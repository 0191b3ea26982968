"""What a rollout asks of its programs: protocols of what is named, compiled and read; knows no shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
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

    @property
    def version(self) -> Hashable:
        """Changes with the programs that are there."""

    @property
    def compiling_alongside(self) -> bool:
        """Whether compiling takes processors from what the programs run on."""

    def compile_cost(self, program: Program) -> float:
        """What compiling it is expected to cost a rollout, in seconds; 0: `get` returns at once."""

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles what is not there, now or in the background; whether it is there then `compile_cost` tells."""

    def is_first_run(self, program: Program) -> bool:
        """Whether it had not run before it was asked for now."""

    def read(self, report: T) -> T:
        """The report of a chunk that is done, as NumPy arrays."""
