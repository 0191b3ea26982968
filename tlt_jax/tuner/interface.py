"""The interface of a tuner: it takes measurements and returns choices; its state is JSON. No JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import Strategy

State = dict[str, Any]
TRAINING, EVALUATION = "training", "evaluation"  # kinds of rollouts
MOST_ROUNDS = 1 << 30  # of a choice that does not limit the length of the chunk
EXPLORATION_ROUNDS = 4  # of an exploration chunk
BUSY = 0.02  # seconds: normal delays of the host, such as dispatching


def is_timed(seconds: float, uncertainty: float) -> bool:
    """True when an uncertainty of `uncertainty` seconds leaves the duration usable.

    It must be below half of the duration, or below BUSY: normal delays of the host never make a
    duration unusable, but compilations do.
    """
    return uncertainty < max(seconds / 2, BUSY)


class Measurement(NamedTuple):
    """One decoding chunk whose results are on the host. All times are wall-clock seconds.

    `batch` is the compiled batch size, `live` the mean number of unfinished rows, `row_rounds` the
    sum of unfinished rows over the rounds, `number` the index of the program within its group.
    `predicted` (tokens per second; nan: no prediction), `reason` and `is_exploring` are those of
    the Choice. hits[D, N, K] counts accepted nodes by depth - 1, rank by score within the tree, and
    largest sibling rank on the path to the node.

    `seconds` may be off by up to `uncertainty`, the time during which the host did not check whether the
    chunk, or the program before it, was done; inf for the first run of a program.
    `is_moved`: `seconds` includes copying the rows to another batch size or cache size.
    `catch_up` is the time the drafter took before the chunk to process the tokens that were decoded
    without it; 0 when that time is unreliable. `least_slots`: the smallest cache bucket that holds
    the rows; 0: unknown. `planned_live`: the live rows of the prediction, of which some may end
    during the chunk, or have ended before it. `taken`: see driver.Clock.
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
    uncertainty: float = 0.0
    is_moved: bool = False
    catch_up: float = 0.0
    least_slots: int = 0
    planned_live: int = 0
    is_exploring: bool = False
    taken: float = 0.0

    @property
    def is_timed(self) -> bool:
        """True when `seconds` is reliable."""
        return is_timed(self.seconds, self.uncertainty)

    @property
    def promised(self) -> float:
        """The predicted tokens per second, scaled to the mean live rows; nan: no prediction."""
        return self.predicted * self.live / (self.planned_live or self.live)


class Choice(NamedTuple):
    """The strategy of the next chunk, and at most how many rounds to run it.

    `predicted`: expected tokens per second of the batch; nan: no prediction. `reason` is for logs.
    `is_exploring`: chosen in order to measure it.
    """

    strategy: Strategy
    predicted: float
    reason: str
    rounds: int = MOST_ROUNDS
    is_exploring: bool = False


class Cell(NamedTuple):
    """A compiled round: rows, cache slots, strategy."""

    batch: int
    slots: int
    strategy: Strategy


class Tuner(NamedTuple):
    """A tuner as pure functions.

    init() -> state. choose(state, live rows, batch, cache slots, arms) -> (state, Choice); `arms`
    are the strategies with compiled programs, () for all. observe(state, Measurement) -> state.
    update_prior(state, estimated={}) -> state, after the weights of the policy or a drafter changed;
    estimated[drafter], for a drafter that strategies name: the expected probability that its draft
    is accepted to depth 1, 2, ..., each given the depth before.
    usable(state, batch, fewest_live) -> the strategies, without plain decoding, that `choose` may
    return for this batch size when at least `fewest_live` rows are unfinished; constant during a
    rollout. predict(state, cells) -> log tokens per second of one live row, and their standard
    errors: float[C] each; the errors are infinite before any seconds were measured.
    `has_fixed_policy`: `choose` may return a strategy that is not among `arms`; only that one is compiled.
    switched(state, kind) -> the state for rollouts of another kind (TRAINING at first, or
    EVALUATION), with separate acceptance evidence and the same costs. is_disturbed(state): whether other
    work slows the machine now: nothing is compiled then that can wait.
    """

    init: Callable[[], State]
    choose: Callable[..., tuple[State, Choice]]
    observe: Callable[[State, Measurement], State]
    update_prior: Callable[..., State]
    usable: Callable[[State, int, int], Sequence[Strategy]]
    predict: Callable[[State, Sequence[Cell]], tuple[np.ndarray, np.ndarray]]
    has_fixed_policy: bool
    switched: Callable[[State, str], State] = lambda state, kind: state
    is_disturbed: Callable[[State], bool] = lambda state: False


def swapped(state: State, kind: str, own: State) -> State:
    """The state with the entries of this kind of rollouts in place of those of the current kind.

    `own`: the initial values of these entries. state["kind"] is the current kind; state["others"]
    stores the entries of the other kinds.
    """
    if kind == state["kind"]:
        return state
    others = {**state["others"], state["kind"]: {name: state[name] for name in own}}
    current = others.pop(kind, own)
    return {**state, **current, "kind": kind, "others": others}


def unchanged(state: State, *_: Any) -> State:
    """The same state: `update_prior` of tuners that do not learn."""
    return state


def expected_saving(apart: np.ndarray, error: np.ndarray) -> np.ndarray:
    """E[max(0, 1 - exp(-x))] for x normal with mean `apart` and standard deviation `error`."""
    error = np.maximum(error, 1e-6)
    above = normal(apart / error)
    return above - np.exp(error**2 / 2 - apart) * normal(apart / error - error)


def normal(x: np.ndarray) -> np.ndarray:
    """The cumulative distribution function of the standard normal distribution."""
    return np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in x])
