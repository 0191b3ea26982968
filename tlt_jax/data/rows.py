"""Rows of a data source with mapped columns, and their problems; knows no tokenizer and no JAX."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt_jax.config import Config, extension, parse
from tlt_jax.config.schema import Data
from tlt_jax.data import answers, files, formats
from tlt_jax.data.encoder import ASSISTANT, ID, USER
from tlt_jax.data.problems import Problems
from tlt_jax.errors import ConfigError

MESSAGE = ("role", "content")  # texts of a chat message
LONE, WHOLE = "a lone surrogate", "write whole characters"
NUMBERS = {"gsm8k", "gsm8k_flexible"}  # rewards that compare numbers
SHOWN = 40  # last characters of a reference that a problem shows


def read(config: Config, knob: str, source: str, problems: Problems) -> list[dict[str, Any]]:
    """The rows of a source with the mapped columns "prompt" and "answer", and their ids as ID, and as "id" if they have none.

    And "solution", when the run has a supervised warm start and the source is data.train.
    """
    data = config.data
    mapping = {"prompt": data.prompt_column, "answer": data.answer_column}
    if data.id_column:
        mapping["id"] = data.id_column
    if config.sft.steps and knob == "data.train":
        mapping["solution"] = config.sft.solution_column

    rows, first_seen = [], {}
    for name, path, found in _sources(parse.expand(source, knob), knob, problems):
        for role, column in mapping.items():
            _check_column(found, role, column, data, path, problems)
        if NUMBERS & set(config.reward.terms):
            _check_numbers(found, data.answer_column, path, problems)
        for line, raw in found:
            mapped = {role: formats.cell(raw, column) for role, column in mapping.items()}
            is_named = mapped.get("id") not in (None, formats.ABSENT)
            mapped = {"id": f"{name}:{line}"} | mapped
            mapped |= {role: formats.text_of(mapped[role]) for role in mapped if role != "prompt"}
            row_id = mapped.pop("id")
            first = first_seen.setdefault(row_id, (path, line))
            if first != (path, line) and is_named:
                detail = f"{row_id!r}, first at {first[0]}:{first[1]}"
                fix = "make data.id_column unique or leave it empty"
                problems.add(path, line, "duplicate id", fix, detail)
            rows.append({"id": row_id} | raw | mapped | {ID: row_id})

    return rows


def _sources(
    source: str, knob: str, problems: Problems
) -> Iterator[tuple[str, str, list[tuple[int, dict[str, Any]]]]]:
    """(name, place, numbered rows) of each file of a source, or of its module:function.

    A folder with the module's name takes precedence.
    """
    if not extension.is_own(source) or Path(source.partition(":")[0]).is_dir():
        for path, name in files.locate(source, knob, problems).items():
            yield name, str(path), files.read(path, problems)
        return

    found = extension.call(knob, source)
    if not isinstance(found, Iterable):
        raise ConfigError(
            f"{knob} {source!r} gave a {type(found).__name__}: return or yield {{column: value, ...}} for each row"
        )
    rows = list(enumerate(found, 1))
    if not rows:
        problems.add(source, None, "the function yields no rows", "yield one mapping per row")
    for line, row in rows:
        if not isinstance(row, dict):
            problems.add(
                source, line, "not a dict", "yield {column: value, ...}", type(row).__name__
            )
    yield source, source, [(line, row) for line, row in rows if isinstance(row, dict)]


def _check_column(
    found: list[tuple[int, dict]],
    role: str,
    column: str,
    data: Data,
    path: str,
    problems: Problems,
) -> None:
    """Records the problems of one column of the rows of a file."""
    knob = "sft.solution_column" if role == "solution" else f"data.{role}_column"
    fix = ""
    for line, raw in found:
        value = formats.cell(raw, column)
        if value is formats.ABSENT:
            if not fix:
                others = [one for one in formats.columns(row for _, row in found) if one != column]
                known = ", ".join(map(repr, others)) or "none: the rows are empty"
                fix = f"set {knob} to one of {known}"
            problems.add(path, line, f"no column {column!r}", fix)
        elif value is None or (isinstance(value, str) and not value.strip()) or value == []:
            what = "empty prompt" if role == "prompt" else f"no {role}"
            problems.add(path, line, what, f"fill in column {column!r} or drop the row")
        elif role == "prompt" and isinstance(value, list):
            if not all(is_message(message) for message in value):
                what = "the prompt is not a list of chat messages"
                problems.add(path, line, what, "use {'role': text, 'content': text} objects")
            elif not data.chat_template:
                what = "the prompt is a list of chat messages"
                problems.add(path, line, what, "set data.chat_template true")
            elif wrong := misfit(value, data.prompt_suffix):
                problems.add(path, line, *wrong)
        elif not isinstance(value, str if role == "prompt" else (str, int, float)):
            what = f"column {column!r} holds a {type(value).__name__}"
            inner = [f"{column}.{name}" for name in value] if isinstance(value, dict) else []
            use = f"set {knob} to {' or '.join(inner)}" if inner else "use text"
            problems.add(path, line, what, use)
        elif isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            what = f"column {column!r} holds {json.dumps(value)}"
            problems.add(path, line, what, "write it as text, or drop the row")
        elif lone := formats.lone_surrogate(value if isinstance(value, str) else ""):
            problems.add(path, line, f"the {role} has {LONE}", WHOLE, lone)


def misfit(prompt: str | Sequence[Mapping[str, str]], suffix: str) -> tuple[str, str, str] | None:
    """What is wrong with a prompt, a text or chat messages; how to mend it; and a detail. None when nothing is.

    `suffix`: data.prompt_suffix, which needs a message of the user.
    """
    texts = [prompt] if isinstance(prompt, str) else [m[key] for m in prompt for key in MESSAGE]
    if lone := next(filter(None, map(formats.lone_surrogate, texts)), ""):
        return f"the prompt has {LONE}", WHOLE, lone
    if isinstance(prompt, str):
        return None
    if prompt[-1]["role"] == ASSISTANT:
        return "the prompt ends with an assistant's message", "remove it, the policy writes it", ""
    if suffix and not any(message["role"] == USER for message in prompt):
        what = "the prompt has no message of the user for data.prompt_suffix"
        return what, "add one, or leave data.prompt_suffix empty", ""
    return None


def _check_numbers(
    found: list[tuple[int, dict]], column: str, path: str, problems: Problems
) -> None:
    """Records the references that are no number, which the rewards of NUMBERS compare with; no other problem of the column."""
    for line, raw in found:
        value = formats.cell(raw, column)
        is_odd = isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))
        if is_odd or not isinstance(value, str | int | float) or not str(value).strip():
            continue
        if answers.reference(text := formats.text_of(value)) is None:
            fix = "correct it, or use the reward math (reward.terms), which compares formulas"
            what = "the reference answer is not one number"
            problems.add(path, line, what, fix, repr(text[-SHOWN:]))


def is_message(value: Any) -> bool:
    """Whether it is a chat message: {"role": text, "content": text}."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in MESSAGE)
