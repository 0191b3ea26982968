"""What a tuner is: measurements in, choices out, a state that is JSON; no JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import Strategy

State = dict[str, Any]
MOST_ROUNDS = 1 << 30  # of a chunk whose length others decide
EXPLORATION_ROUNDS = 4  # of a chunk that explores


BUSY = 0.02  # seconds that a host may be busy with dispatching


def is_timed(seconds: float, doubt: float) -> bool:
    """Whether these seconds, which may be off by so much, tell anything; what a host does besides compiling is let pass."""
    return doubt < max(seconds / 2, BUSY)


class Measurement(NamedTuple):
    """A chunk that was read. `batch` rows were compiled, `live` decoded (mean); `row_rounds` sums live rows over rounds.

    hits[D, N, K] counts accepted nodes by depth - 1, rank by score in the tree, and largest sibling rank on the way.
    `number` counts the programs of the group; `predicted` (tokens per second) and `reason` are of the choice. `seconds` may
    be off by `doubt`: nobody looked for so long whether the chunk, or what it waited for, was done; by any time when no round
    of the program had run before. When the rows `is_moved` to other numbers of rows or slots, they hold that too. What the
    drafter took before to learn of tokens that were decoded without it is in `catch_up`, unless that was doubtful.
    """

    group: int
    batch: int
    live: float
    slots: int
    strategy: Strategy
    rounds: int
    row_rounds: float
    tokens: int
    seconds: float
    hits: np.ndarray
    number: int = 0
    predicted: float = math.nan
    reason: str = ""
    doubt: float = 0.0
    is_moved: bool = False
    catch_up: float = 0.0
    is_exploring: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether `seconds` tells what the chunk took."""
        return is_timed(self.seconds, self.doubt)


class Choice(NamedTuple):
    """A strategy, the tokens per second that the tuner expects of it (nan: it does not know), why, and for how many rounds.

    `is_exploring`: it is tried in order to measure it.
    """

    strategy: Strategy
    predicted: float
    reason: str
    rounds: int = MOST_ROUNDS
    is_exploring: bool = False


class Tuner(NamedTuple):
    """init() -> state; choose(state, live, batch, slots) -> (state, Choice); observe(state, Measurement) -> state;
    renew(state) -> state after the policy's or the drafter's weights changed; usable(batch, fewest_live) -> the strategies
    besides plain decoding that `choose` may return for so many rows of which at least so many are live."""

    init: Callable[[], State]
    choose: Callable[[State, int, int, int], tuple[State, Choice]]
    observe: Callable[[State, Measurement], State]
    renew: Callable[[State], State]
    usable: Callable[[int, int], Sequence[Strategy]]


def unchanged(state: State, *_: Any) -> State:
    """What a tuner learns that learns nothing."""
    return state
