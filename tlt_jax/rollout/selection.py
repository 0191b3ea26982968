"""Which prompts of a request a rollout keeps, by the scores of their answers (dynamic sampling); knows no reward and no clock.

DAPO (arXiv 2503.14476, section 3.2): prompts whose answers all score alike give no gradient and are replaced by further ones.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEAST_SHARE = 1e-3  # least share of prompts that is expected to count
# Weight of the share that was expected before, in multiples of the prompts to keep. What is decided early is not typical:
# short answers end first.
PRIOR = 2


def differ(scores: np.ndarray) -> bool:
    """Whether the scores float[samples] of a prompt's answers are not all equal."""
    return bool(scores.max() != scores.min())


@dataclass(frozen=True)
class Selection:
    """A rollout keeps the first `prompts` prompts of its request, in order, that count; else also the first that do not.

    `scores`: the scores of answers of this process that are new since its last call, by uid; it never waits. `counts`:
    whether a prompt counts, of the scores float[samples] of its answers. `share`: the expected share of prompts that
    count; it affects time only.
    """

    prompts: int
    scores: Callable[[], Mapping[int, float]]
    counts: Callable[[np.ndarray], bool] = differ
    share: float = 1.0


class Choice(NamedTuple):
    """The kept prompts, ascending; how many of them count; and how many prompts, from the first on, were looked at."""

    prompts: tuple[int, ...]
    counted: int
    tried: int


class Chooser:
    """The choice among a window of prompts with `samples` answers each, whatever the order in which scores arrive.

    Prompts below `bound` may be begun. With `in_waves`, first as many as are to be kept; once all of these are decided,
    as many more as are missing, and so on. Otherwise as many as are expected to be needed.
    """

    def __init__(self, selection: Selection, window: int, samples: int, in_waves: bool = False):
        self.selection, self.window, self.samples, self.in_waves = selection, window, samples, in_waves  # fmt: skip
        self.scores: dict[int, dict[int, float]] = {}  # of prompts that lack some
        self.verdicts: list[bool | None] = [None] * window
        self.counting: list[int] = []  # the prompts that count so far, ascending
        self.decided = self.front = 0  # decided prompts; the first one that is not decided
        self.begun = min(selection.prompts, window)  # the prompts that may be begun, before the cap
        self.widen()

    def add(self, prompt: int, scores: Mapping[int, float]) -> None:
        """Adds the scores of answers to a prompt, by sample; the prompt is decided with the last one."""
        known = self.scores.setdefault(prompt, {})
        known.update(scores)
        if len(known) < self.samples:
            return
        ordered = np.array([score for _, score in sorted(self.scores.pop(prompt).items())])
        self.verdicts[prompt] = bool(self.selection.counts(ordered))
        self.decided += 1
        if self.verdicts[prompt]:
            bisect.insort(self.counting, prompt)
        while self.front < self.window and self.verdicts[self.front] is not None:
            self.front += 1
        self.widen()

    def widen(self) -> None:
        """Lets more prompts begin when too few of the begun ones count, or are expected to."""
        wanted, missing = self.begun, self.selection.prompts - len(self.counting)
        if not self.in_waves:
            wanted = self.decided + math.ceil(missing / self.share)
        elif self.front >= self.begun:
            wanted = self.begun + missing
        self.begun = max(self.begun, min(wanted, self.window))

    @property
    def share(self) -> float:
        """The expected share of prompts that count: that of this rollout so far, with `selection.share` as a prior."""
        weight, before = PRIOR * self.selection.prompts, self.selection.share
        found = (weight * before + len(self.counting)) / (weight + self.decided)
        return max(found, LEAST_SHARE)

    @property
    def cap(self) -> int:
        """Prompts from here on are not needed, whatever they score."""
        enough = len(self.counting) >= self.selection.prompts
        return self.counting[self.selection.prompts - 1] + 1 if enough else self.window

    @property
    def bound(self) -> int:
        """Prompts from here on are not to be begun now."""
        return min(self.begun, self.cap)

    @property
    def choice(self) -> Choice | None:
        """The choice; None while prompts that may change it are not decided."""
        if self.front < self.cap:
            return None
        kept = self.counting[: self.selection.prompts]
        missing = self.selection.prompts - len(kept)
        others = [prompt for prompt in range(self.cap) if not self.verdicts[prompt]]
        filled = others[:missing] if missing else []
        return Choice(tuple(sorted(kept + filled)), len(kept), self.cap)
