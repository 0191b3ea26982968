"""Which prompts of a request a rollout keeps, by the scores of their answers (dynamic sampling).

DAPO (arXiv 2503.14476, section 3.2): prompts whose answers all score alike give no gradient and are replaced by further ones.
While a rollout runs, scores come in and the queues' bound goes out, in all of its processes: a process sends the scores of a
prompt's answers in one message, once all that it has begun are scored. Process 0 reads them, decides, and writes the bound
and the choice, which the others read: a message per poll of the board, for any number of prompts and groups.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tlt_jax.distributed.board import POLL_S, Board
from tlt_jax.rollout.recorder import Completion, Decided, Poll

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


class KeptPrompts(NamedTuple):
    """The kept prompts, ascending; how many of them count; and how many prompts, from the first on, were tried."""

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
    def choice(self) -> KeptPrompts | None:
        """The choice; None while prompts that may change it are not decided."""
        if self.front < self.cap:
            return None
        kept = self.counting[: self.selection.prompts]
        missing = self.selection.prompts - len(kept)
        others = [prompt for prompt in range(self.cap) if not self.verdicts[prompt]]
        filled = others[:missing] if missing else []
        return KeptPrompts(tuple(sorted(kept + filled)), len(kept), self.cap)


class Selecting:
    """The choice of one rollout among the prompts of its window, on the board below `scope`; `process` is one of `processes`.

    `choice`: None until it is known. `bound`: prompts from here on are not to be begun now; `cap`: they are never needed.
    `waited`: seconds in which this process decoded nothing and had answers without a score.
    """

    def __init__(
        self,
        selection: Selection,
        window: int,
        samples: int,
        in_waves: bool,
        board: Board,
        scope: str,
        process: int = 0,
        processes: int = 1,
    ):
        self.selection, self.samples, self.board, self.scope = selection, samples, board, scope
        self.process, self.is_alone = process, processes == 1
        self.chooser = Chooser(selection, window, samples, in_waves)
        self.choice: KeptPrompts | None = None
        self.bound, self.cap = self.chooser.bound, self.chooser.cap
        # Scores that are not sent: answers that were begun here, by prompt; the scores that came, by sample too.
        self.begun: dict[int, set[int]] = {}
        self.held: dict[int, dict[int, float]] = {}
        self.unscored = self.sent = 0  # finished answers without a score; messages
        self.polled_at, self.waited, self.waits_since = -math.inf, 0.0, math.nan
        self.written = ""

    @property
    def is_over(self) -> bool:
        """The choice is known: what still runs is not needed."""
        return self.choice is not None

    def listen(self, poll: Poll) -> None:
        """Notes the answers that begin, of which those of several turns may join more than once."""
        for event in poll.events:
            for uid in event.decision.joining if isinstance(event, Decided) else ():
                self.begun.setdefault(uid // self.samples, set()).add(uid)

    def finished(
        self, on_finish: Callable[[Completion], None] | None
    ) -> Callable[[Completion], None]:
        """Calls `on_finish` with the answers that may be needed."""

        def finish(answer: Completion) -> None:
            if on_finish and not self.is_over and answer.prompt < self.cap:
                self.unscored += 1
                on_finish(answer)

        return finish

    def poll(self, now: float, is_decoding: bool) -> bool:
        """Reads new scores, and what other processes wrote; whether anything happened. Never waits."""
        if self.is_over:
            return False
        before = self.bound, self.cap, self.choice
        parts = self.complete(self.selection.scores())
        if self.process == 0:
            self.decide(parts)
        elif parts:
            self.sent += 1
            key = f"{self.scope}/scores/{self.process}.{self.sent}/parts"
            self.board.write(key, json.dumps(parts))
        if not self.is_alone and now - self.polled_at >= POLL_S:
            self.polled_at = now
            self.read_parts() if self.process == 0 else self.read_choice()
        if not math.isnan(self.waits_since):
            self.waited += now - self.waits_since
        self.waits_since = now if self.unscored and not is_decoding else math.nan
        return (self.bound, self.cap, self.choice) != before

    def complete(self, new: Mapping[int, float]) -> dict[int, dict[int, float]]:
        """The scores by prompt and sample that are to be sent: those of prompts with no unscored answer of this process."""
        found = {}
        for uid, score in new.items():
            prompt, sample = divmod(uid, self.samples)
            self.held.setdefault(prompt, {})[sample] = score
        self.unscored -= len(new)
        for prompt in {uid // self.samples for uid in new}:
            if len(self.held[prompt]) == len(self.begun[prompt]):
                found[prompt] = self.held.pop(prompt)
                del self.begun[prompt]
        return found

    def decide(self, parts: Mapping[int, Mapping[int, float]]) -> None:
        """In process 0: adds scores to the choice, and tells the others what changed."""
        for prompt, scores in parts.items():
            self.chooser.add(prompt, scores)
        if not parts:
            return
        self.bound, self.cap = self.chooser.bound, self.chooser.cap
        self.choice = self.chooser.choice
        text = json.dumps([self.bound, self.cap, self.choice])
        if not self.is_alone and text != self.written:
            self.written = text
            self.board.write(f"{self.scope}/selected/now", text)

    def read_parts(self) -> None:
        """In process 0: reads the scores that others sent, and deletes them."""
        for key, text in self.board.texts(f"{self.scope}/scores/").items():
            parts = json.loads(text)
            self.board.delete(key.removesuffix("parts"))
            self.decide(
                {
                    int(prompt): {int(sample): score for sample, score in scores.items()}
                    for prompt, scores in parts.items()
                }
            )

    def read_choice(self) -> None:
        """In the other processes: reads the bound and the choice of process 0."""
        text = self.board.texts(f"{self.scope}/selected/").get(f"{self.scope}/selected/now", "")
        if text and text != self.written:
            self.written = text
            self.bound, self.cap, choice = json.loads(text)
            self.choice = choice and KeptPrompts(tuple(choice[0]), *choice[1:])
