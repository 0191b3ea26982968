"""Extracts the final answer of a text, without evaluating it; knows no reward."""

from __future__ import annotations

import re
from decimal import Decimal

MARK = "####"
BOXED = "\\boxed{"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
LATEX_COMMA = re.compile(r"\{,\}|,\\!")  # 1{,}234 and 1,\!234 are 1,234
# A number does not start inside a word or another number ("m2", "CO2").
NUMBER = re.compile(
    r"(?<![A-Za-z_0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![A-Za-z_0-9])\.[0-9]+"
)
CURRENCY = "$€£¥\\ "


def visible(prompt: str, completion: str) -> str:
    """The completion after its reasoning: the text after the last </think>, or all of it without one.

    Empty when the completion or the end of the prompt opens a <think> that is never closed.
    """
    _, is_closed, answer = completion.rpartition(CLOSE_THINK)
    is_open = OPEN_THINK in completion or prompt.rstrip().endswith(OPEN_THINK)
    return answer if is_closed or not is_open else ""


def after_thoughts(completion: str) -> str:
    """The text after the last </think>; without one the whole completion, even if it is unclosed reasoning."""
    return completion.rpartition(CLOSE_THINK)[2]


def marked(text: str) -> str | None:
    """The last answer that a text marks, by \\boxed{...} or as the rest of a line after "####"; None without one."""
    _, mark, tail = text.rpartition(MARK)
    found = boxed(tail if mark else text)
    if found is None and mark:
        return tail.strip().partition("\n")[0].strip()
    return found


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces balance, else None."""
    start = text.rfind(BOXED)
    while start >= 0:
        depth = 1
        for end in range(start + len(BOXED), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(BOXED) : end]
        start = text.rfind(BOXED, 0, start)
    return None


def numbers(text: str) -> list[Decimal]:
    """The numbers of a text.

    "-$1,234.50" is -1234.50; the "-" of "5-3" is a minus between two numbers.
    """
    text = LATEX_COMMA.sub(",", text)
    return [_signed(text, match) for match in NUMBER.finditer(text)]


def marked_number(text: str) -> Decimal | None:
    """The number that a text marks as its answer; None when it marks none, or the mark holds several."""
    found = numbers(marked(text) or "")
    return found[0] if len(found) == 1 else None


def final_number(text: str) -> Decimal | None:
    """The final number of a text, marked or not; None without one.

    The first number after the last "####", else the last number in the last \\boxed{...}, else the
    last number of the text.
    """
    _, mark, tail = text.rpartition(MARK)
    if mark:
        return next(iter(numbers(tail)), None)
    found = numbers(boxed(text) or "") or numbers(text)
    return found[-1] if found else None


def _signed(text: str, match: re.Match[str]) -> Decimal:
    value = Decimal(match[0].replace(",", ""))
    start = match.start()
    while start and text[start - 1] in CURRENCY:
        start -= 1

    # "- 5" has a dash; "-5", "-$5" and "$ -5" have signs, unless after a number, word or bracket.
    has_sign = start > 0 and text[start - 1] in "-−" and not text[start:].startswith(" ")
    if not has_sign or (start > 1 and (text[start - 2].isalnum() or text[start - 2] in ")]}")):
        return value
    return -value
