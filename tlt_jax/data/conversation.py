"""A conversation as one sequence of tokens: its first prompt, and what the messages of an environment add after an answer.

The tokens of an answer stay as the policy sampled them; no text is encoded twice. Imports no JAX.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from tlt_jax.config import Config, changes
from tlt_jax.data import files, prompt_format
from tlt_jax.data.files import ASSISTANT, ID, USER
from tlt_jax.data.prompt_format import Encoder, Messages, Prompt
from tlt_jax.errors import DataError

TOOL = "tool"  # role of the message with the result of a tool: {"role": "tool", "name": name, "content": text}
ANSWER, PROBE = "AnswerOfThePolicy", "MessageOfTheEnvironment"  # contents that no template changes
BREAK = "BreakInATextOfTheEnvironment"  # after the first letter of a special token's name, which is encoded as text
CACHED = 256  # replies of environments whose tokens are kept
HEAD = 64  # characters after an answer, or its last tokens, where a stop text is looked for


class Conversation:
    """Writes conversations in the format of `config.data`.

    tools: JSON schemas for the chat template. eos_ids: tokens that end an answer, besides the tokenizer's EOS and the
    template's end. Raises DataError, also when the chat template does not write the tools.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        tools: Sequence[dict[str, Any]] = (),
        eos_ids: Collection[int] = (),
    ):
        self.config, self.tokenizer = config, tokenizer
        self.encoder = prompt_format.encoder(config, tokenizer, tools)
        self.added = set(tokenizer.added_tokens_decoder)
        added = tokenizer.added_tokens_decoder.values()
        self.special = [str(token) for token in added if token.special and len(str(token)) > 1]
        self.ends = {*eos_ids, tokenizer.eos_token_id}
        # What the template writes after an answer, to the token that ends it; empty without one.
        self.end: list[int] = []
        self.written: set[tuple[str, ...]] = set()  # roles that the template is known to write
        self.after = lru_cache(CACHED)(self._after)
        if not config.data.chat_template:
            if tools:
                raise DataError(
                    "tools need a chat template that writes them: set data.chat_template true"
                )
            return
        start = [{"role": USER, "content": PROBE}]
        if tools and self._write(start) == self._write(start, replace(self.encoder, tools=())):
            raise DataError(
                "the chat template writes no tools: describe them in data.system, and give no schemas"
            )
        end = self._encode(self._render([], asks=False))
        if marks := [place for place, token in enumerate(end) if token in self.added]:
            self.end = end[: marks[0] + 1]
            self.ends.add(self.end[-1])

    def opening(self, prompt: str | Messages, row: Mapping[str, Any]) -> Prompt:
        """The first prompt, a text or messages, of a row, as prompts of data are written. Raises DataError."""
        if not isinstance(prompt, str):
            _check(prompt)
            if not self.config.data.chat_template:
                prompt = "".join(message["content"] for message in prompt)
        named = {ID: "of an environment", **row}
        if wrong := files.misfit(prompt, self.config.data.prompt_suffix):
            raise DataError(f"the prompt of row {named[ID]}: {wrong[0]}: {wrong[1]}")
        (found,) = self.encoder.prompts([{**named, "prompt": prompt}])
        if BREAK in found.text:
            start, rest = found.text.split(BREAK, 1)
            tokens = [
                *self.tokenizer(start, add_special_tokens=False)["input_ids"],
                *self._encode(rest),
            ]
            text = found.text.replace(BREAK, "")
            found = replace(found, tokens=np.asarray(tokens, np.int32), text=text)
        return replace(found, row=dict(row))

    def quoted(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages with a BREAK in each name of a special token; as they are without a chat template, which writes none."""
        if not self.config.data.chat_template:
            return [*messages]

        def broken(text: Any) -> Any:
            for name in self.special if isinstance(text, str) else ():
                text = text.replace(name, name[0] + BREAK + name[1:])
            return text

        return [{key: broken(text) for key, text in message.items()} for message in messages]

    def continuation(self, answer: np.ndarray, messages: Messages) -> np.ndarray:
        """What follows an answer, int32 [T], to the start of the next one: int32 tokens.

        With a chat template, what it writes between an answer and the next one when these messages are between them, less the
        part of the answer's end that the answer has: a token that ends it, or a stop text with which that end begins. Without
        one, the texts of the messages. Raises DataError when the template cannot write the messages.
        """
        _check(messages)
        if not self.config.data.chat_template:
            text = "".join(message["content"] for message in messages)
            return np.asarray(self._encode(text), np.int32)
        text, tokens = self.after(json.dumps(messages, default=str))
        last, size = answer[-1:].tolist(), len(self.end)
        if size and tokens[:size] == self.end and self.ends.intersection(last):
            tokens = tokens[size:]
        elif tokens[:1] == last and self.added.intersection(last):
            tokens = tokens[1:]  # the start of a turn ends the one before
        elif said := self._said(answer, text):
            tokens = self._encode(text[said:])
        return np.asarray(tokens, np.int32)

    def is_cut(self, answer: np.ndarray) -> bool:
        """Whether an answer has neither a token nor a stop text that ends one."""
        if not self.ends.isdisjoint(answer[-1:].tolist()):
            return False
        tail = answer[-HEAD:].tolist()
        return not any(stop in self.tokenizer.decode(tail) for stop in self.config.rollout.stop)

    def _after(self, key: str) -> tuple[str, list[int]]:
        """The text and tokens after an answer that the messages follow."""
        # Mistral's templates print the id of a call, of nine letters or digits.
        messages = [
            {"tool_call_id": f"{number:09}", **message} if message["role"] == TOOL else message
            for number, message in enumerate(json.loads(key))
        ]
        roles = tuple(message["role"] for message in messages)
        if roles not in self.written:
            probes = [{**one, "content": f"{PROBE}{place}."} for place, one in enumerate(messages)]
            found = self._render(probes)
            for role, probe in zip(roles, probes, strict=True):
                if probe["content"] not in found:
                    raise DataError(
                        f"the chat template drops messages of the role {role!r}: let the environment answer "
                        f"with the role {USER!r}"
                    )
            self.written.add(roles)
        text = self._render(self.quoted(messages))
        return text, self._encode(text)

    def _render(self, messages: Messages, asks: bool = True) -> str:
        """What the template writes after an answer that the messages follow."""
        # A short conversation: a template may leave out, number or move what is earlier.
        start = [{"role": USER, "content": PROBE}, {"role": ASSISTANT, "content": ANSWER}]
        _, answer, after = self._write([*start, *messages], asks=asks).partition(ANSWER)
        if not answer:
            raise DataError("the chat template drops the assistant's message: use another template")
        return after

    def _write(self, messages: Messages, encoder: Encoder | None = None, asks: bool = True) -> str:
        try:
            return (encoder or self.encoder).render(messages, asks)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the chat template rejects messages of the roles {roles} ({' '.join(str(error).split())}): "
                f"let the environment answer with one message of the role {USER!r}"
            ) from error

    def _said(self, answer: np.ndarray, text: str) -> int:
        """How many characters of the text, with a whole stop text and no added token, end the answer."""
        head = text[:HEAD]
        least = min(
            (head.index(stop) + len(stop) for stop in self.config.rollout.stop if stop in head),
            default=HEAD + 1,
        )
        said = self.tokenizer.decode(answer[-HEAD:].tolist())
        # The token that completes a stop text may have more characters.
        sizes = [size for size in range(least, len(head) + 1) if said.endswith(head[:size])]
        size = max(sizes, default=0)
        return size if self.added.isdisjoint(self._encode(head[:size])) else 0

    def _encode(self, text: str) -> list[int]:
        # SentencePiece adds a blank to the start of a text; this one continues another.
        texts = [self.tokenizer.eos_token + part for part in text.split(BREAK)]
        found = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [token for part in found for token in part[1:]]


def _check(messages: Messages) -> None:
    """Raises DataError for what is not a list of whole chat messages."""
    if not prompt_format.is_messages(messages):
        raise DataError(
            f"the environment gave {changes.short(messages)}: give a list of "
            "{'role': text, 'content': text} objects"
        )
    texts = [text for message in messages for text in message.values() if isinstance(text, str)]
    if any(map(files.lone_surrogate, texts)):
        raise DataError(f"a message of the environment has {files.HALF}: {files.WHOLE}")
