"""Programs in virtual time: they compute nothing, and take the seconds of a cost table; and the rollout that they run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from tlt_jax.distributed.board import Ending
from tlt_jax.rollout.executables.compilation import BACKGROUND, CompileCosts
from tlt_jax.rollout.executables.programs import (
    Admit,
    Append,
    CatchUp,
    Decode,
    Harvest,
    Prefill,
    Program,
    Resize,
    Start,
    StateShape,
    of_group,
)
from tlt_jax.rollout.idle import IdleDriver
from tlt_jax.rollout.learned_drafter import FEATURES as FEATURE_S
from tlt_jax.rollout.recorder import IDLE_ROUND, Poll, RolloutResult, WentIdle
from tlt_jax.rollout.request import admission_size
from tlt_jax.rollout.scheduler.driver import Clock, LocalGroups
from tlt_jax.rollout.selection import Selecting
from tlt_jax.simulate import decoding
from tlt_jax.simulate.cost_table import CAPTURED, CPU, FEATURES, CostTable
from tlt_jax.simulate.decoding import Acceptance, Lengths, Rows
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.decode_state import Admission, Appended, Features
from tlt_jax.spec_decode.strategy import DRAFTERS, NGRAM, PLAIN, Strategy

POLL_BEFORE_S = 1e-6  # `simulate` also polls this long before a program is done
THREADS = 4  # compilations of a host at once: rollout.executables.background.MOST_THREADS
DRAFTER = 1 / 20  # a drafter's cost to catch up with a token, relative to the policy's cost of it

RoundCost = Callable[[int, int, Strategy], float]  # rows, slots, strategy -> milliseconds of a round  # fmt: skip


class VirtualClock(Clock):
    """A clock that `sleep` and `jump` advance."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def jump(self, to: float) -> None:
        """Advances to this time, unless it is later already."""
        self.time = max(self.time, to)


@dataclass(frozen=True)
class Marker:
    """A marker that is ready from time `at` on."""

    clock: VirtualClock
    at: float

    def is_ready(self) -> bool:
        return self.clock.now() >= self.at


@dataclass(frozen=True)
class SimulatedState:
    """A decoding state: the rows after all dispatched programs, and the marker `lengths`, ready with them.

    known[B]: the tokens of each row that the drafter has processed.
    """

    rows: Rows
    lengths: Marker
    known: np.ndarray


@dataclass(frozen=True)
class Pending:
    """The report of a chunk, readable once `counts` is ready."""

    report: Report
    counts: Marker


class SimulatedPrograms:
    """Programs of data groups on hosts of their own: each host compiles a program when the first one does.

    Programs of a group run one after the other, each `host` seconds after its dispatch on an idle device. A sequence's
    length is a function of its key. The tokens that a round accepts depend on its key, its rounds so far and the strategy,
    and never on rows, slots or groups. Every token is decoding.NOTHING.

    A missing program is waited for; `prepare` compiles in the background, except on a CPU, whose cores decode.
    `features`: share of a round's seconds that capturing features for a learned drafter costs beyond those of the table.
    `named(strategy)`: the strategy as the table names it.
    """

    def __init__(
        self,
        table: CostTable,
        acceptance: Acceptance,
        lengths: Lengths,
        clock: VirtualClock,
        compiles_free: bool = False,
        named: Callable[[Strategy], Strategy] = lambda strategy: strategy,
    ):
        self.table, self.acceptance, self.lengths, self.clock = table, acceptance, lengths, clock
        self.features, self.compiles_free, self.named = 0.0, compiles_free, named
        self.host, self.waits = table.seconds("host"), table.facts.get("device") == CPU
        self.kinds: dict[type, Callable[..., Any]] = {
            Start: self.start,
            Prefill: self.prefill,
            Admit: self.admit,
            Append: self.append,
            Resize: self.resize,
            CatchUp: self.catch_up,
            Decode: self.decode,
            Harvest: self.harvest,
        }
        self.shapes: Sequence[Any] = ()
        self.compile_costs = CompileCosts()
        for row in table.of("compile"):
            for name in ("", *DRAFTERS) if row.strategy != PLAIN else ("",):
                chunk = Decode(StateShape(0, 1, 1), 1, replace(row.strategy, drafter=name))
                self.compile_costs.note(chunk, row.seconds)
        self.compiles: list[Any] = []  # of the protocol of Executables: nothing is counted here
        self.waited: list[tuple[float, float]] = []
        # The same program of group 0: all hosts compile it at the same time.
        self.of_any = cache(partial(of_group, group=0))
        self.executables: dict[Program, float] = {}  # of group 0, and from when on they are there
        self.pending: list[float] = []  # a heap of the ends of compilations
        self.changes = 0
        self.ran: set[Program] = set()
        self.free_at: dict[int, float] = {}  # of each group, when all that it dispatched is done
        self.due: list[tuple[float, int]] = []  # a heap of the ends of programs, with their groups

    # Compilation

    @property
    def compiling_alongside(self) -> bool:
        return False

    @property
    def version(self) -> int:
        while self.pending and self.pending[0] <= self.clock.now():
            heapq.heappop(self.pending)
            self.changes += 1
        return self.changes

    def compile_cost(self, program: Program) -> float:
        one = self.of_any(program)
        is_ready = self.executables.get(one, math.inf) <= self.clock.now()
        share = 1.0 if self.waits else BACKGROUND
        return 0.0 if is_ready or self.compiles_free else share * self.compile_costs.of(one)

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles missing programs: now on a CPU, else in the background, as far as threads are free."""
        for program in programs:
            if self.waits:
                self.get(program)
                continue
            running = sum(end > self.clock.now() for end in self.pending)
            if self.of_any(program) not in self.executables and running < THREADS:
                self.begin(self.of_any(program))

    def begin(self, program: Program) -> None:
        """Starts to compile."""
        seconds = 0.0 if self.compiles_free else self.compile_costs.of(program)
        self.executables[program] = self.clock.now() + seconds
        heapq.heappush(self.pending, self.executables[program])

    def get(self, program: Program) -> Callable[..., Any]:
        one, now = self.of_any(program), self.clock.now()
        if one not in self.executables:
            self.begin(one)
        if self.executables[one] > now:
            self.clock.jump(self.executables[one])
            self.waited.append((now, self.clock.now()))
        return partial(self.kinds[type(program)], program)

    def rebind(self, shapes: Sequence[Any]) -> None:
        """Drops all programs; new ones capture features if `captures`, which the rounds of the table may do already."""
        self.shapes, captured = shapes, self.table.facts.get(FEATURES) == CAPTURED
        self.features = (1 + FEATURE_S * shapes[0].captures) / (1 + FEATURE_S * captured) - 1
        self.executables = {}
        self.ran.clear()
        self.changes += 1

    def rebinding(self, shapes: Sequence[Any]) -> float:
        """Expected seconds to compile the current programs again, except chunks that draft."""
        plain = [one for one in self.executables if getattr(one, "strategy", PLAIN) == PLAIN]
        return 0.0 if self.compiles_free else sum(map(self.compile_costs.of, plain))

    def memory_held(self, groups: Iterable[int]) -> dict[str, int]:
        """As Executables.memory_held: simulated programs hold nothing."""
        return {"pool_programs": 0, "pool_bytes": 0}

    # Seconds

    def is_first_run(self, program: Program) -> bool:
        if program in self.ran:
            return False
        self.ran.add(program)
        return True

    def read(self, report: Pending, records: bool = False) -> Report:
        return report.report

    def next_ready(self) -> tuple[float, set[int]]:
        """The time at which the next programs are done, and their groups; infinity when no program runs.

        Programs that ended while the host was compiling are among the next.
        """
        if not self.due:
            return math.inf, set()
        ready, groups = self.due[0][0], set()
        while self.due and self.due[0][0] <= max(ready, self.clock.now()):
            groups.add(heapq.heappop(self.due)[1])
        return ready, groups

    def seconds(self, program: Program, rounds: int, start: float, held: float) -> float:
        return (1 + self.features) * noiseless_seconds(self.round_cost(held), program, rounds)

    def round_cost(self, held: float) -> RoundCost:
        """Milliseconds of a round by rows, slots and strategy; chunks hold `held` tokens a row, other programs full rows."""
        table = self.table

        def of(batch: int, slots: int, strategy: Strategy) -> float:
            return 1e3 * table.round_seconds(batch, slots, self.named(strategy), held or slots)

        return of

    def dispatch(self, program: Program, rounds: int = 0, held: float = 0.0) -> Marker:
        """Starts the program `host` seconds from now, or once all earlier ones of its group are done."""
        start = max(self.clock.now() + self.host, self.free_at.get(program.group, 0.0))
        return self.occupy(program.group, start, self.seconds(program, rounds, start, held))

    def occupy(self, group: int, start: float, seconds: float = 0.0) -> Marker:
        """A marker of work that keeps a group busy for so long, and nothing after it."""
        end = self.free_at[group] = start + seconds
        heapq.heappush(self.due, (end, group))
        return Marker(self.clock, end)

    # What programs do to the rows of a group

    def start(self, program: Start) -> SimulatedState:
        rows = decoding.empty(program.state.batch)
        return SimulatedState(rows, self.dispatch(program), np.zeros(program.state.batch, int))

    def prefill(self, program: Prefill, *_: Any) -> tuple[Any, Marker]:
        return (), self.dispatch(program)

    def admit(
        self, program: Admit, state: SimulatedState, prefilled: Any, new: Admission
    ) -> SimulatedState:
        rows, known = decoding.admit(state.rows, new, self.lengths), state.known.copy()
        known[new.rows[new.rows < len(known)]] = 0
        return SimulatedState(rows, self.dispatch(program), known)

    def append(
        self, program: Append, state: SimulatedState, weights: Any, new: Appended
    ) -> tuple[SimulatedState, Marker]:
        marker = self.dispatch(program)
        return replace(
            state, rows=decoding.append(state.rows, new, self.lengths), lengths=marker
        ), marker

    def resize(self, program: Resize, state: SimulatedState, rows: np.ndarray) -> SimulatedState:
        known = state.known[np.maximum(rows, 0)]
        return SimulatedState(decoding.resize(state.rows, rows), self.dispatch(program), known)

    def catch_up(
        self, program: CatchUp, state: SimulatedState, *_: Any
    ) -> tuple[SimulatedState, Marker]:
        missing = np.where(state.rows.live, state.rows.tokens - state.known, 0).sum()
        marker = self.dispatch(program, int(missing))
        return replace(state, lengths=marker, known=state.rows.tokens), marker

    def decode(
        self, program: Decode, state: SimulatedState, weights: Any, host: Any, bounds: np.ndarray
    ) -> tuple[SimulatedState, Pending]:
        rows, report = decoding.decode_chunk(self.acceptance, program, state.rows, *bounds.tolist())
        held = decoding.held(state.rows, rows, report.rounds)
        marker = self.dispatch(program, report.rounds, held)
        known = state.known
        if program.strategy != PLAIN and program.strategy.drafter != NGRAM:
            known = rows.tokens
        return SimulatedState(rows, marker, known), Pending(report, marker)

    def harvest(self, program: Harvest, *_: Any) -> Features:
        return Features(self.dispatch(program), None)


def noiseless_seconds(round_cost: RoundCost, program: Program, rounds: int) -> float:
    """Seconds of a program without noise.

    A prefill or a reply counts as a round with as many nodes as it has tokens. Writing a cache takes as long as
    a round takes to read it; a copy takes twice that. The `rounds` of a catch-up are the tokens that
    the drafter lacks, alike in all rows.
    """

    def write_cost(batch: int, slots: int) -> float:
        return round_cost(batch, slots, PLAIN) - round_cost(batch, 0, PLAIN)

    match program:
        case Decode(StateShape(_, batch, slots), _, strategy):
            taken = max(rounds, IDLE_ROUND) * round_cost(batch, slots, strategy)
        case Prefill(_, prompts, width):
            taken = round_cost(prompts, width, replace(PLAIN, nodes=width))
        case Append(StateShape(_, _, slots), rows, width):
            taken = round_cost(rows, slots, replace(PLAIN, nodes=width))
        case CatchUp(StateShape(_, batch, slots)):
            nodes = max(-(-rounds // batch), 1)
            taken = DRAFTER * round_cost(batch, slots, replace(PLAIN, nodes=nodes))
        case Start(StateShape(_, batch, slots)):
            taken = write_cost(batch, slots)
        case Admit(StateShape(_, batch), Prefill(_, _, width)):
            taken = write_cost(admission_size(batch), width)
        case Resize(_, batch, slots):
            taken = 2 * write_cost(batch, slots)
        case Harvest(_, windows, width):
            taken = 2 * write_cost(windows, width)
    return taken / 1e3


def simulate(
    rollout: LocalGroups,
    programs: SimulatedPrograms,
    background: IdleDriver | None = None,
    selecting: Selecting | None = None,
    ending: Ending | None = None,
) -> RolloutResult:
    """As scheduler.driver.run in virtual time: between events the clock jumps to the next program's end.

    With `selecting` the rollout stops when the choice is known; times at which scores come are in `programs.due`, of
    group -1. Listeners also see the groups just before that end, unfinished: otherwise each measurement would be uncertain by a
    whole chunk. After the first poll only groups whose programs end are polled: nothing has changed for the others. The
    background work begins with the first idle group, or with the rollout where groups may wait for prompts.
    """
    clock, result, groups, is_idle = programs.clock, None, None, selecting is not None
    ending = ending or Ending(len(rollout.states))
    is_in_order = any(context.is_in_order for context in rollout.contexts.values())
    while True:
        polls = [] if result else [poll for poll in rollout.poll(groups) if poll.events]
        for poll in polls:
            if isinstance(poll.events[-1], WentIdle):
                ending.is_idle(poll.group)
                is_idle = True
        happened = is_in_order and bool(polls)  # else one poll reads and dispatches all there is
        if selecting:
            happened |= selecting.poll(clock.now(), rollout.is_decoding())
            if selecting.is_over:
                rollout.stop()
        happened |= is_idle and background is not None and background.poll()
        if result is None and rollout.is_done() and (selecting is None or selecting.is_over):
            result = rollout.result()
        if result and (background is None or background.is_done):
            return result
        if happened:
            continue
        ready, groups = programs.next_ready()
        if math.isinf(ready):
            raise RuntimeError("the rollout is not done, but no program runs")
        if ready > clock.now():  # else it ended while the host was compiling
            clock.jump(ready - POLL_BEFORE_S)
            for group in () if result else groups & rollout.contexts.keys():
                rollout.tell(Poll(group, clock.now(), clock.now(), ()))
        clock.jump(ready)
        groups = None if selecting else groups  # a new bound lets any group go on
