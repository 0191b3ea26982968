"""A policy that answers prompts, for the command `generate` and for notebooks; and a conversation in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tlt_jax.config import Config, parse as parsing, validate
from tlt_jax.config.schema import NONE, Rollout
from tlt_jax.data import prompt_format
from tlt_jax.data.prompt_format import Given, Messages, Prompt, TextStream
from tlt_jax.errors import ConfigError
from tlt_jax.spec_decode import strategy as strategies

# They differ from training: one answer, and no drafter, since compiling one does not pay off for few prompts.
DEFAULTS = {"rollout.samples": 1, "speculation.drafter": NONE, "train.steps": 1}


def configuration_of(
    directory: str, pairs: Sequence[tuple[str, str]], of_model: Mapping[str, Any] = {}
) -> Config:
    """The configuration of a model for inference: what its directory says, and these knobs. Raises ConfigError."""
    tree = DEFAULTS | {"model.path": directory} | dict(of_model)
    config = parsing.build(Config, tree, pairs)
    validate.validate_without_training(config)
    return replace(config, model=replace(config.model, param_dtype=config.model.compute_dtype))


def as_meant(
    model: str, pairs: Sequence[tuple[str, str]], is_raw: bool = False
) -> tuple[Config, str]:
    """The configuration that asks a model as the run that made it did, and what to say of what its makers say.

    Of a model that no run made, the sampling is that of its generation_config.json, or of that of the adapters' base.
    `pairs` take precedence; `is_raw`: nothing of the directory is used. Raises ModelError without the model, DataError, and
    ConfigError when a knob of the chat template would have no effect.
    """
    from tlt_jax.models import from_config, hf

    directory, of_model, makers = hf.resolve(model), {}, {}
    if not is_raw and (directory / prompt_format.NAME).is_file():
        of_model = prompt_format.read(directory)
    elif not is_raw:
        base = from_config.policy_directory(configuration_of(str(directory), pairs))
        makers = prompt_format.read_makers(base)
        of_model = prompt_format.of_makers(makers)
    config = configuration_of(str(directory), pairs, of_model)
    unused = [name for name, value in pairs if name in prompt_format.OF_TEMPLATE and value]
    if unused and not config.data.chat_template:
        raise ConfigError(
            f"{unused[0]} needs the chat template: add --chat (data.chat_template true in Python)"
        )
    return config, prompt_format.describe_makers(makers, {name for name, _ in pairs})


class Model:
    """A policy that answers prompts; it reuses its compiled programs across calls.

    It reads model.path, `data` for the format of prompts, the sampling of `rollout`, `speculation` and train.seed; without
    rollout.slots it decodes rollout.prompts x rollout.samples sequences at once. Raises UserError.
    """

    def __init__(self, config: Config):
        from tlt_jax.distributed.job import Job
        from tlt_jax.inference.rollouts import Rollouts
        from tlt_jax.models import from_config

        self.config = config
        self.rollouts = Rollouts.opened(config, job=Job())  # each process alone
        self.engine, self.tokenizer = self.rollouts.engine, self.rollouts.tokenizer
        from_config.warn_of_tokenizer(config, self.tokenizer)

    def generate(
        self, prompts: Sequence[Given], call: int = 0, **options: Any
    ) -> list[dict[str, Any]]:
        """The answers to texts, chat messages or token ids, by prompt and sample, in the format of `--json`.

        `options` are knobs of `rollout`: samples, temperature, top_k, top_p, max_new_tokens. The same prompts, seed and
        `call` give the same answers; another `call` samples new ones. Raises UserError.
        """
        rollout = self.rollouts.sampling({"samples": 1} | options)
        return self.answer(self.rollouts.prompts(prompts), rollout, call)["completions"]

    def reply(
        self, messages: Messages, call: int = 0, write: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """The object that `--json` prints, with one answer to a conversation, as long as the model's positions allow.

        `write` gets the text in parts while it is decoded. Raises UserError, also for a conversation that fills the model.
        """
        question = prompt_format.encode(messages, self.config, self.tokenizer, "the conversation")
        room = self.rollouts.model.longest - len(question.tokens)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(question.tokens)} tokens, and the model {self.rollouts.model.longest} "
                "positions: begin a new one"
            )
        most = min(self.config.rollout.max_new_tokens, room)
        rollout = replace(self.config.rollout, samples=1, max_new_tokens=most)
        return self.answer([question], rollout, call, write)

    def answer(
        self,
        questions: Sequence[Prompt],
        rollout: Rollout,
        call: int = 0,
        write: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """The object that `--json` prints; `write` gets the text of the only answer in parts."""
        from tlt_jax.rollout.recorder import Emitted, Poll

        stream = TextStream(self.tokenizer, write) if write else None

        def show(poll: Poll) -> None:
            for event in poll.events:
                if isinstance(event, Emitted):
                    stream.add(event.tokens.tolist())

        tokens = [question.tokens for question in questions]
        answers, result = self.rollouts.roll_out(tokens, rollout, call, [show] if stream else [])
        if stream:
            stream.flush()
        drafting = [one for one in result.measurements if one.strategy != strategies.PLAIN]
        return {
            "completions": [
                {
                    "prompt_index": answer.prompt,
                    "sample": answer.sample,
                    "prompt": questions[answer.prompt].text,
                    "token_ids": answer.tokens.tolist(),
                    "logprobs": [float(logprob) for logprob in answer.logprobs],
                    "text": answer.text,
                    "finish_reason": answer.finish,
                }
                for answer in answers
            ],
            "tokens": answers.num_tokens,
            "tokens_per_second": answers.num_tokens / answers.seconds,
            "seconds": answers.seconds,
            "compile_seconds": answers.compile_seconds,
            "accept_length": answers.accept_length,
            "speculated_tokens": answers.speculated_tokens,
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


def converse(model: Model) -> list[dict[str, Any]]:
    """Answers the lines of the standard input as turns of one conversation; the objects of all answers.

    Ctrl-C ends it too.
    """
    messages: list[dict[str, str]] = []
    answers, is_terminal = [], sys.stdin.isatty()
    if is_terminal:
        print(
            "(type a message; an empty line or the end of the input ends the chat)", file=sys.stderr
        )
    try:
        while True:
            if is_terminal:
                print("> ", end="", file=sys.stderr, flush=True)
            if not (line := sys.stdin.readline().strip()):
                break
            messages.append({"role": "user", "content": line})
            answers.append(model.reply(messages, len(answers), write))
            print(flush=True)
            messages[-1]["content"] += model.config.data.prompt_suffix  # as the model has read it
            (answer,) = answers[-1]["completions"]
            messages.append({"role": "assistant", "content": answer["text"]})
    except KeyboardInterrupt:
        print(flush=True)
    return answers


def write(text: str) -> None:
    """Prints a part of an answer at once."""
    print(text, end="", flush=True)
