"""How a rollout ends, for all processes that decode it: they agree by what one of them wrote first; knows no program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from tlt_jax.distributed.board import Board, LocalBoard

LOOK_S = 0.02  # from one look at the board to the next
TELL_S = 0.5  # from one report of the expected seconds to the next
FINISHED, INTERRUPTED = "finished", "interrupted"


class Ending:
    """The end of one rollout of `groups` data groups, on the board below `scope`.

    `process`, of `processes`: this one. `how`: FINISHED once all groups are done, INTERRUPTED when
    a process was told to stop before; empty while it is open, and then the same everywhere. A look
    costs a message of two keys, however many processes there are: what each expects is read by
    process 0 alone, twice a second, which tells the others the two that expect most.
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
        self.looked = self.told = self.summed = -math.inf
        # The processes that expect most, and until when, each in the time of this process.
        self.most: dict[int, float] = {}
        self.heard: dict[str, str] = {}  # key -> text that was read last
        self.until: dict[int, float] = {}  # in process 0: of all processes

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
            if self.process == 0 and now - self.summed >= TELL_S:
                self.summed = now
                self.sum_up(now)
            found = self.board.texts(f"{self.scope}/end/")
            self.how = found.get(f"{self.scope}/end/how", "")
            if self.process and self.is_new(f"{self.scope}/end/most", found):
                told = json.loads(found[f"{self.scope}/end/most"])
                self.most = {process: now + seconds for process, seconds in told}
        return self.how

    def is_new(self, key: str, found: Mapping[str, str]) -> bool:
        """Whether a text is there, and another one than at the last look."""
        if key not in found or self.heard.get(key) == found[key]:
            return False
        self.heard[key] = found[key]
        return True

    def sum_up(self, now: float) -> None:
        """Process 0 reads what each process expects, and tells which two expect most: each looks for the most of the others."""
        found = self.board.texts(f"{self.scope}/expects/")
        for key in found:
            if self.is_new(key, found):
                self.until[int(key.rpartition("/")[2])] = now + float(found[key])
        self.most = dict(sorted(self.until.items(), key=lambda one: -one[1])[:2])
        told = [(process, round(until - now, 3)) for process, until in self.most.items()]
        self.board.write(f"{self.scope}/end/most", json.dumps(told))

    def tell(self, seconds: float, now: float) -> None:
        """This process expects to decode for so many seconds more."""
        if self.processes > 1 and now - self.told >= TELL_S:
            self.told = now
            self.board.write(f"{self.scope}/expects/{self.process}", f"{seconds:.3f}")

    def others(self, now: float) -> float:
        """Seconds that the other processes are expected to take, by what they told last."""
        left = [until - now for process, until in self.most.items() if process != self.process]
        return max(left, default=0.0)
