"""A conversation with a model in a terminal: reads turns, and prints answers while they are decoded."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

HINT = "(type a message; an empty line or the end of the input ends the chat)"


class Replies(Protocol):
    """Answers conversations: inference.model.Model does.

    `suffix`: what the model's prompts end with. reply(messages, call, write) -> the object that `--json` prints, with the
    one answer to the last message, whose text `write` gets in parts.
    """

    suffix: str
    reply: Callable[..., dict[str, Any]]


def converse(model: Replies) -> list[dict[str, Any]]:
    """Answers the lines of the standard input as turns of one conversation; the objects of all answers.

    Ctrl-C ends it too.
    """
    messages: list[dict[str, str]] = []
    answers = []
    try:
        for call, line in zip(itertools.count(), turns(), strict=False):
            messages.append({"role": "user", "content": line})
            answers.append(model.reply(messages, call, write))
            print(flush=True)
            messages[-1]["content"] += model.suffix  # as the model has read it
            (answer,) = answers[-1]["completions"]
            messages.append({"role": "assistant", "content": answer["text"]})
    except KeyboardInterrupt:
        print(flush=True)
    return answers


def turns() -> Iterator[str]:
    """The lines that are typed, to an empty one or the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HINT, file=sys.stderr)
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def write(text: str) -> None:
    """Prints a part of an answer at once."""
    print(text, end="", flush=True)
