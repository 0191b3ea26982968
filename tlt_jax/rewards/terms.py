"""Reward functions, by name; knows no process and imports no JAX."""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable
from typing import Any

from tlt_jax.config import Config
from tlt_jax.data import tasks
from tlt_jax.rewards import answers

Reward = Callable[[str, str, dict[str, Any]], Any]
OPEN_THINK = "<think>"
SAID = re.compile(r"(?i)answer\W{0,4}(?:is\b|:|=)")
WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
PLAIN_ANSWER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def gsm8k(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the final number of the completion equals that of the reference ("... #### 1,234").

    Raises ValueError for a reference without a number.
    """
    wanted = answers.final_number(row["answer"])
    if wanted is None:
        raise ValueError(f"the reference answer {row['answer']!r} has no number")
    return float(answers.final_number(answers.visible(completion)) == wanted)


def exact(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion, without reasoning and outer whitespace, equals the reference."""
    return float(answers.visible(completion).strip() == row["answer"].strip())


def tagged(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, float]:
    """Format reward: 1/2 for one <think>...</think> at the start, 1/2 for a marked answer after it.

    The prompt may contain the opening tag. An answer is marked by \\boxed{...} or "####".
    """
    thoughts, is_closed, answer = completion.partition(answers.CLOSE_THINK)
    is_open, opened = prompt.rstrip().endswith(OPEN_THINK), 0
    if not is_open:
        before, is_open, thoughts = thoughts.partition(OPEN_THINK)
        is_open, opened = is_open and not before.strip(), 1

    is_once = (completion.count(OPEN_THINK), completion.count(answers.CLOSE_THINK)) == (opened, 1)
    is_thought = bool(is_open and is_closed and is_once and thoughts.strip())

    tail = answer if is_closed else completion
    _, mark, marked = tail.rpartition(answers.MARK)
    is_marked = bool((answers.boxed(tail) or "").strip() or (mark and marked.strip()))

    return {
        "score": (is_thought + is_marked) / 2,
        "think": float(is_thought),
        "answer": float(is_marked),
    }


def math_reward() -> Reward:
    """The reward 1 when math-verify finds the final answer equal to the reference.

    Only its LaTeX grammar is used: its plain expressions go to sympy's parse_expr, which evaluates
    text as Python.
    """
    import math_verify

    # It warns that its own timeouts are off; the scorer has timeouts.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grammar = [math_verify.LatexExtractionConfig()]

    def parse(latex: str) -> list[Any]:
        return math_verify.parse(latex, grammar, parsing_timeout=None)

    def score(prompt: str, completion: str, row: dict[str, Any]) -> float:
        wanted = parse(_reference(row["answer"]))
        if not wanted:
            raise ValueError(f"math-verify reads no answer from the reference {row['answer']!r}")
        given = parse(_final(answers.visible(completion)))
        return float(math_verify.verify(wanted, given, timeout_seconds=None))

    return score


def _reference(text: str) -> str:
    """A reference answer as LaTeX: its \\boxed{...}, what follows "####", or all of it."""
    return _formula(_marked(text) or text)


def _final(text: str) -> str:
    """The final answer of a completion as LaTeX, "" for none.

    First of: \\boxed{...}, what follows "####", the whole text if it is one formula, what follows "answer is" or
    "answer:", the text's last formula, its last number.
    """
    marked = _marked(text)
    if marked is not None:
        return _formula(marked)
    if "\n" not in text.strip() and not WORD.search(text):
        return _formula(text)

    said = [match.end() for match in SAID.finditer(text)]
    tail = text[said[-1] :] if said else text
    if "\\(" in tail or "\\[" in tail or tail.replace("\\$", "").count("$") >= 2:
        return tail
    plain = PLAIN_ANSWER.findall(tail)
    return f"${plain[0 if said else -1]}$" if plain else ""


def _marked(text: str) -> str | None:
    _, mark, tail = text.rpartition(answers.MARK)
    return answers.boxed(text) or (tail if mark else None)


def _formula(text: str) -> str:
    """The text as inline LaTeX.

    Unchanged when it contains $...$, else without currency signs and full stop between dollars.
    """
    text = text.strip().removesuffix(".")
    bare = text.replace("\\$", "")
    is_delimited = text.startswith(("\\(", "\\[")) or bare.count("$") in (2, 4)
    return text if is_delimited else f"${bare.replace('$', '')}$"


def resolve(name: str, config: Config) -> Reward:
    """The reward of this name.

    Raises ValueError without one, and whatever importing a user's module raises.
    """
    plain = {"gsm8k": gsm8k, "exact": exact, "format": tagged}
    if name in plain:
        return plain[name]

    if name == "math":
        return math_reward()

    if name == "task":
        if config.data.train:
            raise ValueError(
                "reward.terms: 'task' needs a generated task, but data.train is set: use math, gsm8k or exact"
            )
        task = tasks.make(config.data.task, config.data.task_args)
        return lambda prompt, completion, row: task.verify(completion, row["answer"])

    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(
            f"no reward {name!r}: use task, math, {', '.join(plain)} or module:function"
        )

    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"module {module!r} has no function {function!r}")
    return found


def evaluate(
    name: str, reward: Reward, prompt: str, completion: str, row: dict[str, Any]
) -> dict[str, float]:
    """The numbers of one reward: the score as `name`, other entries of a dict as name/key.

    Raises ValueError for a result that is not finite numbers, and whatever the reward raises.
    """
    result = reward(prompt, completion, row)
    if not isinstance(result, dict):
        return {name: _number(name, result)}
    if "score" not in result:
        raise ValueError(
            f"reward {name!r} gave a dict without 'score': its keys are {sorted(map(str, result))}"
        )
    parts = {
        f"{name}/{key}": _number(f"{name}/{key}", value)
        for key, value in result.items()
        if key != "score"
    }
    return {name: _number(name, result["score"])} | parts


def _number(name: str, value: Any) -> float:
    if isinstance(value, complex) or not hasattr(type(value), "__float__"):
        raise ValueError(f"reward {name!r} gave {type(value).__name__}, not a number")
    if not math.isfinite(value := float(value)):
        raise ValueError(f"reward {name!r} gave {value}")
    return value
