"""Reward functions, by name; knows no process and imports no JAX."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from tlt_jax.config import Config, extension
from tlt_jax.data import answers, tasks
from tlt_jax.errors import ConfigError

Reward = Callable[[str, str, dict[str, Any]], Any]
ANSWER_IS = re.compile(r"(?i)answer\W{0,4}(?:is\b|:|=)")
WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
# A number with a unit in words; words that are no unit, since they change the value.
AMOUNT = re.compile(r"([$€£¥]?\s*-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*%?((?:\s+[A-Za-z]{2,})*)")
VALUES = frozenset(
    "hundred thousand million billion trillion dozen half pi sqrt log ln sin cos tan or and".split()
)
KEY = re.compile(r"[\w./-]+")  # keys of a reward's dict: they become names of metrics
LARGEST = 1e6  # limit of a score: advantages and losses stay finite in float32
PLAIN_ANSWER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def gsm8k(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion marks one number as its answer, equal to that of the reference ("... #### 1,234").

    The marked answer is the rest of the line after the last "####", else the last \\boxed{...}. Marks inside reasoning do not
    count, nor any in unclosed reasoning. Raises ValueError for a reference without a number.
    """
    return float(answers.marked_number(answers.visible(prompt, completion)) == _number_of(row))


def gsm8k_flexible(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the final number of the completion, marked or not, is that of the reference.

    For evaluating models that do not mark their answers; in training it rewards a guess at the end. Raises ValueError
    for a reference without a number.
    """
    return float(answers.final_number(answers.after_thoughts(completion)) == _number_of(row))


def _number_of(row: dict[str, Any]) -> Decimal:
    wanted = answers.final_number(row["answer"])
    if wanted is None:
        raise ValueError(f"the reference answer {row['answer']!r} has no number")
    return wanted


def exact(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion, without reasoning and outer whitespace, equals the reference."""
    return float(answers.visible(prompt, completion).strip() == row["answer"].strip())


def tagged(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, float]:
    """Format reward: 1/2 for one <think>...</think> at the start, 1/2 for a marked answer after it.

    The prompt may contain the opening tag. An answer is marked by \\boxed{...} or "####".
    """
    thoughts, is_closed, answer = completion.partition(answers.CLOSE_THINK)
    is_open, opened = prompt.rstrip().endswith(answers.OPEN_THINK), 0
    if not is_open:
        before, is_open, thoughts = thoughts.partition(answers.OPEN_THINK)
        is_open, opened = is_open and not before.strip(), 1

    is_once = (completion.count(answers.OPEN_THINK), completion.count(answers.CLOSE_THINK)) == (
        opened,
        1,
    )
    is_thought = bool(is_open and is_closed and is_once and thoughts.strip())

    tail = answer if is_closed else completion
    _, mark, marked = tail.rpartition(answers.MARK)
    is_marked = bool((answers.boxed(tail) or "").strip() or (mark and marked.strip()))

    return {
        "score": (is_thought + is_marked) / 2,
        "think": float(is_thought),
        "answer": float(is_marked),
    }


def math_reward(is_flexible: bool = False) -> Reward:
    """The reward 1 when math-verify finds the answer equal to the reference.

    The answer is the last \\boxed{...} outside of reasoning, else the rest of the line after "####"; if `is_flexible`,
    see `_final`. Only math-verify's LaTeX grammar is used: sympy's parse_expr, which reads its plain expressions,
    evaluates text as Python.
    """
    import math_verify

    # It warns that its timeouts are off; the scorer has its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    grammar = [math_verify.LatexExtractionConfig()]

    def parse(latex: str) -> list[Any]:
        return math_verify.parse(latex, grammar, parsing_timeout=None)

    def score(prompt: str, completion: str, row: dict[str, Any]) -> float:
        wanted = parse(_reference(row["answer"]))
        if not wanted:
            raise ValueError(f"math-verify reads no answer from the reference {row['answer']!r}")
        if is_flexible:
            given = parse(_final(answers.after_thoughts(completion)))
        else:
            given = parse(_formula(_marked(answers.visible(prompt, completion)) or ""))
        return float(math_verify.verify(wanted, given, timeout_seconds=None))

    return score


def _reference(text: str) -> str:
    """A reference answer as LaTeX: its \\boxed{...}, else the text after "####", else all of it."""
    return _formula(_marked(text) or text)


def _final(text: str) -> str:
    """The final answer of a completion as LaTeX, "" for none.

    The first that exists of: \\boxed{...}, the text after "####", the whole text if it is one formula, the text after
    "answer is" or "answer:", the last formula, the last number.
    """
    marked = _marked(text)
    if marked is not None:
        return _formula(marked)
    if "\n" not in text.strip() and not WORD.search(text):
        return _formula(text)

    ends = [match.end() for match in ANSWER_IS.finditer(text)]
    tail = text[ends[-1] :] if ends else text
    if "\\(" in tail or "\\[" in tail or tail.replace("\\$", "").count("$") >= 2:
        return tail
    plain = PLAIN_ANSWER.findall(tail)
    return f"${plain[0 if ends else -1]}$" if plain else ""


def _marked(text: str) -> str | None:
    """The last \\boxed{...}, else the text after "####": some models write "#### Step 2" as a heading."""
    return answers.boxed(text) or answers.marked(text)


def _formula(text: str) -> str:
    """The text as inline LaTeX.

    Unchanged when it contains $...$, else put between dollars, without currency signs, full stop, surrounding Markdown, and
    the unit in words after a number.
    """
    text = text.strip().lstrip("#").strip("*_` ").removesuffix(".").strip("*_` ")
    text = answers.LATEX_COMMA.sub(",", text)
    amount = AMOUNT.fullmatch(text)
    if amount and not VALUES & {word.lower() for word in amount[2].split()}:
        text = amount[1]
    bare = text.replace("\\$", "")
    is_delimited = text.startswith(("\\(", "\\[")) or bare.count("$") in (2, 4)
    return text if is_delimited else f"${bare.replace('$', '')}$"


def resolve(name: str, config: Config) -> Reward:
    """The reward of this name. Raises ConfigError when none has it."""
    plain = {"gsm8k": gsm8k, "gsm8k_flexible": gsm8k_flexible, "exact": exact, "format": tagged}
    if name in plain:
        return plain[name]

    if name in ("math", "math_flexible"):
        return math_reward(is_flexible=name != "math")

    if name == "task":
        if config.data.train:
            raise ConfigError(
                "reward.terms: 'task' needs a generated task, but data.train is set: use math, gsm8k or exact"
            )
        task = tasks.make(config.data.task, config.data.task_args)
        return lambda prompt, completion, row: task.verify(completion, row["answer"])

    if not extension.is_own(name):
        raise ConfigError(
            f"reward.terms: no reward {name!r}: use task, math, math_flexible, {', '.join(plain)} or module:function"
        )
    return extension.load("reward.terms", name)


def local(config: Config) -> list[str]:
    """The rewards that no other process can import, as a knob shows them."""
    terms, task = config.reward.terms, config.data.task
    uses_task = "task" in terms and isinstance(task, extension.Local)
    found = [name for name in terms if isinstance(name, extension.Local)]
    return found + [task] * uses_task


def evaluate(
    name: str, reward: Reward, prompt: str, completion: str, row: dict[str, Any]
) -> dict[str, float]:
    """The numbers of one reward: the score as `name`, other entries of a dict as name/key.

    Raises ValueError for values that are no numbers or too large, and for invalid keys; and whatever the reward raises.
    """
    result = reward(prompt, completion, row)
    if not isinstance(result, dict):
        return {name: number(f"reward {name!r}", result)}
    if "score" not in result:
        raise ValueError(
            f"reward {name!r} gave a dict without 'score': its keys are {sorted(map(str, result))}"
        )
    if odd := [key for key in result if not KEY.fullmatch(str(key))]:
        raise ValueError(
            f"reward {name!r} gave a dict with the key {odd[0]!r}: use letters, digits and _ . - /"
        )
    parts = {f"{name}/{key}": value for key, value in result.items() if key != "score"}
    named = {name: result["score"]} | parts
    return {one: number(f"reward {one!r}", value) for one, value in named.items()}


def number(source: str, value: Any) -> float:
    """The score that `source` gave: a number, also a boolean or one of NumPy or JAX. Raises ValueError for others."""
    is_number = hasattr(type(value), "__float__") and not isinstance(value, str | bytes | complex)
    try:
        found = float(value) if is_number else None
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None:
        raise ValueError(f"{source} gave {type(value).__name__}, not a number")
    if not abs(found) <= LARGEST:
        raise ValueError(f"{source} gave {found}: scores are between {-LARGEST:g} and {LARGEST:g}")
    return found
