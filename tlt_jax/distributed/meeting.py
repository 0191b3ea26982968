"""A point that all processes of a job reach together, or stop before; by the board, with no program on a device."""

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
    """The next point at which the processes of a job meet: made by each of them, in the same order.

    It goes on when all have come, and not when one of them is to stop before; process 0 decides it
    once, so the answer is the same for all. A look costs one message, however many processes there are.
    """

    def __init__(self, job: Job):
        self.job = job
        job.met += 1
        self.scope, self.said = f"met/{job.met}/", f"said/{job.met}/"
        self.is_marked = False

    def stops(self, wanted: bool) -> bool:
        """Whether this process, or another one, is to stop before the meeting."""
        if self.job.count == 1:
            return wanted
        if wanted and not self.is_marked:
            self.is_marked = True
            self.job.board.first(f"{self.scope}stop", "")
        return wanted or f"{self.scope}stop" in self.look()

    def goes_on(self, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all have come, or one of them is `interrupted` before; whether all have come."""
        if self.job.count == 1:
            return not interrupted()
        if not self.stops(interrupted()):
            self.job.board.increment(f"{self.scope}come")
        goes_on = self.job.wait(lambda: self.answer(interrupted))
        if goes_on and self.job.is_first and self.job.met > 1:
            # All have come here, so all have left the meeting before, and read what was decided before.
            for left in (f"met/{self.job.met - 1}/", f"said/{self.job.met - 1}/", "decided/"):
                self.job.board.delete(left)
        return goes_on

    def answer(self, interrupted: Callable[[], bool]) -> bool | None:
        """What process 0 has decided; None until then."""
        wants = interrupted()
        found = self.look()
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

    def look(self) -> dict[str, str]:
        """What is known of the meeting."""
        return self.job.board.texts(self.scope)

    def heard(self, text: str) -> dict[int, str]:
        """What the processes say, by index, without those that say nothing; waits for all."""
        if self.job.count == 1:
            return {0: text} if text else {}
        if text:
            self.job.board.write(f"{self.said}{self.job.index}", text)
        self.goes_on()
        found = self.job.board.texts(self.said)
        return {int(key.rpartition("/")[2]): found[key] for key in sorted(found)}
