"""The end of a rollout in all of its processes: the first to write the outcome decides; knows no program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from tlt_jax.distributed.board import Board, LocalBoard

POLL_S = 0.02  # seconds between two polls of the board
REPORT_S = 0.5  # seconds between two reports of the expected seconds
FINISHED, INTERRUPTED = "finished", "interrupted"


class Ending:
    """The end of one rollout of `groups` data groups, on the board below `scope`.

    `process`: this one of `processes`. `how`: FINISHED once all groups are done, INTERRUPTED when a
    process was interrupted before; empty until then, and the same in all processes. A poll reads
    two keys, for any number of processes: process 0 alone reads the expected seconds of each, twice a
    second, and writes the two largest for the others.
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
        self.done: set[int] = set()  # idle groups of this process
        self.how = ""
        self.polled_at = self.reported_at = self.collected_at = -math.inf
        # The two processes with the latest expected ends, and these ends, on this process's clock.
        self.longest: dict[int, float] = {}
        self.last_read: dict[str, str] = {}  # key -> text that was read last
        self.expected_end: dict[int, float] = {}  # of all processes; in process 0 only

    def is_idle(self, group: int) -> None:
        """Notes that a group of this process has nothing left to decode."""
        if group not in self.done:
            self.done.add(group)
            if self.board.increment(f"{self.scope}/idle") == self.groups:
                self.how = self.board.first(f"{self.scope}/end/how", FINISHED)

    def interrupt(self) -> None:
        """Ends the rollout as INTERRUPTED, unless it has finished already."""
        self.how = self.board.first(f"{self.scope}/end/how", INTERRUPTED)

    def poll(self, now: float) -> str:
        """`how`, after a poll of the board when one is due."""
        if not self.how and self.processes > 1 and now - self.polled_at >= POLL_S:
            self.polled_at = now
            if self.process == 0 and now - self.collected_at >= REPORT_S:
                self.collected_at = now
                self.publish_longest(now)
            found = self.board.texts(f"{self.scope}/end/")
            self.how = found.get(f"{self.scope}/end/how", "")
            if self.process and self.is_new(f"{self.scope}/end/most", found):
                longest = json.loads(found[f"{self.scope}/end/most"])
                self.longest = {process: now + seconds for process, seconds in longest}
        return self.how

    def is_new(self, key: str, found: Mapping[str, str]) -> bool:
        """Whether the key has a text that differs from the last one read."""
        if key not in found or self.last_read.get(key) == found[key]:
            return False
        self.last_read[key] = found[key]
        return True

    def publish_longest(self, now: float) -> None:
        """In process 0: reads the reports, and writes the two largest, so that each process finds the largest of the others."""
        found = self.board.texts(f"{self.scope}/expects/")
        for key in found:
            if self.is_new(key, found):
                self.expected_end[int(key.rpartition("/")[2])] = now + float(found[key])
        self.longest = dict(sorted(self.expected_end.items(), key=lambda one: -one[1])[:2])
        left = [(process, round(end - now, 3)) for process, end in self.longest.items()]
        self.board.write(f"{self.scope}/end/most", json.dumps(left))

    def tell(self, seconds: float, now: float) -> None:
        """Reports the seconds that this process expects to decode still."""
        if self.processes > 1 and now - self.reported_at >= REPORT_S:
            self.reported_at = now
            self.board.write(f"{self.scope}/expects/{self.process}", f"{seconds:.3f}")

    def others(self, now: float) -> float:
        """The largest seconds that another process expects to decode still, by the last reports."""
        left = [end - now for process, end in self.longest.items() if process != self.process]
        return max(left, default=0.0)
