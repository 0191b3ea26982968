"""Few programs of a data group are un-awaited at any time, however many chunks may be in flight."""

from __future__ import annotations

import numpy as np
import pytest
import toys

from tlt_jax.rollout.scheduler import group as machine
from tlt_jax.rollout.scheduler.state import InFlight
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN

V, FAR = 12, 40  # FAR: chunks that may be in flight
TABLE = toys.table(V, scale=1.0)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [11, 10]]
PARAMS = DecodingParams(Sampling(1.0), eos_ids=(0,))
pytestmark = pytest.mark.usefixtures("x64")


class Held:
    """The marker of a program, ready once it is released."""

    def __init__(self, program: list):
        self.program, self.is_released = program, False

    def is_ready(self) -> bool:
        return self.is_released


class Queue:
    """The queue of each group's unfinished programs, in order; `most`: its largest length."""

    def __init__(self, groups: int):
        self.programs, self.most = [[] for _ in range(groups)], [0] * groups
        self.newest, self.is_compiling = None, False

    def watch(self, executables):
        """The executables, with their calls recorded."""
        get = executables.get

        def recorded(program):
            if self.is_compiling:  # an admission reads the shardings of its prefill
                return get(program)
            self.newest, queued = [program], self.programs[program.group]
            queued.append(self.newest)
            self.most[program.group] = max(self.most[program.group], len(queued))
            self.is_compiling = True
            found = get(program)
            self.is_compiling = False
            return found

        executables.get = recorded
        return executables

    def done(self, group: int, kind: str, program: list) -> None:
        """Notes that the program is done; unless it is a prefill, all earlier ones are done too."""
        queued = self.programs[group]
        (last,) = [i for i, one in enumerate(queued) if one is program]
        del queued[last if kind == "prefill" else 0 : last + 1]


def play(groups: int, strategy, in_flight: int, watch=lambda executables: executables):
    """A rollout in short chunks, of few rows."""
    executables = watch(toys.executables(groups, V, toys.table_drafter()))
    shape = {"capacity": 3, "batches": (3,), "rounds": 1, "max_new_tokens": 40}
    return toys.play(
        executables, TABLE, PROMPTS, 3, PARAMS, **shape, strategy=strategy, in_flight=in_flight
    )


def held(monkeypatch, groups: int, strategy, in_flight: int) -> tuple[list[int], list]:
    """The largest number of unfinished programs of each group, and all answers.

    Markers become ready one by one: the oldest program's, once its group is blocked.
    """
    queue, advance = Queue(groups), machine.advance

    def flight(number, kind, marker, **rest) -> InFlight:
        return InFlight(number, kind, Held(queue.newest), **rest)

    def watched(context, state, is_stopping):
        for one in state.flights[:1]:
            if one.marker.is_released:
                queue.done(context.index, one.kind, one.marker.program)
        after, events = advance(context, state, is_stopping)
        if after.flights and not events:
            after.flights[0].marker.is_released = True
        return after, events

    monkeypatch.setattr(machine, "InFlight", flight)
    monkeypatch.setattr(machine, "advance", watched)
    result = play(groups, strategy, in_flight, queue.watch)
    return queue.most, [one.tokens.tolist() for one in result.completions]


@pytest.mark.parametrize("groups, strategy", [(1, PLAIN), (2, toys.TREE)])
def test_few_programs_of_a_group_are_un_awaited(monkeypatch, groups, strategy):
    expected = [one.tokens.tolist() for one in play(groups, strategy, 1).completions]
    most, answers = held(monkeypatch, groups, strategy, FAR)
    assert machine.MAX_UNAWAITED - machine.MOST_PER_STEP < min(most), "the bound is nearly reached"
    assert max(most) <= machine.MAX_UNAWAITED
    assert answers == expected and np.unique([len(one) for one in answers]).size > 1


def test_as_few_chunks_are_un_awaited_as_the_request_allows(monkeypatch):
    """Two chunks, and before them the start, and the prefill and admission of the joining samples."""
    assert held(monkeypatch, 1, PLAIN, 2)[0] == [2 + 3]
