"""Who decodes which sample: whole prompts from a queue, then single waiting samples; knows no device and no clock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Dealer:
    """The queue of one rollout: `prompts` prompts of `samples` samples each, on the counters below `scope`."""

    board: Board
    scope: str
    prompts: int
    samples: int

    def claim(self) -> int | None:
        """The next prompt that nobody has, or None."""
        if self.board.get(f"{self.scope}/claimed") >= self.prompts:
            return None
        index = self.board.increment(f"{self.scope}/claimed") - 1
        return index if index < self.prompts else None

    def take(self, prompt: int, count: int) -> list[int]:
        """Up to `count` samples of a prompt that nobody has started; they are started now."""
        end = self.board.increment(f"{self.scope}/started/{prompt}", count)
        return list(range(min(end - count, self.samples), min(end, self.samples)))

    def started(self, prompt: int) -> int:
        """How many samples of a prompt are started."""
        return min(self.board.get(f"{self.scope}/started/{prompt}"), self.samples)

    def steal(self) -> tuple[int, int] | None:
        """A single sample that its group has not started, or None when there is none."""
        for prompt in range(min(self.board.get(f"{self.scope}/claimed"), self.prompts)):
            if self.started(prompt) < self.samples:
                for sample in self.take(prompt, 1):
                    return prompt, sample
        return None

    def close(self) -> None:
        """Forgets this rollout's counters."""
        self.board.delete(self.scope + "/")
