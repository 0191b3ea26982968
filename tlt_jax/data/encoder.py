"""Tokenizes rows: prompts with their chat template, and solutions. Knows no file, model or device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from tlt_jax.config import Config
from tlt_jax.errors import DataError

ID = "tlt_id"  # column that rows get: the id by which the files of a run name them
USER, ASSISTANT = "user", "assistant"  # roles of chat messages


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt: int32 `tokens` [T], and `text` with the chat template.

    `row` has the columns of the source, and the mapped columns "prompt", "answer" and, for a warm start, "solution"; and its
    id as ID, also as "id" where the source has no such column.
    """

    index: int
    tokens: np.ndarray
    row: dict[str, Any]
    text: str = ""

    @property
    def id(self) -> str:
        """The id of the row."""
        return self.row[ID]


@dataclass(frozen=True)
class Encoder:
    """Tokenizes rows with the chat template, suffix and system message of the configuration."""

    config: Config
    tokenizer: Any

    def text(self, prompt: str | list[dict[str, str]]) -> str:
        """The prompt with suffix, system message and chat template; the suffix ends the last message of the user."""
        data = self.config.data
        if not data.chat_template:
            return prompt + data.prompt_suffix

        messages = (
            [{"role": USER, "content": prompt}]
            if isinstance(prompt, str)
            else [dict(m) for m in prompt]
        )
        for last in [one for one in messages if one["role"] == USER][-1:]:
            last["content"] += data.prompt_suffix
        if data.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": data.system})

        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **data.chat_template_kwargs
        )

    def prompts(self, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
        """The tokenized prompts of the rows. Raises DataError when the chat template rejects one."""
        texts = []
        for row in rows:
            try:
                texts.append(self.text(row["prompt"]))
            except TemplateError as error:
                raise DataError(f"the chat template rejects row {row[ID]}: {error}") from error
        # The template adds the special tokens.
        tokens = self._tokens(texts, special=not self.config.data.chat_template)
        return [Prompt(i, *parts) for i, parts in enumerate(zip(tokens, rows, texts, strict=True))]

    def solutions(self, rows: Sequence[dict[str, Any]]) -> list[np.ndarray]:
        """Token ids int32 of the rows' solutions, with EOS."""
        tokens = self._tokens([row["solution"] for row in rows], special=False)
        return [np.append(t, np.int32(self.tokenizer.eos_token_id)) for t in tokens]

    def _tokens(self, texts: list[str], special: bool) -> list[np.ndarray]:
        if not texts:
            return []
        return [
            np.asarray(ids, np.int32)
            for ids in self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        ]
