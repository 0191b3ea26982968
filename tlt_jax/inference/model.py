"""A policy that answers prompts, for the command `generate` and for notebooks: formats them, decodes, and returns texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tlt_jax.config import Config, parse as parsing
from tlt_jax.config.schema import Rollout
from tlt_jax.data import questions as asking
from tlt_jax.data.questions import Given, Messages, Question
from tlt_jax.data.token_bytes import TextStream
from tlt_jax.errors import ConfigError
from tlt_jax.spec_decode import strategy as strategies

OPTIONS = ("samples", "temperature", "top_k", "top_p", "max_new_tokens")  # of Model.generate


class Model:
    """A policy that answers prompts; it reuses its compiled programs across calls.

    It reads model.path, `data` for the format of prompts, the sampling of `rollout`, `speculation` and train.seed; without
    rollout.slots it decodes rollout.prompts x rollout.samples sequences at once. Raises UserError.
    """

    def __init__(self, config: Config):
        from tlt_jax.distributed.job import Job
        from tlt_jax.inference import rollout_model
        from tlt_jax.models import from_config

        self.config = config
        self.rollouts = rollout_model.opened(config, job=Job())  # each process alone
        self.engine, self.tokenizer = self.rollouts.engine, self.rollouts.tokenizer
        from_config.warn_of_tokenizer(config, self.tokenizer)

    @property
    def suffix(self) -> str:
        """What follows the text of each prompt."""
        return self.config.data.prompt_suffix

    def check_template(self) -> None:
        """Raises DataError when conversations cannot be encoded."""
        asking.encode([{"role": "user", "content": "-"}], self.config, self.tokenizer, "--chat")

    def generate(
        self, prompts: Sequence[Given], call: int = 0, **options: Any
    ) -> list[dict[str, Any]]:
        """The answers to texts, chat messages or token ids, by prompt and sample, in the format of `--json`.

        `options` are knobs of `rollout`: samples, temperature, top_k, top_p, max_new_tokens. The same prompts, seed and
        `call` give the same answers; another `call` samples new ones. Raises UserError.
        """
        if unknown := sorted(options.keys() - set(OPTIONS)):
            raise ConfigError(
                f"generate takes no {unknown[0]}: use {', '.join(OPTIONS)}, and give other knobs to open_model"
            )
        knobs = {"samples": 1} | options
        pairs = [(f"rollout.{name}", str(value)) for name, value in knobs.items()]
        rollout = parsing.build(Config, {"rollout": asdict(self.config.rollout)}, pairs).rollout
        given = [
            asking.encode(prompt, self.config, self.tokenizer, f"prompt {number}")
            for number, prompt in enumerate(prompts)
        ]
        return self.answer(given, rollout, call)["completions"]

    def reply(
        self, messages: Messages, call: int = 0, write: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """The object that `--json` prints, with one answer to a conversation, as long as the model's positions allow.

        `write` gets the text in parts while it is decoded. Raises UserError, also for a conversation that fills the model.
        """
        question = asking.encode(messages, self.config, self.tokenizer, "the conversation")
        room = self.rollouts.model.max_positions - len(question.tokens)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(question.tokens)} tokens, and the model {self.rollouts.model.max_positions} "
                "positions: begin a new one"
            )
        most = min(self.config.rollout.max_new_tokens, room)
        rollout = replace(self.config.rollout, samples=1, max_new_tokens=most)
        return self.answer([question], rollout, call, write)

    def answer(
        self,
        questions: Sequence[Question],
        rollout: Rollout,
        call: int = 0,
        write: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """The object that `--json` prints; `write` gets the text of the only answer in parts."""
        from tlt_jax.rollout.events import Emitted, Look

        stream = TextStream(self.tokenizer, write) if write else None

        def show(look: Look) -> None:
            for event in look.events:
                if isinstance(event, Emitted):
                    stream.add(event.tokens.tolist())

        tokens = [np.asarray(question.tokens, np.int32) for question in questions]
        result = self.rollouts.roll_out(tokens, rollout, call, [show] if stream else [])
        if stream:
            stream.flush()

        # Compilations that ran in the background while it decoded are not subtracted.
        waited = sum(end - begin for begin, end in result.compile_waits[0])
        seconds = result.stats["seconds"] - waited
        drafting = [one for one in result.measurements if one.strategy != strategies.PLAIN]
        return {
            "completions": [
                {
                    "prompt_index": answer.prompt,
                    "sample": answer.sample,
                    "prompt": questions[answer.prompt].text,
                    "token_ids": answer.tokens.tolist(),
                    "logprobs": [float(logprob) for logprob in answer.logprobs],
                    "text": None
                    if self.tokenizer is None
                    else self.tokenizer.decode(answer.tokens.tolist(), skip_special_tokens=True),
                    "finish_reason": answer.finish,
                }
                for answer in result.completions
            ],
            "tokens": result.stats["tokens"],
            "tokens_per_second": result.stats["tokens"] / seconds,
            "seconds": seconds,
            "compile_seconds": waited,
            "accept_length": result.stats["accept_length"],
            "speculated_tokens": result.stats["speculated_tokens"],
            "speculated_rounds": sum(one.row_rounds for one in drafting),
            "not_drafted": None if drafting else self.not_drafted(),
        }

    def not_drafted(self) -> str:
        """Why the last answers had no drafted token."""
        if not self.engine.arms:
            return "no drafter is set (--drafter)"
        compiled = {
            getattr(one, "strategy", strategies.PLAIN) for one in self.engine.programs.executables
        }
        always = f"--strategy {strategies.name(self.engine.arms[0])} always drafts"
        if compiled == {strategies.PLAIN}:
            return (
                "a program that drafts is compiled only if the answers are expected to take longer than compiling it, and "
                f"these were too short; {always}"
            )
        return f"the tuner measured plain decoding as the fastest; {always}"
