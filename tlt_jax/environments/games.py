"""A small game, and adapters of TextArena's games and Reasoning Gym's tasks."""

from __future__ import annotations

import importlib
import random
import re
from types import ModuleType
from typing import Any

from tlt_jax.data import answers
from tlt_jax.errors import EnvironmentsError

LOST_A_TURN = 0.1  # reward that GuessNumber takes for each turn after the first


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
