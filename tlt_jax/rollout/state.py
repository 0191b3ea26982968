"""What the host side of a rollout writes down: the job, views and decisions, what a group knows, events. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from tlt_jax.rollout.events import Decision
from tlt_jax.rollout.executables import Executables, Key
from tlt_jax.rollout.queue import WorkQueue
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.spec_decode.decode import DecodeState, Report, Weights
from tlt_jax.spec_decode.interface import PyTree
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.tuner.interface import MOST_ROUNDS


@dataclass(frozen=True)
class GroupView:
    """What a decision is made from.

    `tokens`: most that a sequence may have when the chunk begins, `limit`: that any may ever have; `widest`: slots of the
    prefills that join; `rounds`: of a chunk; `waiting`: whether samples wait.
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

    def need(self, strategy: Strategy, rounds: int = MOST_ROUNDS) -> int:
        """Cache slots that a chunk of this strategy and so many rounds may fill."""
        return max(self.widest, min(self.tokens + min(rounds, self.rounds) * strategy.path, self.limit))


Decider = Callable[[GroupView], Decision]
Guide = Callable[[tuple[int | None, ...]], PyTree]  # uids of the rows of a chunk that drafts -> what the drafter is given


@dataclass(frozen=True)
class GroupContext:
    """The fixed side of the machine."""

    index: int
    registry: Executables
    weights: Weights
    job: RolloutRequest
    dealer: WorkQueue
    decide: Decider
    guide: Guide = lambda rows: ()


@dataclass(frozen=True)
class Running:
    """A sequence in a row: tokens known so far (with the prompt), and how many it may have."""

    uid: int
    tokens: int
    limit: int


@dataclass(frozen=True)
class Prefilled:
    """Keys and values of prompts, on the device; `rows` says where each prompt is."""

    rows: dict[int, int]
    sizes: tuple[int, int]
    values: PyTree


@dataclass(frozen=True)
class Joining:
    """Samples that enter together: from one prefill, which is still to be made when `values` is None."""

    source: Prefilled
    rows: tuple[tuple[int, int], ...]  # (row, uid)


@dataclass(frozen=True)
class InFlight:
    """A program that was dispatched and not read yet; `rows` are the uids that its rows hold, `most` the tokens of any.

    `key` names the program of a chunk.
    """

    number: int
    kind: str
    marker: jax.Array
    rows: tuple[int | None, ...] = ()
    report: Report | None = None
    most: int = 0
    key: Key | None = None


@dataclass(frozen=True)
class GroupState:
    """What the host knows of a group. `device` is the state after all that was dispatched; `rows` lag behind it.

    `behind` is the most tokens that the drafter may lack of any row.
    """

    device: DecodeState | None = None
    batch: int = 0
    slots: int = 0
    rows: tuple[Running | None, ...] = ()
    held: tuple[Prefilled, ...] = ()
    flights: tuple[InFlight, ...] = ()
    decision: Decision | None = None
    joining: tuple[Joining, ...] = ()
    dispatched: int = 0
    retired: int = 0
    exhausted: bool = False
    behind: int = 0
    is_moved: bool = False  # to other numbers of rows or slots, since the last chunk

    @property
    def is_done(self) -> bool:
        return not (self.flights or self.decision or any(self.rows))
