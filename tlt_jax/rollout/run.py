"""The run of one rollout: its queues and planners, the groups that decode it, and one result of all processes.

Also the programs that a rollout needs first, known before it has weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from tlt_jax.distributed.board import Ending, LocalBoard
from tlt_jax.rollout import exchange
from tlt_jax.rollout.dialogue import Dialogue, Partner
from tlt_jax.rollout.executables.programs import CatchUp, Decode, Prefill, Program, Start
from tlt_jax.rollout.idle import ExpectedTime, IdleDriver, IdleWork
from tlt_jax.rollout.recorder import (
    Completion,
    Emitted,
    Listener,
    Poll,
    Replied,
    RolloutResult,
)
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler import driver, group
from tlt_jax.rollout.scheduler.payback import Payback
from tlt_jax.rollout.scheduler.planner import Planner, learned, most_lag
from tlt_jax.rollout.scheduler.queue import DealtQueue, OpenQueue, WorkQueue
from tlt_jax.rollout.scheduler.state import (
    GroupContext,
    GroupState,
    Harvester,
    Needs,
    no_context,
)
from tlt_jax.rollout.selection import KeptPrompts, Selecting, Selection
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.tuner.interface import State as TunerState

if TYPE_CHECKING:
    from tlt_jax.rollout.engine import Engine


class RolloutRun:
    """The local data groups of an engine decode one request; `number` counts the engine's rollouts.

    The groups of a process share one planner and, with all processes, one work queue. In a deterministic rollout each
    group has a planner of its own, and prompts are dealt to the groups beforehand.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        request: RolloutRequest,
        weights: Mapping[int, Weights],
        tuner: TunerState | None,
        harvesters: Mapping[int, Harvester] | None = None,
        selection: Selection | None = None,
        partner: Partner | None = None,
        turn_tokens: int = 0,
        arrivals: OpenQueue | None = None,
    ):
        self.arrivals = arrivals
        self.engine, self.number, self.request = engine, number, request
        self.tuner = engine.tuner.init() if tuner is None else tuner
        self.scope, job = f"rollout/{number}", engine.job
        if job.is_first:  # no process reads keys of the rollout before the last any more
            job.board.delete(f"rollout/{number - 2}/")
        self.ending = Ending(len(engine.groups), job.board, self.scope, job.index, job.count)
        self.selecting = None
        if selection:
            self.selecting = Selecting(
                selection, len(request.prompts), request.samples, engine.cost_table is not None,
                job.board, self.scope, job.index, job.count,
            )  # fmt: skip
        self.dialogue = None
        if partner:
            can_append = engine.programs.shapes[0].target.append is not None
            self.dialogue = Dialogue(request, partner, turn_tokens, can_append)
        if engine.ngram_memory:
            engine.ngram_memory.begin(request.prompts, request.samples)
        self.contexts = self.make_contexts(weights, harvesters)

    def make_contexts(
        self, weights: Mapping[int, Weights], harvesters: Mapping[int, Harvester] | None
    ) -> list[GroupContext]:
        """What does not change of each local group while the rollout runs."""
        engine, request, selecting = self.engine, self.request, self.selecting
        payback, prompts = engine.payback[request.params], len(request.prompts)
        expected = selecting.bound if selecting else prompts
        payback.begin(request.rollouts_left, expected * request.samples)
        may_go_on = self.dialogue is not None or self.arrivals is not None
        given = engine, request, self.tuner, payback, may_go_on
        planner = partial(make_planner, *given)
        sizes = prompts, request.samples, (lambda: selecting.bound) if selecting else None
        if engine.cost_table:
            count = len(engine.groups)
            parts = {i: (DealtQueue(i, count, *sizes), planner()) for i in engine.local_groups}
        else:
            queue = self.arrivals or WorkQueue(engine.job.board, self.scope, *sizes)
            shared = queue, planner()
            parts = dict.fromkeys(engine.local_groups, shared)
        return [
            GroupContext(
                index, engine.programs, weights[index], request, *parts[index], needs(engine),
                engine.programs.shapes[0].drafter.reads_history, harvesters[index] if harvesters else None,
                engine.cost_table is not None, self.dialogue,
            )
            for index in engine.local_groups
        ]  # fmt: skip

    def decode(
        self,
        listeners: Sequence[Listener],
        on_finish: Callable[[Completion], None] | None,
        interrupted: Callable[[], bool] | None,
        idle_work: IdleWork | None,
        least_idle: float,
    ) -> RolloutResult:
        """The local groups' answers, once all groups of all processes are done; stats say what was compiled.

        Raises Interrupted.
        """
        programs, groups = self.engine.programs, self.engine.local_groups
        before, waited = len(programs.compiles), len(programs.waited)
        own, selecting = [self.remember], self.selecting
        if self.dialogue:
            own.append(self.dialogue.listen)
        if selecting:
            own, on_finish = [*own, selecting.listen], selecting.finished(on_finish)
        listening = [*own, *listeners]
        rollout = driver.LocalGroups(self.contexts, listening, on_finish, self.engine.clock)
        background = idle_work and self.idle_driver(rollout, idle_work, least_idle)
        result = self.engine.drive(rollout, interrupted, background, self.ending, selecting)
        if selecting:
            result = kept(result, selecting.choice)
            result.stats.update(score_wait=selecting.waited)

        began = rollout.recorder.begin
        waits = [(start - began, end - began) for start, end in programs.waited[waited:]]
        new = programs.compiles[before:]
        result.stats.update(
            programs=len(programs.executables),
            compiles=len(new),
            compile_seconds=sum(compiled.seconds for compiled in new),
            **programs.memory_held(groups),
        )
        if self.dialogue:
            result.stats.update(awaited=rollout.awaited)
        if background:
            used = sum(background.used.values())
            result.stats.update(idle_used=used, idle_delay=background.delay)
        return replace(result, compile_waits=dict.fromkeys(groups, waits))

    def idle_driver(
        self, rollout: driver.LocalGroups, work: IdleWork, least_idle: float
    ) -> IdleDriver:
        """What gives groups that have nothing left to decode this work."""
        ending, recorder = self.ending, rollout.recorder
        left = ExpectedTime(self.request, self.engine.lengths)

        def expected() -> float:
            now = rollout.clock.now()
            seconds = left.seconds(rollout.states, recorder.measurements, recorder.lengths)
            ending.tell(seconds, now)
            return max(seconds, ending.others(now))

        groups = len(self.engine.groups)
        return IdleDriver(rollout, work, groups, least_idle, expected, lambda: bool(ending.how))

    def remember(self, poll: Poll) -> None:
        """Keeps the answers that n-grams are drawn from."""
        for event in poll.events if self.engine.ngram_memory else ():
            if isinstance(event, Emitted | Replied) and event.tokens is not None:
                self.engine.ngram_memory.write(event.uid, event.tokens)

    def exchanged(
        self, result: RolloutResult, wanted: Callable[[Sequence[Completion]], set[int]]
    ) -> RolloutResult:
        """The result of all processes; of answers that others decoded, this one has the tokens of those `wanted`."""
        job = self.engine.job
        merged = exchange.exchanged(job, result, wanted) if job.count > 1 else result
        return replace(merged, choice=self.selecting.choice) if self.selecting else merged

    def learned(self, result: RolloutResult) -> TunerState:
        """The tuner's state after the rollout, the same in all processes."""
        engine, tuner = self.engine, self.tuner
        if engine.cost_table:
            return learned(engine.tuner, tuner, result.measurements, engine.cost_table)
        if engine.job.count == 1:
            return self.contexts[0].planner.state
        for measurement in result.measurements:  # all learn the same, in the same order
            tuner = engine.tuner.observe(tuner, measurement)
        return tuner


def kept(result: RolloutResult, choice: KeptPrompts) -> RolloutResult:
    """The result with the answers to the chosen prompts alone; the stat kept_tokens has their tokens."""
    prompts = frozenset(choice.prompts)
    completions = [one for one in result.completions if one.prompt in prompts]
    result.stats.update(kept_tokens=sum(len(one.tokens) for one in completions))
    return replace(result, completions=completions, partial={})


def make_planner(
    engine: Engine,
    request: RolloutRequest,
    tuner: TunerState,
    payback: Payback,
    may_go_on: bool = False,
) -> Planner:
    """A planner of the request's chunks; `may_go_on`: of answers of several turns."""
    slots = engine.cache_buckets(request.prompts, request.max_new_tokens, may_go_on)
    longest = max(
        len(prompt) + limit
        for prompt, limit in zip(request.prompts, request.max_new_tokens, strict=True)
    )
    return Planner(
        engine.batches, slots, engine.tuner, tuner, payback, longest, len(engine.local_groups), engine.cost_table
    )  # fmt: skip


def needs(engine: Engine) -> dict[str, Needs]:
    """What the engine's drafters need from the host, by their names in strategies."""
    shapes = engine.programs.shapes[0]
    return {
        name: Needs(
            engine.ngram_memory.siblings if jax.tree.leaves(one.host_context(1)) else no_context,
            one.catch_up is not None,
        )
        for name, one in {"": shapes.drafter, **shapes.drafters}.items()
    }


class Nothing:
    """Executables of which none is compiled, and which compute nothing."""

    version, compiling_alongside = 0, False

    def get(self, program: Program) -> Callable[..., Any]:
        return lambda *_: None

    def compile_cost(self, program: Program) -> float:
        return 1.0

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles nothing."""


def compiles_early(engine: Engine) -> bool:
    """Whether cores are free for programs that are needed later: one for each of the two that compile at once at least.

    On a CPU several processes may share the cores: they compile nothing early.
    """
    programs = engine.programs
    return programs.spare_cores >= 2 and not (programs.is_cpu and engine.job.count > 1)


def begin_compiling(engine: Engine, request: RolloutRequest, tuner: TunerState) -> None:
    """Starts to compile what the request's first chunk needs in the background."""
    for program in first_programs(engine, request, tuner):
        engine.programs.begin(program)


def first_programs(engine: Engine, request: RolloutRequest, tuner: TunerState) -> list[Program]:
    """The programs of the first chunk of the first local group, in the order in which compiling them should begin.

    They are those that the group would compile now; without admissions, which are lowered when their prefill is compiled.
    """
    index, payback = engine.local_groups[0], Payback()
    payback.begin(request.rollouts_left, len(request.keys))
    sizes = len(request.prompts), request.samples
    queue = WorkQueue(LocalBoard(), "first", *sizes)
    if engine.cost_table:
        queue = DealtQueue(index, len(engine.groups), *sizes)
    may_go_on = bool(engine.config.environment.path or engine.config.environment.tools)
    planner = make_planner(engine, request, tuner, payback, may_go_on)
    context = GroupContext(index, Nothing(), None, request, queue, planner, needs(engine))
    state, _ = group.plan(context, GroupState())
    shape, strategy = group.shape_of(context, state), state.decision.strategy
    prefills = dict.fromkeys(Prefill(index, *joining.source.sizes) for joining in state.joining)
    chunk = Decode(shape, request.rounds, strategy, request.params)
    widest = max(joining.source.sizes[1] for joining in state.joining)
    catch_up = [CatchUp(shape)] if widest > most_lag(context, strategy) else []
    return [*prefills, chunk, Start(shape), *catch_up]
