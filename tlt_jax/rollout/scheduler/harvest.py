"""The harvest: copies the features of ended sequences out of the decoding state; knows no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from tlt_jax.rollout.buckets import block_size
from tlt_jax.rollout.events import Dispatched, Emitted, Ended, Event, Harvested
from tlt_jax.rollout.executables.programs import GroupShapes, StateShape, shardings
from tlt_jax.rollout.executables.protocols import Program, Programs
from tlt_jax.rollout.scheduler.state import (
    GroupContext,
    GroupState,
    Harvester,
    InFlight,
    Running,
    Window,
    queued,
)
from tlt_jax.spec_decode import decode_state
from tlt_jax.spec_decode.decode_state import BROKEN, RUNNING, DecodeState, Features


@dataclass(frozen=True)
class Harvest:
    """harvest(state, rows[R], starts[R]) -> a window of features of each of these rows.

    The state is not donated. Windows keep the sharding of the state's features.
    """

    state: StateShape
    rows: int
    width: int

    @property
    def group(self) -> int:
        return self.state.group

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state, target, places = shapes.state(self.state), shapes.target, shapes.array(self.rows)
        sources = Features(
            target.features(state.cache), target.states(state.cache) if target.states else None
        )
        function = partial(decode_state.harvest, target, self.width)
        program = jax.jit(function, out_shardings=shardings(sources))
        return program.lower(state, places, places)

    def __call__(
        self,
        programs: Programs,
        state: DecodeState,
        rows: Int32[np.ndarray, " R"],
        starts: Int32[np.ndarray, " R"],
    ) -> Features:
        return programs.get(self)(state, rows, starts)

    def __str__(self) -> str:
        return f"harvest of {self.rows} x {self.width} from {self.state}"


def ended(rows: Sequence[Running | None], news: Mapping[int, Emitted]) -> list[Ended]:
    """The sequences that end with these tokens, with their current rows; not those whose logits were not finite."""
    return [
        Ended(running.uid, row, running.tokens + len(news[running.uid].tokens))
        for row, running in enumerate(rows)
        if running and running.uid in news and news[running.uid].finish not in (RUNNING, BROKEN)
    ]


def wanted(harvester: Harvester, ends: Iterable[Ended]) -> list[Window]:
    """The windows that the harvester wants of these ended sequences."""
    return [
        Window(end.uid, end.row, start)
        for end in ends
        for start in harvester.wanted(end.uid, end.length)
    ]


def harvest(
    context: GroupContext, state: GroupState, shape: StateShape
) -> tuple[GroupState, list[Event]]:
    """Dispatches the copy of the next windows out of the decoding state of this shape.

    One program copies as many windows as a prefill of their width has prompts: few sizes. While it
    is still compiling in the background, these windows are dropped.
    """
    width = context.harvester.width
    size = block_size(len(state.windows), width)
    now, later = state.windows[:size], state.windows[size:]
    rows, starts = np.zeros((2, size), np.int32)
    rows[: len(now)] = [window.row for window in now]
    starts[: len(now)] = [window.start for window in now]
    program = Harvest(shape, size, width)
    if context.programs.compile_cost(program):
        context.programs.prepare([program])
        if context.programs.compile_cost(program):
            return state.replace(windows=later), []
    values = program(context.programs, state.device, rows, starts)
    marker = (
        values.features if values.states is None else values.states
    )  # features may have width 0
    flight = InFlight(state.dispatched, "harvest", marker, windows=now, values=values)
    event = Dispatched(flight.number, "harvest", state.batch, state.slots)
    return queued(state.replace(windows=later), flight), [event]


def harvested(flight: InFlight) -> list[Event]:
    """The event of a finished harvest; none for other programs."""
    if flight.values is None:
        return []
    windows = tuple((window.uid, window.start) for window in flight.windows)
    return [Harvested(windows, flight.values, flight.marker)]
