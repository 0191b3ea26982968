"""How the drafter of an adaptive run learns in an RL step: on idle data groups, and from the rows of the policy's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tlt_jax.config import Config
from tlt_jax.config.schema import AUTO
from tlt_jax.drafter.idle_training import IdleTraining
from tlt_jax.drafter.interface import Copies, Windows
from tlt_jax.drafter.investment import Investment
from tlt_jax.drafter.merge import DeviceCopies
from tlt_jax.drafter.micro_step import MicroStep
from tlt_jax.drafter.recipe import DrafterState, Recipe
from tlt_jax.drafter.recipes import idle_recipe
from tlt_jax.drafter.replay import Replay
from tlt_jax.drafter.step_training import Lesson, StepTraining
from tlt_jax.models.architecture import Params
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.interface import RolloutEngine
from tlt_jax.rollout.recorder import Completion, RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.driver import WALL, Clock
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.strategy import LEARNED
from tlt_jax.train import adaptive
from tlt_jax.train.run_state import RunState
from tlt_jax.tuner.interface import State as TunerState

DETERMINISTIC_SHARE = 0.05  # what drafter_training.share auto is where no clock takes part


@dataclass
class Taught:
    """What the drafter learned so far in a step: its state, metrics, and the investment after it.

    `lesson`: what it is to learn from the rows of the update, None when nothing.
    """

    drafter: DrafterState | None
    investment: Investment
    metrics: dict[str, float] = field(default_factory=dict)
    lesson: Lesson | None = None


class LearningParts(NamedTuple):
    """What DrafterLearning decides about: on devices (`on_devices`), or simulated in virtual time.

    `create(answers)`: a drafter before its first update.
    """

    recipe: Recipe
    copies: Copies
    replays: Mapping[int, Windows]
    piece: Callable[[int, int, int], Program]
    create: Callable[[Sequence[Completion]], DrafterState]
    clock: Clock = WALL


def on_devices(config: Config, engine: RolloutEngine) -> LearningParts:
    """The drafter of drafter_training on the devices of the engine's local groups."""
    recipe = idle_recipe(config, engine.model_config, engine.learned, engine.mesh)
    groups = {index: engine.groups[index] for index in engine.local_groups}
    replay = adaptive.replay_config(config, recipe)
    return LearningParts(
        recipe,
        DeviceCopies(recipe, groups),
        {index: Replay(replay, index, mesh) for index, mesh in groups.items()},
        partial(MicroStep, recipe=recipe),
        lambda answers: adaptive.create(config, recipe, answers=answers),
    )


class DrafterLearning:
    """Trains the drafter of speculation.drafter `adaptive`, and decides when the rollout starts to draft with it.

    `idle` trains it on data groups that have nothing left to decode, `in_update` from the packed rows of the policy's
    update (None with drafter_training.share 0). `steps`: RL steps of the run.
    """

    def __init__(self, config: Config, engine: RolloutEngine, steps: int, parts: LearningParts):
        self.config, self.engine, self.steps = config, engine, steps
        self.recipe, self.create, knobs = parts.recipe, parts.create, config.idle_training
        self.idle = IdleTraining(
            parts.copies,
            parts.replays,
            engine.programs,
            parts.piece,
            least_idle=knobs.least_idle_s,
            floor=knobs.floor,
            rescue=knobs.rescue,
            starting=engine.learned_compile_cost,
            job=engine.job,
            follows=config.drafter_training.share != 0,
            is_idle_used=not config.rollout.deterministic,
            clock=parts.clock,
        )
        self.in_update = None
        if share := config.drafter_training.share:
            if share == AUTO:
                share = DETERMINISTIC_SHARE if config.rollout.deterministic else None
            self.in_update = StepTraining(
                self.recipe, share, engine.programs.compile_costs.of, engine.job.told
            )

    def resume(self, state: RunState) -> None:
        """Lets the rollout use the drafter of a state that the run starts or continues from."""
        is_used = not self.in_update or learned_drafter.is_usable(self.engine, state.tuner)
        self.engine.use_learned(state.drafter is not None and is_used)
        if self.in_update and self.engine.drafter:
            self.idle.activate()

    def before_publish(self) -> None:
        """Lets the rollout use the drafter once its training pays off."""
        if self.idle.is_active:
            self.engine.use_learned(True)

    def begin_rollout(
        self, request: RolloutRequest, weights: dict[int, Weights], state: RunState
    ) -> dict[str, Any]:
        """A rollout begins: the arguments of Engine.run that let idle groups train the drafter."""
        self.idle.begin(state.step, request, weights, state.drafter)
        return self.idle.background_work()

    def needs_all_answers(self, state: RunState) -> bool:
        """Whether a drafter may be created after this rollout, whose draft vocabulary is counted in all answers."""
        return not self.idle.is_active and is_untrained(state.drafter)

    def after_rollout(
        self,
        state: RunState,
        policy: Params,
        tuner: TunerState,
        rollout: RolloutResult,
        timed: Callable[[], AbstractContextManager[None]],
    ) -> Taught:
        """Merges what idle groups learned, and decides what is learned from the rows of the update; `timed` counts seconds.

        `policy`: that of the state, with all its weights. A drafter is created when its training is found to pay off.
        """
        with timed():
            investment = state.investment
            if self.in_update:
                investment = self.in_update.earned(
                    investment,
                    partial(learned_drafter.payback, self.engine, tuner),
                    state.step,
                    self.rollouts_left(state),
                    self.engine.drafter is not None,
                )
            taught = self.learn_from_harvest(state, rollout, investment)
        has_trained = taught.metrics.get("drafter/steps", 0) > 0
        chosen = self.in_update and self.in_update.chosen(
            taught.investment, state.step, has_trained
        )
        if chosen:
            drafter = taught.drafter or self.create(rollout.completions)
            taught.lesson = Lesson(self.recipe, chosen, state.step, policy, drafter, timed)
        return taught

    def learn_from_harvest(
        self, state: RunState, rollout: RolloutResult, investment: Investment
    ) -> Taught:
        """The drafter after idle training; where the rollout has its features, it also learns from the harvest now.

        It may spend the investment's credit on that. A drafter is created when training is found to pay off, also in the
        place of one that a fixed policy needed before there were answers to take a draft vocabulary from.
        """
        idle, drafter = self.idle, state.drafter
        groups = adaptive.decoding_seconds(rollout, self.config.mesh.data, idle.kind)
        seconds = rollout.stats["seconds"] - max(group.compile_wait for group in groups)
        longest_idle, length = max(group.idle for group in groups), rollout.stats["accept_length"]
        may_create = not idle.is_active and not self.config.drafter_training.start
        may_create = may_create and is_untrained(drafter)
        paid = investment.credit if idle.is_active else 0.0
        left = self.rollouts_left(state)
        drafter, metrics = idle.end(drafter, seconds, longest_idle, length, left, paid)
        tokens = metrics.get("drafter/tokens", 0.0)
        investment = investment.measured(idle.depths).learned(tokens, 0, idle.paid_seconds, False)
        if may_create and idle.is_active:
            drafter = self.create(rollout.completions)
        return Taught(drafter, investment, metrics | adaptive.idle_metrics(rollout, groups))

    def after_update(self, taught: Taught, tuner: TunerState) -> tuple[TunerState, str]:
        """Adds what was learned in the update to `taught`; the tuner's state with the measured acceptance.

        Also a message when the rollout starts to draft with the drafter: empty otherwise. The tuner learns the acceptance
        of a drafter that learns in the update once drafting with it pays.
        """
        depths: Sequence[float] = self.idle.depths
        if lesson := taught.lesson:
            taught.drafter = lesson.drafter
            taught.metrics |= lesson.learned.metrics
            taught.investment = self.in_update.after(taught.investment, lesson)
            depths = lesson.learned.depths or depths
        engine = self.engine
        if not depths:
            return engine.tuner.update_prior(tuner), ""
        measured = engine.tuner.update_prior(tuner, {LEARNED: depths})
        if not self.idle.follows or self.idle.pays_off:
            return measured, ""
        saved, compile_cost = learned_drafter.payback(engine, tuner, depths)
        if not engine.job.decided(saved > compile_cost):
            return engine.tuner.update_prior(tuner), ""
        self.idle.activate()
        held = ", ".join(f"{depth:.2f}" for depth in depths)
        gain = "" if engine.cost_table else f"; {saved - compile_cost:.0f} s to gain"
        return measured, f"the drafter drafts from here on: of its drafts {held} hold{gain}"

    def rollouts_left(self, state: RunState) -> int:
        """Rollouts of the run after this step's."""
        return self.steps - state.step - 1

    def export(self, state: RunState) -> None:
        """Writes the drafter's directory, if there is a drafter."""
        if state.drafter:
            adaptive.export(
                self.config, self.recipe.drafter, state.drafter.params, self.idle.known_depths, state.step,
            )  # fmt: skip


def is_untrained(drafter: DrafterState | None) -> bool:
    """Whether there is no drafter yet, or one without an update."""
    return drafter is None or int(drafter.step) == 0
