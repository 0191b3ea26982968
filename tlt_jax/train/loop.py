"""The RL loop, from a configuration to a trained policy: read it top to bottom."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from tlt_jax import run_folder
from tlt_jax.checkpoint import Store
from tlt_jax.cli import DIVERGED, DONE, PREEMPTED
from tlt_jax.config import Config, validate
from tlt_jax.data import dataset as datasets, packing
from tlt_jax.data.dataset import Dataset, Prompt
from tlt_jax.data.packing import Example
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.process import Preemption
from tlt_jax.errors import Interrupted
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.metrics import Writer
from tlt_jax.models import from_config
from tlt_jax.models.transformer import Params
from tlt_jax.rewards import Score, Scorer
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.sampling import Sampling
from tlt_jax.train import evaluation, memory, policy_update, sft, speculation_metrics, step_metrics
from tlt_jax.train.advantages import answer_weights, group_advantages
from tlt_jax.train.policy_update import Batch, PolicyState, Programs, Recipe

TUNER = "tuner"  # of a checkpoint's meta: it is of no importance to the policy, and JSON

log = logging.getLogger(__name__)


def train(config: Config) -> int:
    """Trains to the last step, going on from the newest checkpoint of the run folder; returns the exit code."""
    tokenizer = datasets.tokenizer(config)
    dataset = datasets.load(config, tokenizer)
    model = from_config.model_config(config, tokenizer)
    validate.validate_model(config, model)
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
    steps = total_steps(config, dataset)
    recipe = Recipe.of(config, model, mesh, steps * config.algorithm.minibatches)
    drafter, drafter_params = from_config.load_drafter(config, model, mesh)
    engine = Engine(config, model, mesh, datasets.stop_ids(config, tokenizer), drafter)
    memory.preflight(config, recipe, engine)
    run_folder.enter(config)
    with (
        Store(config.run, config.checkpoint.keep, config.checkpoint.best_metric) as store,
        Preemption() as preempted,
        Scorer(config) as scorer,
    ):
        resumed = store.latest()
        # A checkpoint without metrics, of a step that is evaluated: the run was stopped in its evaluation.
        is_due = resumed is not None and evaluates(config, resumed, steps) and not store.describe(resumed)["metrics"]
        if resumed is not None and resumed >= steps and not is_due and run_folder.is_exported(config):
            print(f"{config.run} is finished: it has all {resumed} steps. Another run needs another folder.")
            return DONE
        with Writer(config, steps, resumed) as writer, step_metrics.Profiler(config) as profiler:
            try:
                state = begin(config, recipe, dataset, store, writer, resumed, preempted)
            except Interrupted:
                return PREEMPTED
            if resumed is not None:
                engine.resume(store.describe(resumed)["meta"].get(TUNER))
            reference = run_folder.reference(config, state.params, model, mesh, is_new=resumed is None)
            programs = policy_update.programs(recipe)
            step = resumed or 0
            while True:
                watch = step_metrics.Stopwatch()
                with watch.phase("update_weights"):
                    weights = engine.publish(state.params, drafter_params)
                measured: dict[str, float] = {}
                is_new = step != resumed or is_due
                try:
                    if is_new and evaluates(config, step, steps):
                        with watch.phase("eval"):
                            measured = evaluation.evaluate(engine, weights, dataset, tokenizer, scorer, config, preempted)
                        step_metrics.say_evaluation(writer, step, steps, measured, watch)
                    if is_new and (step == resumed or saves(config, step, steps) or store.improves(measured)):
                        with watch.phase("save_checkpoint"):
                            store.save(step, {"policy": state}, {TUNER: engine.learned()}, measured)
                    if step >= steps:
                        break
                    profiler.enter(step + 1)
                    prompts, texts = dataset.prompts(step), {}
                    with watch.phase("rollout"):
                        rollout = roll_out(config, engine, weights, prompts, step, tokenizer, scorer, texts, preempted)
                except Interrupted:
                    store.save(step, {"policy": state}, {TUNER: engine.learned()}, measured)
                    return PREEMPTED
                with watch.phase("reward"):
                    scores = scorer.collect()
                drafting = engine.time_drafting(weights, rollout)
                del weights  # they may share buffers with the policy, which the update donates
                state, learned = learn(config, recipe, programs, state, reference, prompts, rollout, scores, watch)
                step += 1
                profiler.leave(step)
                scalars = step_metrics.of_rollout(config, prompts, rollout, scores) | learned
                scalars |= speculation_metrics.metrics(engine, rollout, drafting)
                scalars |= step_metrics.of_step(dataset, config, step, scalars, watch)
                answers = step_metrics.records(prompts, rollout, scores, texts)
                writer.step(step, scalars, answers, rollout.spans, speculation_metrics.chunks(engine, rollout))
                if int(state.skips) >= config.train.max_nonfinite:
                    print(
                        f"error: step {step}: {int(state.skips)} updates in a row were not finite: lower "
                        "optim.learning_rate, or look at the rewards and completions in the run folder",
                        file=sys.stderr,
                    )
                    return DIVERGED
        if config.checkpoint.export:
            run_folder.write_model(config, run_folder.export(config), state.params, model, mesh, tokenizer)
    return DONE


def total_steps(config: Config, dataset: Dataset) -> int:
    """RL steps of the run: train.steps, or what train.epochs come to."""
    if config.train.steps:
        return config.train.steps
    if dataset.rows is None:
        raise datasets.DataError("train.epochs counts passes over rows, and a generated task has no last row: set train.steps")
    return max(1, config.train.epochs * dataset.rows // config.rollout.prompts)


def evaluates(config: Config, step: int, steps: int) -> bool:
    """True before the first step, at every eval.every-th and after the last, unless eval.every is 0."""
    return config.eval.every > 0 and (step % config.eval.every == 0 or step == steps)


def saves(config: Config, step: int, steps: int) -> bool:
    """True after every checkpoint.every-th step and after the last."""
    return step == steps or (config.checkpoint.every > 0 and step > 0 and step % config.checkpoint.every == 0)


def begin(
    config: Config,
    recipe: Recipe,
    dataset: Dataset,
    store: Store,
    writer: Writer,
    resumed: int | None,
    interrupted: Callable[[], bool],
) -> PolicyState:
    """The state to go on from: that of the checkpoint, or the warm-started policy with a new optimizer."""
    if resumed is not None:
        log.info("%s goes on from step %d", config.run, resumed)
        return store.restore(resumed, {"policy": policy_update.abstract_state(recipe)}).items["policy"]
    params = sft.warm_start(config, recipe.model, recipe.mesh, dataset, writer, interrupted)
    return policy_update.create(params, recipe)


def roll_out(
    config: Config,
    engine: Engine,
    weights: Sequence[Params],
    prompts: Sequence[Prompt],
    step: int,
    tokenizer,
    scorer: Scorer,
    texts: dict[int, str],
    interrupted: Callable[[], bool],
) -> RolloutResult:
    """The answers of a step; each is sent to be scored, and its text noted, while others are still being decoded."""
    settings = config.rollout

    def finished(answer) -> None:
        texts[answer.uid] = evaluation.submit(scorer, tokenizer, prompts[answer.prompt], answer)

    return engine.rollout(
        weights,
        prompts,
        settings.samples,
        Sampling(settings.temperature, settings.top_k, settings.top_p),
        settings.max_new_tokens,
        stream=TRAIN_STREAM,
        step=step,
        on_finish=finished,
        interrupted=interrupted,
    )


def learn(
    config: Config,
    recipe: Recipe,
    programs: Programs,
    state: PolicyState,
    reference: Params | None,
    prompts: Sequence[Prompt],
    rollout: RolloutResult,
    scores: Mapping[int, Score],
    watch: step_metrics.Stopwatch,
) -> tuple[PolicyState, dict[str, float]]:
    """The policy after the optimizer steps of one rollout, and their metrics."""
    rewards = np.array([scores[answer.uid].value for answer in rollout.completions]).reshape(len(prompts), -1)
    advantages = group_advantages(rewards, config.algorithm.advantage).reshape(-1)
    parts = np.array_split(np.arange(len(advantages)), config.algorithm.minibatches)
    batches, fills = zip(*(make_batch(config, recipe, prompts, rollout, advantages, part) for part in parts), strict=True)
    with watch.phase("old_log_prob"):
        if len(batches) > 1:
            batches = [batch.replace(old=programs.token_logprobs(state.params, batch)) for batch in batches]
        if reference is not None:
            batches = [batch.replace(reference=programs.token_logprobs(reference, batch)) for batch in batches]
    updates = []
    with watch.phase("update"):
        for batch in batches:
            state, metrics = programs.update(state, batch)
            updates.append(jax.device_get(metrics))
    return state, step_metrics.of_update(updates, rewards, advantages) | {"actor/packed_ratio": float(np.mean(fills))}


def make_batch(
    config: Config,
    recipe: Recipe,
    prompts: Sequence[Prompt],
    rollout: RolloutResult,
    advantages: np.ndarray,
    part: np.ndarray,
) -> tuple[Batch, float]:
    """The answers `part` as a minibatch of packed rows, and how full the rows are."""
    answers = [rollout.completions[i] for i in part]
    examples = [Example(answer.uid, prompts[answer.prompt].tokens, answer.tokens) for answer in answers]
    packed = packing.pack(examples, packing.row_tokens(config), packing.rows(config), config.mesh.data)
    weights = answer_weights(packed.answer_lengths, config.algorithm.aggregation, config.rollout.max_new_tokens)
    recorded = [answer.logprobs for answer in answers]
    return policy_update.make_batch(packed, recipe.mesh, weights, advantages[part], recorded), packed.fill
