"""The rollout engine in virtual time: EngineBase decides, and RolloutRun runs, on simulated programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tlt_jax.config import Config
from tlt_jax.distributed.job import Job
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.rollout.engine import EngineBase
from tlt_jax.rollout.idle import IdleDriver, IdleWork
from tlt_jax.rollout.learned_drafter import FEATURES
from tlt_jax.rollout.recorder import Listener, Look, RolloutRecorder, RolloutResult, WentIdle
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.run import RolloutRun
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.planner import GroupCandidates, Planner
from tlt_jax.rollout.scheduler.state import GroupView, Harvester
from tlt_jax.simulate import simulator
from tlt_jax.simulate.decoding import NOTHING
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import DRAFTERS
from tlt_jax.tuner.interface import Cell, State as TunerState

NOTHINGS = np.broadcast_to(NOTHING, 1 << 40)  # one byte of memory


class SimulatedEngine(EngineBase):
    """An engine of `groups` data groups whose programs are simulated; with the methods of rollout.engine.Engine.

    `make_programs(drafters)` returns simulator.SimulatedPrograms, given the names that strategies may have for drafters.
    """

    def __init__(
        self,
        config: Config,
        drafter: DrafterConfig | None,
        groups: int,
        is_cpu: bool,
        make_programs: Callable[[Sequence[str]], Any],
    ):
        super().__init__(config, drafter, groups, is_cpu, Job())
        self.model_config = self.mesh = self.ngram_memory = None
        self.groups = [None] * groups
        self.local_groups, self.basis = range(groups), {}
        self.programs = make_programs(("", *DRAFTERS))
        self.use_learned(drafter is not None)
        self.running: SimulatedRun | None = None

    @property
    def clock(self) -> simulator.VirtualClock:
        """The virtual clock of all programs."""
        return self.programs.clock

    @property
    def is_over(self) -> bool:
        """Whether no data group has anything left to decode."""
        return self.running is None or bool(self.running.ending.how)

    def use_learned(self, is_used: bool) -> None:
        """As Engine.use_learned."""
        if is_used != (self.drafter is not None) or not self.programs.executables:
            self.drafter = self.learned if is_used else None
            self.programs.rebind(is_used, FEATURES)

    def learned_compile_cost(self) -> float:
        """As Engine.learned_compile_cost."""
        return 0.0 if self.drafter else self.programs.rebinding()

    def publish(self, params: Any, drafter: Any = None) -> dict[int, Weights]:
        """As Engine.publish: it takes its seconds."""
        self.clock.sleep(self.programs.table.seconds("publish"))
        return dict.fromkeys(self.local_groups, Weights(None, ()))

    def run(
        self,
        request: RolloutRequest,
        weights: Mapping[int, Weights],
        tuner: TunerState | None = None,
        *,
        harvesters: Mapping[int, Harvester] | None = None,
        listeners: Sequence[Listener] = (),
        idle_work: IdleWork | None = None,
        least_idle: float = 0.0,
    ) -> tuple[RolloutResult, TunerState]:
        """As Engine.run, in virtual time."""
        run = SimulatedRun(self, next(self.rollouts), request, weights, tuner, harvesters)
        run.clock, self.running = self.clock, run
        result = run.decode([run.note_idle, *listeners], None, None, idle_work, least_idle)
        self.running = None
        self.lengths = [len(one.tokens) for one in result.completions]
        return result, run.learned(result)


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


class SharedPlanner(Planner):
    """A planner of groups whose programs are compiled at the same time: what is compiled is looked up once for all."""

    def compiled(self, view: GroupView, candidates: GroupCandidates) -> list[Cell]:
        return super().compiled(replace(view, group=0), candidates)


class CountingRecorder(RolloutRecorder):
    """A recorder of answers without tokens: their parts are joined by their lengths alone."""

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return NOTHINGS[: sum(map(len, parts))]


class SimulatedRun(RolloutRun):
    """A RolloutRun in virtual time."""

    planner_type, recorder_type = SharedPlanner, CountingRecorder

    def drive(
        self,
        rollout: driver.LocalGroups,
        interrupted: Callable[[], bool] | None,
        background: IdleDriver | None,
    ) -> RolloutResult:
        return simulator.simulate(rollout, self.engine.programs, background)

    def note_idle(self, look: Look) -> Any:
        """The rollout is over once all groups were noted."""
        if look.events and isinstance(look.events[-1], WentIdle):
            self.ending.is_idle(look.group)
