"""The candidate programs of one data group's next chunk, and their compile costs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from tlt_jax.rollout.executables.programs import (
    Admit,
    CatchUp,
    Decode,
    Prefill,
    Resize,
    Start,
    StateShape,
)
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.scheduler.state import GroupContext, GroupView
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner.interface import Cell


@dataclass(frozen=True)
class GroupCandidates:
    """The candidate programs of a group with its current rows and slots; implements state.CandidatePrograms."""

    context: GroupContext
    view: GroupView

    @property
    def version(self) -> Hashable:
        return self.context.programs.version

    def compile_cost(self, cell: Cell) -> float:
        return sum(map(self.context.programs.compile_cost, self.needed(cell)))

    def chunk_compile_cost(self, cell: Cell) -> float:
        return self.context.programs.compile_cost(self.chunk(cell))

    def chunk(self, cell: Cell) -> Decode:
        """The chunk of this cell."""
        request = self.context.request
        return Decode(self.shape(cell), request.rounds, cell.strategy, request.params)

    def shape(self, cell: Cell) -> StateShape:
        """The sizes of the decoding state in this cell."""
        return StateShape(self.context.index, cell.batch, cell.slots)

    def needed(self, cell: Cell) -> list[Program]:
        """The programs that a chunk of this cell needs: the chunk itself, and those that bring the rows to its shape."""
        context, view = self.context, self.view
        shape = self.shape(cell)
        programs: list[Program] = [self.chunk(cell)]
        if most_lag(context, cell.strategy) < math.inf:
            programs.append(CatchUp(shape))
        if not view.batch:
            programs.append(Start(shape))
        elif cell[:2] != (view.batch, view.slots):
            programs.append(
                Resize(
                    StateShape(context.index, view.batch, view.slots),
                    cell.batch,
                    cell.slots,
                )
            )
        admit = partial(Admit, shape)
        return programs + [admit(Prefill(context.index, *sizes)) for sizes in view.sources]


def most_lag(context: GroupContext, strategy: Strategy) -> float:
    """The most tokens that the drafter may lack when a chunk of this strategy starts."""
    return strategy.path if extends(context, strategy) else math.inf


def extends(context: GroupContext, strategy: Strategy) -> bool:
    """Whether the rounds of this strategy bring a drafter's state up to date."""
    return strategy != PLAIN and context.needs[strategy.drafter].catches_up
