"""Calls of tools: the formats of families worked by hand, and what a policy may write instead."""

from __future__ import annotations

import json
import time

import pytest
from chat_templates import tokenizer_of

from tlt_jax.data.tool_calls import HERMES, LLAMA, MISTRAL, MOST, format_of, parse_calls
from tlt_jax.errors import DataError

ADD = ("add", {"a": 1, "b": [2, {"c": "</tool_call>"}]})
DECLARED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
FLAT = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"tool_calls": {"open": "<call>", "close": "</call>", "content": "json"}},
}


def call(key: str = "arguments", **changes) -> str:
    return json.dumps({"name": ADD[0], key: ADD[1]} | changes)


GOOD = [
    (HERMES, f"Let me see.\n<tool_call>\n{call()}\n</tool_call>", 1),
    (HERMES, f"<tool_call>{call()}</tool_call>\n<tool_call>\n{call()}</tool_call><|im_end|>", 2),
    (HERMES, f"<think>\n<tool_call> no\n</think>\n<tool_call>{call()}</tool_call>", 1),
    (HERMES, f"<think>so <tool_call>{call()}</tool_call>", 0),
    (HERMES, "I would call add with 1 and 2: {}", 0),
    (LLAMA, call("parameters"), 1),
    (LLAMA, f"\n<|python_tag|>{call('parameters')}<|eom_id|>", 1),
    (LLAMA, f"{call('parameters')}; {call()}<|eot_id|>", 2),
    (LLAMA, "{x} is a set, and <|python_tag|> a tag", 0),
    (LLAMA, '{"answer": 3}', 0),
    (MISTRAL, f"[TOOL_CALLS] [{call(id='abcdefghi')}, {call()}]</s>", 2),
    (MISTRAL, f"Yes.[TOOL_CALLS][{call()}]", 1),
    (MISTRAL, f" [{call()}]", 1),
    (MISTRAL, "[1, 2]", 0),
    (DECLARED, f"Yes.<call>{call()}</call><call>{call()}</call><|im_end|>", 2),
    (DECLARED, "No.<|im_end|>", 0),
    (FLAT, f"<call>{call()}</call>", 1),
]


@pytest.mark.parametrize(("format", "text", "count"), GOOD)
def test_calls_are_read_from_the_text_of_an_answer(format, text, count):
    assert parse_calls(text, format) == ([ADD] * count, [])


BAD = [
    (HERMES, "<tool_call>{'name': 'f'}</tool_call>", "not valid JSON: Expecting property name"),
    (HERMES, '<tool_call>"f"</tool_call>', "not a JSON object"),
    (HERMES, "<tool_call>{}</tool_call>", "not a JSON object"),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
    (HERMES, f"<tool_call>{call(name=3)}</tool_call>", "has no name"),
    (HERMES, f"<tool_call>{call(name='')}</tool_call>", "has no name"),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "arguments of 'f' are not a JSON object"),
    (HERMES, f"<tool_call>{call(arguments='{}')}</tool_call>", "arguments of 'add' are not"),
    (HERMES, f"<tool_call>{call()}", "does not end with </tool_call>"),
    (HERMES, f"<tool_call>{call()}</tool_", "does not end with </tool_call>"),
    (HERMES, f"<tool_call>{call()} and more</tool_call>", "does not end with </tool_call>"),
    (HERMES, f"<tool_call>{call()[:-4]}", "not valid JSON"),
    (HERMES, "<tool_call>", "not valid JSON"),
    (HERMES, f"<tool_call{call()}", "does not begin with <tool_call>"),
    (HERMES, f"{call()}</tool_call>", "does not begin with <tool_call>"),
    (LLAMA, call("parameters")[:-2], "not valid JSON"),
    (LLAMA, "<|python_tag|>search.call(query='a')", "not valid JSON"),
    (LLAMA, '{"parameters": {}}', "has no name"),
    (LLAMA, call("parameters", parameters=[1]), "are not a JSON object"),
    (MISTRAL, f"[TOOL_CALLS]{call()}", "not followed by a JSON list"),
    (MISTRAL, f"[TOOL_CALLS][{call()}", "not valid JSON"),
    (MISTRAL, "[TOOL_CALLS][1]", "not a JSON object"),
    (DECLARED, "<call>{1}</call>", "cannot be read"),
    (DECLARED, "<call>[]</call>", "not a JSON object"),
    (DECLARED, "<call>" + call()[:-3], "cannot be read"),
]


@pytest.mark.parametrize(("format", "text", "error"), BAD)
def test_a_malformed_call_is_one_line_for_the_model(format, text, error):
    calls, errors = parse_calls(text, format)
    assert calls == [] and len(errors) == 1
    assert error in errors[0] and "\n" not in errors[0] and len(errors[0]) < 200


def test_other_calls_of_an_answer_are_read():
    text = f"<tool_call>{{</tool_call><tool_call>{call()}</tool_call>"
    calls, errors = parse_calls(text, HERMES)
    assert calls == [ADD] and len(errors) == 1


MILLION = 1_000_000
PIECES = [
    "<tool_call>", '<tool_call>{"a":"', "[", '{"name":', '{"a":', '{"name":"f","parameters":{}};', " ", "1", "<call>", '\\"',
    "</tool_call>", "<think></think>", "<|im_end|>a", '<call>{"name":"f","arguments":{}}</call>', "x",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("start", ["", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<call>"])
def test_a_million_characters_are_read_in_a_second(start, piece):
    text = start + piece * (MILLION // len(piece))
    for format in (HERMES, LLAMA, MISTRAL, DECLARED):
        began = time.perf_counter()
        calls, errors = parse_calls(text, format)
        assert time.perf_counter() - began < 1
        assert len(calls) + len(errors) <= MOST + 1
        assert all(len(error) < 200 for error in errors)


@pytest.mark.parametrize("piece", PIECES)
def test_the_longest_text_that_a_declared_format_reads_takes_seconds(piece):
    began = time.perf_counter()
    parse_calls("a" + piece * (250_000 // len(piece) - 1), DECLARED)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("family", "format"),
    [("qwen2.5", HERMES), ("qwen3", HERMES), ("hermes", HERMES), ("llama3.1", LLAMA), ("mistral", MISTRAL)],
)  # fmt: skip
def test_the_format_is_the_one_that_the_template_asks_for(family, format):
    assert format_of(tokenizer_of(family)) == format


def test_the_declared_format_comes_first():
    tokenizer = tokenizer_of("qwen3")
    tokenizer.response_template = DECLARED
    assert format_of(tokenizer) == DECLARED


@pytest.mark.parametrize("template", [None, "gemma", "<tool_call><function=", "[TOOL_CALLS][ARGS]"])
def test_a_template_without_a_known_format_is_refused(template):
    tokenizer = tokenizer_of("gemma2")
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="add response_template to tokenizer_config.json"):
        format_of(tokenizer)
