"""Small facts that the processes of a run share; knows no rollout."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol


class Board(Protocol):
    """Small facts shared by the processes of a job: what a coordination service offers."""

    def increment(self, key: str, by: int = 1) -> int:
        """Adds to a counter that starts at 0, atomically; the new value."""

    def get(self, key: str) -> int:
        """The counter's value."""

    def delete(self, prefix: str) -> None:
        """Forgets the counters below a prefix."""


class LocalBoard:
    """The board of a single process."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = defaultdict(int)

    def increment(self, key: str, by: int = 1) -> int:
        self.counters[key] += by
        return self.counters[key]

    def get(self, key: str) -> int:
        return self.counters.get(key, 0)

    def delete(self, prefix: str) -> None:
        for key in [key for key in self.counters if key.startswith(prefix)]:
            del self.counters[key]
