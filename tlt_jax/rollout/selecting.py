"""The choice of prompts while a rollout runs, in all of its processes: scores come in, the queues' bound goes out.

A process sends the scores of a prompt's answers in one message, once all that it has begun are scored. Process 0 reads them,
decides, and writes the bound and the choice, which the others read: a message per poll of the board, for any number of
prompts and groups.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping

from tlt_jax.distributed.board import POLL_S, Board
from tlt_jax.rollout.events import Decided, Look
from tlt_jax.rollout.recorder import Completion
from tlt_jax.rollout.selection import Choice, Chooser, Selection


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
        self.choice: Choice | None = None
        self.bound, self.cap = self.chooser.bound, self.chooser.cap
        self.begun: Counter[int] = (
            Counter()
        )  # answers begun here whose scores are not sent, by prompt
        self.held: dict[
            int, dict[int, float]
        ] = {}  # scores that are not sent, by prompt and sample
        self.unscored = self.sent = 0  # finished answers without a score; messages
        self.polled_at, self.waited, self.waits_since = -math.inf, 0.0, math.nan
        self.written = ""

    @property
    def is_over(self) -> bool:
        """The choice is known: what still runs is not needed."""
        return self.choice is not None

    def listen(self, look: Look) -> None:
        """Counts the answers that begin."""
        for event in look.events:
            if isinstance(event, Decided):
                self.begun.update(uid // self.samples for uid in event.decision.joining)

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
        self.count_wait(now, is_decoding)
        return (self.bound, self.cap, self.choice) != before

    def complete(self, new: Mapping[int, float]) -> dict[int, dict[int, float]]:
        """The scores by prompt and sample that are to be sent: those of prompts with no unscored answer of this process."""
        found = {}
        for uid, score in new.items():
            prompt, sample = divmod(uid, self.samples)
            self.held.setdefault(prompt, {})[sample] = score
        self.unscored -= len(new)
        for prompt in {uid // self.samples for uid in new}:
            if len(self.held[prompt]) == self.begun[prompt]:
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
            self.choice = choice and Choice(tuple(choice[0]), *choice[1:])

    def count_wait(self, now: float, is_decoding: bool) -> None:
        """Adds the time since the last poll when only scores were awaited then."""
        if not math.isnan(self.waits_since):
            self.waited += now - self.waits_since
        self.waits_since = now if self.unscored and not is_decoding else math.nan
