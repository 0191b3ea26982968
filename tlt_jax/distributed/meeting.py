"""A barrier of all processes of a job, at which one of them can stop all; through the board, without a device program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tlt_jax.distributed.board import Board


class Job(Protocol):
    """The part of distributed.job.Job that a meeting uses."""

    index: int
    count: int
    board: Board
    met: int  # meetings so far

    @property
    def is_first(self) -> bool: ...

    def wait(self, look: Callable[[], bool | None]) -> bool: ...


class Meeting:
    """The next barrier of the processes of a job; every process makes its meetings in the same order.

    The processes continue when all have arrived, and stop when one of them stops before; process 0
    decides once, so that the answer is the same for all. A poll costs one message for any number of
    processes.
    """

    def __init__(self, job: Job):
        self.job = job
        job.met += 1
        self.scope, self.said = f"met/{job.met}/", f"said/{job.met}/"
        self.is_marked = False

    def stops(self, wanted: bool) -> bool:
        """Whether this process (`wanted`) or another one stops before the meeting."""
        if self.job.count == 1:
            return wanted
        if wanted and not self.is_marked:
            self.is_marked = True
            self.job.board.first(f"{self.scope}stop", "")
        return wanted or f"{self.scope}stop" in self.read()

    def goes_on(self, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all have arrived, or one is `interrupted` before; whether all have arrived."""
        if self.job.count == 1:
            return not interrupted()
        if not self.stops(interrupted()):
            self.job.board.increment(f"{self.scope}come")
        goes_on = self.job.wait(lambda: self.decision(interrupted))
        if goes_on and self.job.is_first and self.job.met > 1:
            # All have arrived here, so all have left the last meeting and read its decisions.
            for left in (f"met/{self.job.met - 1}/", f"said/{self.job.met - 1}/", "decided/"):
                self.job.board.delete(left)
        return goes_on

    def decision(self, interrupted: Callable[[], bool]) -> bool | None:
        """The decision of process 0, which takes it here; None until then."""
        wants = interrupted()
        found = self.read()
        decided = found.get(f"{self.scope}goes_on")
        if decided is None and self.job.is_first:
            if self.stops(wants):
                decided = "0"
            elif int(found.get(f"{self.scope}come", 0)) == self.job.count:
                decided = "1"
            if decided:
                self.job.board.write(f"{self.scope}goes_on", decided)
        elif decided is None:
            self.stops(wants)
        return None if decided is None else decided == "1"

    def read(self) -> dict[str, str]:
        """The board's texts of this meeting."""
        return self.job.board.texts(self.scope)

    def heard(self, text: str) -> dict[int, str]:
        """The texts of all processes by index, without empty ones; waits for all processes."""
        if self.job.count == 1:
            return {0: text} if text else {}
        if text:
            self.job.board.write(f"{self.said}{self.job.index}", text)
        self.goes_on()
        found = self.job.board.texts(self.said)
        return {int(key.rpartition("/")[2]): found[key] for key in sorted(found)}
