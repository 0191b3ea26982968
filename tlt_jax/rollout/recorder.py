"""What happens in a rollout, as events, and the answers, timeline and measurements that are recorded from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from tlt_jax.spec_decode.decode_state import (
    BROKEN,
    RUNNING,
    STOPPED,
    TRUNCATED,
    TURN,
    Features,
)
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.verify import BINS, Stats
from tlt_jax.tuner import cost_model
from tlt_jax.tuner.interface import MOST_ROUNDS, Cell, Measurement, is_timed

if TYPE_CHECKING:
    from tlt_jax.rollout.selection import KeptPrompts

# Finish reasons: the answer is complete, was cut at its limit, or the policy's logits were not finite.
STOP, LENGTH, NONFINITE = "stop", "length", "nonfinite"
FINISH = {STOPPED: STOP, TRUNCATED: LENGTH, BROKEN: NONFINITE}
IDLE_ROUND = 0.01  # expected time of a chunk without a live row, in rounds


@dataclass(frozen=True)
class Decision:
    """Shape of the next chunk, and the samples that join before it; taken after `retired` chunks were read.

    The chunk ends once fewer than `min_live` sequences are live, since waiting samples can then take
    their rows or a smaller batch holds them, and after at most `rounds` rounds. A rollout can be
    replayed from its decisions. `predicted`: tokens per second with `live` rows, nan when unknown.
    `least_slots`: slots of the smallest cache bucket that fits.
    """

    group: int
    retired: int
    batch: int
    slots: int
    strategy: Strategy
    min_live: int = 1
    rounds: int = MOST_ROUNDS
    joining: tuple[int, ...] = ()
    live: int = 0
    least_slots: int = 0
    predicted: float = math.nan
    reason: str = ""
    is_exploring: bool = False


@dataclass(frozen=True)
class Decided:
    """A decision was taken."""

    decision: Decision


@dataclass(frozen=True)
class Dispatched:
    """A program was queued on the group's devices: "prefill", "catch_up", "decode", "harvest", or a kind of idle work.

    `decision`: the chunk's, None for other programs; `is_moved`: whether the state was resized before
    the chunk.
    """

    number: int
    kind: str
    batch: int
    slots: int
    decision: Decision | None = None
    is_moved: bool = False

    @property
    def strategy(self) -> Strategy:
        return self.decision.strategy if self.decision else PLAIN


@dataclass(frozen=True)
class Retired:
    """A program is done and was read.

    For a chunk: its rounds, emitted tokens and acceptance statistics. `is_untimed`: its time is unreliable, since it is the
    program's first run or a compilation took cores from its devices.
    """

    number: int
    kind: str
    rounds: int = 0
    tokens: int = 0
    stats: Stats | None = None
    is_untimed: bool = False


class Emitted(NamedTuple):
    """New tokens int32[n] of a sequence, their log-probs, and RUNNING or the reason why it ended.

    `accepted`: how many of the tokens a drafter had proposed. `record`: the target's of the token before each. `support`:
    see decode.Report.
    """

    uid: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: int
    accepted: int = 0
    record: np.ndarray | None = None
    support: np.ndarray | None = None


@dataclass(frozen=True)
class PromptsRecorded:
    """The target's record of all tokens of these prompts but the last, see interface.TokenRecord.

    Key ~uid: of a sequence with its turns and replies so far.
    """

    prompts: dict[int, np.ndarray]


class Replied(NamedTuple):
    """A reply to a turn of the policy, which is appended to its sequence; None: the sequence has ended."""

    uid: int
    tokens: np.ndarray | None


@dataclass(frozen=True)
class Ended:
    """A sequence has ended, and not with logits that are not finite; emitted only with a harvester.

    Also one that waits for a reply when its row is lent: it may go on, and then ends again. None of one that ends without a
    row. `row`: its current row; `length`: its tokens, with the prompt's. It has features of positions 0 to length - 2.
    """

    uid: int
    row: int
    length: int


@dataclass(frozen=True)
class Harvested:
    """Windows of ended sequences, (uid, first position) of each in order, were copied out of the decoding state.

    `values` may hold padding after them. The listener owns them from here on; `marker`, one of
    them, is ready.
    """

    windows: tuple[tuple[int, int], ...]
    values: Features
    marker: jax.Array


@dataclass(frozen=True)
class WentIdle:
    """The group has finished its part of the rollout; its decoding state is released."""


class ReplyRecorded(NamedTuple):
    """The target's record of the token before each of the last reply's, where this was appended alone."""

    uid: int
    record: np.ndarray


Event = (
    Decided
    | Dispatched
    | Retired
    | Emitted
    | Replied
    | ReplyRecorded
    | PromptsRecorded
    | Ended
    | Harvested
    | WentIdle
)


@dataclass(frozen=True)
class Poll:
    """One poll of one group, in seconds of the rollout's clock; polls without events are reported too.

    The time since the previous poll bounds the error of a measurement. `taken`: see driver.Clock.
    """

    group: int
    began: float
    ended: float
    events: tuple[Event, ...]
    taken: float = 0.0


Listener = Callable[[Poll], None]  # called after the dispatches of the poll


@dataclass(frozen=True)
class Completion:
    """An answer: its tokens (with the EOS or stop sequence), their log-probs, and its finish reason, one of FINISH.

    `accepted`: how many of the tokens a drafter had proposed. `record`: the policy's of prompt and answer without the last
    token, such as the experts of each; None: it keeps none. `support`: int32[tokens, K] ids of the tokens from which each was
    drawn, -1 after the last; None: not asked for. `replies`: first and end of what others wrote among the tokens, whose
    log-probs are 0, and which have no support.
    """

    uid: int
    prompt: int
    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str
    accepted: int = 0
    record: np.ndarray | None = None
    replies: tuple[tuple[int, int], ...] = ()
    support: np.ndarray | None = None

    @property
    def own(self) -> np.ndarray:
        """bool[tokens]: which the policy chose."""
        found = np.ones(len(self.tokens), bool)
        for first, end in self.replies:
            found[first:end] = False
        return found


@dataclass(frozen=True)
class Span:
    """A span of the timeline of a group's devices, in seconds since the start of the rollout.

    `kind` is the program's, or "speculate" for a chunk that drafts; `number` the index of the program within its group,
    -1, -2, ... of idle work.
    """

    group: int
    kind: str
    start: float
    end: float
    batch: int
    number: int


@dataclass(frozen=True)
class RolloutResult:
    """All completions, ordered by uid, with the timeline, the decisions, and totals.

    `partial`: uid -> int32[n], the tokens so far of the sequences that a stopped rollout did not finish. `measurements`: one
    for each chunk that ran a round. `reliability`: float[3, bins], by bins of the acceptance probability that scores
    predict: drafted nodes, the sum of their predicted probabilities, and accepted nodes (see Stats). `compile_waits`: by
    data group, start and end of its host's waits for a compilation, on the clock of the spans. `choice`: the prompts whose
    completions these are, of a rollout that selects; the answers to others are left out.
    """

    completions: list[Completion]
    spans: list[Span]
    decisions: list[Decision]
    measurements: list[Measurement]
    reliability: np.ndarray
    stats: dict[str, float]
    partial: dict[int, np.ndarray] = field(default_factory=dict)
    compile_waits: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    choice: KeptPrompts | None = None


@dataclass
class RolloutRecorder:
    """Records every poll; `begin`: start of the rollout, in seconds of its clock.

    `observe` is called with every measurement, `on_finish` with every complete sequence. Programs of unknown kinds become
    spans of the timeline.
    """

    samples: int
    begin: float
    on_finish: Callable[[Completion], None] | None = None
    observe: Callable[[Measurement], None] = lambda measurement: None
    parts: dict[int, list[Emitted]] = field(default_factory=dict)
    completions: dict[int, Completion] = field(default_factory=dict)
    prompts: dict[int, np.ndarray] = field(default_factory=dict)  # their records
    prefilled: dict[int, int] = field(
        default_factory=dict
    )  # uid -> parts of it that such a record has
    replies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # tokens of each answer, as they ended
    spans: list[Span] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    reliability: np.ndarray = field(default_factory=lambda: np.zeros((3, BINS)))
    open: dict[tuple[int, int], tuple[Dispatched, float, float]] = field(default_factory=dict)
    totals: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        by_group = [Counter() for _ in range(4)]
        self.polled, self.free_at, self.uncertainty, self.catch_up = by_group

    def record(self, poll: Poll) -> None:
        """Adds one poll, which read the programs that were ready at `began`, and dispatched others until `ended`."""
        group, polled, now = poll.group, poll.began - self.begin, poll.ended - self.begin
        if not poll.events:
            self.polled[group] = polled
            return
        retired = [event for event in poll.events if isinstance(event, Retired)]
        times, uncertainty = self.shares(group, retired, polled)
        for event in poll.events:
            match event:
                case Emitted(uid):
                    self.parts.setdefault(uid, []).append(event)
                    if event.finish not in (RUNNING, TURN):
                        self.finish(uid, event.finish)
                case Replied(uid, None):
                    self.finish(uid, STOPPED)
                case Replied(uid, tokens):
                    first = sum(len(part.tokens) for part in self.parts[uid])
                    self.replies.setdefault(uid, []).append((first, first + len(tokens)))
                    silent = np.zeros(len(tokens), self.parts[uid][0].logprobs.dtype)
                    support = self.parts[uid][0].support
                    if support is not None:
                        support = np.full((len(tokens), support.shape[1]), -1, np.int32)
                    part = Emitted(uid, tokens, silent, RUNNING, support=support)
                    self.parts[uid].append(part)
                case ReplyRecorded(uid, record):
                    self.parts[uid][-1] = self.parts[uid][-1]._replace(record=record)
                case PromptsRecorded(prompts):
                    self.prompts |= prompts
                    for key in prompts:  # what a prefill has replaces what rounds had
                        if key < 0:
                            self.prefilled[~key] = len(self.parts[~key])
                case Decided(decision):
                    self.decisions.append(decision)
                case Dispatched(number):
                    self.open[group, number] = (event, polled, now)
                case Retired(number):
                    dispatched = self.open.pop((group, number))[0]
                    self.retire(group, event, dispatched, *times[number], uncertainty, poll.taken)

    def shares(
        self, group: int, retired: Sequence[Retired], polled: float
    ) -> tuple[dict[int, tuple[float, float]], float]:
        """Start and end of the programs that were read in one poll, which share its time in proportion to their expected work.

        Also the uncertainty of these, in seconds. A program was queued at some time during a poll, and it and its predecessor
        ended at some time since the poll before: long times when the host was compiling.
        """
        before, self.polled[group] = self.polled[group], polled
        if not retired:
            return {}, 0.0
        _, earliest, queued = self.open[group, retired[0].number]
        start = max(queued, self.free_at[group])
        uncertainty = start - max(earliest, self.free_at[group] - self.uncertainty[group])
        ends = [polled]
        if len(retired) > 1:
            work = [expected_work(self.open[group, one.number][0], one) for one in retired]
            apart = (polled - start) * np.cumsum(work)[:-1] / np.sum(work)
            ends = [*(start + apart).tolist(), polled]
        self.free_at[group], self.uncertainty[group] = polled, polled - max(before, earliest)
        pairs = pairwise([start, *ends])
        times = {one.number: pair for one, pair in zip(retired, pairs, strict=True)}
        return times, uncertainty + self.uncertainty[group]

    def retire(
        self,
        group: int,
        retired: Retired,
        dispatched: Dispatched,
        start: float,
        end: float,
        uncertainty: float,
        taken: float = 0.0,
    ) -> None:
        """Records a finished program: a span of the timeline, and a measurement for a chunk."""
        kind, strategy = retired.kind, dispatched.strategy
        label = "speculate" if kind == "decode" and strategy != PLAIN else kind
        self.spans.append(Span(group, label, start, end, dispatched.batch, retired.number))
        self.totals["rounds"] += retired.rounds
        self.totals["row_rounds"] += retired.rounds * dispatched.batch
        self.totals[kind] += 1
        if kind == "catch_up" and is_timed(end - start, uncertainty):
            self.catch_up[group] += end - start
        if retired.stats is None or not retired.rounds:
            return
        decision = dispatched.decision
        live_rounds = int(np.sum(retired.stats.row_rounds))
        measurement = Measurement(
            group=group,
            batch=dispatched.batch,
            live=live_rounds / retired.rounds,
            slots=dispatched.slots,
            strategy=strategy,
            rounds=retired.rounds,
            row_rounds=live_rounds,
            tokens=retired.tokens,
            seconds=end - start,
            uncertainty=math.inf if retired.is_untimed else uncertainty,
            hits=np.asarray(retired.stats.hits),
            number=retired.number,
            predicted=decision.predicted,
            reason=decision.reason,
            is_moved=dispatched.is_moved,
            catch_up=self.catch_up[group],
            least_slots=decision.least_slots,
            planned_live=decision.live,
            is_exploring=decision.is_exploring,
            taken=taken,
        )
        self.catch_up[group] = 0.0
        self.measurements.append(measurement)
        if strategy != PLAIN:  # else nothing was drafted
            stats = retired.stats
            self.totals["declined"] += int(stats.declined)
            self.reliability += np.stack([stats.nodes, stats.promised, stats.accepted])
        self.observe(measurement)

    def finish(self, uid: int, code: int) -> None:
        """Records and reports a complete sequence."""
        parts, record = self.parts.pop(uid), None
        if parts[0].record is not None:
            begun = self.prefilled.pop(uid, 0)
            first = self.prompts.pop(~uid) if begun else self.prompts[uid // self.samples]
            record = np.concatenate([first, *(part.record for part in parts[begun:])])
        support = None
        if parts[0].support is not None:
            support = np.concatenate([part.support for part in parts])
        completion = Completion(
            uid,
            *divmod(uid, self.samples),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            FINISH[code],
            sum(part.accepted for part in parts),
            record,
            tuple(self.replies.pop(uid, ())),
            support,
        )
        self.completions[uid] = completion
        self.lengths.append(len(completion.tokens))
        if self.on_finish:
            self.on_finish(completion)

    def result(self, end: float) -> RolloutResult:
        """The result at `end` on the rollout's clock; completions in order of uid."""
        seconds = end - self.begin
        speculated = [measured for measured in self.measurements if measured.strategy != PLAIN]
        drafted = sum(measured.tokens for measured in speculated)
        open_tokens = [len(part.tokens) for parts in self.parts.values() for part in parts]
        tokens = sum(self.lengths) + sum(open_tokens)
        stats = {
            "tokens": tokens,
            "speculated_tokens": drafted,
            "accept_length": drafted / max(sum(measured.row_rounds for measured in speculated), 1),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "rounds": self.totals["rounds"],
            "row_rounds": self.totals["row_rounds"],
            "chunks": self.totals["decode"],
            "prefills": self.totals["prefill"],
            "declined": self.totals["declined"],
        }
        completions = [self.completions[uid] for uid in sorted(self.completions)]
        partial = {
            uid: np.concatenate([part.tokens for part in parts])
            for uid, parts in self.parts.items()
        }
        return RolloutResult(
            completions,
            self.spans,
            self.decisions,
            self.measurements,
            self.reliability,
            stats,
            partial,
        )


def expected_work(dispatched: Dispatched, retired: Retired) -> float:
    """Expected time of a program, up to a common factor.

    A prefill counts as a round with as many nodes as it has tokens, a catch-up as a plain round.
    """
    strategy, rounds = dispatched.strategy, retired.rounds + IDLE_ROUND
    if retired.kind == "prefill":
        strategy, rounds = replace(PLAIN, nodes=dispatched.slots), 1
    if retired.kind == "catch_up":
        rounds = 1
    return rounds * math.exp(
        cost_model.predict({}, [Cell(dispatched.batch, dispatched.slots, strategy)])[0][0]
    )
