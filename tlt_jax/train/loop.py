"""The RL training loop, from a configuration to a trained policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tlt_jax import run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.cli import DONE, PREEMPTED
from tlt_jax.config import Config
from tlt_jax.data import prompt_format
from tlt_jax.distributed.job import Job
from tlt_jax.distributed.process import Preemption
from tlt_jax.distributed.watch import Watch
from tlt_jax.environments.pool import Environments
from tlt_jax.errors import Interrupted
from tlt_jax.metrics import NoWriter, Writer
from tlt_jax.metrics.run import open_run
from tlt_jax.models import from_config, hf
from tlt_jax.rewards import Scorer
from tlt_jax.train import health, run_state, setup as setups, startup, teacher
from tlt_jax.train.environment import environments
from tlt_jax.train.setup import frozen
from tlt_jax.train.startup import TrainingRun
from tlt_jax.train.step_metrics import Profiler, Stopwatch
from tlt_jax.train.trainer import Trainer

log = logging.getLogger(__name__)


def train(config: Config, watching: Watch | None = None) -> int:
    """Trains to the last step, starting from the newest checkpoint of the run folder; the exit code.

    `watching`: of the processes that train together. Raises UserError for what is wrong with the
    configuration, its files or checkpoints, or differs between processes.
    """
    watching = watching or Watch(Job())
    setup = startup.load(config, watching.job)
    run = startup.make_run(setup)
    locked = [run_folder.DRAFTER] if run.drafter else []
    with (
        run_folder.entered(config, setup.job, *locked),
        Preemption() as preempted,
        Store(
            config.run,
            config.checkpoint.keep,
            config.checkpoint.best_metric,
            identity=run_folder.identity(config, setup.dataset.digest()),
            job=setup.job,
            evaluation=run_folder.evaluation(config),
        ) as store,
        Scorer(config) as scorer,
        environments(config) as pool,
    ):
        watching.alive("resume")
        if setup.job.decided(startup.is_finished(config, store, run.steps)):
            if setup.job.is_first:
                print(
                    f"{config.run} is finished: it has all {store.latest()} steps. Another run needs another folder."
                )
            return DONE

        def interrupted() -> bool:
            watching.alive()
            return preempted()

        try:
            with started(run, store, scorer, pool, watching, interrupted) as trainer:
                while (code := trainer.step()) is None:
                    pass
        except Interrupted:  # of the warm start: a step saves its state, and returns the code
            return PREEMPTED
        if code != DONE:
            return code
        watching.alive("export")
        export(trainer)
    if setup.job.is_first:
        policy, metrics = trainer.state.policy, open_run(config.run).metrics
        skips = int(policy.skipped)
        remarks = health.remarks(metrics, int(policy.step) - skips, skips)
        print(run_folder.summary(config, *startup.example(setup.dataset), remarks=remarks))
    return DONE


@contextmanager
def started(
    run: TrainingRun,
    store: Store,
    scorer: Scorer,
    pool: Environments | None,
    watching: Watch,
    interrupted: Callable[[], bool],
) -> Iterator[Trainer]:
    """Context of a trainer that starts, or resumes from the newest checkpoint, with what writes and times its steps.

    Raises CheckpointError; Interrupted, which is said, when the warm start was.
    """
    config, programs = run.config, startup.update_programs(run)
    drafter = run.drafter.recipe if run.drafter else None
    state = run_state.resume(store, run.recipe, drafter, run.engine.tuner, run.engine.basis)
    policy = None
    resumed = None if state is None else state.step
    evaluates = resumed is not None and startup.lacks_evaluation(config, store, resumed, run.steps)
    with (
        Writer(config, run.steps, resumed) if run.job.is_first else NoWriter() as writer,
        Profiler(config) as profiler,
        Stopwatch(tell=watching.alive) as watch,
        ExitStack() as ending,
    ):
        ending.callback(run.engine.programs.background.cancel)
        if state is None:
            startup.begin_rollout(run)
            watching.alive("warm_start")
            try:
                state, policy = startup.new_state(run, writer, interrupted)
            except Interrupted:
                writer.say(run_folder.stopped(config, None))
                raise
        else:
            log.info("%s resumes from step %d", config.run, resumed)
        if run.drafter:
            run.drafter.resume(state)
        startup.begin_rollout(run, state)
        source = run_folder.start_of(store.identity)
        start = frozen(run, policy, source)
        trainer = Trainer(
            run, programs, start, store, scorer, writer, watch, profiler, interrupted, state, resumed, evaluates,
            pool, teacher.load(config, run.recipe, run.dataset.encoder),
        )  # fmt: skip
        del state, policy  # the trainer replaces them: nothing else may hold their arrays
        watch.lap()  # the seconds of the start belong to no step
        yield trainer


def export(trainer: Trainer) -> None:
    """Writes the policy, and the drafter of an adaptive run, as model directories, unless checkpoint.export is off."""
    run, config, state = trainer.run, trainer.run.config, trainer.state
    if not config.checkpoint.export:
        return
    if run.drafter:
        run.drafter.export(state)
        if state.drafter and run.job.is_first:
            learned = int(state.drafter.step), int(state.investment.tokens)
            setups.leave(run, run_folder.drafter_export(config), run.engine.learned, *learned)
    hf.save_whole(
        trainer.policy,
        run.model,
        run_folder.export(config),
        run.mesh,
        run.tokenizer,
        config.model.param_dtype,
        run_folder.of_step(state.step),
        prompt_format.files(config) | setups.lineage_file(Path(config.run)),
        from_config.source_directory(config),
    )
