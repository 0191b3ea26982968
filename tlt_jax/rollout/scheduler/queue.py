"""The work queue of samples: a group takes whole prompts first, then steals single samples of other groups' prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tlt_jax.distributed.board import Board


class Taken(NamedTuple):
    """(prompt, sample) for a group's free rows; prompts whose samples are all started; whether the queue is empty."""

    samples: list[tuple[int, int]]
    started: frozenset[int]
    is_exhausted: bool


class WorkQueue:
    """The queue of one rollout: `prompts` prompts of `samples` samples each, on the board's counters below `scope`.

    A group that starts all samples of its prompts at once sends one message to the board for all of
    them. Only a prompt with waiting samples has its own counter.
    """

    def __init__(self, board: Board, scope: str, prompts: int, samples: int):
        self.board, self.scope, self.prompts, self.samples = board, scope, prompts, samples
        self.claimed = 0  # prompts that all processes have claimed, as last read
        self.whole: set[int] = set()  # the prompts whose samples this process started all at once

    def take(self, free: int, prefilled: Iterable[int] = ()) -> Taken:
        """Starts up to `free` samples: of prompts prefilled by the caller, then of whole new prompts, then stolen ones."""
        found: list[tuple[int, int]] = []
        started: set[int] = set()
        for prompt in prefilled:
            if len(found) < free:
                samples, is_last = self._start(prompt, free - len(found))
                found += samples
                started |= {prompt} if is_last else set()

        while len(found) < free and (new := self._claim(-(-(free - len(found)) // self.samples))):
            for prompt in new:
                samples = range(min(free - len(found), self.samples))
                found += [(prompt, sample) for sample in samples]
                if len(samples) < self.samples:
                    self.board.increment(self._waiting(prompt), len(samples))
                else:
                    self.whole.add(prompt)
                    started.add(prompt)

        is_exhausted = False
        while len(found) < free and not is_exhausted:
            stolen = self._steal(free - len(found))
            is_exhausted = not stolen
            found += stolen
        return Taken(found, frozenset(started), is_exhausted)

    def _waiting(self, prompt: int) -> str:
        """The key of the counter of a prompt's started samples; no counter exists when all were started at once."""
        return f"{self.scope}/waiting/{prompt}"

    def _claim(self, count: int) -> range:
        """Claims the next prompts, at most `count`."""
        if self.claimed >= self.prompts:
            return range(0)
        self.claimed = self.board.increment(f"{self.scope}/claimed", count)
        return range(min(self.claimed - count, self.prompts), min(self.claimed, self.prompts))

    def _start(self, prompt: int, count: int) -> tuple[list[tuple[int, int]], bool]:
        """Starts up to `count` waiting samples of a prompt; also whether none is left."""
        if prompt in self.whole:
            return [], True
        end = self.board.increment(self._waiting(prompt), count)
        samples = range(min(end - count, self.samples), min(end, self.samples))
        return [(prompt, sample) for sample in samples], end >= self.samples

    def _steal(self, count: int) -> list[tuple[int, int]]:
        """Steals at most `count` samples, one of each prompt with waiting samples; empty when none waits."""
        found: list[tuple[int, int]] = []
        for key, started in self.board.counters(f"{self.scope}/waiting/").items():
            if started < self.samples and len(found) < count:
                found += self._start(int(key.rpartition("/")[2]), 1)[0]
        return found
