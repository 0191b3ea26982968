"""Prompts that a user gives, as tokens: texts, chat messages, and token ids. Knows no model and no device."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlt_jax.config import Config, changes
from tlt_jax.data import adapter_files, files, prompt_format, rows
from tlt_jax.data.encoder import ID
from tlt_jax.data.problems import Problems
from tlt_jax.errors import ConfigError, DataError

Messages = Sequence[dict[str, str]]  # a chat: {"role": text, "content": text} of each message
Given = str | Sequence[int] | Messages  # a prompt: a text, token ids, or a chat


@dataclass(frozen=True)
class Question:
    """A prompt: its token ids, and its text with everything that is put around it (None when given as ids)."""

    tokens: Sequence[int]
    text: str | None


def encode(prompt: Given, config: Config, tokenizer: Any, place: str) -> Question:
    """A prompt in the format of `config.data`; messages always have the chat template, and ids stay as they are.

    Raises DataError, which names the `place`, without tokenizer, chat template or tokens.
    """
    is_text = isinstance(prompt, str)
    if not is_text and not is_messages(prompt):
        return Question(read_ids(prompt, place), None)
    if tokenizer is None:
        raise DataError(f"{place}: the model directory has no tokenizer: give token ids instead")
    if not (is_text or tokenizer.chat_template):
        raise DataError(f"{place}: the model has no chat template for messages: give a text")
    if not is_text:
        config = replace(config, data=replace(config.data, chat_template=True))
    if wrong := rows.misfit(prompt, config.data.prompt_suffix):
        what, fix, detail = wrong
        raise DataError(f"{place}: {what}{f' ({detail})' if detail else ''}: {fix}")
    encoder = prompt_format.encoder(config, tokenizer)
    (found,) = encoder.prompts([{ID: place, "prompt": prompt}])
    if not len(found.tokens):
        raise DataError(f"{place}: the prompt is empty: give at least one token")
    return Question(found.tokens.tolist(), found.text)


def read_file(name: str, config: Config, tokenizer: Any) -> list[Question]:
    """The prompts of a JSONL or Parquet file. Raises ConfigError without the file, and DataError."""
    path, problems = Path(name), Problems()
    if not path.is_file():
        raise ConfigError(f"--prompts {name}: no such file")
    lines = files.read(path, problems)
    problems.stop_if_any()

    questions = []
    for line, row in lines:
        place = f"{path}:{line}"
        if isinstance(row.get("prompt_ids"), list):
            questions.append(Question(read_ids(row["prompt_ids"], place), None))
        elif isinstance(row.get("prompt"), str) or is_messages(row.get("prompt")):
            questions.append(encode(row["prompt"], config, tokenizer, place))
        else:
            raise DataError(
                f'{place}: no prompt: write {{"prompt": "text"}}, {{"prompt": [{{"role": "user", "content": "text"}}]}} or '
                '{"prompt_ids": [1, 2, 3]}'
            )
    return questions


def is_messages(prompt: Any) -> bool:
    """Whether it is a list of chat messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(map(rows.is_message, prompt))


def read_ids(words: Sequence[Any], place: str) -> list[int]:
    """Token ids from texts, numbers of JSON or NumPy. Raises DataError, with those that are none."""
    is_row = isinstance(words, Iterable) and not isinstance(words, bytes)
    found = [(word, token_id(word)) for word in words] if is_row else []
    wrong = [word for word, number in found if number is None]
    if wrong or not found:
        shown = " ".join(changes.short(wrong or words).split())
        raise DataError(
            f'{place}: {shown} are no token ids: write whole numbers from 0, below the size of the vocabulary, such as "1,2,3"'
        )
    return [number for _, number in found]


def token_id(word: Any) -> int | None:
    """The token id that a text or number is; None for another value, and for one outside of int32."""
    try:
        number = int(word) if isinstance(word, str) else operator.index(word)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < 2**31 and not isinstance(word, bool) else None


def find_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory; None without one. Raises DataError when it cannot be loaded."""
    source = adapter_files.tokenizer_source(str(directory))
    if Path(source).is_dir() and not adapter_files.has_tokenizer(Path(source)):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the tokenizer of {source} does not load: {str(error).strip().splitlines()[0]}"
        ) from error
