"""One RL step of TLT (arXiv 2511.16665, figure 4): the rollout, with idle groups training the drafter, then the update."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tlt_jax import run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.cli import DIVERGED, DONE, PREEMPTED
from tlt_jax.data.dataset import Prompt
from tlt_jax.environments.pool import Environments
from tlt_jax.errors import Interrupted
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.metrics import Writer, evaluations
from tlt_jax.models import lora
from tlt_jax.models.architecture import Params
from tlt_jax.rewards import Score, Scorer, scorer as scorers
from tlt_jax.rollout import exchange
from tlt_jax.rollout.recorder import Completion, RolloutResult
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.train import (
    batch as batches,
    dynamic_sampling,
    evaluation,
    health,
    policy_update,
    run_state,
    step_metrics,
)
from tlt_jax.train.adaptive import Learned
from tlt_jax.train.batch import Batch
from tlt_jax.train.dynamic_sampling import DynamicSampling
from tlt_jax.train.environment import Play, check_alike
from tlt_jax.train.evaluation import Evaluator
from tlt_jax.train.health import Health
from tlt_jax.train.policy_update import PolicyState, UpdatePrograms
from tlt_jax.train.run_state import RunState
from tlt_jax.train.teacher import Teacher
from tlt_jax.tuner.interface import State as TunerState

if TYPE_CHECKING:
    from tlt_jax.train.startup import TrainingRun


class Rolled(NamedTuple):
    """The rollout of a step: the prompts that it may try, the answers that it learns from, the tuner's state after it.

    `told`: text, log-prob sum and rewards of the turns of the local answers, by uid; `began`: when it started, on the
    stopwatch's clock.
    """

    prompts: list[Prompt]
    result: RolloutResult
    tuner: TunerState
    told: dict[int, tuple[str, float, list[float] | None]]
    began: float


@dataclass
class Trainer:
    """Trains a policy step by step; `state` is all that survives a step, and all that a checkpoint needs.

    `programs`: of the policy's update. `start`: the frozen start policy, which is the reference of the KL term and the base
    of adapters; None for a run that needs none. `resumed`: the step of the checkpoint that the run continues from, None for
    a new run; it is saved again only when `evaluates_resumed`, because its evaluation was interrupted.
    """

    run: TrainingRun
    programs: UpdatePrograms
    start: Params | None
    store: Store
    scorer: Scorer
    writer: Writer
    watch: step_metrics.Stopwatch
    profiler: step_metrics.Profiler
    interrupted: Callable[[], bool]
    state: RunState
    resumed: int | None = None
    evaluates_resumed: bool = False
    pool: Environments | None = None
    teacher: Teacher | None = None
    evaluator: Evaluator = field(init=False)
    sampling: DynamicSampling = field(init=False)
    health: Health = field(init=False)

    def __post_init__(self):
        run = self.run
        parts = run.config, run.engine, run.dataset, run.tokenizer, self.scorer, self.pool
        self.evaluator = Evaluator(*parts)
        self.health, self.sampling = Health(run.config), DynamicSampling(run.config, self.scorer)
        if words := health.filtered(run.config):
            self.writer.say(words)

    def step(self) -> int | None:
        """One RL step; the exit code when the run ends instead: it is done, was interrupted, or diverged."""
        weights, measured = self.publish(), {}
        try:
            measured = self.evaluate(weights)
            self.save(measured)
            if self.state.step >= self.run.steps:
                return DONE
            rolled = self.roll_out(weights)  # idle data groups train the drafter meanwhile
            scores = self.score(rolled.result)
        except Interrupted:
            return self.stop(measured)

        learned = self.merge_drafter(rolled)
        del weights  # they may share buffers with the policy, which the update donates
        batch = self.pack(rolled, scores)
        learned = self.learn_drafter(learned, batch, rolled)
        policy, updates = self.update_policy(batch)
        tuner = self.update_tuner(rolled.tuner, learned)
        self.state = self.next_state(policy, learned, tuner, rolled)
        self.report(rolled, scores, batch, updates, learned.metrics)
        return self.diverged(rolled, scores)

    @property
    def base(self) -> Params | None:
        """The base of the adapters that are trained; None when all weights are."""
        return self.start if self.run.recipe.lora else None

    @property
    def policy(self) -> Params:
        """The policy's weights, which share buffers with the state."""
        return lora.whole(self.state.policy.params, self.base)

    def publish(self) -> dict[int, Weights]:
        """The rollout's copy of the policy and of the drafter, by local data group."""
        with self.watch.phase("update_weights"):
            run, drafter = self.run, self.state.drafter
            if run.drafter:
                run.drafter.before_publish()
            return run.engine.publish(
                self.policy, drafter.params if drafter else run.drafter_params
            )

    @property
    def is_new(self) -> bool:
        """Whether the state is not that of a complete checkpoint."""
        return self.state.step != self.resumed or self.evaluates_resumed

    def evaluate(self, weights: dict[int, Weights]) -> dict[str, float]:
        """The metrics eval/*, when an evaluation is due; the tuner learns from it. Raises Interrupted."""
        config, state = self.run.config, self.state
        if not (self.is_new and evaluation.is_due(config, state.step, self.run.steps)):
            return {}
        left = -(-(self.run.steps - state.step) // config.eval.every)
        with self.watch.phase("eval"):
            found = self.evaluator.evaluate(weights, state.tuner, self.interrupted, left)
            self.writer.lines(evaluations.FOLDER, state.step, found.answers)
        self.state = state.replace(tuner=found.tuner)
        self.writer.evaluation(state.step, found.metrics)
        return found.metrics

    def save(self, measured: dict[str, float]) -> None:
        """Saves a checkpoint when one is due, or when this evaluation is the best so far."""
        step, config = self.state.step, self.run.config
        is_due = run_state.is_due(config, step, self.run.steps) or self.store.improves(measured)
        if self.is_new and (step == self.resumed or is_due):
            with self.watch.phase("save_checkpoint"):
                run_state.save(self.store, self.state, self.run.engine.basis, measured)

    def stop(self, measured: dict[str, float]) -> int:
        """Saves the state before the interrupted step, and says that the run was stopped; the exit code."""
        with self.watch.phase("save_checkpoint"):
            run_state.save(self.store, self.state, self.run.engine.basis, measured)
            self.store.wait()
        checkpoint = self.store.folder / str(self.state.step)
        self.writer.say(run_folder.stopped(self.run.config, checkpoint))
        return PREEMPTED

    def roll_out(self, weights: dict[int, Weights]) -> Rolled:
        """Answers to the step's prompts; each is submitted for scoring while others are still decoded.

        Data groups that have nothing left to decode train the drafter. Raises Interrupted.
        """
        config, state = self.run.config, self.state
        self.profiler.enter(state.step + 1)
        told = {}
        prompts = dynamic_sampling.window(config, self.run.dataset, state.step, state.position)
        play = None
        if self.pool:
            sizes = config.rollout.samples, TRAIN_STREAM, state.step
            play = Play(config, self.pool, self.run.tokenizer, self.run.model.eos_ids, *sizes)

        def finished(answer: Completion) -> None:
            prompt = prompts[answer.prompt]
            self.sampling.lengths[answer.uid] = len(answer.tokens)
            text = evaluation.submit(self.scorer, self.run.tokenizer, prompt, answer, play)
            logprob = float(np.sum(answer.logprobs, dtype=np.float64))
            told[answer.uid] = text, logprob, play.rewards(answer.uid) if play else None

        with self.watch.phase("rollout"), play or nullcontext():
            run, background = self.run, {}
            if play:
                prompts = play.open(prompts)
                check_alike(run.job, prompts)
            request = run.request(prompts, state.step)
            wanted = partial(batches.needed, config, prompts, run.engine.local_groups)
            if run.drafter:
                background = run.drafter.begin_rollout(request, weights, state)
                if run.drafter.needs_all_answers(state):
                    wanted = exchange.everything
            began = self.watch.clock()
            result, tuner = run.engine.run(
                request, weights, state.tuner, on_finish=finished,
                interrupted=self.interrupted, wanted=wanted, partner=play,
                turn_tokens=config.environment.turn_tokens, **background, **self.sampling.arguments(),
            )  # fmt: skip
        return Rolled(prompts, result, tuner, told, began)

    def score(self, result: RolloutResult) -> dict[int, Score]:
        """The scores of all processes' answers, by uid, with the penalty of long ones. Raises Interrupted."""
        with self.watch.phase("reward"):
            if result.choice:
                self.scorer.drop_others({answer.uid for answer in result.completions})
            scores = evaluation.collected(self.run.job, self.scorer, self.interrupted)
            lengths = {answer.uid: len(answer.tokens) for answer in result.completions}
            scores = scorers.shortened(self.run.config, scores, lengths)
            return scorers.penalized(self.run.config, scores, lengths)

    def merge_drafter(self, rolled: Rolled) -> Learned:
        """The drafter that idle groups trained during the rollout."""
        if not self.run.drafter:
            return Learned(self.state.drafter, self.state.investment)
        with self.watch.phase("drafter"):
            return self.run.drafter.merge(self.state, rolled.tuner, rolled.result)

    def pack(self, rolled: Rolled, scores: dict[int, Score]) -> Batch:
        """The answers as packed rows, with all that drafter and policy learn from."""
        run, answers = self.run, rolled.result.completions
        with self.watch.phase("update"):
            batch = batches.pack(run.config, run.recipe, rolled.prompts, rolled.result, scores)
            with self.watch.phase("old_log_prob"):
                batch = batches.add_logprobs(
                    run.config, self.programs, self.policy, self.start, batch, batches.is_finite(answers)
                )  # fmt: skip
                if self.teacher:
                    batch = self.teacher.scored(batch, self.policy, rolled.prompts, answers)
                return batch

    def learn_drafter(self, learned: Learned, batch: Batch, rolled: Rolled) -> Learned:
        """The drafter after its training on some of the rows."""
        if not self.run.drafter:
            return learned
        with self.watch.phase("drafter"):
            answers, step = rolled.result.completions, self.state.step
            return self.run.drafter.learn(learned, self.policy, batch.rows, answers, step)

    def update_policy(self, batch: Batch) -> tuple[PolicyState, list[dict[str, Any]]]:
        """The policy after one optimizer step on each minibatch, and what the steps measured. The state's is donated."""
        policy, updates = self.state.policy, []
        with self.watch.phase("update"):
            for rows in batch.minibatches:
                policy, metrics = policy_update.update(
                    self.programs, policy, rows, self.state.step, self.base
                )
                updates.append(jax.device_get(metrics) | batch.metrics)
        return policy, updates

    def update_tuner(self, tuner: TunerState, learned: Learned) -> TunerState:
        """The tuner's state for the new weights of policy and drafter."""
        run = self.run
        if not run.drafter:
            return run.engine.tuner.update_prior(tuner)
        tuner, message = run.drafter.update_tuner(tuner, learned.depths)
        if message:
            self.writer.say(f"step {self.state.step + 1}/{run.steps}  {message}")
        return tuner

    def next_state(
        self, policy: PolicyState, learned: Learned, tuner: TunerState, rolled: Rolled
    ) -> RunState:
        """The state after the step."""
        step, choice = self.state.step, rolled.result.choice
        position = dynamic_sampling.after(self.run.config, step, self.state.position, choice)
        return RunState(step + 1, policy, learned.drafter, tuner, learned.investment, position)

    def report(
        self,
        rolled: Rolled,
        scores: dict[int, Score],
        batch: Batch,
        updates: list[dict[str, Any]],
        metrics: dict[str, float],
    ) -> None:
        """Writes the metrics and the answers of the step that has just been done."""
        run, state, result = self.run, self.state, rolled.result
        kind = run.engine.drafter_kind
        self.profiler.leave(state.step)
        with self.watch.phase("metrics"):
            prompts = dynamic_sampling.taken(rolled.prompts, result.choice)
            scalars = step_metrics.of_rollout(run.config, prompts, result, scores)
            scalars |= step_metrics.of_update(updates, batch.rewards, batch.advantages, batch.fill)
            scalars |= metrics | step_metrics.of_drafting(kind, result)
            scalars |= self.sampling.metrics(result)
            position = dynamic_sampling.start(run.config, state.step, state.position)
            scalars |= step_metrics.of_step(run.dataset, position, scalars, self.watch, run.job)
            seconds = step_metrics.seconds_without(scalars, "drafter", "eval")
            self.state = state.replace(investment=state.investment.after_step(seconds))

            own = {uid: one for uid, one in rolled.told.items() if uid in scores}
            told, answers = evaluation.told_first(run.job, own), []
            if run.job.is_first:
                answers = [
                    evaluation.record(
                        rolled.prompts, one, scores[one.uid], told[one.uid][0], uid=one.uid, group=one.prompt,
                        advantage=float(advantage), logprob=told[one.uid][1], accepted=one.accepted,
                        turns=told[one.uid][2],
                    )
                    for one, advantage in zip(result.completions, batch.advantages, strict=True)
                ]  # fmt: skip
            chunks = step_metrics.chunks(kind, result)
            phases = step_metrics.phases(self.watch, rolled.began)
            self.writer.step(state.step, scalars, answers, result.spans, chunks, phases)
            grown = self.health.grown(scalars.get("actor/rollout_logprob_diff_mean"))
            filled = dynamic_sampling.filled(result.choice)
            for words in (filled, *health.remarks_of_step(scores, updates), grown):
                if words:
                    self.writer.say(f"step {state.step}/{run.steps}  {words}")

    def diverged(self, rolled: Rolled, scores: dict[int, Score]) -> int | None:
        """DIVERGED when the run cannot go on after this step, with the reason on stderr."""
        policy, is_last = self.state.policy, self.state.step == self.run.steps
        is_untrained = is_last and 0 < int(policy.skipped) == int(policy.step)
        problem = self.health.problem(rolled.result, scores, int(policy.skips), is_untrained)
        if problem and self.run.job.is_first:
            print(f"error: step {self.state.step}: {problem}", file=sys.stderr)
        return DIVERGED if problem else None
