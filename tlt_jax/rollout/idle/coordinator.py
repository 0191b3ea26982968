"""The coordinator of idle work, a pure state machine over messages; knows no device, clock or kind of work.

The worker coordinator of TLT (arXiv 2511.16665, section 4.2). A data group is BUSY while it decodes,
IDLE when it has nothing to decode, and TRAINING while it does idle work. Groups work
independently, so none waits for others: any number may train, and join at any time. A group that
waits for prompts is IDLE until it gets some. Every message
carries its RL step; messages of other steps are ignored.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import Enum


class Mode(Enum):
    """The mode of a data group."""

    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"


@dataclass(frozen=True)
class Coordinator:
    """The modes of all data groups in an RL step.

    `least_seconds`: work starts only with at least this much expected idle time. `gave_up`: groups
    whose work ended early, and does not start again. `is_over`: the rollout is done or was
    interrupted, so no work starts.
    """

    step: int
    modes: tuple[Mode, ...]
    least_seconds: float = 0.0
    gave_up: frozenset[int] = frozenset()
    is_over: bool = False

    @property
    def training(self) -> tuple[int, ...]:
        """The groups in mode TRAINING."""
        return tuple(group for group, mode in enumerate(self.modes) if mode is Mode.TRAINING)


@dataclass(frozen=True)
class Finished:
    """A group has nothing left to decode in this step."""

    step: int
    group: int


@dataclass(frozen=True)
class Waits:
    """A group has nothing to decode now, and may get more in this step."""

    step: int
    group: int


@dataclass(frozen=True)
class Resumed:
    """A group that waited decodes again."""

    step: int
    group: int


@dataclass(frozen=True)
class Expected:
    """The rollout is expected to take `seconds` more; sent repeatedly."""

    step: int
    seconds: float


@dataclass(frozen=True)
class GaveUp:
    """A group's idle work ended early: nothing to do, or an error. The group stays idle in this step."""

    step: int
    group: int


@dataclass(frozen=True)
class Ended:
    """RL work needs all groups: the rollout is done or was interrupted."""

    step: int


Message = Finished | Waits | Resumed | Expected | GaveUp | Ended


@dataclass(frozen=True)
class Start:
    """Tells a group to start idle work."""

    step: int
    group: int


@dataclass(frozen=True)
class Stop:
    """Tells a group to stop idle work: it dispatches no further piece."""

    step: int
    group: int


Command = Start | Stop


def begin(step: int, groups: int, least_seconds: float) -> Coordinator:
    """The coordinator at the start of an RL step: all groups are busy."""
    return Coordinator(step, (Mode.BUSY,) * groups, least_seconds)


def receive(state: Coordinator, message: Message) -> tuple[Coordinator, list[Command]]:
    """The state after a message, and the commands to the groups."""
    if message.step != state.step:
        return state, []
    match message:
        case Finished(_, group):
            if state.modes[group] is Mode.BUSY:
                state = with_mode(state, {group}, Mode.IDLE)
            if any(mode is Mode.BUSY for mode in state.modes):
                return state, []
            return over(state)
        case Waits(_, group):
            is_busy = state.modes[group] is Mode.BUSY
            return (with_mode(state, {group}, Mode.IDLE) if is_busy else state), []
        case Resumed(_, group):
            is_training = state.modes[group] is Mode.TRAINING
            resumed = with_mode(state, {group}, Mode.BUSY)
            return resumed, [Stop(state.step, group)] if is_training else []
        case Expected(_, seconds):
            return (state, []) if seconds < state.least_seconds else started(state)
        case GaveUp(_, group):
            if state.modes[group] is Mode.TRAINING:
                state = with_mode(state, {group}, Mode.IDLE)
            return replace(state, gave_up=state.gave_up | {group}), []
        case Ended():
            return over(state)


def started(state: Coordinator) -> tuple[Coordinator, list[Command]]:
    """Starts every idle group, unless it gave up or the rollout is over."""
    if state.is_over:
        return state, []
    idle = [group for group, mode in enumerate(state.modes) if mode is Mode.IDLE]
    ready = [group for group in idle if group not in state.gave_up]
    if ready:
        state = with_mode(state, frozenset(ready), Mode.TRAINING)
    return state, [Start(state.step, group) for group in ready]


def over(state: Coordinator) -> tuple[Coordinator, list[Command]]:
    """Stops all groups; none starts again."""
    working = state.training
    commands: list[Command] = [Stop(state.step, group) for group in working]
    return replace(with_mode(state, frozenset(working), Mode.IDLE), is_over=True), commands


def with_mode(state: Coordinator, groups: Set[int], mode: Mode) -> Coordinator:
    """The state with these groups in this mode."""
    modes = (mode if index in groups else old for index, old in enumerate(state.modes))
    return replace(state, modes=tuple(modes))
