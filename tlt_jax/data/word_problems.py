"""Grade-school arithmetic in sentences: a generated task for a language model with any tokenizer.

Knows no file, no model and no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

import numpy as np

from tlt_jax.data import answers
from tlt_jax.data.generated import Row, character_tokenizer, is_eval, mix, row_keys
from tlt_jax.errors import ConfigError

NAMES = ("Anna", "Ben", "Emma", "Jack", "Lily", "Mary", "Max", "Sam", "Tom", "Will")
THINGS = ("apples", "balls", "books", "cards", "coins", "eggs", "pens", "shells", "stones", "toys")
BOXES = ("bags", "baskets", "boxes")
GAINS = (
    "{name} finds {number} more.",
    "{name} buys {number} more.",
    "{friend} gives {name} {number} more.",
)
LOSSES = ("{name} loses {number}.", "{name} sells {number}.", "{name} gives {number} to {friend}.")
QUESTION = "How many {things} does {name} have now?"
LARGEST_FACTOR = 9  # of a number of boxes, and of the things in each; the smallest is 2
MOST_OPERATIONS, LEAST_LARGEST = 8, 10
NUMBERS = 4 + 2 * MOST_OPERATIONS  # draws that an attempt's numbers take; those of its words follow
DRAWS = NUMBERS + 4 + MOST_OPERATIONS


@dataclass(frozen=True)
class Arithmetic:
    """The numbers of a problem: one number or the factors of a product, and what is added to it in turn."""

    start: tuple[int, ...]
    changes: tuple[int, ...]

    def steps(self) -> list[tuple[str, int]]:
        """Each calculation, and its result."""
        total = math.prod(self.start)
        found = [(" * ".join(map(str, self.start)), total)] if len(self.start) > 1 else []
        for change in self.changes:
            found.append((f"{total} {'+' if change > 0 else '-'} {abs(change)}", total + change))
            total += change
        return found


@dataclass(frozen=True)
class WordProblems:
    """How many things somebody has after `min_operations` to `max_operations` calculations.

    "Tom has 3 boxes of 4 apples. Ben gives Tom 5 more. How many apples does Tom have now?" takes two; its worked
    solution is "3 * 4 = 12, 12 + 5 = 17". Numbers of the text are at most `largest`, those of a product at most 9, and
    every result is at least 1. A hash of its numbers assigns a problem to training or evaluation, so that for every seed
    the splits share no problem, whatever its words. Raises ConfigError for values out of range.
    """

    min_operations: int = 1
    max_operations: int = 3
    largest: int = 20

    def __post_init__(self):
        low, high = self.min_operations, self.max_operations
        if not 1 <= low <= high <= MOST_OPERATIONS:
            raise ConfigError(
                f"data.task_args: 1 <= min_operations {low} <= max_operations {high} <= {MOST_OPERATIONS} does not hold"
            )
        if self.largest < LEAST_LARGEST:
            raise ConfigError(
                f"data.task_args.largest {self.largest} is below {LEAST_LARGEST}: raise it"
            )

    def rows(self, seed: int, indices: Sequence[int], split: str) -> list[Row]:
        """The problems of these indices; each depends only on (seed, index, split)."""
        keys = row_keys(seed, np.asarray(indices, np.uint64), split)
        return [
            _row(f"{split}-{index}", *self._draw(key, split))
            for index, key in zip(indices, keys, strict=True)
        ]

    def verify(self, completion: str, answer: str) -> float:
        """Reward: 1 when the final number of a completion, after its reasoning, is the answer, else 0."""
        return float(answers.final_number(answers.after_thoughts(completion)) == Fraction(answer))

    def longest_row(self) -> Row:
        """A row with the longest prompt and the longest solution of the task, in characters."""
        gains = (self.largest,) * self.max_operations
        product = Arithmetic((LARGEST_FACTOR, LARGEST_FACTOR), gains[1:])
        words = [0, 0, *(kind.index(max(kind, key=len)) for kind in (THINGS, BOXES))]
        tellings = [GAINS.index(max(GAINS, key=len))] * MOST_OPERATIONS
        rows = [
            _row("longest", one, words + tellings)
            for one in (Arithmetic((self.largest,), gains), product)
        ]
        solved = max(rows, key=lambda row: len(row.solution))
        return replace(solved, prompt=max((row.prompt for row in rows), key=len))

    def tokenizer(self):
        """A transformers fast tokenizer with one token per character, for a policy without one of its own."""
        return character_tokenizer(["Ġ", "Ċ", *map(chr, range(ord("!"), ord("~") + 1))])

    def _draw(self, key: np.uint64, split: str) -> tuple[Arithmetic, list[int]]:
        """The numbers and the words of a row: the first ones from its key whose numbers belong to the split."""
        for attempt in count():
            draws = _draws(key, attempt)
            numbers = self._numbers(draws)
            if _is_eval(numbers) == (split == "eval"):
                return numbers, draws[NUMBERS:]

    def _numbers(self, draws: list[int]) -> Arithmetic:
        """The numbers of a problem, from its first NUMBERS draws."""
        spread = self.max_operations - self.min_operations + 1
        operations = self.min_operations + draws[0] % spread
        if is_product := bool(draws[1] % 2):
            start = tuple(2 + draw % (LARGEST_FACTOR - 1) for draw in draws[2:4])
        else:
            start = (2 + draws[2] % (self.largest - 1),)

        total, changes = math.prod(start), []
        for i in range(operations - is_product):
            sign, size = draws[4 + 2 * i : 6 + 2 * i]
            is_gain = total == 1 or bool(sign % 2)
            limit = self.largest if is_gain else min(self.largest, total - 1)
            changes.append((1 + size % limit) * (1 if is_gain else -1))
            total += changes[-1]
        return Arithmetic(start, tuple(changes))


def _draws(key: np.uint64, attempt: int) -> list[int]:
    """The numbers from 0 that one attempt of a row draws from."""
    first = np.uint64(attempt * DRAWS)
    bits = mix(np.array([key]) + first + np.arange(DRAWS, dtype=np.uint64))
    return (bits >> np.uint64(33)).tolist()


def _is_eval(numbers: Arithmetic) -> bool:
    """Whether a problem belongs to the evaluation split: of all problems with the same numbers the same."""
    values = np.array([[len(numbers.start), *numbers.start, *numbers.changes]])
    return bool(is_eval(values.astype(np.int64), np.array([values.shape[1]]))[0])


def _row(name: str, numbers: Arithmetic, words: list[int]) -> Row:
    """A problem in sentences, and its worked solution. `words`: draws that choose names, things and tellings."""
    first, other, thing, box, *tellings = words
    person = NAMES[first % len(NAMES)]
    friend = NAMES[(first + 1 + other % (len(NAMES) - 1)) % len(NAMES)]
    things, boxes = THINGS[thing % len(THINGS)], BOXES[box % len(BOXES)]

    held = f"{boxes} of ".join(f"{number} " for number in numbers.start)
    sentences = [f"{person} has {held}{things}."]
    for change, telling in zip(numbers.changes, tellings, strict=False):
        patterns = GAINS if change > 0 else LOSSES
        pattern = patterns[telling % len(patterns)]
        sentences.append(pattern.format(name=person, friend=friend, number=abs(change)))
    sentences.append(QUESTION.format(name=person, things=things))

    steps = numbers.steps()
    solution = ", ".join(f"{calculation} = {result}" for calculation, result in steps)
    return Row(name, " ".join(sentences), solution, str(steps[-1][1]))
