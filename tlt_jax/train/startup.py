"""The start of an RL run: what its configuration names, the state that it starts or resumes from, and its trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from tlt_jax import run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, parse, validate
from tlt_jax.config.schema import ADAPTIVE
from tlt_jax.data import dataset as datasets
from tlt_jax.data.dataset import Dataset
from tlt_jax.distributed.job import Job
from tlt_jax.errors import ConfigError, DamagedCheckpoint
from tlt_jax.metrics import Writer, check_trackers
from tlt_jax.models import from_config, remat as remats
from tlt_jax.models.architecture import Params
from tlt_jax.models.drafter import DrafterParams
from tlt_jax.rollout import first
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.background import Early
from tlt_jax.rollout.executables.disk_cache import sources
from tlt_jax.spec_decode.strategy import LEARNED
from tlt_jax.train import (
    accumulation,
    adaptive,
    dynamic_sampling,
    evaluation,
    losses,
    memory,
    minibatches,
    policy_update,
    run_state,
    sft,
)
from tlt_jax.train.drafter_learning import DrafterLearning, on_devices
from tlt_jax.train.policy_update import Trained, UpdatePrograms
from tlt_jax.train.recipe import Recipe
from tlt_jax.train.request import training_request
from tlt_jax.train.run_state import RunState
from tlt_jax.train.setup import Setup
from tlt_jax.tuner.acceptance import GUESS

SHORT = 60  # characters of a prompt that a line shows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machinery:
    """What a run of `steps` RL steps is made with, before it enters its folder.

    `drafter`: None without an adaptive drafter; `drafter_params`: the weights of drafter_training.start, or of the drafter
    that speculation.drafter names; None when it names none.
    """

    setup: Setup
    steps: int
    recipe: Recipe
    engine: Engine
    drafter: DrafterLearning | None
    drafter_params: DrafterParams | None


def load(config: Config, job: Job) -> Setup:
    """Checks the configuration, and loads its tokenizer and data. Raises UserError, also when processes differ."""
    validate.validate_rl(config)
    losses.check(config.algorithm.loss)
    if job.is_first:
        check_trackers(config)
    tokenizer = datasets.tokenizer(config)
    dataset = datasets.load(config, tokenizer)
    if job.is_first:
        print(dataset.describe(), flush=True)
    job.agree(facts(config, dataset))
    return Setup.of(config, tokenizer, dataset, job)


def machinery(setup: Setup) -> Machinery:
    """The engine and the recipes of a run. Raises ConfigError for what the devices cannot hold."""
    config, model, mesh = setup.config, setup.model, setup.mesh
    steps = total_steps(config, setup.dataset)
    recipe = Recipe.of(config, model, mesh, steps)
    drafter, drafter_params = from_config.load_drafter(config, model, mesh)
    recipe = memory.fitted(config, recipe, drafter, setup.job)
    if setup.job.is_first:
        log.info("model.remat %s: %s", config.model.remat, remats.spell(recipe.remat))
        if recipe.lora:
            log.info("model.lora: %s", policy_update.share_trained(recipe))
    is_adaptive = config.speculation.drafter == ADAPTIVE
    stops = datasets.stop_rules(config, setup.tokenizer)
    captures_states = is_adaptive and not config.rollout.deterministic
    engine = Engine(config, model, mesh, stops, drafter, captures_states, setup.job, recipe.lora)
    learning = None
    if is_adaptive:
        learning = DrafterLearning(config, engine, steps, on_devices(config, engine))
    memory.preflight(config, recipe, engine.programs.shapes[0], engine.capacity, drafter)
    return Machinery(setup, steps, recipe, engine, learning, drafter_params)


def update_programs(parts: Machinery) -> UpdatePrograms:
    """The programs of the update. They and the rollout's reshard begin to compile in the background, where cores are free."""
    config, engine, recipe = parts.setup.config, parts.engine, parts.recipe
    correct = partial(memory.corrected, config, engine.learned, parts.setup.job)
    update = accumulation.programs(config, recipe, correct)
    if not first.compiles_early(engine):
        return update
    early = UpdatePrograms(*(Early(one, engine.programs.background) for one in update))
    state, rows = policy_update.abstract_state(recipe), minibatches.abstract_rows(config, recipe)
    policy = policy_update.abstract_policy(recipe)
    sums = partial(policy_update.abstract_sums, recipe, rows)
    engine.reshard.compile(lambda: (policy,))
    for scored in minibatches.scored_policies(config, policy, policy_update.abstract_base(recipe)):
        early.score.compile(lambda scored=scored: (scored, rows.replace(old=None, reference=None)))
    early.empty.compile(lambda: (policy, rows))
    early.accumulate.compile(lambda: (sums(), policy, rows))
    early.apply.compile(lambda: (state, sums(), state.step))
    return early


def begin_rollout(parts: Machinery, state: RunState | None = None) -> None:
    """Starts to compile for the rollout from this state, where cores are free; None: of a new run without its weights.

    What a new run decodes first depends on them only where it has a drafter to start with.
    """
    setup, engine = parts.setup, parts.engine
    if not first.compiles_early(engine):
        return
    if state is None:
        if parts.drafter_params is not None or (parts.drafter and engine.tuner.has_fixed_policy):
            return
        if parts.drafter:
            engine.use_learned(False)
    step, tuner = (state.step, state.tuner) if state is not None else (0, engine.tuner.init())
    if step < parts.steps:
        position = None if state is None else state.position
        prompts = dynamic_sampling.window(setup.config, setup.dataset, step, position)
        request = training_request(setup, engine, prompts, step, parts.steps)
        first.begin_compiling(engine, request, tuner)


def facts(config: Config, dataset: Dataset) -> dict[str, Any]:
    """What all processes of a run must have in common: every knob, the code, the data."""
    return {
        **{name: str(value) for name, value in parse.flatten(config).items()},
        "tlt_jax's code": sources(),
        "jax": jax.__version__,
        "data": dataset.digest(),
    }


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


def resume(parts: Machinery, store: Store) -> RunState | None:
    """The state of the newest checkpoint; None without one. Raises CheckpointError."""
    drafter = parts.drafter.recipe if parts.drafter else None
    engine = parts.engine
    return run_state.resume(store, parts.recipe, drafter, engine.tuner, engine.basis)


def new_state(
    parts: Machinery, writer: Writer, interrupted: Callable[[], bool]
) -> tuple[RunState, Params]:
    """The state of a new run: what it trains, and the drafter if there is one to start from; and its start policy.

    A tuner with a fixed policy needs an adaptive drafter at once, and gets an untrained one. Raises ModelError before the
    warm start for a drafter whose record of acceptance cannot be read; Interrupted.
    """
    config, tuner, start = parts.setup.config, parts.engine.tuner, parts.drafter_params
    acceptance = from_config.drafter_acceptance(config)
    policy, trained = start_of(parts.setup, parts.recipe, writer, interrupted)
    state = RunState(0, policy_update.create(trained, parts.recipe), None, tuner.init())
    if parts.drafter and (start is not None or tuner.has_fixed_policy):
        state = state.replace(drafter=adaptive.create(config, parts.drafter.recipe, start))
    if start is not None:
        # Without a record the tuner knows only that the drafter was trained.
        known = {LEARNED: acceptance or GUESS}
        state = state.replace(tuner=tuner.update_prior(state.tuner, known))
    return state, policy


def start_of(
    setup: Setup, recipe: Recipe, writer: Writer, interrupted: Callable[[], bool]
) -> tuple[Params, Trained]:
    """The start policy of a new run, and what the run trains: the same weights, or with model.lora adapters.

    A warm start trains all weights. The base of adapters has the compute dtype. Raises ConfigError, Interrupted.
    """
    config, model, mesh = setup.config, setup.model, setup.mesh
    if not recipe.lora:
        params = sft.warm_start(setup, writer, interrupted)
        return params, params
    if config.sft.steps and from_config.adapter_directory(config):
        raise ConfigError(
            f"sft.steps {config.sft.steps} with the adapters of model.path {config.model.path}: a warm start trains all "
            "weights: use sft.steps 0, or model.lora.rank 0, which merges the adapters first"
        )
    adapters = from_config.start_adapters(config, recipe.lora, model, mesh)
    dtype = config.model.compute_dtype
    if not config.sft.steps:
        return from_config.load_base(config, model, mesh, dtype), adapters
    params = sft.warm_start(setup, writer, interrupted)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params), adapters
