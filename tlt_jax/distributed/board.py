"""The board: small values that the processes of a job share; and the end of a rollout, which they decide on it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from jax.errors import JaxRuntimeError


class Board(Protocol):
    """Counters and texts under keys like `rollout/3/claimed`, the same for all processes of a job.

    Every call is atomic, and costs one message to the job's coordination service: 0.1 to 2 ms.
    """

    def increment(self, key: str, by: int = 1) -> int:
        """Adds to a counter that starts at 0; returns the new value."""

    def counters(self, prefix: str) -> dict[str, int]:
        """The counters below a prefix that ends in `/`, by key."""

    def first(self, key: str, text: str) -> str:
        """Writes the text unless the key has one; returns the key's text, which never changes afterwards."""

    def write(self, key: str, text: str) -> None:
        """Writes the text, replacing an earlier one."""

    def texts(self, prefix: str) -> dict[str, str]:
        """The texts below a prefix that ends in `/`, by key."""

    def delete(self, prefix: str) -> None:
        """Deletes all keys below a prefix that ends in `/`."""


class LocalBoard:
    """The board of a single process; thread-safe."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lock = threading.RLock()

    def increment(self, key: str, by: int = 1) -> int:
        with self.lock:
            value = int(self.values.get(key, 0)) + by
            self.values[key] = str(value)
        return value

    def counters(self, prefix: str) -> dict[str, int]:
        return {key: int(value) for key, value in self.texts(prefix).items()}

    def first(self, key: str, text: str) -> str:
        with self.lock:
            return self.values.setdefault(key, text)

    def write(self, key: str, text: str) -> None:
        with self.lock:
            self.values[key] = text

    def texts(self, prefix: str) -> dict[str, str]:
        with self.lock:
            return {key: text for key, text in self.values.items() if key.startswith(prefix)}

    def delete(self, prefix: str) -> None:
        with self.lock:
            for key in self.texts(prefix):
                del self.values[key]


class ServiceBoard:
    """The board on the coordination service of `jax.distributed`; `client` is its client.

    `root`: a prefix that ends in `/`, under which this board is alone; its users do not see it.
    """

    def __init__(self, client: Any, root: str = ""):
        self.client, self.root = client, root

    def increment(self, key: str, by: int = 1) -> int:
        return self.client.key_value_increment(self.root + key, by)

    def counters(self, prefix: str) -> dict[str, int]:
        return {key: int(value) for key, value in self.texts(prefix).items()}

    def first(self, key: str, text: str) -> str:
        try:
            self.client.key_value_set(self.root + key, text)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self.client.key_value_try_get(self.root + key)
        return text

    def write(self, key: str, text: str) -> None:
        self.client.key_value_set(self.root + key, text, allow_overwrite=True)

    def texts(self, prefix: str) -> dict[str, str]:
        found = self.client.key_value_dir_get(self.root + prefix)
        return {key.removeprefix(self.root): text for key, text in found}

    def delete(self, prefix: str) -> None:
        self.client.key_value_delete(self.root + prefix)


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
