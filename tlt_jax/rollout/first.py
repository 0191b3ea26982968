"""The programs that a rollout needs first, known before it has weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tlt_jax.distributed.board import LocalBoard
from tlt_jax.rollout.executables.programs import CatchUp, Decode, Prefill, Start
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.interface import RolloutEngine
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.run import make_planner, needs
from tlt_jax.rollout.scheduler import group
from tlt_jax.rollout.scheduler.candidates import most_lag
from tlt_jax.rollout.scheduler.deterministic import DealtQueue
from tlt_jax.rollout.scheduler.payback import Payback
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.rollout.scheduler.state import GroupContext, GroupState
from tlt_jax.tuner.interface import State as TunerState


class Nothing:
    """Programs of which none is compiled, and which compute nothing; implements `Programs`."""

    version, compiling_alongside = 0, False

    def get(self, program: Program) -> Callable[..., Any]:
        return lambda *_: None

    def compile_cost(self, program: Program) -> float:
        return 1.0

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles nothing."""


def compiles_early(engine: RolloutEngine) -> bool:
    """Whether cores are free for programs that are needed later: one for each of the two that compile at once at least.

    On a CPU several processes may share the cores: they compile nothing early.
    """
    programs = engine.programs
    return programs.spare_cores >= 2 and not (programs.is_cpu and engine.job.count > 1)


def begin_compiling(engine: RolloutEngine, request: RolloutRequest, tuner: TunerState) -> None:
    """Starts to compile what the request's first chunk needs in the background."""
    for program in first_programs(engine, request, tuner):
        engine.programs.begin(program)


def first_programs(
    engine: RolloutEngine, request: RolloutRequest, tuner: TunerState
) -> list[Program]:
    """The programs of the first chunk of the first local group, in the order in which compiling them should begin.

    They are those that the group would compile now; without admissions, which are lowered when their prefill is compiled.
    """
    index, payback = engine.local_groups[0], Payback()
    payback.begin(request.rollouts_left, len(request.keys))
    sizes = len(request.prompts), request.samples
    queue = (
        DealtQueue(index, len(engine.groups), *sizes)
        if engine.cost_table
        else WorkQueue(LocalBoard(), "first", *sizes)
    )
    context = GroupContext(
        index, Nothing(), None, request, queue, make_planner(engine, request, tuner, payback), needs(engine)
    )  # fmt: skip
    state, _ = group.plan(context, GroupState())
    shape, strategy = group.shape_of(context, state), state.decision.strategy
    prefills = dict.fromkeys(Prefill(index, *joining.source.sizes) for joining in state.joining)
    chunk = Decode(shape, request.rounds, strategy, request.params)
    widest = max(joining.source.sizes[1] for joining in state.joining)
    catch_up = [CatchUp(shape)] if widest > most_lag(context, strategy) else []
    return [*prefills, chunk, Start(shape), *catch_up]
