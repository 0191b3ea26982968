"""A small game, a calculator, and adapters of TextArena's games and Reasoning Gym's tasks."""

from __future__ import annotations

import ast
import importlib
import operator
import random
import re
from fractions import Fraction
from types import ModuleType
from typing import Any

from tlt_jax.data import answers
from tlt_jax.data.tasks import NAMES, THINGS
from tlt_jax.errors import EnvironmentsError

LOST_A_TURN = 0.1  # reward that GuessNumber takes for each turn after the first
EXPRESSION = re.compile(r"[0-9.+*/() -]{1,64}")  # so short that no result is large
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALL = re.compile(r"<<([^<>]*)>>\s*\Z")  # at the end of a turn
PROBLEMS = (  # what somebody has, and its calculation; the first two are examples
    ("{total} {things} and sells {number}", "{total} - {number}"),
    ("{boxes} boxes of {number} {things} and buys {more} more", "{boxes} * {number} + {more}"),
    ("{number} {things} and buys {more} more", "{number} + {more}"),
    ("{boxes} boxes of {number} {things}", "{boxes} * {number}"),
)
EXAMPLES = (
    {"name": "Joe", "things": "keys", "total": 248, "number": 75},
    {"name": "Meg", "things": "maps", "boxes": 12, "number": 35, "more": 140},
)


class GuessNumber:
    """Guess a number: "guess 1-9:", to which "5" gets "higher 6-9:", "lower 1-4:" or "right".

    Each answer tells the bounds that are left, so that it suffices to read the last one. The reward is 1 for a right first
    guess, and 0.1 less for each turn before it, at least 0.
    """

    def reset(
        self, seed: int = 0, low: int = 1, high: int = 9, answer: str = "", prompt: Any = ""
    ) -> str:
        """The bounds of the number, unless a prompt has told them. `answer`: the number; empty: drawn by the seed."""
        if not low <= high:
            raise ValueError(f"low {low} is above high {high}")
        self.low, self.high, self.turns = low, high, 0
        self.number = int(answer) if answer else random.Random(seed).randint(low, high)
        return "" if prompt else f"guess {low}-{high}:"

    def step(self, text: str) -> tuple[str, float, bool, dict[str, float]]:
        """What is said of a guess, its reward, whether it is right, and the turns so far."""
        self.turns += 1
        info = {"turns": float(self.turns)}
        if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
            return f"no guess {self.low}-{self.high}:", 0.0, False, info
        guess = int(text)
        if guess == self.number:
            return "right", max(0.0, 1 - LOST_A_TURN * (self.turns - 1)), True, info
        if guess < self.number:
            word, self.low = "higher", max(self.low, guess + 1)
        else:
            word, self.high = "lower", min(self.high, guess - 1)
        return f"{word} {self.low}-{self.high}:", 0.0, False, info


def calculate(expression: str) -> str:
    """The value of a sum, difference, product or quotient of numbers, or what is wrong with it. Runs no code of the text."""
    try:
        if not EXPRESSION.fullmatch(expression):
            raise ValueError
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.6g}"
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError):
        return "error: not a calculation"


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(op=sign) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(node.left), _value(node.right))
    raise ValueError


class Calculator:
    """A problem in a sentence, and a calculator: a turn that ends with "<<12 * 35>>" gets "420".

    Two worked examples come first. The reward is 1 when the last number of a turn without a call is the answer, else 0.
    `tool` False: the examples have no call, and none is answered.
    """

    def __init__(self, tool: bool = True):
        self.tool = tool

    def reset(self, seed: int) -> str:
        """The examples and a problem, which the seed draws."""
        draw = random.Random(seed)
        number, more, boxes = draw.randint(100, 999), draw.randint(100, 999), draw.randint(11, 99)
        names = {"name": draw.choice(NAMES), "things": draw.choice(THINGS)}
        numbers = {"number": number, "more": more, "boxes": boxes, "total": number + more}
        problem, calculation = _problem(draw.choice(PROBLEMS), names | numbers)
        self.answer, self.calls = calculate(calculation), 0

        said = ""
        for pattern, values in zip(PROBLEMS, EXAMPLES, strict=False):
            example, worked = _problem(pattern, values)
            call = f"<<{worked}>> {calculate(worked)}\n" if self.tool else ""
            said += f"{example}{call}Answer: {calculate(worked)}\n\n"
        return said + problem

    def step(self, text: str) -> tuple[str, float, bool, dict[str, float]]:
        """The result of a call; or nothing, with the reward of the answer. And the calls so far."""
        if self.tool and (call := CALL.search(text)):
            self.calls += 1
            return f" {calculate(call[1])}\n", 0.0, False, {"calls": self.calls}
        reward = float(answers.final_number(text) == Fraction(self.answer))
        return "", reward, True, {"calls": self.calls}


def _problem(pattern: tuple[str, str], values: dict[str, Any]) -> tuple[str, str]:
    held, calculation = (part.format(**values) for part in pattern)
    question = "{name} has {held}. How many {things} does {name} have now?\n"
    return question.format(held=held, **values), calculation


class TextArena:
    """A game of TextArena for one player; its reward comes at the end. Raises EnvironmentsError for an unknown game."""

    def __init__(self, game: str, **args: Any):
        library = _library("textarena", "games")
        try:
            self.game = library.make(game, **args)
        except ValueError as error:
            raise EnvironmentsError(f"environment.path 'textarena:{game}': {error}") from error
        self.said = ""  # all that the game has said, which most games repeat

    def reset(self, seed: int) -> str:
        self.game.reset(num_players=1, seed=seed)
        return self._new("")

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        done, info = self.game.step(action=text)
        if not done:
            return self._new(text), 0.0, False, info or {}
        rewards, game_info = self.game.close()
        reward = (rewards or {}).get(0, 0.0)
        if isinstance(reward, str):  # some games swap it with the reason of an invalid move
            reward = 0.0
        return "", reward, True, (info or {}) | game_info.get(0, {})

    def _new(self, action: str) -> str:
        """What the game says, without what it said before and without the action."""
        _, text = self.game.get_observation()
        if not isinstance(text, str):  # of a game without wrappers: (sender, text, kind)
            return "\n".join(said for sender, said, _ in text if sender < 0).strip()
        new, self.said = text.removeprefix(self.said), text
        _, is_echoed, rest = new.partition(action) if action else ("", "", "")
        return (rest.removeprefix("]") if is_echoed else new).strip()


class ReasoningGym:
    """A generated problem of Reasoning Gym, and the score of its answer; one turn.

    The answer is the text in <answer> tags, the marked one or the whole text, after reasoning.
    """

    def __init__(self, name: str, **args: Any):
        self.name, self.args = name, args
        self.library = _library("reasoning_gym", "reasoning")
        try:
            self._make(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise EnvironmentsError(f"environment.path 'reasoning_gym:{name}': {error}") from error

    def reset(self, seed: int) -> str:
        self.problems = self._make(seed)
        self.entry = self.problems[0]
        return self.entry["question"]

    def step(self, text: str) -> tuple[str, float, bool, dict[str, float]]:
        text = answers.after_thoughts(text)
        tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = tagged[-1] if tagged else answers.marked(text) or text
        return "", self.problems.score_answer(answer.strip(), self.entry), True, {}

    def _make(self, seed: int) -> Any:
        return self.library.create_dataset(self.name, seed=seed, size=1, **self.args)


def _library(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentsError(
            f"environment.path {name!r} needs a package ({error}): pip install tlt-jax[{extra}]"
        ) from error
