"""Which group decodes which samples: whole prompts first, then single samples of other groups' prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tlt_jax.distributed.board import Board


class Taken(NamedTuple):
    """(prompt, sample) of a group's free rows; prompts of which no sample waits any more; whether none waits at all."""

    samples: list[tuple[int, int]]
    started: frozenset[int]
    is_exhausted: bool


@dataclass(frozen=True)
class WorkQueue:
    """The queue of one rollout: `prompts` prompts of `samples` samples each, on the counters below `scope`."""

    board: Board
    scope: str
    prompts: int
    samples: int

    def take(self, free: int, prefilled: Iterable[int] = ()) -> Taken:
        """Up to `free` samples, started now: of the prompts prefilled here, of whole new prompts, then stolen ones."""
        found: list[tuple[int, int]] = []
        started: set[int] = set()

        def start(prompt: int) -> None:
            samples, is_last = self._start(prompt, free - len(found))
            found.extend((prompt, sample) for sample in samples)
            if is_last:
                started.add(prompt)

        for prompt in prefilled:
            if len(found) < free:
                start(prompt)

        while len(found) < free and (
            prompts := self._claim(-(-(free - len(found)) // self.samples))
        ):
            for prompt in prompts:
                start(prompt)

        is_exhausted = False
        while len(found) < free and not is_exhausted:
            stolen = self._steal()
            is_exhausted = stolen is None
            found += [stolen] if stolen else []
        return Taken(found, frozenset(started), is_exhausted)

    def close(self) -> None:
        """Forgets this rollout's counters."""
        self.board.delete(self.scope + "/")

    def _claim(self, count: int) -> range:
        """The next prompts that nobody has, at most `count`."""
        if self.board.get(f"{self.scope}/claimed") >= self.prompts:
            return range(0)
        end = self.board.increment(f"{self.scope}/claimed", count)
        return range(min(end - count, self.prompts), min(end, self.prompts))

    def _start(self, prompt: int, count: int) -> tuple[range, bool]:
        """Up to `count` samples of a prompt that nobody has started, and whether none is left."""
        end = self.board.increment(f"{self.scope}/started/{prompt}", count)
        samples = range(min(end - count, self.samples), min(end, self.samples))
        return samples, end >= self.samples

    def _steal(self) -> tuple[int, int] | None:
        """A single sample of a claimed prompt that nobody has started, or None when there is none."""
        for prompt in range(min(self.board.get(f"{self.scope}/claimed"), self.prompts)):
            if self.board.get(f"{self.scope}/started/{prompt}") < self.samples:
                for sample in self._start(prompt, 1)[0]:
                    return prompt, sample
        return None
