"""The one loop that drives every data group of a process, and what a rollout returns; knows no network."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt_jax.spec_decode import group as machine
from tlt_jax.spec_decode.chunk import RUNNING, TRUNCATED
from tlt_jax.spec_decode.records import (
    Decided,
    Decider,
    Decision,
    Dispatched,
    Event,
    Group,
    GroupState,
    Retired,
    Tokens,
    View,
)
from tlt_jax.spec_decode.tree import PLAIN, Strategy

POLL_SECONDS = 2e-4


class Interrupted(Exception):
    """The rollout was asked to stop before it was done; nothing of it is kept."""


@dataclass(frozen=True)
class Completion:
    """An answer: its tokens (the EOS or stop sequence too), their log-probs, and "stop" or "length"."""

    uid: int
    prompt: int
    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str


@dataclass(frozen=True)
class Span:
    """What a group's devices did, in seconds since the rollout began: "prefill" or "decode"."""

    group: int
    kind: str
    start: float
    end: float
    batch: int


@dataclass(frozen=True)
class RolloutResult:
    """All completions, ordered by uid, with the timeline, the decisions and totals."""

    completions: list[Completion]
    spans: list[Span]
    decisions: list[Decision]
    stats: dict[str, float]


@dataclass
class Ledger:
    """What the events add up to; the only part of a rollout that reads a clock."""

    groups: int
    samples: int
    on_finish: Callable[[Completion], None] | None
    begin: float = field(default_factory=time.perf_counter)
    parts: dict[int, list[Tokens]] = field(default_factory=dict)
    completions: dict[int, Completion] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    open: dict[tuple[int, int], tuple[Dispatched, float]] = field(default_factory=dict)
    totals: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.free_at = [0.0] * self.groups

    def record(self, group: int, events: Sequence[Event]) -> None:
        """Takes note of the events of one `advance`."""
        now = time.perf_counter() - self.begin
        for event in events:
            match event:
                case Decided(decision):
                    self.decisions.append(decision)
                case Dispatched(number):
                    self.open[group, number] = (event, now)
                case Retired(number, kind, rounds):
                    dispatched, at = self.open.pop((group, number))
                    self.spans.append(Span(group, kind, max(at, self.free_at[group]), now, dispatched.batch))
                    self.free_at[group] = now
                    self.totals.update({"rounds": rounds, "row_rounds": rounds * dispatched.batch, kind: 1})
                case Tokens(uid):
                    self.parts.setdefault(uid, []).append(event)
                    self.totals["tokens"] += len(event.tokens)
                    if event.finish != RUNNING:
                        self.finish(uid, event.finish)

    def finish(self, uid: int, code: int) -> None:
        """The sequence is complete: reports it."""
        parts = self.parts.pop(uid)
        completion = Completion(
            uid,
            *divmod(uid, self.samples),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            "length" if code == TRUNCATED else "stop",
        )
        self.completions[uid] = completion
        if self.on_finish:
            self.on_finish(completion)

    def result(self, groups: Sequence[Group]) -> RolloutResult:
        """Everything, in order of uid."""
        seconds = time.perf_counter() - self.begin
        registry = groups[0].registry
        stats = {
            "tokens": self.totals["tokens"],
            "seconds": seconds,
            "tokens_per_second": self.totals["tokens"] / seconds,
            "rounds": self.totals["rounds"],
            "row_rounds": self.totals["row_rounds"],
            "chunks": self.totals["decode"],
            "prefills": self.totals["prefill"],
            "programs": len(registry.executables),
        }
        completions = [self.completions[uid] for uid in sorted(self.completions)]
        return RolloutResult(completions, self.spans, self.decisions, stats)


def rollout(
    groups: Sequence[Group],
    on_finish: Callable[[Completion], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> RolloutResult:
    """Decodes the groups' job to its end; one thread, no group waits for another."""
    states = [GroupState() for _ in groups]
    ledger = Ledger(len(groups), groups[0].job.samples, on_finish)
    busy = True
    while busy:
        if interrupted and interrupted():
            raise Interrupted("the rollout was interrupted")
        happened = False
        for i, group in enumerate(groups):
            states[i], events = machine.advance(group, states[i])
            ledger.record(i, events)
            happened |= bool(events)
        busy = not all(state.is_done for state in states)
        if busy and not happened:
            time.sleep(POLL_SECONDS)
    return ledger.result(groups)


def bucketed(batches: Sequence[int], slots: Sequence[int], strategy: Strategy = PLAIN) -> Decider:
    """The decider with one strategy: the smallest buckets that fit; the cache shrinks only together with the batch."""

    def decide(view: View) -> Decision:
        batch = next(size for size in batches if size >= view.live)
        room = next(size for size in slots if size >= view.longest)
        if batch == view.batch:
            room = max(room, view.slots)
        return Decision(view.group, view.retired, batch, room, strategy)

    return decide
