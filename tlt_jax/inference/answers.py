"""What a policy's rollout returns to a training loop of one's own: answers, totals of a call, and what its scores select."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt_jax.distributed.job import Job
from tlt_jax.errors import RewardError
from tlt_jax.rewards import terms
from tlt_jax.rollout.recorder import Completion
from tlt_jax.rollout.selection import Selection


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer to prompt number `prompt`, its `sample`-th from 0.

    prompt_tokens: int32[P]. tokens: int32[T], with the EOS or what completed a stop text. logprobs: float[T], of the
    tokens at the sampling temperature, before top-k and top-p. finish: "stop", "length" (cut at max_new_tokens) or
    "nonfinite" (the policy's logits were). text: without special tokens; None without a tokenizer.
    """

    prompt: int
    sample: int
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str
    text: str | None


@dataclass(frozen=True, eq=False)
class Answers(Sequence[Answer]):
    """The answers of one call, by prompt and sample, and its totals over all processes.

    num_tokens: decoded, also of answers that were not kept. accept_length: mean tokens that a round with drafts added to an
    answer; 0.0 when none drafted. speculated_tokens: the tokens of these rounds, of `num_tokens`. seconds: of decoding;
    compile_seconds: waited for compilations in addition.
    """

    answers: tuple[Answer, ...]
    num_tokens: int
    speculated_tokens: int
    accept_length: float
    seconds: float
    compile_seconds: float

    def __getitem__(self, index):
        return self.answers[index]

    def __len__(self) -> int:
        return len(self.answers)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)


class Scoring:
    """A selection of `keep` prompts by the scores of a caller's function: what it does wrong is raised in all processes."""

    def __init__(self, keep: int, score: Callable[[Completion], Any]):
        self.keep, self.score = keep, score
        self.new: dict[int, float] = {}
        self.wrong: list[Exception] = []

    def arguments(self) -> dict[str, Any]:
        """The arguments of `Engine.run` that select by the scores, and interrupt the rollout once one is missing."""
        return {
            "selection": Selection(self.keep, self.scores),
            "on_finish": self.finished,
            "interrupted": lambda: bool(self.wrong),
        }

    def finished(self, one: Completion) -> None:
        """Scores an answer."""
        if self.wrong:
            return
        try:
            value = self.score(one)
        except (
            Exception
        ) as error:  # the function is the caller's: no process may wait for one that has ended
            self.wrong.append(error)
            return
        source = f"score, of an answer to prompt {one.prompt},"
        try:
            self.new[one.uid] = terms.number(source, value)
        except ValueError as error:
            self.wrong.append(RewardError(str(error)))

    def scores(self) -> dict[int, float]:
        """The scores since the last call, by uid."""
        found, self.new = self.new, {}
        return found

    def check(self, job: Job) -> None:
        """Raises what went wrong in one process in all of them."""
        reasons = [str(error) or type(error).__name__ for error in self.wrong]
        said = job.meeting().heard("".join(reasons))
        if self.wrong:
            raise self.wrong[0]
        if said:
            process, reason = min(said.items())
            raise RewardError(f"score failed in process {process}: {reason}")
