"""Host state of one data group: the fixed context of a rollout, and the state that `advance` replaces."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import jax

from tlt_jax.rollout.events import Decision
from tlt_jax.rollout.executables.protocols import Program, Programs
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.queue import Taken
from tlt_jax.spec_decode.decode import DecodeState, Report, Weights
from tlt_jax.spec_decode.harvest import Features
from tlt_jax.spec_decode.interface import PyTree
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.tuner.interface import MOST_ROUNDS, Cell, Measurement


@dataclass(frozen=True)
class GroupView:
    """What a decision is made from.

    `tokens`: most that a sequence may have when the chunk begins, `limit`: that any may ever have; `widest`: slots of the
    prefills that join; `rounds`: of a chunk; `waiting`: whether samples wait; `sources`: prompts and width of the prefills
    that sequences join from; `finished`: sequences that ended here.
    """

    group: int
    retired: int
    live: int
    tokens: int
    limit: int
    widest: int
    rounds: int
    batch: int
    slots: int
    waiting: bool = False
    sources: tuple[tuple[int, int], ...] = ()
    finished: int = 0

    def need(self, strategy: Strategy, rounds: int = MOST_ROUNDS) -> int:
        """Cache slots that a chunk of this strategy and so many rounds may fill."""
        return max(
            self.widest, min(self.tokens + min(rounds, self.rounds) * strategy.path, self.limit)
        )


class CandidatePrograms(Protocol):
    """The programs that a group may go on with."""

    @property
    def version(self) -> Hashable:
        """Changes with the prices."""

    def compile_cost(self, cell: Cell) -> float:
        """What compiling costs before a chunk of this cell, in seconds; 0: all its programs are there."""

    def chunk_compile_cost(self, cell: Cell) -> float:
        """The same of the chunk alone, whatever rows and slots the group has; above 0 only where `compile_cost` is."""


class Queue(Protocol):
    """Deals the samples of the prompts to groups."""

    def take(self, free: int, prefilled: Iterable[int] = ()) -> Taken: ...


class Decider(Protocol):
    """Takes decisions, and learns from what the chunks measured; may serve several rollouts."""

    def worth_compiling(self, view: GroupView, candidates: CandidatePrograms) -> Cell | None: ...

    def decide(self, view: GroupView, candidates: CandidatePrograms) -> Decision: ...

    def observe(self, measurement: Measurement) -> None: ...


class Harvester(Protocol):
    """Says which features of a finished sequence are copied out of the decoding state, in windows of `width` positions.

    Each width compiles its own program. Positions beyond the sequence hold undefined values.
    """

    width: int

    def wanted(self, uid: int, length: int) -> Sequence[int]:
        """First positions of the windows worth keeping; asked once, when the sequence of `length` tokens was read as ended."""


def no_context(rows: Sequence[int | None]) -> PyTree:
    """The host context of a drafter that needs none."""
    return ()


@dataclass(frozen=True)
class Needs:
    """What a drafter needs of the host.

    `host_context`: uids of the rows of a chunk that drafts (None: an empty row) -> what the drafter is given;
    `catches_up`: whether it must learn of tokens that were decoded without it.
    """

    host_context: Callable[[Sequence[int | None]], PyTree] = no_context
    catches_up: bool = False


@dataclass(frozen=True)
class GroupContext:
    """The fixed side of a group in a rollout.

    `needs`: of the drafters, by the names that strategies have for them; `remembers`: whether any reads the history.
    Without a `harvester` nothing is copied out of the decoding state. `is_in_order`: what is read when, and so what
    each decision knows, follows from counts alone.
    """

    index: int
    programs: Programs
    weights: Weights
    request: RolloutRequest
    queue: Queue
    planner: Decider
    needs: Mapping[str, Needs] = field(default_factory=lambda: {"": Needs()})
    remembers: bool = False
    harvester: Harvester | None = None
    is_in_order: bool = False


@dataclass(frozen=True)
class Running:
    """A sequence in a row: tokens known so far (with the prompt), and how many it may have."""

    uid: int
    tokens: int
    limit: int


@dataclass(frozen=True)
class Prefilled:
    """Keys and values of prompts, on the device; `rows` says where each prompt is, `sizes` prompts and width."""

    rows: dict[int, int]
    sizes: tuple[int, int]
    values: PyTree


@dataclass(frozen=True)
class Joining:
    """Samples that enter together: from one prefill, which is still to be made when `values` is None."""

    source: Prefilled
    rows: tuple[tuple[int, int], ...]  # (row, uid)


@dataclass(frozen=True)
class Window:
    """What is to be copied out of a row that is free, from this position on, before it is used again."""

    uid: int
    row: int
    start: int


@dataclass(frozen=True)
class InFlight:
    """A program that was dispatched and not read yet, and how many `programs` are done when it is.

    Of a chunk: `rows` are the uids that its rows hold, `most` the tokens of any, `program` its name. Of a harvest: the
    windows, and their `values`.
    """

    number: int
    kind: str
    marker: jax.Array
    programs: int = 1
    rows: tuple[int | None, ...] = ()
    report: Report | None = None
    most: int = 0
    program: Program | None = None
    compiling_alongside: bool = False
    windows: tuple[Window, ...] = ()
    values: Features | None = None


@dataclass(frozen=True)
class GroupState:
    """What the host knows of a group. `device` is the state after all that was dispatched; `rows` lag behind it.

    `drafter_lag` is the most tokens that the drafter whose state it holds may lack of any row; `started` the prompts whose
    samples are all started; `unmarked` counts programs on `device` since the last one in flight that took it: they end when
    `device` is there. `windows` wait to be harvested, from rows as they are now: before them no row moves or is used again.
    """

    device: DecodeState | None = None
    batch: int = 0
    slots: int = 0
    rows: tuple[Running | None, ...] = ()
    prefills: tuple[Prefilled, ...] = ()
    flights: tuple[InFlight, ...] = ()
    decision: Decision | None = None
    joining: tuple[Joining, ...] = ()
    windows: tuple[Window, ...] = ()
    dispatched: int = 0
    retired: int = 0
    started: frozenset[int] = frozenset()
    is_exhausted: bool = False
    drafter_lag: int = 0
    unmarked: int = 0
    finished: int = 0  # sequences that ended here
    is_moved: bool = False  # to other numbers of rows or slots, since the last chunk
    is_blocked: bool = False  # nothing more can be dispatched before something in flight is read
    is_released: bool = False  # nothing was left to do; `device` was freed

    @property
    def unawaited(self) -> int:
        """Programs that were dispatched and may not be done."""
        return sum(flight.programs for flight in self.flights) + self.unmarked

    @property
    def is_idle(self) -> bool:
        """Nothing in flight, no live row, nothing left to take or to harvest."""
        return self.is_exhausted and not (self.is_busy or any(self.rows))

    @property
    def is_busy(self) -> bool:
        """Something is in flight, or will be dispatched whatever comes."""
        return bool(self.flights or self.decision or self.windows)


def queued(state: GroupState, flight: InFlight) -> GroupState:
    """The state with one more program in flight that consumes `device`; it ends after those before it."""
    flight = replace(flight, programs=1 + state.unmarked)
    return replace(
        state, flights=(*state.flights, flight), dispatched=state.dispatched + 1, unmarked=0
    )
