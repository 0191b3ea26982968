"""The start of an RL run: what its configuration names, the state that it starts or resumes from, and its trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from tlt_jax import run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, parse, validate
from tlt_jax.config.schema import ADAPTIVE
from tlt_jax.data import dataset as datasets, prompt_format
from tlt_jax.data.dataset import Dataset
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.distributed.job import Job
from tlt_jax.errors import ConfigError, DamagedCheckpoint
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.metrics import Writer, check_trackers
from tlt_jax.models import from_config, remat as remats
from tlt_jax.models.architecture import Params
from tlt_jax.models.drafter import DrafterParams
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.background import Early
from tlt_jax.rollout.executables.disk_cache import sources
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.run import begin_compiling, compiles_early
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.spec_decode.strategy import LEARNED
from tlt_jax.train import (
    adaptive,
    batch,
    dynamic_sampling,
    evaluation,
    losses,
    memory,
    policy_update,
    setup as setups,
    sft,
    teacher,
)
from tlt_jax.train.adaptive import DrafterLearning
from tlt_jax.train.policy_update import Recipe, UpdatePrograms
from tlt_jax.train.run_state import RunState
from tlt_jax.train.setup import Setup
from tlt_jax.tuner.acceptance import GUESS

SHORT = 60  # characters of a prompt that a line shows

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Setup):
    """A run of `steps` RL steps, before it enters its folder: its inputs, and what it is made with.

    `drafter`: None without an adaptive drafter; `drafter_params`: the weights of drafter_training.start, or of the drafter
    that speculation.drafter names; None when it names none.
    """

    steps: int
    recipe: Recipe
    engine: Engine
    drafter: DrafterLearning | None
    drafter_params: DrafterParams | None

    def request(self, prompts: Sequence[Prompt], step: int) -> RolloutRequest:
        """What the rollout that follows `step` decodes."""
        rollout = self.config.rollout
        return self.engine.request(
            [prompt.tokens for prompt in prompts],
            rollout.samples,
            Sampling.of(rollout),
            rollout.max_new_tokens,
            stream=TRAIN_STREAM,
            step=step,
            rollouts_left=self.steps - step - 1,
            records=True,
        )


def load(config: Config, job: Job) -> Setup:
    """Checks the configuration, and loads its tokenizer and data. Raises UserError, also when processes differ."""
    validate.validate_rl(config)
    losses.check(config.algorithm.loss)
    if job.is_first:
        check_trackers(config)
    tokenizer = prompt_format.tokenizer_of(config)
    dataset = datasets.load(config, tokenizer)
    if job.is_first:
        print(dataset.describe(), flush=True)
    job.agree(  # what all processes of a run must have in common: every knob, the code, the data
        {name: str(value) for name, value in parse.flatten(config).items()}
        | {"tlt_jax's code": sources(), "jax": jax.__version__, "data": dataset.digest()}
    )
    setup = Setup.of(config, tokenizer, dataset, job)
    teacher.check(config, dataset, setup.model)
    return setup


def make_run(setup: Setup) -> TrainingRun:
    """The run of a setup. Raises ConfigError for what the devices cannot hold."""
    is_adaptive = setup.config.speculation.drafter == ADAPTIVE
    if is_adaptive:
        setup = setups.with_start_drafter(setup)
    config, model, mesh = setup.config, setup.model, setup.mesh
    steps = total_steps(config, setup.dataset)
    recipe = Recipe.of(config, model, mesh, steps)
    drafter, drafter_params = from_config.load_drafter(config, model, mesh)
    recipe = memory.fitted(config, recipe, drafter, setup.job)
    if setup.job.is_first:
        log.info("model.remat %s: %s", config.model.remat, remats.spell(recipe.remat))
        if recipe.lora:
            log.info("model.lora: %s", policy_update.share_trained(recipe))
    stops = datasets.stop_rules(config, setup.tokenizer)
    captures_states = is_adaptive and not config.rollout.deterministic
    records = validate.replays(config.algorithm, recipe.compute_dtype, model)
    engine = Engine(
        config,
        model,
        mesh,
        stops,
        drafter,
        captures_states,
        setup.job,
        recipe.lora,
        records=records,
    )
    depths = None if drafter_params is None else start_depths(config)
    learning = DrafterLearning(config, engine, steps, depths) if is_adaptive else None
    memory.preflight(config, recipe, engine.programs.shapes[0], engine.capacity, drafter)
    return TrainingRun(
        **vars(setup), steps=steps, recipe=recipe, engine=engine, drafter=learning, drafter_params=drafter_params
    )  # fmt: skip


def start_depths(config: Config) -> Sequence[float]:
    """Acceptance by depth that the drafter's directory records; without a record it is only known to be trained.

    Raises ModelError for a record that cannot be read.
    """
    return from_config.drafter_acceptance(config) or GUESS


def update_programs(run: TrainingRun) -> UpdatePrograms:
    """The programs of the update. They and the rollout's reshard begin to compile in the background, where cores are free."""
    config, engine, recipe = run.config, run.engine, run.recipe
    correct = partial(memory.corrected, config, engine.learned, run.job)
    update = policy_update.corrected_programs(config, recipe, correct)
    if not compiles_early(engine):
        return update
    early = UpdatePrograms(*(Early(one, engine.programs.background) for one in update))
    state, rows = policy_update.abstract_state(recipe), batch.abstract_rows_of(config, recipe)
    policy = policy_update.abstract_policy(recipe)
    sums = partial(policy_update.abstract_sums, recipe, rows)
    engine.reshard.compile(lambda: (policy,))
    unscored = batch.bare(rows)
    for scored in batch.scored_policies(config, policy, policy_update.abstract_base(recipe)):
        early.score.compile(lambda scored=scored: (scored, unscored))
    early.empty.compile(lambda: (policy, rows))
    early.accumulate.compile(lambda: (sums(), policy, rows))
    early.apply.compile(lambda: (state, sums(), state.step))
    return early


def begin_rollout(run: TrainingRun, state: RunState | None = None) -> None:
    """Starts to compile for the rollout from this state, where cores are free; None: of a new run without its weights.

    What a new run decodes first depends on them only where it has a drafter to start with.
    """
    engine = run.engine
    if not compiles_early(engine):
        return
    if state is None:
        begins_plain = run.drafter.begins_plain if run.drafter else False
        has_start = run.drafter_params is not None and not begins_plain
        if has_start or (run.drafter and engine.tuner.has_fixed_policy):
            return
        if run.drafter:
            engine.use_learned(False)
    step, tuner = (state.step, state.tuner) if state is not None else (0, engine.tuner.init())
    if step < run.steps:
        position = None if state is None else state.position
        prompts = dynamic_sampling.window(run.config, run.dataset, step, position)
        if all(len(prompt.tokens) for prompt in prompts):  # else environments begin them
            begin_compiling(engine, run.request(prompts, step), tuner)


def total_steps(config: Config, dataset: Dataset) -> int:
    """RL steps of the run: train.steps, or those of train.epochs.

    A step of an epoch takes rollout.prompts rows, or rollout.max_prompts. Raises DataError for epochs of a generated task.
    """
    if config.train.steps:
        return config.train.steps
    if dataset.rows is None:
        raise datasets.DataError(
            "train.epochs counts passes over rows, and a generated task has no last row: set train.steps"
        )
    taken = config.rollout.max_prompts or config.rollout.prompts
    return max(1, config.train.epochs * dataset.rows // taken)


def example(dataset: Dataset) -> list[str]:
    """A short prompt of the data, of one line, to try the policy on; none when there is none."""
    prompts = [prompt.row["prompt"] for prompt in dataset.eval or dataset.prompts(0)]
    is_short = [isinstance(one, str) and len(one) <= SHORT and one.isprintable() for one in prompts]
    return [prompt for prompt, short in zip(prompts, is_short, strict=True) if short][:1]


def is_finished(config: Config, store: Store, steps: int) -> bool:
    """Whether the run folder has the last step, its evaluation and its export."""
    last = store.latest()
    if last is None or last < steps or not run_folder.is_exported(config, last):
        return False
    return not lacks_evaluation(config, store, last, steps)


def lacks_evaluation(config: Config, store: Store, step: int, steps: int) -> bool:
    """Whether a saved step's evaluation was interrupted, or what was saved of it cannot be read."""
    try:
        return evaluation.is_due(config, step, steps) and not store.index(step)["metrics"]
    except DamagedCheckpoint:
        return True


def new_state(
    run: TrainingRun, writer: Writer, interrupted: Callable[[], bool]
) -> tuple[RunState, Params]:
    """The state of a new run: what it trains, and the drafter if there is one to start from; and its start policy.

    It trains the start policy, or with model.lora adapters, whose base has the compute dtype; a warm start trains all
    weights. A tuner with a fixed policy needs an adaptive drafter at once, and gets an untrained one. Raises ConfigError;
    ModelError before the warm start for a drafter whose record of acceptance cannot be read; Interrupted.
    """
    config, model, mesh, tuner = run.config, run.model, run.mesh, run.engine.tuner
    start, lora, sft_steps = run.drafter_params, run.recipe.lora, run.config.sft.steps
    setups.keep_start(run, run.engine.learned, start if run.drafter else None)
    if lora and sft_steps and from_config.adapter_directory(config):
        raise ConfigError(
            f"sft.steps {sft_steps} with the adapters of model.path {config.model.path}: a warm start trains all "
            "weights: use sft.steps 0, or model.lora.rank 0, which merges the adapters first"
        )
    adapters = from_config.start_adapters(config, lora, model, mesh) if lora else None
    dtype = config.model.compute_dtype
    if lora and not sft_steps:
        policy = from_config.load_base(config, model, mesh, dtype)
    else:
        policy = sft.warm_start(run, writer, interrupted)
        if lora:
            policy = jax.tree.map(lambda leaf: leaf.astype(dtype), policy)
    trained = policy_update.create(adapters if lora else policy, run.recipe)
    state = RunState(0, trained, None, tuner.init())
    if run.drafter and (start is not None or tuner.has_fixed_policy):
        state = state.replace(drafter=adaptive.create(config, run.drafter.recipe, start))
    if run.drafter:
        state = state.replace(tuner=run.drafter.started(state.tuner))
    elif start is not None:
        known = {LEARNED: start_depths(config)}
        state = state.replace(tuner=tuner.update_prior(state.tuner, known))
    return state, policy
