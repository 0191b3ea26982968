"""What the host side of a rollout writes down: the job, views and decisions, what a group knows, events. Data only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from tlt_jax.rollout.executables import Key, Registry
from tlt_jax.rollout.queue import Dealer
from tlt_jax.spec_decode.decode import DecodeState, Report, Weights
from tlt_jax.spec_decode.stats import Stats
from tlt_jax.spec_decode.stopping import Rules
from tlt_jax.spec_decode.tree import PLAIN, PyTree, Strategy
from tlt_jax.tuner.exploration import MOST_ROUNDS


@dataclass(frozen=True)
class Job:
    """What a rollout decodes, the same for every group: prompts, longest answer and samples of each, keys by uid."""

    prompts: tuple[np.ndarray, ...]
    samples: int
    max_new_tokens: tuple[int, ...]
    keys: np.ndarray
    rules: Rules
    rounds: int
    in_flight: int
    capacity: int


@dataclass(frozen=True)
class View:
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


@dataclass(frozen=True)
class Decision:
    """Shape of the next chunk, and the samples that join before it; taken after `retired` chunks were read.

    The chunk ends once less than `floor` sequences are live, as others may then take their rows, or fewer rows do, and after
    `rounds` if those are fewer than the job's. It is data: a rollout can be replayed from its decisions.
    """

    group: int
    retired: int
    batch: int
    slots: int
    strategy: Strategy
    floor: int = 1
    rounds: int = MOST_ROUNDS
    joining: tuple[int, ...] = ()
    predicted: float = math.nan  # tokens per second
    reason: str = ""


Decider = Callable[[View], Decision]
Guide = Callable[[tuple[int | None, ...]], PyTree]  # uids of the rows of a chunk that drafts -> what the drafter is given


@dataclass(frozen=True)
class Group:
    """The fixed side of the machine."""

    index: int
    registry: Registry
    weights: Weights
    job: Job
    dealer: Dealer
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
class Flight:
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
    flights: tuple[Flight, ...] = ()
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


@dataclass(frozen=True)
class Dispatched:
    """A program was queued on the group's devices; of a chunk also its strategy, what was predicted of it and why, and
    whether its rows were moved to other numbers of rows or slots before.
    """

    number: int
    kind: str
    batch: int
    slots: int
    strategy: Strategy = PLAIN
    predicted: float = math.nan
    reason: str = ""
    is_moved: bool = False


@dataclass(frozen=True)
class Retired:
    """A program is done and was read.

    Of a chunk: its rounds, the tokens that it emitted, what its trees were worth, and whether no round of it had run before.
    """

    number: int
    kind: str
    rounds: int = 0
    tokens: int = 0
    stats: Stats | None = None
    is_first: bool = False


@dataclass(frozen=True)
class Tokens:
    """New tokens of a sequence; `finish` is RUNNING or why it ended."""

    uid: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: int


@dataclass(frozen=True)
class Decided:
    """A decision was taken."""

    decision: Decision


Event = Dispatched | Retired | Tokens | Decided
