"""The protocols of programs and of what compiles and runs them; knows no shape."""

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
        """The program lowered for its group's devices or device descriptions; `shapes`: the group's GroupShapes.

        `get` returns the executable of another program, whose shardings this one reads.
        """


class Programs(Protocol):
    """Compiles and runs programs: executables.compilation does so, simulate.simulator simulates it."""

    def get(self, program: Program) -> Callable[..., Any]:
        """The executable; compiles it now when it is missing."""

    @property
    def version(self) -> Hashable:
        """Changes whenever a program becomes available or is dropped."""

    @property
    def compiling_alongside(self) -> bool:
        """Whether a background compilation takes cores from the devices."""

    def compile_cost(self, program: Program) -> float:
        """The expected cost of compiling it to a rollout, in seconds; 0: `get` returns at once."""

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles missing programs, now or in the background; `compile_cost` is 0 once one is available."""

    def is_first_run(self, program: Program) -> bool:
        """Whether this is the first call with this program."""

    def read(self, report: T) -> T:
        """The report of a finished chunk, as NumPy arrays."""
