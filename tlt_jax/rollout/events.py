"""The events of a rollout, as data: polls of the groups, decisions, programs dispatched and read, tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from tlt_jax.spec_decode.decode_state import Features
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.verify import Stats
from tlt_jax.tuner.interface import MOST_ROUNDS


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

    `accepted`: how many of the tokens a drafter had proposed.
    """

    uid: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: int
    accepted: int = 0


@dataclass(frozen=True)
class Ended:
    """A sequence has ended, and not with logits that are not finite; emitted only with a harvester.

    `row`: its current row; `length`: its tokens, with the prompt's. It has features of positions 0
    to length - 2.
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


Event = Decided | Dispatched | Retired | Emitted | Ended | Harvested | WentIdle


@dataclass(frozen=True)
class Look:
    """One poll of one group, in seconds of the rollout's clock; polls without events are reported too.

    The time since the previous look bounds the error of a measurement.
    """

    group: int
    began: float
    ended: float
    events: tuple[Event, ...]


Listener = Callable[[Look], None]  # called after the dispatches of the look
