"""What a policy's rollout returns to a training loop of one's own: answers, and totals of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


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
