"""Simulates rollouts in virtual time: the real scheduler on programs that compute nothing, with a cost function."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tlt_jax.distributed.board import LocalBoard
from tlt_jax.rollout.events import Look, WentIdle
from tlt_jax.rollout.executables.programs import (
    Admit,
    CatchUp,
    Decode,
    Prefill,
    Resize,
    Start,
)
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.driver import BackgroundWork, Rollout
from tlt_jax.rollout.scheduler.harvest import Harvest
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.rollout.scheduler.state import Decider, GroupContext, Needs
from tlt_jax.rollout.selecting import Selecting
from tlt_jax.simulate import decoding, scenarios
from tlt_jax.simulate.decoding import Acceptance, Lengths, Rows
from tlt_jax.simulate.round_costs import noiseless_seconds
from tlt_jax.simulate.scenarios import Scenario
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.decode_state import Admission, Features, Weights
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, PLAIN

POLL_BEFORE_S = 1e-6  # `simulate` also polls this long before a program is done

Costs = Callable[[Program, int, float], float]  # program, its rounds, its start time -> seconds
Compiling = Callable[[Program], float]  # program -> the host's seconds to compile it


def no_compile_time(program: Program) -> float:
    """Compiling takes no time."""
    return 0.0


class VirtualClock:
    """A clock that `sleep` and `jump` advance; implements driver.Clock."""

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
    """Simulated programs of all groups; those of one group run one after the other; implements `Programs`.

    A sequence's tokens and length are functions of its key. The tokens that a round accepts depend on
    its key, its rounds so far and the strategy, and never on rows, slots or groups. `host`: seconds from a
    dispatch to the start of a program on an idle device. The first `get` of a program takes the host its
    seconds of `compiling`, recorded in `compiled`. Without `writes` every token is decoding.NOTHING.
    """

    def __init__(
        self,
        costs: Costs,
        acceptance: Acceptance,
        lengths: Lengths,
        clock: VirtualClock,
        compiling: Compiling = no_compile_time,
        writes: bool = True,
    ):
        self.costs, self.acceptance, self.lengths, self.clock = costs, acceptance, lengths, clock
        self.writes, self.host = writes, 0.0
        self.kinds: dict[type, Callable[..., Any]] = {
            Start: self.start,
            Prefill: self.prefill,
            Admit: self.admit,
            Resize: self.resize,
            CatchUp: self.catch_up,
            Decode: self.decode,
            Harvest: self.harvest,
        }
        self.compiling, self.compiled, self.ran = compiling, {}, set()
        self.free_at: dict[
            int, float
        ] = {}  # of each group, the time at which all its dispatched programs are done
        # A heap of the times at which programs are done, with their groups.
        self.due: list[tuple[float, int]] = []

    def get(self, program: Program) -> Callable[..., Any]:
        """A function that dispatches the program; compiles it now when it is missing."""
        if program not in self.compiled:
            self.compiled[program] = self.compiling(program)
            self.clock.sleep(self.compiled[program])
        return partial(self.kinds[type(program)], program)

    @property
    def version(self) -> int:
        return len(self.compiled)

    @property
    def compiling_alongside(self) -> bool:
        return False

    def compile_cost(self, program: Program) -> float:
        return 0.0 if program in self.compiled else self.compiling(program)

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles the programs; the host waits."""
        for program in programs:
            self.get(program)

    def is_first_run(self, program: Program) -> bool:
        if program in self.ran:
            return False
        self.ran.add(program)
        return True

    def read(self, report: Pending) -> Report:
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
        """Seconds of a program that starts then; `held`: tokens that a row of a chunk holds on average."""
        return self.costs(program, rounds, start)

    def dispatch(self, program: Program, rounds: int = 0, held: float = 0.0) -> Marker:
        """Starts the program `host` seconds from now, or once all earlier ones of its group are done."""
        start = max(self.clock.now() + self.host, self.free_at.get(program.group, 0.0))
        end = self.free_at[program.group] = start + self.seconds(program, rounds, start, held)
        heapq.heappush(self.due, (end, program.group))
        return Marker(self.clock, end)

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
        rows, report = decoding.decode_chunk(
            self.acceptance, program, state.rows, *bounds.tolist(), self.writes
        )
        held = decoding.held(state.rows, rows, report.rounds)
        marker = self.dispatch(program, report.rounds, held)
        known = state.known
        if program.strategy != PLAIN and program.strategy.drafter != NGRAM:
            known = rows.tokens
        return SimulatedState(rows, marker, known), Pending(report, marker)

    def harvest(self, program: Harvest, *_: Any) -> Features:
        return Features(self.dispatch(program), None)


class ScenarioCosts:
    """The costs of a scenario with the noise of its clock; each group has its own noise."""

    def __init__(self, scenario: Scenario):
        self.scenario, self.random, self.seen = scenario, {}, set()

    def __call__(self, program: Program, rounds: int, at: float) -> float:
        is_first, group = program not in self.seen, program.group
        self.seen.add(program)
        seed = [self.scenario.seed, group]
        random = self.random.setdefault(group, np.random.default_rng(seed))
        seconds = noiseless_seconds(self.scenario.cost, program, rounds)
        return self.scenario.with_noise(random, seconds, is_first) * self.scenario.load(at)


def long_tailed(longest: int) -> Lengths:
    """Heavy-tailed answer lengths, as scenarios.lengths draws them."""
    return lambda key: int(scenarios.lengths(np.random.default_rng(key.tolist()), 1, longest)[0])


def in_scenario(
    scenario: Scenario, lengths: Lengths, compiling: Compiling = no_compile_time
) -> SimulatedPrograms:
    """Programs with the costs and drafts of a scenario, on a new virtual clock."""
    return SimulatedPrograms(
        ScenarioCosts(scenario), scenario.trees, lengths, VirtualClock(), compiling
    )


def request(
    prompts: Sequence[int],
    samples: int,
    max_new_tokens: int,
    *,
    seed: int,
    capacity: int,
    rounds: int = 16,
    in_flight: int = 2,
    rollouts_left: float = 0,
) -> RolloutRequest:
    """A request for answers to prompts with these numbers of tokens; a sequence's key is its seed and uid."""
    uids = np.arange(len(prompts) * samples, dtype=np.uint32)
    return RolloutRequest(
        prompts=tuple(np.zeros(tokens, np.int32) for tokens in prompts),
        samples=samples,
        max_new_tokens=(max_new_tokens,) * len(prompts),
        keys=np.stack([np.full_like(uids, seed), uids], axis=1),
        params=DecodingParams(),
        rounds=rounds,
        in_flight=in_flight,
        capacity=capacity,
        rollouts_left=rollouts_left,
    )


def contexts(
    programs: SimulatedPrograms,
    request: RolloutRequest,
    planner: Decider,
    groups: int = 1,
    catches_up: bool = True,
    selecting: Selecting | None = None,
) -> list[GroupContext]:
    """Groups that share one queue, up to the bound of `selecting`, and one planner; the drafter NGRAM never catches up."""
    bound = (lambda: selecting.bound) if selecting else None
    queue = WorkQueue(LocalBoard(), "simulator", len(request.prompts), request.samples, bound)
    learned = Needs(catches_up=catches_up)
    needs = {"": learned, NGRAM: Needs(), LEARNED: learned, MERGED: learned}
    fixed = {"weights": Weights((), ()), "request": request, "queue": queue, "planner": planner}
    return [GroupContext(group, programs, **fixed, needs=needs) for group in range(groups)]


def simulate(
    rollout: Rollout,
    programs: SimulatedPrograms,
    background: BackgroundWork | None = None,
    selecting: Selecting | None = None,
) -> RolloutResult:
    """Runs the rollout and the `background` work to their end; between events the clock jumps to the next program's end.

    With `selecting` the rollout stops when the choice is known; times at which scores come are in `programs.due`, of
    group -1. Listeners also see the groups just before that end, unfinished: otherwise each measurement would be uncertain by a
    whole chunk. After the first poll only groups whose programs end are polled: nothing has changed for the others. The
    background work begins with the first idle group, or with the rollout where groups may wait for prompts.
    """
    clock, result, groups, is_idle = programs.clock, None, None, False
    is_in_order = any(context.is_in_order for context in rollout.contexts.values())
    while True:
        events = [] if result else [one for look in rollout.poll(groups) for one in look.events]
        is_idle = (
            is_idle or selecting is not None or any(isinstance(one, WentIdle) for one in events)
        )
        happened = is_in_order and bool(events)  # else one poll reads and dispatches all there is
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
                rollout.tell(Look(group, clock.now(), clock.now(), ()))
        clock.jump(ready)
        groups = None if selecting else groups  # a new bound lets any group go on
