"""Simulated programs whose seconds are those of a cost table, with compilation in the background of every host."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from tlt_jax.rollout.executables.compile_cost import BACKGROUND, CompileCosts
from tlt_jax.rollout.executables.programs import Decode, StateShape, of_group
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.simulate.cost_table import CAPTURED, CPU, FEATURES, CostTable
from tlt_jax.simulate.decoding import Acceptance, Lengths
from tlt_jax.simulate.round_costs import RoundCost, noiseless_seconds
from tlt_jax.simulate.simulator import Marker, SimulatedPrograms, VirtualClock
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

THREADS = 4  # compilations of a host at once: rollout.executables.background.MOST_THREADS


@dataclass(frozen=True)
class MicroStep:
    """A group's micro-step of idle drafter training on `tokens` tokens, as drafter.micro_step.MicroStep."""

    group: int
    tokens: int
    relative_seconds: float


class TabledPrograms(SimulatedPrograms):
    """Programs of data groups on hosts of their own: each host compiles a program when the first one does.

    A missing program is waited for; `prepare` compiles in the background, except on a CPU, whose cores decode.
    `features`: share of a round's seconds that capturing features for a learned drafter costs beyond those of the table.
    `drafters`: names of the drafters that strategies name, "" included. `named(strategy)`: the strategy as the table
    names it.
    """

    def __init__(
        self,
        table: CostTable,
        acceptance: Acceptance,
        lengths: Lengths,
        clock: VirtualClock,
        drafters: Sequence[str] = ("",),
        compiles_free: bool = False,
        named: Callable[[Strategy], Strategy] = lambda strategy: strategy,
    ):
        super().__init__(lambda *_: 0.0, acceptance, lengths, clock, writes=False)
        self.table, self.features, self.compiles_free = table, 0.0, compiles_free
        self.named = named
        self.host, self.waits = table.seconds("host"), table.facts.get("device") == CPU
        drafter = SimpleNamespace(reads_history=False, host_context=lambda _: (), catch_up=None)
        learned = SimpleNamespace(reads_history=False, host_context=lambda _: (), catch_up=True)
        named = {name: drafter if name == "ngram" else learned for name in drafters if name}
        self.shapes = [SimpleNamespace(drafter=learned, drafters=named)]
        self.compile_costs = CompileCosts()
        for strategy, seconds in table.compile_rows():
            for drafter in drafters if strategy != PLAIN else ("",):
                chunk = Decode(StateShape(0, 1, 1), 1, replace(strategy, drafter=drafter))
                self.compile_costs.note(chunk, seconds)
        self.compiles: list[Any] = []  # of the protocol of Executables: nothing is counted here
        self.waited: list[tuple[float, float]] = []
        self.alike: dict[Program, Program] = {}
        self.ready: dict[
            Program, Callable[..., Any]
        ] = {}  # what `get` returns of compiled programs
        self.ready_at: dict[Program, float] = {}  # of the programs of group 0
        self.pending: list[float] = []  # a heap of the ends of compilations
        self.changes = 0

    # Compilation

    def of_any(self, program: Program) -> Program:
        """The same program of group 0: all hosts compile it at the same time."""
        found = self.alike.get(program)
        if found is None:
            found = self.alike[program] = of_group(program, 0)
        return found

    @property
    def executables(self) -> dict[Program, float]:
        """The programs that were compiled."""
        return self.ready_at

    @property
    def version(self) -> int:
        while self.pending and self.pending[0] <= self.clock.now():
            heapq.heappop(self.pending)
            self.changes += 1
        return self.changes

    def compile_cost(self, program: Program) -> float:
        one = self.of_any(program)
        is_ready = self.ready_at.get(one, math.inf) <= self.clock.now()
        share = 1.0 if self.waits else BACKGROUND
        return 0.0 if is_ready or self.compiles_free else share * self.compile_costs.of(one)

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles missing programs: now on a CPU, else in the background, as far as threads are free."""
        for program in programs:
            if self.waits:
                self.get(program)
                continue
            running = sum(end > self.clock.now() for end in self.pending)
            if self.of_any(program) not in self.ready_at and running < THREADS:
                self.begin(self.of_any(program))

    def begin(self, program: Program) -> None:
        """Starts to compile."""
        seconds = 0.0 if self.compiles_free else self.compile_costs.of(program)
        self.ready_at[program] = self.clock.now() + seconds
        heapq.heappush(self.pending, self.ready_at[program])

    def get(self, program: Program) -> Callable[..., Any]:
        if program in self.ready:
            return self.ready[program]
        one, now = self.of_any(program), self.clock.now()
        if one not in self.ready_at:
            self.begin(one)
        if self.ready_at[one] > now:
            self.clock.jump(self.ready_at[one])
            self.waited.append((now, self.clock.now()))
        self.compiled[program] = 0.0
        self.ready[program] = super().get(program)
        return self.ready[program]

    def rebind(self, is_learned: bool, features: float) -> None:
        """Drops all programs; new ones capture features, at this share of a round's seconds, if `is_learned`.

        The rounds of the table may do so already.
        """
        is_captured = self.table.facts.get(FEATURES) == CAPTURED
        self.features = (1 + is_learned * features) / (1 + is_captured * features) - 1
        self.ready_at = {}
        self.ran.clear(), self.ready.clear()
        self.changes += 1

    def rebinding(self) -> float:
        """Expected seconds to compile the current programs again, except chunks that draft."""
        plain = [one for one in self.ready_at if getattr(one, "strategy", PLAIN) == PLAIN]
        return 0.0 if self.compiles_free else sum(map(self.compile_costs.of, plain))

    def memory_held(self, groups: Iterable[int]) -> dict[str, int]:
        """As Executables.memory_held: simulated programs hold nothing."""
        return {"pool_programs": 0, "pool_bytes": 0}

    # Seconds

    def seconds(self, program: Program, rounds: int, start: float, held: float) -> float:
        if isinstance(program, MicroStep):
            return self.table.seconds("micro_step", program.tokens)
        return (1 + self.features) * noiseless_seconds(self.round_cost(held), program, rounds)

    def round_cost(self, held: float) -> RoundCost:
        """Milliseconds of a round by rows, slots and strategy; chunks hold `held` tokens a row, other programs full rows."""
        table = self.table

        def of(batch: int, slots: int, strategy: Strategy) -> float:
            return 1e3 * table.round_seconds(batch, slots, self.named(strategy), held or slots)

        return of

    def dispatched_at(self, group: int, seconds: float) -> Marker:
        """A marker of work of a group that takes this long, after all that was dispatched before."""
        start = max(self.clock.now(), self.free_at.get(group, 0.0))
        end = self.free_at[group] = start + seconds
        heapq.heappush(self.due, (end, group))
        return Marker(self.clock, end)

    def ends_early(self, group: int, at: float) -> None:
        """The last work of a group that `dispatched_at` started ends at this time."""
        self.free_at[group] = at
        heapq.heappush(self.due, (at, group))
