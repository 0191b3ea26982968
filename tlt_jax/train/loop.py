"""The RL training loop, from a configuration to a trained policy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from tlt_jax import run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.cli import DIVERGED, DONE, PREEMPTED
from tlt_jax.config import Config, parse, validate
from tlt_jax.config.schema import ADAPTIVE, AUTO
from tlt_jax.data import dataset as datasets
from tlt_jax.data.dataset import Dataset, Prompt
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.job import Job
from tlt_jax.distributed.process import Preemption
from tlt_jax.distributed.watch import Watch
from tlt_jax.drafter.idle_training import IdleTraining
from tlt_jax.drafter.investment import Investment
from tlt_jax.drafter.micro_step import MicroStep
from tlt_jax.drafter.recipe import DrafterState, Recipe as DrafterRecipe
from tlt_jax.drafter.step_training import Lesson, StepTraining
from tlt_jax.errors import DamagedCheckpoint, Interrupted
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.metrics import NoWriter, Writer, check_trackers
from tlt_jax.models import from_config, hf
from tlt_jax.models.eagle import DrafterParams
from tlt_jax.rewards import Scorer
from tlt_jax.rollout import exchange
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.disk_cache import sources
from tlt_jax.rollout.recorder import Completion, RolloutResult
from tlt_jax.spec_decode.decode import Weights
from tlt_jax.spec_decode.decoding_params import Sampling
from tlt_jax.spec_decode.strategy import LEARNED
from tlt_jax.train import (
    adaptive,
    evaluation,
    losses,
    memory,
    minibatches,
    policy_update,
    run_state,
    sft,
    speculation_metrics,
    step_metrics,
)
from tlt_jax.train.accounts import Stopwatch
from tlt_jax.train.health import Health, failures
from tlt_jax.train.recipe import Recipe
from tlt_jax.train.run_state import RunState
from tlt_jax.tuner.acceptance import GUESS
from tlt_jax.tuner.interface import State as TunerState

SHARE_BY_COUNTS = 0.05  # that drafter_training.share auto is where no clock takes part

log = logging.getLogger(__name__)


def train(config: Config, watching: Watch | None = None) -> int:
    """Trains to the last step, from the newest checkpoint of the run folder on; the exit code.

    `watching`: of the processes that do it together. Raises UserError for what is wrong with the
    configuration, its files or checkpoints, or differs between processes.
    """
    watching = watching or Watch(Job())
    job = watching.job
    validate.validate_rl(config)
    losses.check(config.algorithm.loss)
    if job.is_first:
        check_trackers(config)
    tokenizer = datasets.tokenizer(config)
    dataset = datasets.load(config, tokenizer)
    if job.is_first:
        print(dataset.describe(), flush=True)
    job.agree(facts(config, dataset))
    model = from_config.model_config(config, tokenizer)
    validate.validate_model(config, model, jax.device_count())
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)

    steps = total_steps(config, dataset)
    recipe = Recipe.of(config, model, mesh, steps * config.algorithm.minibatches)
    drafter, drafter_params = from_config.load_drafter(config, model, mesh)
    is_adaptive = config.speculation.drafter == ADAPTIVE
    stops = datasets.stop_rules(config, tokenizer)
    captures_states = is_adaptive and not config.rollout.deterministic
    engine = Engine(config, model, mesh, stops, drafter, captures_states, job)
    trainer = make_trainer(config, engine) if is_adaptive else None
    memory.preflight(config, recipe, engine.programs.shapes[0], engine.capacity, drafter)

    with (
        run_folder.entered(config, job, *([run_folder.DRAFTER] if is_adaptive else [])),
        Preemption() as preempted,
        Store(
            config.run,
            config.checkpoint.keep,
            config.checkpoint.best_metric,
            identity=run_folder.identity(config, dataset.digest()),
            job=job,
        ) as store,
        Scorer(config) as scorer,
    ):
        watching.alive("resume")

        def interrupted() -> bool:
            watching.alive()
            return preempted()

        last = store.latest()
        is_finished = last is not None and last >= steps and run_folder.is_exported(config, last)
        is_finished = is_finished and not lacks_evaluation(config, store, last, steps)
        if job.decided(is_finished):
            if job.is_first:
                print(
                    f"{config.run} is finished: it has all {last} steps. Another run needs another folder."
                )
            return DONE

        drafting = trainer.recipe if trainer else None
        state = run_state.resume(config, store, recipe, drafting, engine.tuner, engine.basis)
        resumed = None if state is None else state.step
        is_due = resumed is not None and lacks_evaluation(config, store, resumed, steps)
        with (
            Writer(config, steps, resumed) if job.is_first else NoWriter() as writer,
            step_metrics.Profiler(config) as profiler,
            Stopwatch(tell=watching.alive) as watch,
        ):
            try:
                if state is None:
                    watching.alive("warm_start")
                    state = begin(
                        config,
                        recipe,
                        engine,
                        trainer,
                        drafter_params,
                        dataset,
                        writer,
                        interrupted,
                    )
                else:
                    log.info("%s goes on from step %d", config.run, state.step)
            except Interrupted:
                writer.say(run_folder.stopped(config, None))
                return PREEMPTED
            learning = step_training(config, engine, trainer)
            if trainer:
                is_used = not learning or engine.knows_learned(state.tuner)
                engine.use_learned(state.drafter is not None and is_used)
                if learning and engine.drafter:
                    trainer.activate()

            reference = minibatches.kl_reference(
                config,
                state.policy.params,
                model,
                mesh,
                is_new=resumed is None,
                source=run_folder.start_of(store.identity),
                job=job,
            )
            programs = policy_update.programs(recipe)
            health = Health(config)
            watch.lap()  # what came before belongs to no step
            while True:
                with watch.phase("update_weights"):
                    if trainer and trainer.is_active:
                        engine.use_learned(True)
                    fixed = state.drafter.params if state.drafter else drafter_params
                    weights = engine.publish(state.policy.params, fixed)

                measured: dict[str, float] = {}
                is_new = state.step != resumed or is_due
                try:
                    if is_new and evaluates(config, state.step, steps):
                        with watch.phase("eval"):
                            measured, tuner = evaluation.evaluate(
                                engine,
                                weights,
                                dataset,
                                tokenizer,
                                scorer,
                                config,
                                state.tuner,
                                interrupted,
                                -(-(steps - state.step) // config.eval.every),
                            )
                        state = state.replace(tuner=tuner)
                        step_metrics.say_evaluation(writer, state.step, steps, measured)

                    if is_new and (
                        state.step == resumed
                        or run_state.is_due(config, state.step, steps)
                        or store.improves(measured)
                    ):
                        with watch.phase("save_checkpoint"):
                            run_state.save(store, state, engine.basis, measured)

                    if state.step >= steps:
                        break

                    profiler.enter(state.step + 1)

                    prompts, texts = dataset.prompts(state.step), {}
                    with watch.phase("rollout"):
                        rollout, tuner = roll_out(
                            config,
                            engine,
                            weights,
                            prompts,
                            state,
                            tokenizer,
                            scorer,
                            texts,
                            interrupted,
                            steps - state.step - 1,
                            trainer,
                        )
                    with watch.phase("reward"):
                        scores = evaluation.collected(job, scorer, interrupted)
                except Interrupted:
                    with watch.phase("save_checkpoint"):
                        run_state.save(store, state, engine.basis, measured)
                        store.wait()
                    writer.say(run_folder.stopped(config, store.folder / str(state.step)))
                    return PREEMPTED

                drafting = {}
                if config.speculation.time_drafting:
                    with watch.phase("time_drafting"):
                        drafting = engine.time_drafting(weights, rollout)
                trained, investment, lesson = (state.drafter, {}), state.investment, None
                if trainer:
                    with watch.phase("drafter"):
                        left = steps - state.step - 1
                        if learning:
                            worth, drafts = partial(engine.worth_of_learned, tuner), engine.drafter
                            investment = learning.earned(
                                investment, worth, state.step, left, drafts is not None
                            )
                        *trained, investment = after_rollout(
                            config, trainer, state.drafter, rollout, left, investment
                        )
                del weights  # they may share buffers with the policy, which the update donates

                chosen = learning and learning.chosen(
                    investment, state.step, trained[1].get("drafter/steps", 0) > 0
                )
                if chosen:
                    drafter = trained[0] or adaptive.create(
                        config, trainer.recipe, answers=rollout.completions
                    )
                    lesson = Lesson(
                        trainer.recipe,
                        chosen,
                        state.step,
                        state.policy.params,
                        drafter,
                        partial(watch.phase, "drafter"),
                    )
                with watch.phase("update"):
                    policy, learned = minibatches.update_policy(
                        config,
                        recipe,
                        programs,
                        state.policy,
                        reference,
                        prompts,
                        rollout,
                        scores,
                        watch,
                        lesson,
                    )
                depths = trainer.depths if trainer else []
                if lesson:
                    trained = lesson.drafter, trained[1] | lesson.learned.metrics
                    depths = lesson.learned.depths or depths
                    investment = learning.after(investment, lesson)
                tuner, begins = updated(engine, trainer, tuner, depths)
                if begins:
                    writer.say(f"step {state.step + 1}/{steps}  {begins}")
                state = RunState(state.step + 1, policy, trained[0], tuner, investment)

                profiler.leave(state.step)
                with watch.phase("metrics"):
                    scalars = step_metrics.of_rollout(config, prompts, rollout, scores)
                    scalars |= step_metrics.of_update(*learned)
                    scalars |= speculation_metrics.metrics(engine.drafter_kind, rollout, drafting)
                    scalars |= trained[1]
                    scalars |= step_metrics.of_step(
                        dataset, config, state.step, scalars, watch, job
                    )
                    seconds = step_metrics.seconds_without(scalars, "drafter", "eval")
                    state = state.replace(investment=investment.after_step(seconds))

                    texts = evaluation.told_first(job, texts)
                    answers = (
                        step_metrics.records(prompts, rollout, scores, texts)
                        if job.is_first
                        else []
                    )
                    chunks = speculation_metrics.chunks(engine.drafter_kind, rollout)
                    writer.step(state.step, scalars, answers, rollout.spans, chunks)
                    failed = failures(scores)
                    if failed:
                        writer.say(f"step {state.step}/{steps}  {failed}")

                problem = health.problem(rollout, scores, int(state.policy.skips))
                if problem:
                    if job.is_first:
                        print(f"error: step {state.step}: {problem}", file=sys.stderr)
                    return DIVERGED

        watching.alive("export")
        if config.checkpoint.export:
            if state.drafter:
                adaptive.export(
                    config,
                    trainer.recipe.drafter,
                    state.drafter.params,
                    trainer.known_depths,
                    state.step,
                )
            hf.save_whole(
                state.policy.params,
                model,
                run_folder.export(config),
                mesh,
                tokenizer,
                config.model.param_dtype,
                run_folder.of_step(state.step),
            )
    if job.is_first:
        print(run_folder.summary(config))
    return DONE


def facts(config: Config, dataset: Dataset) -> dict[str, Any]:
    """What all processes of a run have to have in common: every knob, the code, the data."""
    return {
        **{name: str(value) for name, value in parse.flatten(config).items()},
        "tlt_jax's code": sources(),
        "jax": jax.__version__,
        "data": dataset.digest(),
    }


def total_steps(config: Config, dataset: Dataset) -> int:
    """RL steps of the run: train.steps, or those of train.epochs.

    Raises DataError for epochs of a generated task.
    """
    if config.train.steps:
        return config.train.steps
    if dataset.rows is None:
        raise datasets.DataError(
            "train.epochs counts passes over rows, and a generated task has no last row: set train.steps"
        )
    return max(1, config.train.epochs * dataset.rows // config.rollout.prompts)


def evaluates(config: Config, step: int, steps: int) -> bool:
    """True at step 0, every eval.every-th and the last; never when eval.every is 0."""
    return config.eval.every > 0 and (step % config.eval.every == 0 or step == steps)


def lacks_evaluation(config: Config, store: Store, step: int, steps: int) -> bool:
    """True when the run was stopped in the evaluation of a step that it saved, or what it saved cannot be read."""
    try:
        return evaluates(config, step, steps) and not store.index(step)["metrics"]
    except DamagedCheckpoint:
        return True


def begin(
    config: Config,
    recipe: Recipe,
    engine: Engine,
    trainer: IdleTraining | None,
    start: DrafterParams | None,
    dataset: Dataset,
    writer: Writer,
    interrupted: Callable[[], bool],
) -> RunState:
    """The state that a new run begins with: that of the warm-started policy.

    With a trainer its drafter too, where there is one: `start`, one for a tuner that goes by a rule,
    or the one that was begun when training was found to pay off. Raises ModelError for a drafter
    whose record of acceptance cannot be read, before the warm start.
    """
    acceptance = from_config.drafter_acceptance(config)
    params = sft.warm_start(
        config, recipe.model, recipe.mesh, dataset, writer, interrupted, engine.job
    )
    state = RunState(0, policy_update.create(params, recipe), None, engine.tuner.init())
    if trainer and (start is not None or engine.tuner.has_fixed_policy):
        state = state.replace(drafter=adaptive.create(config, trainer.recipe, start))
    if start is not None:
        # Of one without a record nothing is known but that it was trained.
        known = {LEARNED: acceptance or GUESS}
        state = state.replace(tuner=engine.tuner.update_prior(state.tuner, known))
    return state


def make_trainer(config: Config, engine: Engine) -> IdleTraining:
    """What the engine's data groups do while they are idle."""
    recipe = DrafterRecipe.while_idle(config, engine.model_config, engine.learned, engine.mesh)
    knobs = config.idle_training
    return IdleTraining(
        recipe,
        {index: engine.groups[index] for index in engine.local_groups},
        engine.programs,
        partial(MicroStep, recipe=recipe),
        adaptive.replay_config(config, recipe),
        knobs.micro_step_ms / 1e3,
        knobs.least_idle_s,
        knobs.floor,
        knobs.rescue,
        engine.learned_compile_cost,
        engine.job,
        follows=config.drafter_training.share != 0,
        is_idle_used=not config.rollout.deterministic,
    )


def step_training(
    config: Config, engine: Engine, trainer: IdleTraining | None
) -> StepTraining | None:
    """What the drafter learns in updates; None when nothing does."""
    share = config.drafter_training.share
    if not trainer or share == 0:
        return None
    if share == AUTO:
        share = SHARE_BY_COUNTS if config.rollout.deterministic else None
    return StepTraining(trainer.recipe, share, engine.programs.compile_costs.of, engine.job.told)


def after_rollout(
    config: Config,
    trainer: IdleTraining,
    drafter: DrafterState | None,
    rollout: RolloutResult,
    rollouts_left: int,
    investment: Investment,
) -> tuple[DrafterState | None, dict[str, float], Investment]:
    """The drafter after a rollout, the metrics of its training, and what of the investment that leaves.

    Where the rollout has the drafter's features what it harvested is learned from, in the seconds that may be spent.
    A new one is begun when that is found to pay off: also in the place of one that a tuner by rule
    had to have, untrained, before there were answers to take a draft vocabulary from.
    """
    groups = adaptive.decoding_seconds(rollout, config.mesh.data, trainer.kind)
    seconds = rollout.stats["seconds"] - max(group.compile_wait for group in groups)
    idle, length = max(group.idle for group in groups), rollout.stats["accept_length"]
    begins = not trainer.is_active and not config.drafter_training.start
    begins = begins and (drafter is None or int(drafter.step) == 0)
    paid = investment.credit if trainer.is_active else 0.0
    drafter, metrics = trainer.end(drafter, seconds, idle, length, rollouts_left, paid)
    tokens = metrics.get("drafter/tokens", 0.0)
    investment = investment.measured(trainer.depths).learned(tokens, 0, trainer.paid_seconds, False)
    if begins and trainer.is_active:
        drafter = adaptive.create(config, trainer.recipe, answers=rollout.completions)
    return drafter, metrics | adaptive.idle_metrics(rollout, groups), investment


def updated(
    engine: Engine, trainer: IdleTraining | None, tuner: TunerState, depths: Sequence[float]
) -> tuple[TunerState, str]:
    """The tuner's state after an update of the weights, and what is to be said where drafting with the drafter begins.

    `depths`: acceptance of the learned drafter, as it was measured in this step; empty: it was not. Of a drafter that
    learns in the update the tuner knows once drafting with it pays.
    """
    if not trainer or not depths:
        return engine.tuner.update_prior(tuner), ""
    knowing = engine.tuner.update_prior(tuner, {LEARNED: depths})
    if not trainer.follows or trainer.pays_off:
        return knowing, ""
    saved, compile_cost = engine.worth_of_learned(tuner, depths)
    if not engine.job.decided(saved > compile_cost):
        return engine.tuner.update_prior(tuner), ""
    trainer.activate()
    held = ", ".join(f"{depth:.2f}" for depth in depths)
    gain = "" if engine.cost_table else f"; {saved - compile_cost:.0f} s to gain"
    return knowing, f"the drafter drafts from here on: of its drafts {held} hold{gain}"


def roll_out(
    config: Config,
    engine: Engine,
    weights: Mapping[int, Weights],
    prompts: Sequence[Prompt],
    state: RunState,
    tokenizer: Any,
    scorer: Scorer,
    texts: dict[int, str],
    interrupted: Callable[[], bool],
    rollouts_left: int,
    trainer: IdleTraining | None,
) -> tuple[RolloutResult, TunerState]:
    """The answers of a step, and the tuner's state after them; idle data groups train the drafter meanwhile.

    Each answer is submitted for scoring, and its text added to `texts` by uid, while others are
    still being decoded. Raises Interrupted.
    """

    def finished(answer: Completion) -> None:
        texts[answer.uid] = evaluation.submit(scorer, tokenizer, prompts[answer.prompt], answer)

    rollout, tokens = config.rollout, [prompt.tokens for prompt in prompts]
    request = engine.request(
        tokens,
        rollout.samples,
        Sampling.of(rollout),
        rollout.max_new_tokens,
        stream=TRAIN_STREAM,
        step=state.step,
        rollouts_left=rollouts_left,
    )
    idle = {}
    if trainer:
        trainer.begin(state.step, request, weights, state.drafter)
        idle = trainer.background_work()
    # A drafter that is begun from the answers counts the tokens of all of them.
    is_new = state.drafter is None or int(state.drafter.step) == 0
    may_begin = trainer is not None and not trainer.is_active and is_new
    own = partial(minibatches.needed, config, prompts, engine.local_groups)
    return engine.run(
        request,
        weights,
        state.tuner,
        on_finish=finished,
        interrupted=interrupted,
        wanted=exchange.everything if may_begin else own,
        **idle,
    )
