"""One RL step of TLT (arXiv 2511.16665, figure 4): the rollout, with idle groups training the drafter, then the update."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from tlt_jax import run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.cli import DIVERGED, DONE, PREEMPTED
from tlt_jax.config.schema import NONE
from tlt_jax.data.dataset import Prompt
from tlt_jax.errors import Interrupted
from tlt_jax.metrics import Writer, evaluations
from tlt_jax.models.drafter import DrafterParams
from tlt_jax.rewards import Score, Scorer, scorer as scorers
from tlt_jax.rollout import exchange
from tlt_jax.rollout.interface import RolloutEngine
from tlt_jax.rollout.recorder import Completion, RolloutResult
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.train import (
    drafting_words,
    dynamic_sampling,
    evaluation,
    minibatches,
    run_state,
    speculation_metrics,
    step_metrics,
)
from tlt_jax.train.accounts import Stopwatch
from tlt_jax.train.drafter_learning import DrafterLearning, Taught
from tlt_jax.train.drafting_words import DraftingWords
from tlt_jax.train.dynamic_sampling import DynamicSampling
from tlt_jax.train.evaluation import Evaluator
from tlt_jax.train.health import Health, failures, filtered, left_out, skipped
from tlt_jax.train.minibatches import Learned, PolicyTraining
from tlt_jax.train.request import training_request
from tlt_jax.train.run_state import RunState
from tlt_jax.train.setup import Setup
from tlt_jax.tuner.interface import State as TunerState


class Rolled(NamedTuple):
    """The rollout of a step: the prompts that it may try, the answers that it learns from, the tuner's state after it.

    `told`: text and log-prob sum of the local answers, by uid; `began`: when it started, on the stopwatch's clock.
    """

    prompts: list[Prompt]
    result: RolloutResult
    tuner: TunerState
    told: dict[int, tuple[str, float]]
    began: float


@dataclass
class Trainer:
    """Trains a policy step by step; `state` is all that survives a step, and all that a checkpoint needs.

    `steps`: of the whole run. `fixed_drafter`: the weights of a drafter that is not trained. `drafter`: None without an
    adaptive drafter. `resumed`: the step of the checkpoint that the run continues from, None for a new run; it is saved
    again only when `evaluates_resumed`, because its evaluation was interrupted.
    """

    setup: Setup
    steps: int
    engine: RolloutEngine
    policy: PolicyTraining
    drafter: DrafterLearning | None
    fixed_drafter: DrafterParams | None
    store: Store
    scorer: Scorer
    writer: Writer
    watch: Stopwatch
    profiler: step_metrics.Profiler
    interrupted: Callable[[], bool]
    state: RunState
    resumed: int | None = None
    evaluates_resumed: bool = False
    drafting_words: DraftingWords = field(init=False)
    evaluator: Evaluator = field(init=False)
    sampling: DynamicSampling = field(init=False)
    health: Health = field(init=False)

    def __post_init__(self):
        config = self.setup.config
        self.evaluator = Evaluator(
            config, self.engine, self.setup.dataset, self.setup.tokenizer, self.scorer
        )
        self.health, self.drafting_words = Health(config), DraftingWords(self.steps)
        self.sampling = DynamicSampling(config, self.scorer)
        if words := filtered(config):
            self.writer.say(words)

    def step(self) -> int | None:
        """One RL step; the exit code when the run ends instead: it is done, was interrupted, or diverged."""
        weights, measured = self.publish(), {}
        try:
            measured = self.evaluate(weights)
            self.save(measured)
            if self.state.step >= self.steps:
                return DONE
            rolled = self.roll_out(weights)  # idle data groups train the drafter meanwhile
            scores = self.score(rolled.result)
        except Interrupted:
            return self.stop(measured)

        drafting = speculation_metrics.metrics(self.engine.drafter_kind, rolled.result)
        taught = self.teach_drafter(rolled)
        del weights  # they may share buffers with the policy, which the update donates
        with self.watch.phase("update"):
            policy, learned = self.policy.update(
                self.state.policy,
                rolled.prompts,
                rolled.result,
                scores,
                self.state.step,
                taught.lesson,
            )
        tuner = self.update_tuner(rolled.tuner, taught)
        config, step, choice = self.setup.config, self.state.step, rolled.result.choice
        position = dynamic_sampling.after(config, step, self.state.position, choice)
        self.state = RunState(step + 1, policy, taught.drafter, tuner, taught.investment, position)
        self.report(rolled, scores, learned, taught.metrics | drafting)
        return self.diverged(rolled, scores)

    def publish(self) -> dict[int, Weights]:
        """The rollout's copy of the policy and of the drafter, by local data group."""
        with self.watch.phase("update_weights"):
            if self.drafter:
                self.drafter.before_publish()
            drafter = self.state.drafter.params if self.state.drafter else self.fixed_drafter
            return self.engine.publish(self.policy.weights(self.state.policy), drafter)

    @property
    def is_new(self) -> bool:
        """Whether the state is not that of a complete checkpoint."""
        return self.state.step != self.resumed or self.evaluates_resumed

    def evaluate(self, weights: dict[int, Weights]) -> dict[str, float]:
        """The metrics eval/*, when an evaluation is due; the tuner learns from it. Raises Interrupted."""
        config, state = self.setup.config, self.state
        if not (self.is_new and evaluation.is_due(config, state.step, self.steps)):
            return {}
        left = -(-(self.steps - state.step) // config.eval.every)
        with self.watch.phase("eval"):
            found = self.evaluator.evaluate(weights, state.tuner, self.interrupted, left)
            self.writer.lines(evaluations.FOLDER, state.step, found.answers)
        self.state = state.replace(tuner=found.tuner)
        self.writer.evaluation(state.step, found.metrics)
        return found.metrics

    def save(self, measured: dict[str, float]) -> None:
        """Saves a checkpoint when one is due, or when this evaluation is the best so far."""
        step, config = self.state.step, self.setup.config
        is_due = run_state.is_due(config, step, self.steps) or self.store.improves(measured)
        if self.is_new and (step == self.resumed or is_due):
            with self.watch.phase("save_checkpoint"):
                run_state.save(self.store, self.state, self.engine.basis, measured)

    def stop(self, measured: dict[str, float]) -> int:
        """Saves the state before the interrupted step, and says that the run was stopped; the exit code."""
        with self.watch.phase("save_checkpoint"):
            run_state.save(self.store, self.state, self.engine.basis, measured)
            self.store.wait()
        checkpoint = self.store.folder / str(self.state.step)
        self.writer.say(run_folder.stopped(self.setup.config, checkpoint))
        return PREEMPTED

    def roll_out(self, weights: dict[int, Weights]) -> Rolled:
        """Answers to the step's prompts; each is submitted for scoring while others are still decoded.

        Data groups that have nothing left to decode train the drafter. Raises Interrupted.
        """
        config, state = self.setup.config, self.state
        self.profiler.enter(state.step + 1)
        dataset, told = self.setup.dataset, {}
        prompts = dynamic_sampling.window(config, dataset, state.step, state.position)

        def finished(answer: Completion) -> None:
            prompt = prompts[answer.prompt]
            self.sampling.lengths[answer.uid] = len(answer.tokens)
            text = evaluation.submit(self.scorer, self.setup.tokenizer, prompt, answer)
            told[answer.uid] = text, float(np.sum(answer.logprobs, dtype=np.float64))

        with self.watch.phase("rollout"):
            request = training_request(self.setup, self.engine, prompts, state.step, self.steps)
            background = {}
            wanted = partial(minibatches.needed, config, prompts, self.engine.local_groups)
            if self.drafter:
                background = self.drafter.begin_rollout(request, weights, state)
                if self.drafter.needs_all_answers(state):
                    wanted = exchange.everything
            began = self.watch.clock()
            result, tuner = self.engine.run(
                request, weights, state.tuner, on_finish=finished,
                interrupted=self.interrupted, wanted=wanted, **background, **self.sampling.arguments(),
            )  # fmt: skip
        return Rolled(prompts, result, tuner, told, began)

    def score(self, result: RolloutResult) -> dict[int, Score]:
        """The scores of all processes' answers, by uid, with the penalty of long ones. Raises Interrupted."""
        with self.watch.phase("reward"):
            if result.choice:
                self.scorer.drop_others({answer.uid for answer in result.completions})
            scores = evaluation.collected(self.setup.job, self.scorer, self.interrupted)
            lengths = {answer.uid: len(answer.tokens) for answer in result.completions}
            return scorers.penalized(self.setup.config, scores, lengths)

    def teach_drafter(self, rolled: Rolled) -> Taught:
        """What idle groups taught the drafter, and what it is to learn from the rows of the update."""
        if not self.drafter:
            return Taught(self.state.drafter, self.state.investment)
        timed = partial(self.watch.phase, "drafter")
        policy = self.policy.weights(self.state.policy)
        return self.drafter.after_rollout(self.state, policy, rolled.tuner, rolled.result, timed)

    def update_tuner(self, tuner: TunerState, taught: Taught) -> TunerState:
        """The tuner's state for the new weights of policy and drafter; adds to `taught` what the update taught."""
        if not self.drafter:
            return self.engine.tuner.update_prior(tuner)
        tuner, message = self.drafter.after_update(taught, tuner)
        if message:
            self.writer.say(f"step {self.state.step + 1}/{self.steps}  {message}")
        return tuner

    def report(
        self,
        rolled: Rolled,
        scores: dict[int, Score],
        learned: Learned,
        metrics: dict[str, float],
    ) -> None:
        """Writes the metrics and the answers of the step that has just been done."""
        setup, state, result = self.setup, self.state, rolled.result
        self.profiler.leave(state.step)
        with self.watch.phase("metrics"):
            prompts = dynamic_sampling.taken(rolled.prompts, result.choice)
            scalars = step_metrics.of_rollout(setup.config, prompts, result, scores)
            scalars |= step_metrics.of_update(*learned) | metrics | self.sampling.metrics(result)
            position = dynamic_sampling.start(setup.config, state.step, state.position)
            scalars |= step_metrics.of_step(setup.dataset, position, scalars, self.watch, setup.job)
            seconds = step_metrics.seconds_without(scalars, "drafter", "eval")
            self.state = state.replace(investment=state.investment.after_step(seconds))

            own = {uid: one for uid, one in rolled.told.items() if uid in scores}
            told = evaluation.told_first(setup.job, own)
            answers = []
            if setup.job.is_first:
                answers = step_metrics.records(
                    rolled.prompts, result, scores, told, learned.advantages
                )
            chunks = speculation_metrics.chunks(self.engine.drafter_kind, result)
            phases = step_metrics.phases(self.watch, rolled.began)
            self.writer.step(state.step, scalars, answers, result.spans, chunks, phases)
            self.say_drafting(result)
            filled = dynamic_sampling.filled(result.choice)
            words_of_updates = skipped(learned.updates), left_out(learned.updates)
            grown = self.health.grown(scalars.get("actor/rollout_logprob_diff_mean"))
            for words in (filled, failures(scores), *words_of_updates, grown):
                if words:
                    self.writer.say(f"step {state.step}/{self.steps}  {words}")

    def say_drafting(self, result: RolloutResult) -> None:
        """Says when the rollout begins or ceases to draft."""
        if self.engine.drafter_kind == NONE:
            return
        why = drafting_words.reason(self.engine, self.state.tuner, result)
        if words := self.drafting_words.after(self.state.step, result.measurements, why):
            self.writer.say(words)

    def diverged(self, rolled: Rolled, scores: dict[int, Score]) -> int | None:
        """DIVERGED when the run cannot go on after this step, with the reason on stderr."""
        policy, is_last = self.state.policy, self.state.step == self.steps
        is_untrained = is_last and 0 < int(policy.skipped) == int(policy.step)
        problem = self.health.problem(rolled.result, scores, int(policy.skips), is_untrained)
        if problem and self.setup.job.is_first:
            print(f"error: step {self.state.step}: {problem}", file=sys.stderr)
        return DIVERGED if problem else None
