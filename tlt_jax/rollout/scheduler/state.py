"""Host state of one data group: the fixed context of a rollout, and the state that `advance` replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

from tlt_jax.spec_decode.interface import PyTree
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.tuner.interface import MOST_ROUNDS

if TYPE_CHECKING:
    import numpy as np

    from tlt_jax.rollout.dialogue import Dialogue
    from tlt_jax.rollout.executables.compilation import Executables
    from tlt_jax.rollout.executables.programs import Program
    from tlt_jax.rollout.recorder import Decision
    from tlt_jax.rollout.request import RolloutRequest
    from tlt_jax.rollout.scheduler.planner import Planner
    from tlt_jax.rollout.scheduler.queue import DealtQueue, WorkQueue
    from tlt_jax.spec_decode.decode import Report
    from tlt_jax.spec_decode.decode_state import DecodeState, Features, Weights


@dataclass(frozen=True)
class GroupView:
    """The input of a decision.

    `tokens`: most tokens of a sequence at the start of the chunk; `limit`: most that any sequence may ever have; `widest`:
    slots of the widest joining prefill; `rounds`: of a chunk; `waiting`: whether samples wait; `sources`: prompts and width
    of the prefills that sequences join from; `finished`: sequences that this group has finished.
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
        """Cache slots that a chunk of this strategy with at most `rounds` rounds may fill."""
        return max(
            self.widest, min(self.tokens + min(rounds, self.rounds) * strategy.path, self.limit)
        )


class Harvester(Protocol):
    """Selects the features of a finished sequence that are copied out of the decoding state, in windows of `width` positions.

    Each width compiles its own program. Positions beyond the sequence hold undefined values.
    """

    width: int

    def wanted(self, uid: int, length: int) -> Sequence[int]:
        """First positions of the windows to keep; called when the sequence of `length` tokens has ended, see Ended."""


def no_context(rows: Sequence[int | None]) -> PyTree:
    """The (empty) host context of a drafter that needs none."""
    return ()


@dataclass(frozen=True)
class Needs:
    """What a drafter needs from the host.

    `host_context`: uids of the rows of a chunk that drafts (None: an empty row) -> the drafter's host input;
    `catches_up`: whether it must process tokens that were decoded without it.
    """

    host_context: Callable[[Sequence[int | None]], PyTree] = no_context
    catches_up: bool = False


@dataclass(frozen=True)
class GroupContext:
    """The constant inputs of a group in a rollout.

    `needs`: needs of the drafters, by their names in strategies; `reads_history`: whether any drafter reads the history.
    Without a `harvester` nothing is copied out of the decoding state. `is_in_order`: programs are read in a fixed order,
    so that the inputs of each decision depend on no clock. `dialogue`: of answers of several turns; None: of one.
    """

    index: int
    programs: Executables
    weights: Weights
    request: RolloutRequest
    queue: WorkQueue | DealtQueue
    planner: Planner
    needs: Mapping[str, Needs] = field(default_factory=lambda: {"": Needs()})
    reads_history: bool = False
    harvester: Harvester | None = None
    is_in_order: bool = False
    dialogue: Dialogue | None = None

    def tokens(self, key: int) -> np.ndarray:
        """The tokens of a prompt, or under the key ~uid those of a sequence that goes on."""
        return self.request.prompts[key] if key >= 0 else self.dialogue.text(~key)


class Running(NamedTuple):
    """A sequence in a row: tokens read so far (with the prompt), and their limit."""

    uid: int
    tokens: int
    limit: int


@dataclass(frozen=True)
class Prefilled:
    """Keys and values of prompts, on the device.

    `rows`: prompt (see GroupContext.tokens) -> row; `sizes`: number of prompts and width.
    """

    rows: dict[int, int]
    sizes: tuple[int, int]
    values: PyTree


@dataclass(frozen=True)
class Joining:
    """Samples that are admitted together, from one prefill; `source.values` is None until it was dispatched."""

    source: Prefilled
    rows: tuple[tuple[int, int], ...]  # (row, uid)


@dataclass(frozen=True)
class WindowCopy:
    """A window to copy out of an ended row, from position `start` on, before the row is used again."""

    uid: int
    row: int
    start: int


@dataclass(frozen=True)
class InFlight:
    """A dispatched program that was not read yet; `programs`: how many are done when it is, with itself.

    For a chunk: `rows` are the uids of its rows, `most` the most tokens that one may get. For a harvest: the `windows`, and
    their `values`. For a prefill: the row of each of its `prompts`. For an append: the `uids` of its rows.
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
    windows: tuple[WindowCopy, ...] = ()
    values: Features | None = None
    prompts: Mapping[int, int] = field(default_factory=dict)
    uids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupState:
    """The host's state of a group. `device` is the decoding state after all dispatched programs; `rows` lag behind it.

    `drafter_lag`: most tokens that the drafter's state may lack in any row; `started`: prompts whose samples are all
    started; `unmarked`: programs that took `device` after the last flight; they are done when `device` is ready. `windows`
    wait to be harvested from the rows as they are now: until then no row moves or is used again. `away`: tokens of the
    sequences that wait for a reply; `back`: sequences that have one; `held`: the row of each of these that still has its
    cache. `appending`: sequences with rows to which the reply is to be appended.
    """

    device: DecodeState | None = None
    batch: int = 0
    slots: int = 0
    rows: tuple[Running | None, ...] = ()
    prefills: tuple[Prefilled, ...] = ()
    flights: tuple[InFlight, ...] = ()
    decision: Decision | None = None
    joining: tuple[Joining, ...] = ()
    windows: tuple[WindowCopy, ...] = ()
    dispatched: int = 0
    retired: int = 0
    started: frozenset[int] = frozenset()
    is_exhausted: bool = False
    may_get_more: bool = False  # the queue gave nothing when asked last, and may give more
    drafter_lag: int = 0
    unmarked: int = 0
    finished: int = 0  # sequences that this group has finished
    is_moved: bool = False  # resized since the last chunk
    is_blocked: bool = False  # nothing can be dispatched before a flight is read
    is_released: bool = False  # the group has finished; `device` was freed
    away: Mapping[int, int] = field(default_factory=dict)
    back: tuple[int, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    appending: tuple[int, ...] = ()

    def replace(self, **changes: Any) -> GroupState:
        """The state with other fields, as dataclasses.replace returns it: a chunk replaces its state a dozen times."""
        changed = object.__new__(GroupState)
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    @property
    def unawaited(self) -> int:
        """Dispatched programs that may still run."""
        return sum(flight.programs for flight in self.flights) + self.unmarked

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight, live, waiting in the queue or to be harvested."""
        return self.is_exhausted and not (self.is_busy or any(self.rows) or self.away or self.back)

    @property
    def is_waiting(self) -> bool:
        """As `is_idle`, but the queue may give more later, or a reply come."""
        may_go_on = self.may_get_more or self.away
        return bool(may_go_on) and not (self.is_busy or any(self.rows) or self.back)

    @property
    def awaits_replies(self) -> bool:
        """Nothing is left to decode until an environment replies."""
        return self.is_waiting and bool(self.away)

    @property
    def is_busy(self) -> bool:
        """Something is in flight, or certain to be dispatched."""
        return bool(self.flights or self.decision or self.windows)


def queued(state: GroupState, flight: InFlight) -> GroupState:
    """The state with one more flight, whose program takes `device` and so ends after all earlier ones."""
    flight = replace(flight, programs=1 + state.unmarked)
    return state.replace(
        flights=(*state.flights, flight), dispatched=state.dispatched + 1, unmarked=0
    )
