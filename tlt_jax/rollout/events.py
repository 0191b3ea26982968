"""What happens in a rollout, as data: decisions, and programs that were dispatched and read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tlt_jax.spec_decode.stats import Stats
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner.interface import MOST_ROUNDS


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
class Emitted:
    """New tokens of a sequence; `finish` is RUNNING or why it ended."""

    uid: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: int


@dataclass(frozen=True)
class Decided:
    """A decision was taken."""

    decision: Decision


Event = Dispatched | Retired | Emitted | Decided
