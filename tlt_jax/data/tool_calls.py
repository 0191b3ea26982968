"""Calls of tools in the text of an answer, in the format that a chat template asks for. Imports no JAX."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tlt_jax.config import changes
from tlt_jax.errors import DataError

HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Qwen too
LLAMA = "llama"  # {"name": ..., "parameters": {...}} and nothing before it
MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": {...}}]
OPEN, CLOSE, LIST, PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
THINK, THOUGHT = "<think>", "</think>"  # around a thought
ARGUMENTS = ("arguments", "parameters")  # keys of a call
MOST = 64  # calls of an answer: what is no JSON may be read to the end of the text for each
# Characters that the parser of a response_template gets, in all and at once.
LONGEST, PART = 250_000, 512
BLANKS = " \t\r\n"

Format = str | dict[str, Any]  # one of the three, or a response_template of transformers
Calls = list[tuple[str, dict[str, Any]]]  # names and arguments
Read = tuple[Any, str]  # a value, and what is wrong with it


def format_of(tokenizer: Any) -> Format:
    """The format of calls that the tokenizer declares, or else its chat template shows. Raises DataError without one."""
    if declared := getattr(tokenizer, "response_template", None):
        return declared
    template = tokenizer.get_chat_template(tools=[]) if tokenizer.chat_template else ""
    # These have names and arguments that are no JSON.
    if "<function=" not in template and "[ARGS]" not in template:
        if OPEN in template:
            return HERMES
        if LIST in template:
            return MISTRAL
        if PYTHON in template or '"parameters"' in template:
            return LLAMA
    raise DataError(
        "the chat template shows no format of tool calls that is known: add response_template to tokenizer_config.json"
    )


def parse_calls(text: str, format: Format) -> tuple[Calls, list[str]]:
    """The calls of an answer, in order, and what is wrong with those that cannot be read, in words for the model.

    The text may have its special tokens; a response_template may need them. A call in a thought is none.
    """
    thought, end, rest = text.partition(THOUGHT)
    if end or thought.lstrip().startswith(THINK):
        text = rest
    calls, errors = [], []
    for found, error in _values(text, format):
        if len(calls) + len(errors) == MOST:
            errors.append(f"only {MOST} calls of an answer are read")
            break
        call = found if isinstance(found, dict) else {}
        name = call.get("name")
        arguments = next((call[key] for key in ARGUMENTS if key in call), None)
        if error or not call:
            errors.append(error or "a call is not a JSON object")
        elif not isinstance(name, str) or not name:
            errors.append("a call has no name")
        elif not isinstance(arguments, dict):
            errors.append(f"the arguments of {changes.short(name)} are not a JSON object")
        else:
            calls.append((name, arguments))
    return calls, errors


def _values(text: str, format: Format) -> Iterator[Read]:
    """What stands where calls do."""
    if not isinstance(format, str):
        yield from _declared(text, format)
    elif format == HERMES:
        yield from _tagged(text)
    elif format == MISTRAL:
        _, mark, body = text.partition(LIST)
        if mark or text.lstrip().startswith("[{"):
            found, _, error = _read(body if mark else text, 0)
            if isinstance(found, list):
                yield from ((one, "") for one in found)
            else:
                yield found, error or f"{LIST} is not followed by a JSON list"
    else:
        body = text.strip().removeprefix(PYTHON).lstrip()
        looks = body.startswith("{") and any(f'"{key}"' in body for key in ("name", *ARGUMENTS))
        is_call = looks or PYTHON in text[: len(text) - len(body)]
        while is_call:
            found, end, error = _read(body, 0)
            yield found, error
            body = body[end:].lstrip(BLANKS + ";")
            is_call = not error and body.startswith("{")


def _tagged(text: str) -> Iterator[Read]:
    if OPEN not in text and (OPEN[:-1] in text or CLOSE in text):
        yield None, f"a call does not begin with {OPEN}"
    end = 0
    while (start := text.find(OPEN, end)) >= 0:
        start += len(OPEN)
        found, end, error = _read(text, start)
        end = _skip(text, end)
        if not error and not text.startswith(CLOSE, end):
            error = f"a call does not end with {CLOSE} after one JSON object"
        yield found, error


def _declared(text: str, template: dict[str, Any]) -> Iterator[Read]:
    from transformers.utils.chat_parsing import ResponseParser

    if len(text) > LONGEST:
        yield None, f"calls are not read in an answer of more than {LONGEST} characters"
        return
    try:
        parser = ResponseParser(template, prefix="")
        # Its time grows with the square of what it gets at once.
        for start in range(0, len(text), PART):
            parser.feed(text[start : start + PART])
        found = parser.finalize()[0].get("tool_calls", [])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield None, f"the calls cannot be read: {changes.short(str(error))}"
        return
    for call in found if isinstance(found, list) else [found]:
        yield call.get("function", call) if isinstance(call, dict) else call, ""


def _read(text: str, start: int) -> tuple[Any, int, str]:
    """The JSON value at a place, its end, and what is wrong: then the end is the place."""
    try:
        return *json.JSONDecoder().raw_decode(text, _skip(text, start)), ""
    except json.JSONDecodeError as error:
        near = changes.short(text[error.pos : error.pos + 20])
        return None, start, f"a call is not valid JSON: {error.msg} at {near}"
    except (ValueError, RecursionError) as error:  # a number of too many digits; nested too deeply
        return None, start, f"a call is not valid JSON: {changes.short(str(error))}"


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in BLANKS:
        place += 1
    return place
