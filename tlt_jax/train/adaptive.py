"""The drafter of an adaptive run (speculation.drafter) in an RL step: how it starts, learns, is measured and is written.

It learns on idle data groups during a rollout, and from the packed rows of the policy's update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tlt_jax import atomic, keys, run_folder
from tlt_jax.config import Config
from tlt_jax.config.schema import AUTO
from tlt_jax.data import packing
from tlt_jax.data.packing import PackedRows
from tlt_jax.drafter import recipe as drafter_recipe, step_training
from tlt_jax.drafter.idle_training import IdleTraining
from tlt_jax.drafter.investment import CHANCE, HOPED, Investment
from tlt_jax.drafter.recipe import DrafterRecipe, DrafterState, idle_recipe
from tlt_jax.drafter.replay import Replay, ReplayConfig
from tlt_jax.drafter.step_training import StepTraining
from tlt_jax.drafter.update import Copies, MicroStep
from tlt_jax.metrics import GroupSeconds, group_seconds
from tlt_jax.models import drafter as drafters, hf_drafter
from tlt_jax.models.architecture import Params
from tlt_jax.models.drafter import DrafterParams
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.recorder import Completion, RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.strategy import LEARNED
from tlt_jax.tuner.interface import State as TunerState

if TYPE_CHECKING:
    from tlt_jax.rollout.engine import Engine
    from tlt_jax.train.run_state import RunState

DETERMINISTIC_SHARE = 0.05  # what drafter_training.share auto is where no clock takes part
WINDOW = 512  # most tokens of a finished sequence that are stored together
WIDTH_MULTIPLE = 16  # of a window
# Of a data group's replay buffer: its size, and the fewest windows.
REPLAY_BYTES, REPLAY_WINDOWS = 512 * 2**20, 8
HELD_OUT = 8  # every 8th sequence is held out from training, to measure on


def replay_config(config: Config, recipe: DrafterRecipe) -> ReplayConfig:
    """The replay buffer of each data group: REPLAY_BYTES, and at least REPLAY_WINDOWS windows."""
    width = min(WINDOW, -(-packing.longest(config) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    numbers = (len(recipe.drafter.captures) + 1) * recipe.model.hidden_size  # features and states
    window = width * numbers * np.dtype(recipe.compute_dtype).itemsize
    most = max(REPLAY_BYTES, REPLAY_WINDOWS * window)
    return ReplayConfig(width=width, max_bytes=most, seed=config.train.seed, held_out=HELD_OUT)


def create(
    config: Config,
    recipe: DrafterRecipe,
    start: DrafterParams | None = None,
    texts: Iterable[np.ndarray] = (),
) -> DrafterState:
    """The drafter before its first update: `start`, or a new one.

    The draft vocabulary of a new one, if smaller than the policy's, has the most frequent tokens of the texts, int[T] each;
    ties go to the lower ids.
    """
    drafter, dtype = recipe.drafter, config.model.param_dtype
    if start is not None:
        return drafter_recipe.create(start, recipe)
    ids = None
    if not drafter.has_full_vocab:
        ids = drafters.frequent_ids(texts, drafter.draft_vocab_size, recipe.model.vocab_size)
    init_key = keys.stream_key(config.train.seed, keys.DRAFTER_WEIGHTS)
    return drafter_recipe.create(drafters.init(drafter, recipe.mesh, init_key, dtype, ids), recipe)


def decoding_seconds(rollout: RolloutResult, groups: int, kind: str) -> list[GroupSeconds]:
    """Busy, idle and compile-wait seconds of each data group; spans of `kind` (idle work) count as idle."""
    spans = [span for span in rollout.spans if span.kind != kind]
    return group_seconds(spans, rollout.compile_waits, groups, (0.0, rollout.stats["seconds"]))


def idle_metrics(rollout: RolloutResult, groups: Sequence[GroupSeconds]) -> dict[str, float]:
    """The metrics idle/*: idle share of the groups' rollout time, and the share of it that idle work used."""
    idle, used = sum(group.idle for group in groups), rollout.stats.get("idle_used", 0.0)
    return {
        "idle/ratio": idle / (len(groups) * rollout.stats["seconds"]),
        "idle/used_ratio": min(used / idle, 1.0) if idle > 0 else 0.0,
        "idle/delay_s": rollout.stats.get("idle_delay", 0.0),
    }


def export(
    directory: Path,
    dtype: str,
    recipe: DrafterRecipe,
    state: DrafterState,
    acceptance: Sequence[float],
    made_from: Mapping[str, Any] | None = None,
    is_owner: bool | None = None,
) -> str:
    """Writes the drafter's directory, with weights of `dtype`; what serving engines cannot load it, "" if all can.

    `acceptance`: by depth; `is_owner`: whether this process writes what is not sharded, by default process 0.
    """
    atomic.write_directory(
        directory,
        lambda at: hf_drafter.save(state.params, recipe.drafter, at, dtype, acceptance),
        jax.process_index() == 0 if is_owner is None else is_owner,
        made_from,
    )
    return hf_drafter.caveat(recipe.drafter, recipe.model.family)


class Learned(NamedTuple):
    """The drafter after a part of an RL step, the investment in its training, and metrics.

    `depths`: its acceptance at depth 1, 2, ..., each given the depths before, when it was measured in this step.
    """

    drafter: DrafterState | None
    investment: Investment
    metrics: dict[str, float] = {}
    depths: Sequence[float] = ()


class DrafterLearning:
    """Trains the drafter of speculation.drafter `adaptive`, and decides when the rollout starts to draft with it.

    `idle` trains it on data groups that have nothing left to decode, `in_update` from the packed rows of the policy's
    update (None with drafter_training.share 0). `steps`: RL steps of the run. `start_depths`: acceptance by depth of the one
    that the drafter starts from; None: it is new.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        steps: int,
        start_depths: Sequence[float] | None = None,
    ):
        self.config, self.engine, self.steps = config, engine, steps
        self.start_depths = start_depths
        self.recipe = idle_recipe(config, engine.model_config, engine.learned, engine.mesh)
        self.idle = IdleTraining(
            *self.copies_and_replays(),
            engine.programs,
            partial(MicroStep, recipe=self.recipe),
            job=engine.job,
            is_idle_used=not config.rollout.deterministic,
            clock=engine.clock,
            must_pay=config.drafter_training.share == AUTO,
        )
        self.in_update = None
        if share := config.drafter_training.share:
            if share == AUTO:
                share = DETERMINISTIC_SHARE if config.rollout.deterministic else None
            self.in_update = StepTraining(
                self.recipe, share, engine.programs.compile_costs.of, engine.job.told
            )

    @property
    def has_start(self) -> bool:
        """Whether the drafter starts from another one."""
        return self.start_depths is not None

    @property
    def begins_plain(self) -> bool:
        """Whether a drafter to start with is used only once the first rollout's seconds say that this pays.

        With drafter_training.share auto, where the processors that decode also compile: programs with features take up to
        twice as long to compile. Elsewhere it is used at once.
        """
        engine, share = self.engine, self.config.drafter_training.share
        decides = share == AUTO and not (engine.cost_table or engine.tuner.has_fixed_policy)
        return self.has_start and decides and engine.is_cpu

    def started(self, tuner: TunerState) -> TunerState:
        """The tuner's state at the start of a run."""
        if not self.has_start or self.begins_plain:
            return tuner
        return self.engine.tuner.update_prior(tuner, {LEARNED: self.start_depths})

    def copies_and_replays(self) -> tuple[Copies, dict[int, Replay]]:
        """What the engine's local groups train on."""
        groups = {index: self.engine.groups[index] for index in self.engine.local_groups}
        replay = replay_config(self.config, self.recipe)
        replays = {index: Replay(replay, index, mesh) for index, mesh in groups.items()}
        return Copies(self.recipe, groups), replays

    def create(self, answers: Sequence[Completion]) -> DrafterState:
        """A drafter before its first update, whose draft vocabulary is counted in the answers."""
        return create(self.config, self.recipe, texts=(one.tokens for one in answers))

    def train(
        self, drafter: DrafterState, policy: Params, rows: Sequence[PackedRows], step: int
    ) -> tuple[DrafterState, dict[str, float], list[float]]:
        """The drafter after an optimizer step on each of the rows, metrics, and acceptance by depth."""
        return step_training.learn(self.recipe, drafter, policy, rows, step)

    def resume(self, state: RunState) -> None:
        """Lets the rollout use the drafter of a state that the run starts or continues from."""
        is_used = not self.in_update or learned_drafter.is_usable(self.engine, state.tuner)
        self.engine.use_learned(state.drafter is not None and is_used)
        has_learned = self.has_start or not is_untrained(state.drafter)
        if self.engine.drafter and (self.in_update or has_learned):
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
        is_new = is_untrained(state.drafter) and not self.has_start
        return is_new and not self.idle.is_active

    def merge(self, state: RunState, tuner: TunerState, rollout: RolloutResult) -> Learned:
        """The drafter after a rollout in which idle groups trained; they may learn more from what was harvested.

        The investment gets the credit of this step, and pays for what is learned from the harvest. Where only idle groups
        train, a drafter is created when this is found to pay off, also in the place of one that a fixed policy needed
        before there were answers to take a draft vocabulary from.
        """
        idle, engine, investment = self.idle, self.engine, state.investment
        if self.in_update:
            worth = partial(learned_drafter.payback, engine, tuner)
            left, drafts = self.steps - state.step - 1, engine.drafter is not None
            investment = self.in_update.earned(investment, worth, state.step, left, drafts)
        groups = decoding_seconds(rollout, self.config.mesh.data, idle.kind)
        seconds = rollout.stats["seconds"] - max(group.compile_wait for group in groups)
        may_start = not self.in_update and not idle.pays_off and idle.is_idle_used
        paid = investment.credit if idle.is_active else 0.0
        drafter, metrics = idle.end(state.drafter, seconds, paid)
        tokens = metrics.get("drafter/tokens", 0.0)
        investment = investment.measured(idle.depths).learned(tokens, 0, idle.paid_seconds, False)
        if may_start and (engine.drafter or engine.job.decided(self.may_pay(tuner))):
            idle.activate()
            if not self.has_start and is_untrained(drafter):
                drafter = self.create(rollout.completions)
        return Learned(drafter, investment, metrics | idle_metrics(rollout, groups), idle.depths)

    def learn(
        self,
        learned: Learned,
        policy: Params,
        rows: Sequence[PackedRows],
        answers: Sequence[Completion],
        step: int,
    ) -> Learned:
        """The drafter after learning from some rows of the update after `step` RL steps, before the policy learns from them.

        `policy`: the one that generated the `answers` in the rows. A drafter is created when there is none.
        """
        has_trained = learned.metrics.get("drafter/steps", 0) > 0
        chosen = self.in_update and self.in_update.chosen(
            learned.investment, step, has_trained, len(rows)
        )
        if not self.in_update or chosen is None:
            return learned
        drafter, clock = learned.drafter or self.create(answers), self.engine.clock
        jax.block_until_ready(rows)
        began, given = clock.now(), [rows[place] for place in chosen]
        drafter, metrics, depths = self.train(drafter, policy, given, step)
        metrics |= {"drafter/share": len(chosen) / len(rows)}
        investment = self.in_update.after(learned.investment, metrics, depths, clock.now() - began)
        return Learned(drafter, investment, learned.metrics | metrics, depths or learned.depths)

    def may_pay(self, tuner: TunerState) -> bool:
        """Whether drafting with a drafter that training may well give is expected to save more than starting it costs."""
        saved, compile_cost = learned_drafter.payback(self.engine, tuner, HOPED)
        return CHANCE * saved > compile_cost

    def update_tuner(self, tuner: TunerState, depths: Sequence[float]) -> tuple[TunerState, str]:
        """The tuner's state with the measured acceptance by depth, if any, for the new weights of policy and drafter.

        Also a message when the rollout starts to draft with the drafter: empty otherwise. The tuner learns the acceptance
        of a drafter that learns in the update once drafting with it pays.
        """
        engine = self.engine
        if self.begins_plain and not self.idle.pays_off:
            depths = depths or self.start_depths
        if not depths:
            return engine.tuner.update_prior(tuner), ""
        measured = engine.tuner.update_prior(tuner, {LEARNED: depths})
        if not self.in_update or self.idle.pays_off:
            return measured, ""
        saved, compile_cost = learned_drafter.payback(engine, tuner, depths)
        is_disturbed = engine.tuner.is_disturbed(tuner)  # compiling would take longest now
        if not engine.job.decided(saved > compile_cost and not is_disturbed):
            return engine.tuner.update_prior(tuner), ""
        self.idle.activate()
        held = ", ".join(f"{depth:.2f}" for depth in depths)
        gain = "" if engine.cost_table else f"; {saved - compile_cost:.0f} s to gain"
        return measured, f"the drafter drafts from here on: of its drafts {held} hold{gain}"

    def export(self, state: RunState) -> None:
        """Writes the drafter's directory, if there is a drafter."""
        if state.drafter:
            directory, dtype = run_folder.drafter_export(self.config), self.config.model.param_dtype
            depths, made_from = state.investment.depths, run_folder.of_step(state.step)
            if caveat := export(directory, dtype, self.recipe, state.drafter, depths, made_from):
                print(caveat)


def is_untrained(drafter: DrafterState | None) -> bool:
    """Whether there is no drafter yet, or one without an update."""
    return drafter is None or int(drafter.step) == 0
