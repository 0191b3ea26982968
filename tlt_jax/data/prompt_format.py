"""Prompts: how a configuration formats and tokenizes them, what a model directory says of it, and prompts that a user gives;
and the bytes of tokens."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from tlt_jax.config import Config, changes, parse
from tlt_jax.data import adapter_files, tasks
from tlt_jax.data.files import ID, USER, Problems, is_message, misfit, read_file
from tlt_jax.errors import ConfigError, DataError


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt: int32 `tokens` [T], and its text with everything that is put around it (None when given as ids).

    `row` has the columns of the source, and the mapped columns "prompt", "answer" and, for a warm start, "solution"; and its
    id as ID, also as "id" where the source has no such column.
    """

    tokens: np.ndarray
    row: dict[str, Any]
    text: str | None = ""

    @property
    def id(self) -> str:
        """The id of the row."""
        return self.row[ID]


@dataclass(frozen=True)
class Encoder:
    """Tokenizes rows with the chat template, suffix and system message of the configuration; `tools`: schemas, for it."""

    config: Config
    tokenizer: Any
    tools: Sequence[dict[str, Any]] = ()

    def text(self, prompt: str | list[dict[str, str]]) -> str:
        """The prompt with suffix, system message and chat template; the suffix ends the last message of the user."""
        data = self.config.data
        if not data.chat_template:
            return prompt + data.prompt_suffix

        given = [{"role": USER, "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [dict(message) for message in given]
        for last in [one for one in messages if one["role"] == USER][-1:]:
            last["content"] += data.prompt_suffix
        if data.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": data.system})

        return self.render(messages)

    def render(self, messages: Messages, asks: bool = True) -> str:
        """The messages by the chat template, as they are; `asks`: to the start of the next answer. Raises TemplateError."""
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(self.tools) or None,
            tokenize=False,
            add_generation_prompt=asks,
            **self.config.data.chat_template_kwargs,
        )

    def prompts(self, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
        """The tokenized prompts of the rows. Raises DataError when the chat template rejects one."""
        texts = []
        for row in rows:
            try:
                texts.append(self.text(row["prompt"]))
            except TemplateError as error:
                fix = ": leave data.system empty" if self.config.data.system else ""
                raise DataError(f"the chat template rejects row {row[ID]}: {error}{fix}") from error
        # The template adds the special tokens.
        tokens = self._tokens(texts, special=not self.config.data.chat_template)
        return list(map(Prompt, tokens, rows, texts))

    def solutions(self, rows: Sequence[dict[str, Any]]) -> list[np.ndarray]:
        """Token ids int32 of the rows' solutions, with EOS."""
        tokens = self._tokens([row["solution"] for row in rows], special=False)
        return [np.append(t, np.int32(self.tokenizer.eos_token_id)) for t in tokens]

    def _tokens(self, texts: list[str], special: bool) -> list[np.ndarray]:
        found = self.tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        return [np.asarray(ids, np.int32) for ids in found]


NAME = "prompt_format.json"  # file in a model directory
# Without effect when data.chat_template is off.
OF_TEMPLATE = ("data.system", "data.chat_template_kwargs")
KNOBS = (
    "data.chat_template", *OF_TEMPLATE, "data.prompt_suffix", "rollout.stop", "rollout.temperature",
    "rollout.top_k", "rollout.top_p", "rollout.max_new_tokens",
)  # fmt: skip
MAKERS = "generation_config.json"  # file in a model directory, of transformers
SAMPLING = ("temperature", "top_k", "top_p")  # settings of that file that are knobs of `rollout`
# Others that change answers, which nothing here does, with the value that changes none; so does null.
UNSUPPORTED = {
    "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 0, "repetition_penalty": 1,
    "encoder_repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "no_repeat_ngram_size": 0,
    "num_beams": 1, "penalty_alpha": 0, "guidance_scale": 1, "min_length": 0, "min_new_tokens": 0,
    **dict.fromkeys(
        ("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
         "forced_eos_token_id", "exponential_decay_length_penalty", "stop_strings", "watermarking_config"), None,
    ),
}  # fmt: skip


def files(config: Config) -> dict[str, dict[str, Any]]:
    """The content of the file, knob -> value, by its name, as models.hf.save wants it.

    Without chat template those that need one have no value.
    """
    values = parse.flatten(config)
    unused = () if config.data.chat_template else OF_TEMPLATE
    return {
        NAME: {name: type(values[name])() if name in unused else values[name] for name in KNOBS}
    }


def read(directory: Path) -> dict[str, Any]:
    """The knobs of the run that made the model; empty for other models. Raises DataError."""
    return read_object(directory / NAME, of_run)


def read_makers(directory: Path) -> dict[str, Any]:
    """What the makers of a model say of generating from it; empty when they say nothing. Raises DataError."""
    return read_object(directory / MAKERS, of_makers)


def read_object(path: Path, knobs: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The JSON object in a file; empty without the file. Raises DataError, also when its `knobs` are invalid."""
    if not path.is_file():
        return {}
    try:
        found = dict(json.loads(path.read_text("utf-8")))
        parse.build(Config, knobs(found))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): correct it, or ignore it with --raw (raw=True in Python)"
        ) from error
    return found


def of_run(found: dict[str, Any]) -> dict[str, Any]:
    """The knobs that a run wrote. Raises ConfigError for others."""
    if unknown := sorted(found.keys() - set(KNOBS)):
        raise ConfigError(f"{', '.join(unknown)} is not one of {', '.join(KNOBS)}")
    return found


def of_makers(found: dict[str, Any]) -> dict[str, Any]:
    """The knobs of what `read_makers` found: how to sample, and greedy where do_sample is false. Raises ConfigError."""
    samples = found.get("do_sample")
    if not isinstance(samples, bool | None):
        raise ConfigError(f"do_sample {samples!r} is not true or false")
    if samples is False:
        return {"rollout.temperature": 0.0}
    return {f"rollout.{name}": found[name] for name in SAMPLING if found.get(name) is not None}


def describe_makers(found: Mapping[str, Any], given: Collection[str]) -> str:
    """The end of the line of `describe`: what of `read_makers` is used where no knob is `given`, and what is not supported."""
    used = [name.removeprefix("rollout.") for name in of_makers(found) if name not in given]
    odd = [
        f"{name} {changes.short(found[name])}"
        for name, neutral in UNSUPPORTED.items()
        if found.get(name) not in (None, neutral)
    ]
    parts = [f"{', '.join(used)} from {MAKERS}"] if used else []
    parts += [f"not supported: {', '.join(odd)} of {MAKERS}"] if odd else []
    return "".join(f"; {part}" for part in parts)


def encoder(config: Config, tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> Encoder:
    """The encoder of a configuration. Raises DataError when the tokenizer has no chat template that it needs."""
    if config.data.chat_template and not tokenizer.chat_template:
        raise DataError(
            "data.chat_template is true, but the tokenizer has no chat template: set it to false"
        )
    return Encoder(config, tokenizer, tools)


def describe(config: Config) -> str:
    """One line: what is put around a prompt, and how answers are sampled."""
    data, rollout = config.data, config.rollout
    parts = ["chat template" if data.chat_template else "text as it is"]
    if data.chat_template:
        parts += [f"{name} {value}" for name, value in data.chat_template_kwargs.items()]
        parts += [f"system {changes.short(data.system)}"] if data.system else []
    parts += [f"suffix {changes.short(data.prompt_suffix)}"] if data.prompt_suffix else []
    parts += [f"stop {changes.short(rollout.stop)}"] if rollout.stop else []
    return f"prompts: {', '.join([*parts, describe_sampling(config)])}"


def describe_sampling(config: Config) -> str:
    """How answers are sampled."""
    rollout = config.rollout
    parts = [f"temperature {rollout.temperature:g}"]
    parts += [f"top-k {rollout.top_k}"] if rollout.top_k else []
    parts += [f"top-p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    return ", ".join(parts)


Messages = Sequence[dict[str, str]]  # a chat: {"role": text, "content": text} of each message
Given = str | Sequence[int] | Messages  # a prompt: a text, token ids, or a chat


def encode(prompt: Given, config: Config, tokenizer: Any, place: str) -> Prompt:
    """A prompt in the format of `config.data`; messages always have the chat template, and ids stay as they are.

    Raises DataError, which names the `place`, without tokenizer, chat template or tokens.
    """
    is_text = isinstance(prompt, str)
    if not is_text and not is_messages(prompt):
        return of_ids(prompt, place)
    if tokenizer is None:
        raise DataError(f"{place}: the model directory has no tokenizer: give token ids instead")
    if not (is_text or tokenizer.chat_template):
        raise DataError(f"{place}: the model has no chat template for messages: give a text")
    if not is_text:
        config = replace(config, data=replace(config.data, chat_template=True))
    if wrong := misfit(prompt, config.data.prompt_suffix):
        what, fix, detail = wrong
        raise DataError(f"{place}: {what}{f' ({detail})' if detail else ''}: {fix}")
    (found,) = encoder(config, tokenizer).prompts([{ID: place, "prompt": prompt}])
    if not len(found.tokens):
        raise DataError(f"{place}: the prompt is empty: give at least one token")
    return found


def read_prompts(name: str, config: Config, tokenizer: Any) -> list[Prompt]:
    """The prompts of a JSONL or Parquet file. Raises ConfigError without the file, and DataError."""
    path, problems = Path(name), Problems()
    if not path.is_file():
        raise ConfigError(f"--prompts {name}: no such file")
    lines = read_file(path, problems)
    problems.stop_if_any()

    questions = []
    for line, row in lines:
        place = f"{path}:{line}"
        if isinstance(row.get("prompt_ids"), list):
            questions.append(of_ids(row["prompt_ids"], place))
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
    return isinstance(prompt, list | tuple) and bool(prompt) and all(map(is_message, prompt))


def of_ids(words: Sequence[Any], place: str) -> Prompt:
    """The prompt of token ids: texts, numbers of JSON or NumPy. Raises DataError, with those that are none."""
    is_row = isinstance(words, Iterable) and not isinstance(words, bytes)
    found = [(word, token_id(word)) for word in words] if is_row else []
    wrong = [word for word, number in found if number is None]
    if wrong or not found:
        shown = " ".join(changes.short(wrong or words).split())
        raise DataError(
            f'{place}: {shown} are no token ids: write whole numbers from 0, below the size of the vocabulary, such as "1,2,3"'
        )
    return Prompt(np.array([number for _, number in found], np.int32), {}, None)


def token_id(word: Any) -> int | None:
    """The token id that a text or number is; None for another value, and for one outside of int32."""
    try:
        number = int(word) if isinstance(word, str) else operator.index(word)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < 2**31 and not isinstance(word, bool) else None


def tokenizer_of(config: Config) -> Any:
    """The tokenizer of model.tokenizer, else of model.path, else of the generated task.

    Raises DataError when it cannot be loaded or has no EOS token.
    """
    knob = "model.tokenizer" if config.model.tokenizer else "model.path"
    source = config.model.tokenizer or config.model.path
    if not source and config.data.train:
        raise DataError("data.train needs a tokenizer: set model.path or model.tokenizer")
    if not source:
        return tasks.make(config.data.task, config.data.task_args).tokenizer()

    path = adapter_files.tokenizer_source(parse.expand(source, knob))
    if not Path(path).exists() and not parse.HUB_ID.fullmatch(path):
        raise DataError(
            f"{knob} {source!r} is neither a directory nor a hub id (owner/name): correct it"
        )

    loaded = load_tokenizer(path, f"{knob} {source!r}")
    if loaded.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {knob} {source!r} has no EOS token: add eos_token to its tokenizer_config.json"
        )
    return loaded


def find_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory; None without one. Raises DataError when it cannot be loaded."""
    source = adapter_files.tokenizer_source(str(directory))
    if Path(source).is_dir() and not adapter_files.has_tokenizer(Path(source)):
        return None
    return load_tokenizer(source, source)


def load_tokenizer(source: str, name: str) -> Any:
    """The tokenizer of a directory or hub id, which errors call by this name. Raises DataError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{name} has no loadable tokenizer: {reason}: give a directory with one, or a hub id"
        ) from error


BLANK = "\u2581"  # blank of SentencePiece
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
LONGEST = 4  # tokens of a character: it has at most so many bytes


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of each token by id; those of a special token are its name.

    For byte-level BPE (GPT-2, Qwen, Llama 3) and SentencePiece (Llama 2, Gemma). Raises DataError for other tokenizers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend else None
    decoder = json.dumps(decoder or {}, ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        letters = byte_letters()
    elif BLANK in decoder or '"Metaspace"' in decoder:
        letters = None
    else:
        raise DataError(
            "rollout.stop needs a byte-level or SentencePiece tokenizer, and this is another kind: leave rollout.stop empty"
        )

    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    found = []
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if number in added or token is None:
            found.append(added.get(number, "").encode())
        elif letters:
            found.append(bytes(letters[letter] for letter in token))
        elif byte := BYTE.fullmatch(token):
            found.append(bytes([int(byte[1], 16)]))
        else:
            found.append(token.replace(BLANK, " ").encode())
    return found


def byte_letters() -> dict[str, int]:
    """Letter -> byte of a byte-level vocabulary: printable bytes are their own letters, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + position): byte for position, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class TextStream:
    """Text of an answer that grows: `write` gets each part once, and no part of a character.

    All parts together are the text of all tokens, without special tokens. Each token is decoded a few times, however many
    there are: with the one before it, since tokenizers may decode the first token in another way.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        self.tokenizer, self.write = tokenizer, write
        added = tokenizer.added_tokens_decoder
        self.special = {number for number, token in added.items() if token.special}
        self.last: list[int] = []  # the last token whose text is written
        self.new: list[int] = []  # the tokens after it
        self.due = 0  # their number at which they are decoded
        # Whether the newest is a byte of SentencePiece: one that does not fit would change the text of all bytes before it.
        self.is_byte = False

    def add(self, tokens: list[int]) -> None:
        """Adds the next tokens; writes their text once no later token can change it."""
        names = self.tokenizer.convert_ids_to_tokens(tokens)
        for token, name in zip(tokens, names, strict=True):
            if name is not None and token not in self.special:  # others have no text
                self.new.append(token)
                self.is_byte = BYTE.fullmatch(name) is not None
        if len(self.new) < self.due or self.is_byte:
            return
        if (text := self.text(self.last + self.new)).endswith("\N{REPLACEMENT CHARACTER}"):
            self.due = 2 * len(self.new) if len(self.new) > LONGEST else 0
        else:
            self.show(text)

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def show(self, text: str) -> None:
        """Writes what is new in the text of the last and the new tokens."""
        if new := text[len(self.text(self.last)) :]:
            self.write(new)
        self.last, self.new, self.due = (self.last + self.new)[-1:], [], 0

    def flush(self) -> None:
        """Writes what was not written yet: the answer has ended."""
        self.show(self.text(self.last + self.new))
