"""Plans every chunk: buckets that fit, the tuner's strategy, and the programs worth compiling.

In a deterministic rollout (`rollout.deterministic`) decisions depend on counts and a cost table, not on a clock: every group
has a planner, chunks are read one by one in the order in which decisions follow from them, every program counts as
compiled, and a round costs what the cost model predicts for its shape before any measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tlt_jax.rollout.executables.programs import (
    Admit,
    Append,
    CatchUp,
    Decode,
    Prefill,
    Program,
    Resize,
    Start,
    StateShape,
)
from tlt_jax.rollout.recorder import Decision
from tlt_jax.rollout.scheduler.payback import CAUTION, Payback, smallest
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name
from tlt_jax.tuner import cost_model
from tlt_jax.tuner.interface import Cell, Choice, Measurement, State, Tuner

if TYPE_CHECKING:
    from tlt_jax.rollout.scheduler.state import GroupContext, GroupView

# While samples wait, a chunk ends once one in this many of its sequences has ended.
ADMISSION_PATIENCE = 64
FEW = 4  # a chunk with room for fewer rounds than this gets a longer cache
# Measured seconds between two evaluations of the candidates: at least this many, and this share of the run's.
WEIGHED, WEIGHED_SHARE = 0.5, 0.05
LASTS = 2.0  # rollouts' worth of saved time that pay for one more program
ROUND = 0.02  # seconds that a cost table assumes for the fixed part of a round

CostTable = Callable[[Measurement], Measurement]


@dataclass(frozen=True)
class GroupCandidates:
    """The candidate programs of a group with its current rows and slots."""

    context: GroupContext
    view: GroupView

    @property
    def version(self) -> Hashable:
        """Changes whenever a compile cost changes."""
        return self.context.programs.version

    def compile_cost(self, cell: Cell) -> float:
        """Compile cost of all that a chunk of this cell needs, in seconds; 0: everything is compiled."""
        return sum(map(self.context.programs.compile_cost, self.needed(cell)))

    def chunk_compile_cost(self, cell: Cell) -> float:
        """The same for the chunk alone, independent of the group's rows and slots; above 0 only where `compile_cost` is."""
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
        programs += [Append(shape, *sizes) for sizes in view.replies]
        admit = partial(Admit, shape)
        return programs + [admit(Prefill(context.index, *sizes)) for sizes in view.sources]


def most_lag(context: GroupContext, strategy: Strategy) -> float:
    """The most tokens that the drafter may lack when a chunk of this strategy starts."""
    return strategy.path if extends(context, strategy) else math.inf


def extends(context: GroupContext, strategy: Strategy) -> bool:
    """Whether the rounds of this strategy bring a drafter's state up to date."""
    return strategy != PLAIN and context.needs[strategy.drafter].catches_up


class AllCompiled:
    """Every program counts as compiled."""

    version = None

    def compile_cost(self, cell: Cell) -> float:
        return 0.0

    def chunk_compile_cost(self, cell: Cell) -> float:
        return 0.0


ALL_COMPILED = AllCompiled()


class Planner:
    """Plans with buckets and a tuner, whose `state` it owns while rollouts run; may serve several rollouts.

    `payback`: how much decoding is left in the run; `longest`: slots that its sequences may need;
    `groups`: data groups that decode in parallel. With a `cost_table`
    decisions depend on no clock: the table gives all seconds, and every program counts as compiled.
    """

    def __init__(
        self,
        batches: Sequence[int],
        slots: Sequence[int],
        tuner: Tuner,
        state: Any = None,
        payback: Payback | None = None,
        longest: int = 0,
        groups: int = 1,
        cost_table: CostTable | None = None,
    ):
        self.batches, self.slots, self.tuner = batches, slots, tuner
        self.state = tuner.init() if state is None else state
        self.payback, self.longest, self.groups = payback or Payback(), longest, groups
        self.compiled_cells: dict[Hashable, list[Cell]] = {}
        self.cost_table = cost_table

    def worth_compiling(self, view: GroupView, candidates: GroupCandidates) -> Cell | None:
        """The cell whose programs should be compiled before the next chunk; None: none.

        With a fixed policy, the cell that the tuner chooses; otherwise the usable cell whose expected
        payback over the rest of the run exceeds its compile cost by most.
        """
        if self.cost_table:
            return None
        self.payback.progress(view.group, view.finished)
        least = self.least(view)
        wait = max(WEIGHED, WEIGHED_SHARE * self.payback.seconds)
        is_due = self.payback.seconds >= self.payback.evaluated_at.get(least, -math.inf) + wait
        if not (is_due or self.tuner.has_fixed_policy):
            return None
        compiled = self.fitting(view, self.compiled(view, candidates))
        if not compiled:
            return None  # `decide` has no choice: the chunk compiles what it needs
        arms = (PLAIN, *self.tuner.usable(self.state, least[0], view.live))
        if self.tuner.has_fixed_policy:
            arms = (self.tuner.choose(self.state, view.live, *least)[1].strategy,)
            compiled = [cell for cell in compiled if cell.strategy in arms]
            if not compiled:
                return self.first(view, arms[0])
        if not is_due or self.tuner.is_disturbed(self.state):
            return None

        self.payback.evaluated_at[least] = self.payback.seconds
        usable = {
            batch: (PLAIN, *self.tuner.usable(self.state, batch, view.live))
            for batch in self.batches
        }
        cells = self.fitting(
            view,
            [
                Cell(batch, slots, arm)
                for batch in self.batches
                for slots in self.slots
                for arm in arms
                if arm in usable[batch]
            ],
        )
        cells = [cell for cell in cells if cell not in compiled]
        if not cells:
            return None
        # Groups decode in parallel: the seconds that one of them saves are not saved again by the others.
        compile_costs = self.groups * np.array([candidates.compile_cost(cell) for cell in cells])
        return self.payback.best(cells, compiled, compile_costs, self.speeds)

    def decide(self, view: GroupView, candidates: GroupCandidates = ALL_COMPILED) -> Decision:
        """Buckets that hold the live rows, and a strategy for them, with compiled programs where possible.

        The cache shrinks only together with the batch. A chunk that could fill more slots than its
        cache has gets fewer rounds, but at least FEW.
        """
        every = self.compiled(view, ALL_COMPILED if self.cost_table else candidates)
        compiled = nearest(self.fitting(view, every)) or [self.first(view)]
        batch, slots = self.shape(compiled)
        arms = tuple(cell.strategy for cell in compiled if cell[:2] == (batch, slots))
        self.state, choice = self.tuner.choose(self.state, view.live, batch, slots, arms)
        reason = choice.reason
        if choice.strategy not in arms:
            wanted = [cell for cell in compiled if cell.strategy == choice.strategy]
            if wanted:
                batch, slots = self.shape(wanted)
            elif self.fitting(view, every):
                batch, slots, arm = next((c for c in compiled if c.strategy == PLAIN), compiled[0])
                reason = f"{reason}, while {name(choice.strategy)} is compiled"
                choice = choice._replace(strategy=arm, predicted=math.nan, is_exploring=False)
            else:
                batch, slots, _ = self.first(view, choice.strategy)

        # The chunk ends once its rows fit a smaller compiled batch; batches that hold them already were not chosen.
        below = min(batch, view.live)
        fewer = max(
            (cell.batch for cell in every if cell.batch < below and cell.slots >= view.need(PLAIN)),
            default=0,
        )
        min_live = max(
            view.live - view.live // ADMISSION_PATIENCE if view.waiting else 1, fewer + 1
        )
        return Decision(
            view.group,
            view.retired,
            batch,
            slots,
            choice.strategy,
            min_live,
            rounds_that_fit(view, slots, choice),
            live=view.live,
            least_slots=self.least(view)[1],
            predicted=choice.predicted,
            reason=reason,
            is_exploring=choice.is_exploring,
        )

    def observe(self, measurement: Measurement) -> None:
        """Updates the tuner and the payback with the measurement of a chunk."""
        measurement = self.cost_table(measurement) if self.cost_table else measurement
        self.state = self.tuner.observe(self.state, measurement)
        batch = smallest(self.batches, measurement.live)
        where = (batch, measurement.least_slots or measurement.slots)
        tokens = measurement.tokens / max(measurement.live, 1.0)
        self.payback.add(where, tokens, measurement.seconds)

    def compiled(self, view: GroupView, candidates: GroupCandidates) -> list[Cell]:
        """The cells whose programs are all compiled, given the group's current rows and slots.

        Where replies can be appended in none of them, those in which only that has to be compiled.
        """
        key = (view.group, view.batch, view.slots, view.sources, view.replies, candidates.version)
        if key not in self.compiled_cells:
            self.compiled_cells = {
                one: cells for one, cells in self.compiled_cells.items() if one[-1] == key[-1]
            }
            chunks = self.chunks(view.group, candidates)
            self.compiled_cells[key] = [
                cell for cell in chunks if not candidates.compile_cost(cell)
            ]
        if view.replies and not self.compiled_cells[key]:
            view = replace(view, replies=())
            return self.compiled(view, replace(candidates, view=view))
        return self.compiled_cells[key]

    def chunks(self, group: int, candidates: GroupCandidates) -> list[Cell]:
        """The cells whose chunk is compiled: few, so that only these are checked for their other programs."""
        key = group, candidates.version
        if key not in self.compiled_cells:
            self.compiled_cells[key] = [
                cell
                for batch in self.batches
                for slots in self.slots
                for arm in (PLAIN, *self.tuner.usable(self.state, batch, 1))
                if not candidates.chunk_compile_cost(cell := Cell(batch, slots, arm))
            ]
        return self.compiled_cells[key]

    def fitting(self, view: GroupView, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that hold the live rows, and the tokens of a few more rounds."""
        return [
            cell
            for cell in cells
            if cell.batch >= view.live
            and cell.slots >= view.need(PLAIN)
            and cell.slots >= view.need(cell.strategy, FEW)
            and (cell.batch != view.batch or cell.slots >= view.slots)
        ]

    def least(self, view: GroupView, strategy: Strategy = PLAIN) -> tuple[int, int]:
        """The smallest buckets that hold the live rows, a chunk of plain decoding and a few rounds of the strategy."""
        batch = smallest(self.batches, view.live)
        kept = view.slots if batch == view.batch else 0
        needed = max(view.need(PLAIN), view.need(strategy, FEW), kept)
        return batch, smallest(self.slots, needed)

    def first(self, view: GroupView, strategy: Strategy = PLAIN) -> Cell:
        """The first cell of a strategy: with slots for the longest sequence, or the fewest slots where these pay off.

        The seconds of a rollout are not known yet; a rollout takes about half as long as compiling a chunk.
        """
        batch, slots = self.least(view, strategy)
        most = max(slots, smallest(self.slots, max(self.longest, view.limit)))
        speed, _ = self.speeds([Cell(batch, slots, PLAIN), Cell(batch, most, PLAIN)])
        share = 1 - math.exp(speed[1] - speed[0])
        return Cell(batch, slots if share * self.payback.rollouts_left > LASTS else most, strategy)

    def shape(self, cells: Sequence[Cell]) -> tuple[int, int]:
        """Rows and slots of the cell with the highest predicted speed, less a part of its standard error."""
        if len({cell[:2] for cell in cells}) == 1:
            return cells[0][:2]
        speed, error = self.speeds(cells)
        sure = speed - CAUTION * error if np.isfinite(error).all() else speed
        return cells[int(np.argmax(sure))][:2]

    def speeds(self, cells: Sequence[Cell]) -> tuple[np.ndarray, np.ndarray]:
        """The tuner's predictions for these cells."""
        return self.tuner.predict(self.state, cells)


def nearest(cells: Sequence[Cell]) -> list[Cell]:
    """The cells without those that another cell of the same strategy matches with no more rows and slots."""
    return [
        cell
        for cell in cells
        if not any(
            other != cell
            and other.strategy == cell.strategy
            and other.batch <= cell.batch
            and other.slots <= cell.slots
            for other in cells
        )
    ]


def rounds_that_fit(view: GroupView, slots: int, choice: Choice) -> int:
    """Rounds of the chunk: those of the choice, or as many as the slots are sure to hold.

    At least one, since every chosen cell holds a few: a rollout of chunks without rounds would never end. Raises
    AssertionError when not even one fits.
    """
    if view.need(choice.strategy, choice.rounds) <= slots:
        return choice.rounds
    rounds = (slots - view.tokens) // choice.strategy.path
    if rounds < 1:
        raise AssertionError(
            f"a cache of {slots} slots has no room for a round of {name(choice.strategy)} after {view.tokens} tokens"
        )
    return rounds


def cost_table(node: float, networks: cost_model.Networks = cost_model.DENSE) -> CostTable:
    """Replaces the measured seconds by those of the table; `node`: cost of a node, in rounds."""

    def with_table_seconds(seen: Measurement) -> Measurement:
        cell = Cell(seen.batch, seen.slots, seen.strategy)
        seconds = ROUND * cost_model.prior_rounds(cell, node, networks) * seen.rounds
        return seen._replace(
            seconds=seconds, uncertainty=0.0, catch_up=0.0, is_moved=False, taken=0.0
        )

    return with_table_seconds


def learned(
    tuner: Tuner, state: State, measurements: Sequence[Measurement], with_table_seconds: CostTable
) -> State:
    """The tuner's state after a rollout; independent of the order in which the chunks were read."""
    for seen in sorted(measurements, key=lambda seen: (seen.number, seen.group)):
        state = tuner.observe(state, with_table_seconds(seen))
    return state
