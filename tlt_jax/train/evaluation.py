"""Evaluation of a policy on the evaluation split: mean@k, pass@k and answer lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tlt_jax.config import Config
from tlt_jax.config.task import is_at_least
from tlt_jax.data.dataset import EVAL, Dataset
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.distributed.job import Job
from tlt_jax.environments.pool import Environments
from tlt_jax.errors import ConfigError, Interrupted
from tlt_jax.keys import EVAL_STREAM
from tlt_jax.metrics.evaluations import Record
from tlt_jax.rewards import Score, Scorer
from tlt_jax.rollout import exchange
from tlt_jax.rollout.recorder import LENGTH, Completion
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.train.environment import Play
from tlt_jax.tuner.interface import EVALUATION, TRAINING, State as TunerState

if TYPE_CHECKING:
    from tlt_jax.rollout.engine import Engine


class Evaluated(NamedTuple):
    """The metrics eval/*, the tuner's state, and the answers, which only process 0 has."""

    metrics: dict[str, float]
    tuner: TunerState
    answers: list[Record]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates policies on the evaluation split of a data set, or on another part.

    The sampling noise does not depend on the training step: two evaluations differ only by the policy.
    """

    config: Config
    engine: Engine
    dataset: Dataset
    tokenizer: Any
    scorer: Scorer
    pool: Environments | None = None

    def evaluate(
        self,
        weights: Any,
        tuner: TunerState | None = None,
        interrupted: Callable[[], bool] | None = None,
        evaluations_left: int = 0,
        split: str = EVAL,
        ks: Sequence[int] = (),
    ) -> Evaluated:
        """Evaluates the policy on a part of the data (see Dataset.part), with metrics for these k, or all of `summarize`.

        The tuner learns the acceptance of drafts in evaluations from evaluations alone, and in training from training; it
        learns the cost of programs from both. Raises ConfigError for an empty split, DataError, and Interrupted.
        """
        prompts, engine, settings = self.dataset.part(split), self.engine, self.config.eval
        texts: dict[int, str] = {}
        if not prompts:
            raise ConfigError(
                f"the split {split} is empty: set data.eval_size above 0, or data.eval"
            )

        play = None
        if self.pool:
            eos_ids = engine.model_config.eos_ids
            sizes = settings.samples, EVAL_STREAM, 0
            play = Play(self.config, self.pool, self.tokenizer, eos_ids, *sizes)
            prompts = play.open(prompts)

        def finished(answer: Completion) -> None:
            texts[answer.uid] = submit(
                self.scorer, self.tokenizer, prompts[answer.prompt], answer, play
            )

        tuner = engine.tuner.switched(engine.tuner.init() if tuner is None else tuner, EVALUATION)
        request = engine.request(
            [prompt.tokens for prompt in prompts],
            settings.samples,
            Sampling.of(settings),
            settings.max_new_tokens or self.config.rollout.max_new_tokens,
            stream=EVAL_STREAM,
            step=0,
            rollouts_left=evaluations_left,
        )
        with play or nullcontext():
            rollout, learned = engine.run(
                request, weights, tuner, on_finish=finished, interrupted=interrupted, wanted=exchange.nothing,
                partner=play, turn_tokens=self.config.environment.turn_tokens,
            )  # fmt: skip
        scores = collected(engine.job, self.scorer, interrupted or (lambda: False))
        texts, answers = told_first(engine.job, texts), []
        if engine.job.is_first:
            answers = [
                record(
                    prompts, one, scores[one.uid], texts[one.uid], split=split, sample=one.sample,
                    is_correct=is_at_least(scores[one.uid].value, settings.correct_at),
                )
                for one in rollout.completions
            ]  # fmt: skip
        tuner = engine.tuner.switched(learned, TRAINING)
        values = np.array([scores[one.uid].value for one in rollout.completions])
        lengths = np.array([len(one.tokens) for one in rollout.completions])
        cut = np.mean([one.finish == LENGTH for one in rollout.completions])
        metrics = summarize(values.reshape(-1, settings.samples), settings.correct_at, ks) | {
            "eval/response_length/mean": float(lengths.mean()),
            "eval/response_length/max": float(lengths.max()),
            "eval/response_length/clip_ratio": float(cut),
        }
        return Evaluated(metrics, tuner, answers)


def is_due(config: Config, step: int, steps: int) -> bool:
    """True at step 0, after every eval.every-th step and after the last; never when eval.every is 0."""
    return config.eval.every > 0 and (step % config.eval.every == 0 or step == steps)


def collected(job: Job, scorer: Scorer, interrupted: Callable[[], bool]) -> dict[int, Score]:
    """The scores of all processes' answers, by uid; waits for them.

    Returns once every process has all of its scores. If one is `interrupted` before, all raise Interrupted.
    """
    meeting = job.meeting()
    scores = scorer.collect(lambda: meeting.stops(interrupted()))
    if not meeting.goes_on(interrupted):
        raise Interrupted("the step was interrupted before its update")
    if job.count == 1:
        return scores
    local = [(uid, *vars(score).values()) for uid, score in scores.items()]
    every = [one for part in job.gather(json.dumps(local).encode()) for one in json.loads(part)]
    return {uid: Score(*fields) for uid, *fields in every}


def told_first(job: Job, told: dict[int, Any]) -> dict[int, Any]:
    """Gathers what all processes know of their answers, JSON by uid, in process 0; empty in others. A collective."""
    if job.count == 1:
        return told
    parts = job.to_first(json.dumps(list(told.items())).encode())
    return {uid: one for part in parts for uid, one in json.loads(part)}


def submit(
    scorer: Scorer, tokenizer: Any, prompt: Prompt, answer: Completion, play: Play | None = None
) -> str:
    """Submits an answer to the scorer under its uid; returns its text, without special tokens.

    Of an environment the row has the outcome of the answer as `environment`.
    """
    text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
    outcome = {"environment": play.outcome(answer)} if play else {}
    scorer.submit(answer.uid, prompt.text, text, prompt.row | outcome)
    return text


def record(
    prompts: Sequence[Prompt], answer: Completion, score: Score, text: str, **own: Any
) -> Record:
    """An answer to one of the prompts, with its score; `own`: what only a step, or only an evaluation says of it."""
    prompt = prompts[answer.prompt]
    return Record(
        **{"uid": None} | own, prompt=prompt.text, completion=text, reward=score.value, length=len(answer.tokens),
        finish=answer.finish, parts=score.parts, failure=score.failure, id=prompt.id,
        reference=str(prompt.row["answer"]),
    )  # fmt: skip


def summarize(scores: np.ndarray, correct_at: float, ks: Sequence[int] = ()) -> dict[str, float]:
    """eval/mean@k (of the first k answers) and eval/pass@k of scores [prompts, samples], for each of these k.

    Without ks: the mean of all, and pass@1, 2, 4, ... up to the number of samples. An answer is correct when its score is at
    least `correct_at` (within TOLERANCE).
    """
    samples = scores.shape[1]
    correct = is_at_least(scores, correct_at).sum(axis=1)
    powers = [1 << i for i in range(samples.bit_length())]
    means = {f"eval/mean@{k}": float(scores[:, :k].mean()) for k in ks or [samples]}
    return means | {
        f"eval/pass@{k}": float(np.mean([pass_at_k(samples, int(c), k) for c in correct]))
        for k in ks or powers
    }


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k answers is correct.

    Given `correct` of `samples` answers (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
