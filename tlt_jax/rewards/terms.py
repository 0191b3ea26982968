"""Reward functions, by name. No JAX."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tlt_jax.config import Config, extension
from tlt_jax.data import answers, tasks
from tlt_jax.errors import ConfigError

Reward = Callable[[str, str, dict[str, Any]], Any]
ANSWER_IS = re.compile(r"(?i)answer\W{0,4}(?:is\b|:|=)")
WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
# A formula in a text; its length is bounded, so that reading many that are never closed stays cheap.
FORMULA = re.compile(
    r"(?s)(?<!\\)\$\$?([^$]{1,500})(?<!\\)\$|\\\((.{1,500}?)\\\)|\\\[(.{1,500}?)\\\]"
)
# Words around the number of an answer: those that say nothing, and those that would change its value.
IDLE = frozenset(
    "the final answer is total of in all a an are there so has have per each left number".split()
)
CHANGING = frozenset(
    """not no never wrong incorrect or and than least most over under below above between about almost nearly minus plus
    negative half third thirds quarter quarters fourth fourths fifth fifths twice double triple pair pairs dozen dozens
    hundred hundreds thousand thousands million millions billion billions trillion squared cubed square cube root power
    factorial divided multiplied one two three four five six seven eight nine ten eleven twelve""".split()
)
KEY = re.compile(r"[\w./-]+")  # keys of a reward's dict: they become names of metrics
LARGEST = 1e6  # limit of a score: advantages and losses stay finite in float32
PLAIN_ANSWER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def gsm8k(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion marks one number as its answer, equal to that of the reference ("... #### 1,234").

    The marked answer: see answers.marked. It may have a known unit, and words of the question. Marks inside reasoning do not
    count, nor any in unclosed reasoning. Raises ValueError for a reference that is not one number.
    """
    given = answers.marked(answers.visible(prompt, completion)) or ""
    amount = answers.amount(given)
    if amount is None and answers.NUMBER.search(given):
        question = {word.lower() for word in answers.WORD.findall(prompt)}
        amount = answers.amount(given, (question | IDLE) - CHANGING)
    return float(amount is not None and answers.same(_number_of(row), amount))


def gsm8k_flexible(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the final number of the completion, marked or not, is that of the reference.

    For evaluating models that do not mark their answers; in training it rewards a guess at the end. Raises ValueError
    for a reference that is not one number.
    """
    given: Fraction | None = answers.final_number(answers.after_thoughts(completion))
    return float(given is not None and answers.stands_for(_number_of(row), given))


def _number_of(row: dict[str, Any]) -> answers.Amount:
    wanted = answers.reference(row["answer"])
    if wanted is None:
        raise ValueError(f"the reference answer {row['answer']!r} is not one number")
    return wanted


def partial_credit(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """The reward of configs/gsm8k_qwen3_1.7b_parity.yaml, of answers `...</reasoning>...<answer>\\boxed{5}</answer>`.

    1 for the right number in this form, each tag once and in this order; 0.5 for it in another form; 0.1 for another number
    in this form; else 0.
    """
    tags = ("</reasoning>", "<answer>", "</answer>")
    places = [completion.find(tag) for tag in tags]
    is_formed = places == sorted(places) and all(completion.count(tag) == 1 for tag in tags)
    if gsm8k(prompt, completion, row):
        return 1.0 if is_formed else 0.5
    return 0.1 if is_formed and answers.last_box(completion)[0] else 0.0


def exact(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """1 when the completion, without reasoning and outer whitespace, equals the reference."""
    return float(answers.visible(prompt, completion).strip() == row["answer"].strip())


def tagged(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, float]:
    """Format reward: 1/2 for one <think>...</think> at the start, 1/2 for a marked answer after it.

    The prompt may contain the opening tag. An answer is marked by \\boxed{...} or "####".
    """
    text = completion
    if prompt.rstrip().endswith(answers.OPEN_THINK):
        text = answers.OPEN_THINK + completion
    thoughts, is_closed, answer = text.partition(answers.CLOSE_THINK)
    before, is_open, thoughts = thoughts.partition(answers.OPEN_THINK)
    is_once = text.count(answers.OPEN_THINK) == text.count(answers.CLOSE_THINK) == 1
    is_thought = bool(is_open and is_closed and is_once and thoughts.strip()) and not before.strip()
    is_marked = bool((answers.marked(answer if is_closed else completion) or "").strip())
    score = (is_thought + is_marked) / 2
    return {"score": score, "think": float(is_thought), "answer": float(is_marked)}


def math_reward(is_flexible: bool = False) -> Reward:
    """The reward 1 when the answer equals the reference as text, amount or formula (formulas.equal).

    The answer is the marked one (answers.marked) outside of reasoning; if `is_flexible`, see `_final`. The reference is
    read alike.
    """
    from tlt_jax.rewards import formulas  # imports SymPy

    # Reads the tables of the parser, before the first answer waits for it.
    formulas.equal("x^2", "(x+1)^2")

    def score(prompt: str, completion: str, row: dict[str, Any]) -> float:
        wanted = answers.marked(row["answer"]) or row["answer"]
        if not answers.cleaned(wanted):
            raise ValueError(f"the reference answer {row['answer']!r} is empty")
        if is_flexible:
            given = _final(answers.after_thoughts(completion))
        else:
            given = answers.marked(answers.visible(prompt, completion)) or ""
        return float(formulas.equal(wanted, given))

    return score


def _final(text: str) -> str:
    """The final answer of a completion, "" for none.

    The first that exists of: the marked answer, the whole text if it is one formula, the last formula after "answer is" or
    "answer:", or of the text, the first number after "answer is", the last number.
    """
    marked = answers.marked(text)
    if marked is not None:
        return marked
    if "\n" not in text.strip() and not WORD.search(text):
        return text

    ends = [match.end() for match in ANSWER_IS.finditer(text)]
    tail = text[ends[-1] :] if ends else text
    if formulas := FORMULA.findall(tail):
        return next(filter(None, formulas[-1]))
    plain = PLAIN_ANSWER.findall(tail)
    return plain[0 if ends else -1] if plain else ""


def played(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, float]:
    """The reward of the environment that replied in the answer, and its numbers. Raises ValueError when it failed."""
    outcome = row["environment"]
    if outcome["failure"]:
        raise ValueError(f"the environment failed: {outcome['failure']}")
    return {"score": outcome["reward"], **outcome["numbers"]}


def resolve(name: str, config: Config) -> Reward:
    """The reward of this name. Raises ConfigError when none has it."""
    plain = {
        "gsm8k": gsm8k, "gsm8k_flexible": gsm8k_flexible, "exact": exact, "format": tagged, "environment": played
    }  # fmt: skip
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
