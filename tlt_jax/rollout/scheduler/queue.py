"""The queues of samples: a group takes whole prompts first, then steals single samples of other groups' prompts.

In a deterministic rollout prompts are dealt to the groups beforehand instead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from tlt_jax.distributed.board import Board
from tlt_jax.rollout.request import RolloutRequest


class Taken(NamedTuple):
    """(prompt, sample) for a group's free rows; prompts whose samples are all started; whether the queue is empty.

    `may_get_more`: it gives nothing now, and may give more later.
    """

    samples: list[tuple[int, int]]
    started: frozenset[int]
    is_exhausted: bool
    may_get_more: bool = False


class WorkQueue:
    """The queue of one rollout: `prompts` prompts of `samples` samples each, on the board's counters below `scope`.

    A group that starts all samples of its prompts at once sends one message to the board for all of
    them. Only a prompt with waiting samples has its own counter. `bound`: prompts from there on are not given now; None:
    all are.
    """

    def __init__(
        self,
        board: Board,
        scope: str,
        prompts: int,
        samples: int,
        bound: Callable[[], int] | None = None,
    ):
        self.board, self.scope, self.prompts, self.samples = board, scope, prompts, samples
        self.bound = bound or (lambda: prompts)
        self.claimed = 0  # prompts that all processes have claimed, as last read
        self.whole: set[int] = set()  # the prompts whose samples this process started all at once
        self.emptied = -1  # the bound with which nothing was left

    def take(self, free: int, prefilled: Iterable[int] = ()) -> Taken:
        """Starts up to `free` samples: of prompts prefilled by the caller, then of whole new prompts, then stolen ones."""
        bound = self.bound()
        if bound == self.emptied < self.prompts:
            return Taken([], frozenset(), False, True)
        found: list[tuple[int, int]] = []
        started: set[int] = set()
        for prompt in prefilled:
            if len(found) < free and prompt < bound:
                samples, is_last = self._start(prompt, free - len(found))
                found += samples
                started |= {prompt} if is_last else set()

        while len(found) < free and (new := self._claim(free - len(found), bound)):
            for prompt in new:
                samples = range(min(free - len(found), self.samples))
                found += [(prompt, sample) for sample in samples]
                if len(samples) < self.samples:
                    self.board.increment(self._waiting(prompt), len(samples))
                else:
                    self.whole.add(prompt)
                    started.add(prompt)

        is_empty = False
        while len(found) < free and not is_empty:
            stolen = self._steal(free - len(found), bound)
            is_empty = not stolen
            found += stolen
        self.emptied = bound if is_empty else self.emptied
        is_exhausted = is_empty and bound >= self.prompts
        return Taken(found, frozenset(started), is_exhausted, is_empty and not is_exhausted)

    def _waiting(self, prompt: int) -> str:
        """The key of the counter of a prompt's started samples; no counter exists when all were started at once."""
        return f"{self.scope}/waiting/{prompt}"

    def _claim(self, free: int, bound: int) -> range:
        """Claims the next prompts below the bound, as many as fill `free` rows.

        Several processes may claim at once: whoever gets prompts beyond the bound leaves their samples to all.
        """
        count = min(-(-free // self.samples), bound - self.claimed)
        if count <= 0:
            return range(0)
        self.claimed = self.board.increment(f"{self.scope}/claimed", count)
        for prompt in range(max(self.claimed - count, bound), min(self.claimed, self.prompts)):
            self.board.increment(self._waiting(prompt), 0)
        return range(min(self.claimed - count, bound), min(self.claimed, bound))

    def _start(self, prompt: int, count: int) -> tuple[list[tuple[int, int]], bool]:
        """Starts up to `count` waiting samples of a prompt; also whether none is left."""
        if prompt in self.whole:
            return [], True
        end = self.board.increment(self._waiting(prompt), count)
        samples = range(min(end - count, self.samples), min(end, self.samples))
        return [(prompt, sample) for sample in samples], end >= self.samples

    def _steal(self, count: int, bound: int) -> list[tuple[int, int]]:
        """Steals at most `count` samples, one of each begun prompt with waiting samples; empty when none waits."""
        found: list[tuple[int, int]] = []
        for key, started in self.board.counters(f"{self.scope}/waiting/").items():
            prompt = int(key.rpartition("/")[2])
            if started < self.samples and len(found) < count and prompt < bound:
                found += self._start(prompt, 1 if started else count - len(found))[0]
        return found


class OpenQueue:
    """Sequences that come while others are decoded, in their order, for all groups of one process.

    It writes them to the request, whose lists of prompts, limits and keys grow; each is a prompt with one sample. It ends once
    `served` of them were added, or none is open for `patience` seconds: `add` then takes no more.
    """

    def __init__(self, request: RolloutRequest, patience: float, served: int = 4096):
        self.request, self.patience, self.served = request, patience, served
        self.lock, self.waiting = threading.Lock(), deque[int]()
        self.open: set[int] = set()
        self.is_ended, self.idle_since = False, time.monotonic()

    def add(self, prompt: np.ndarray, most: int, key: np.ndarray) -> int | None:
        """The uid of a new sequence of at most `most` new tokens; None when the queue has ended. From any thread."""
        request = self.request
        with self.lock:
            if self.is_ended or len(request.prompts) > self.served:
                return None
            uid = len(request.prompts)
            request.prompts.append(np.asarray(prompt, np.int32))
            request.max_new_tokens.append(most)
            request.keys.append(key)
            self.open.add(uid)
            self.waiting.append(uid)
            return uid

    def ended(self, uid: int) -> None:
        """A sequence has ended."""
        with self.lock:
            self.open.discard(uid)
            self.idle_since = time.monotonic()

    def take(self, free: int, prefilled: Iterable[int] = ()) -> Taken:
        """As WorkQueue.take."""
        with self.lock:
            found = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
            is_idle = not self.open and time.monotonic() - self.idle_since > self.patience
            is_full = len(self.request.prompts) > self.served and not self.open
            self.is_ended |= is_idle or is_full
            may_get_more = not found and not self.is_ended
            return Taken([(uid, 0) for uid in found], frozenset(found), self.is_ended, may_get_more)


class DealtQueue:
    """The queue of group `index` of G: all samples of prompts index, index + G, ..., prompt by prompt.

    `bound`: prompts from there on are not given now; None: all are. It may only rise once all groups have decoded what is
    below it, and is read again once this group has taken all of that: so what a group takes depends on no clock.
    """

    def __init__(
        self,
        index: int,
        groups: int,
        prompts: int,
        samples: int,
        bound: Callable[[], int] | None = None,
    ):
        self.index, self.groups, self.prompts, self.samples = index, groups, prompts, samples
        self.bound = bound or (lambda: prompts)
        self.dealt = 0  # prompts that were dealt to all groups
        self.left: list[tuple[int, int]] = []
        self.deal()

    def deal(self) -> None:
        """Deals the prompts up to the bound."""
        bound = max(self.bound(), self.dealt)
        for prompt in range(self.dealt, bound):
            if prompt % self.groups == self.index:
                self.left += [(prompt, sample) for sample in range(self.samples)]
        self.dealt = bound

    def take(self, free: int, prefilled: Iterable[int] = ()) -> Taken:
        """As WorkQueue.take, without work stealing."""
        if not self.left:
            self.deal()
        taken, self.left = self.left[:free], self.left[free:]
        waiting = {prompt for prompt, _ in self.left}
        begun = {prompt for prompt, _ in taken} | set(prefilled)
        is_all = self.dealt >= self.prompts
        is_empty = not self.left
        return Taken(
            taken, frozenset(begun - waiting), is_empty and is_all, is_empty and not is_all
        )
