"""How a rollout ends, for all processes that decode it: they agree by what one of them wrote first; knows no program."""

from __future__ import annotations

import math

from tlt_jax.distributed.board import Board, LocalBoard

LOOK_S = 0.02  # from one look at the board to the next
TELL_S = 0.5  # from one report of the expected seconds to the next
FINISHED, INTERRUPTED = "finished", "interrupted"


class Ending:
    """The end of one rollout of `groups` data groups, on the board below `scope`.

    `process`, of `processes`: this one. `how`: FINISHED once all groups are done, INTERRUPTED when
    a process was told to stop before; empty while it is open, and then the same everywhere.
    """

    def __init__(
        self,
        groups: int,
        board: Board | None = None,
        scope: str = "",
        process: int = 0,
        processes: int = 1,
    ):
        self.groups, self.board, self.scope = groups, board or LocalBoard(), scope
        self.process, self.processes = process, processes
        self.done: set[int] = set()  # groups of this process
        self.how = ""
        self.looked = self.told = -math.inf
        self.expected: dict[str, tuple[str, float]] = {}  # of other processes, and when it was read

    def is_idle(self, group: int) -> None:
        """A group of this process has nothing left to decode."""
        if group not in self.done:
            self.done.add(group)
            if self.board.increment(f"{self.scope}/idle") == self.groups:
                self.how = self.board.first(f"{self.scope}/end/how", FINISHED)

    def interrupt(self) -> None:
        """This process is to stop; too late for a rollout that is finished."""
        self.how = self.board.first(f"{self.scope}/end/how", INTERRUPTED)

    def look(self, now: float) -> str:
        """`how`, after a look at the board when one is due."""
        if not self.how and self.processes > 1 and now - self.looked >= LOOK_S:
            self.looked = now
            found = self.board.texts(f"{self.scope}/end/")
            self.how = found.pop(f"{self.scope}/end/how", "")
            for key, text in found.items():
                if self.expected.get(key, ("", 0.0))[0] != text:
                    self.expected[key] = text, now
        return self.how

    def tell(self, seconds: float, now: float) -> None:
        """This process expects to decode for so many seconds more."""
        if self.processes > 1 and now - self.told >= TELL_S:
            self.told = now
            self.board.write(f"{self.scope}/end/{self.process}", f"{seconds:.3f}")

    def others(self, now: float) -> float:
        """Seconds that the other processes are expected to take, by what they told last."""
        own = f"{self.scope}/end/{self.process}"
        left = [float(text) - (now - at) for key, (text, at) in self.expected.items() if key != own]
        return max(left, default=0.0)
