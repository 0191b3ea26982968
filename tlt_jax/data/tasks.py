"""Generated tasks: rows as functions of (seed, index, split). Needs no data and no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import count
from typing import Any, Protocol

import numpy as np

from tlt_jax.config import extension
from tlt_jax.config.task import OPENINGS
from tlt_jax.data import answers
from tlt_jax.errors import ConfigError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# The splits have different random streams; "sft" draws from the problems of "train".
SPLITS = {"train": 0, "eval": 1, "sft": 2}
EVAL_SHARE = 4  # one problem in four belongs to the evaluation split


@dataclass(frozen=True)
class Row:
    """One problem. The verifier expects `answer`; `solution` ends with it."""

    id: str
    prompt: str
    solution: str
    answer: str


def mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finalizer with its increment: a bijection that mixes uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), uniform for uniform uint64."""
    return (bits >> np.uint64(11)) * 2.0**-53


def row_keys(seed: int, indices: np.ndarray, split: str) -> np.ndarray:
    """One key uint64[R] for each row: a function of (seed, index, split)."""
    return mix(mix(mix(np.array([seed % 2**64], np.uint64)) + np.uint64(SPLITS[split])) + indices)


def is_eval(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool[R], true for problems of the evaluation split: a fixed hash of a problem's numbers.

    `values` int[R, K], in which the numbers past `lengths` int[R] are 0 for every row.
    """
    state = mix(lengths.astype(np.uint64))
    for column in values.T:
        state = mix(state + column.astype(np.uint64))
    return state % np.uint64(EVAL_SHARE) == 0


def character_tokenizer(characters: Iterable[str]):
    """A transformers fast tokenizer with one token for each of these characters, EOS and padding.

    Byte-level (a blank is "Ġ"), because next to a Qwen2 config.json AutoTokenizer replaces the
    pre-tokenizer and decoder of any tokenizer by those of Qwen2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, EOS, UNKNOWN, *characters]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=UNKNOWN)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


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
            counters = np.uint64(attempt * DRAWS) + np.arange(DRAWS, dtype=np.uint64)
            draws = (mix(key + counters) >> np.uint64(33)).tolist()
            numbers = self._numbers(draws)
            values = np.array([[len(numbers.start), *numbers.start, *numbers.changes]])
            if is_eval(values, np.array([values.shape[1]]))[0] == (split == "eval"):
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


DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
LEAST_GUESSED = 8  # the smallest `largest` of Guess; with fewer bounds a split could be empty
SMALLEST_SPACE = 64  # with fewer lists of one length a split could be empty


class Task(Protocol):
    """Protocol of a generated task.

    `rows`: the problems of these indices; each depends only on (seed, index, split), with `split` a
    key of SPLITS. Rows of "eval" should not occur in other splits; "sft" needs worked solutions.
    `verify`: the reward "task" of a completion. `longest_row`: a row with the longest prompt and the
    longest solution. `tokenizer`: of transformers; used when the configuration names none.
    """

    def rows(self, seed: int, indices: Sequence[int], split: str) -> Sequence[Row]: ...

    def verify(self, completion: str, answer: str) -> float: ...

    def longest_row(self) -> Row: ...

    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class Fold:
    """The sum of the digits of a list modulo `modulus`.

    A solution replaces the first two digits by their sum and copies the rest, until one digit is left, in about
    length**2 / 2 tokens: "3725:" -> "025 25=7" modulo 10; with `scan` it writes the running sums: "02=7".

    P(length) is proportional to (length - min_length + 1) ** -tail. A hash of its digits assigns a
    list to training or evaluation, so that the splits are disjoint for every seed. A share `hasty` of
    the "sft" solutions is the (right) answer without working: a policy that imitates them guesses,
    and RL discovers that working is better. Raises ConfigError for values out of range.
    """

    min_length: int = 3
    max_length: int = 12
    tail: float = 1.5
    modulus: int = 10
    hasty: float = 0.0
    scan: bool = False

    def __post_init__(self):
        if not 0 <= self.hasty <= 1:
            raise ConfigError(f"data.task_args.hasty {self.hasty} is not between 0 and 1")
        if not 2 <= self.modulus <= len(DIGITS):
            raise ConfigError(
                f"data.task_args.modulus {self.modulus} is not between 2 and {len(DIGITS)}"
            )
        if not 2 <= self.min_length <= self.max_length:
            lengths = f"min_length {self.min_length} <= max_length {self.max_length}"
            raise ConfigError(f"data.task_args: 2 <= {lengths} does not hold")
        if self.modulus**self.min_length < SMALLEST_SPACE:
            raise ConfigError(
                f"data.task_args: modulus {self.modulus} ** min_length {self.min_length} is below {SMALLEST_SPACE}: "
                "raise one of them"
            )

    def rows(self, seed: int, indices: Sequence[int], split: str) -> list[Row]:
        """The problems of these indices; each depends only on (seed, index, split)."""
        digits, lengths = self._lists(seed, np.asarray(indices, dtype=np.uint64), split)
        alphabet = np.frombuffer(DIGITS.encode(), dtype=np.uint8)
        texts = alphabet[digits]
        sums = alphabet[np.cumsum(digits, axis=1) % self.modulus]

        hurries = np.zeros(len(lengths), bool)
        if split == "sft":
            draws = mix(mix(np.asarray(indices, np.uint64)) + np.uint64(seed % 2**64))
            hurries = unit(draws) < self.hasty

        rows = []
        for index, length, text, total, hurry in zip(
            indices, lengths.tolist(), texts, sums, hurries, strict=True
        ):
            text, total = text[:length].tobytes().decode(), total[:length].tobytes().decode()
            solution = f"={total[-1]}" if hurry else self.solve(text, total)
            rows.append(Row(f"{split}-{index}", f"{text}:", solution, total[-1]))
        return rows

    def solve(self, text: str, sums: str) -> str:
        """The worked solution of a list, given its running sums."""
        lines = [sums[i] + text[i + 1 :] for i in range(1, len(text))]
        before = sums[1:-1] if self.scan else " ".join(lines[:-1])
        return f"{before}={sums[-1]}"

    def verify(self, completion: str, answer: str) -> float:
        """Reward: 1 when the text after the last "=" is the answer, else 0."""
        _, mark, last = completion.rpartition("=")
        return float(bool(mark) and last.strip() == answer)

    def longest_row(self) -> Row:
        """A problem with the longest prompt and solution of the task."""
        digits = DIGITS[1] * self.max_length
        return Row("longest", f"{digits}:", self.solve(digits, digits), digits[-1])

    def tokenizer(self):
        """A transformers fast tokenizer with one token per character, EOS and padding."""
        return character_tokenizer([*DIGITS[: self.modulus], "Ġ", "=", ":"])

    def _lists(self, seed: int, indices: np.ndarray, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Digits int64[R, max_length] (zero past the length) and lengths int[R].

        Rejects lists of the other split and draws them again.
        """
        keys = row_keys(seed, indices, split)
        ranks = np.arange(1, self.max_length - self.min_length + 2, dtype=np.float64)
        weights = ranks**-self.tail
        below = np.cumsum(weights / weights.sum())[:-1]  # the distribution of lengths
        lengths = self.min_length + np.searchsorted(below, unit(mix(keys)), side="right")

        positions = np.arange(self.max_length, dtype=np.uint64)
        digits = np.zeros((len(indices), self.max_length), dtype=np.int64)
        missing, attempt = np.arange(len(indices)), 1

        while missing.size:
            counters = np.uint64(attempt * self.max_length) + positions
            bits = mix(keys[missing, None] + counters) >> np.uint64(33)
            draw = (bits % np.uint64(self.modulus)).astype(np.int64)
            draw *= positions < lengths[missing, None]
            digits[missing] = draw
            held_out = is_eval(draw, lengths[missing])
            missing, attempt = missing[held_out != (split == "eval")], attempt + 1
        return digits, lengths


@dataclass(frozen=True)
class GuessRow(Row):
    """A number to guess, `answer`, and its bounds."""

    low: int
    high: int


@dataclass(frozen=True)
class Guess:
    """Numbers to guess in several turns, within two bounds from 1 to `largest`: "guess 3-8:".

    For tlt_jax.environments.games:GuessNumber, which answers guesses; its reward counts, and `verify` knows the last turn
    alone. A solution is any number up to `largest`: a policy that imitates them guesses without reading, and RL discovers
    the bounds. A hash of its bounds assigns a problem to training or evaluation. Raises ConfigError for a `largest` out of
    range.
    """

    largest: int = 9

    def __post_init__(self):
        if not LEAST_GUESSED <= self.largest < 10**9:
            raise ConfigError(
                f"data.task_args.largest {self.largest} is below {LEAST_GUESSED} or has more than 9 digits: change it"
            )

    def rows(self, seed: int, indices: Sequence[int], split: str) -> list[GuessRow]:
        """The problems of these indices; each depends only on (seed, index, split)."""
        keys = row_keys(seed, np.asarray(indices, np.uint64), split)
        return [self._row(*job, split) for job in zip(indices, keys, strict=True)]

    def verify(self, completion: str, answer: str) -> float:
        """1 when a completion is the number, else 0."""
        return float(completion.strip() == answer)

    def longest_row(self) -> GuessRow:
        """A row with the longest prompt and solution of the task."""
        most = str(self.largest)
        return GuessRow("longest", f"guess {most}-{most}:", most, most, self.largest, self.largest)

    def tokenizer(self):
        """A transformers fast tokenizer with one token per character of the game."""
        return character_tokenizer(["Ġ", "-", ":", *DIGITS[:10], *"eghilnorstuw"])

    def _row(self, index: int, key: np.uint64, split: str) -> GuessRow:
        for attempt in count():
            counters = np.uint64(4 * attempt) + np.arange(4, dtype=np.uint64)
            *ends, place, guess = (mix(key + counters) >> np.uint64(33)).tolist()
            low, high = sorted(1 + end % self.largest for end in ends)
            if is_eval(np.array([[low, high]]), np.array([2]))[0] == (split == "eval"):
                number, solution = low + place % (high - low + 1), 1 + guess % self.largest
                prompt = f"guess {low}-{high}:"
                return GuessRow(f"{split}-{index}", prompt, str(solution), str(number), low, high)


@dataclass(frozen=True)
class Openings:
    """Rows without a prompt: each begins with what its environment says first (environment.path), which its seed decides.

    Neither has a solution to imitate or an answer that `verify` could know; rewards are the environment's.
    """

    def rows(self, seed: int, indices: Sequence[int], split: str) -> list[Row]:
        """Rows that differ by their names."""
        return [Row(f"{split}-{index}", "", "", "") for index in indices]

    def verify(self, completion: str, answer: str) -> float:
        """Raises ConfigError."""
        raise ConfigError(f"data.task {OPENINGS!r} knows no answers: set reward.terms")

    def longest_row(self) -> Row:
        """A row."""
        return Row("longest", "", "", "")

    def tokenizer(self):
        """As WordProblems.tokenizer."""
        return WordProblems().tokenizer()


METHODS = ("rows", "verify", "longest_row", "tokenizer")
TASKS = {"fold": Fold, "word_problems": WordProblems, "guess": Guess, OPENINGS: Openings}


def make(name: str, args: dict[str, Any]) -> Task:
    """The task of this name with these arguments (data.task, data.task_args).

    For module:function the Task that function(**args) returns. Raises ConfigError.
    """
    if extension.is_own(name):
        maker = extension.load("data.task", name)
        if reason := extension.misfit(maker, **args):
            raise ConfigError(f"data.task_args {args} do not fit {name!r}: {reason}")
        task = maker(**args)
        if missing := [method for method in METHODS if not callable(getattr(task, method, None))]:
            raise ConfigError(
                f"data.task {name!r} gave a {type(task).__name__} without {', '.join(missing)}: see Task in "
                "tlt_jax/data/tasks.py"
            )
        return task
    if name not in TASKS:
        raise ConfigError(
            f"data.task {name!r} is not a task: choose one of {', '.join(TASKS)}, or module:function"
        )

    known = {f.name: f.type for f in fields(TASKS[name])}
    for key, value in args.items():
        if key not in known:
            raise ConfigError(
                f"data.task_args.{key} is not an argument of {name!r}: it takes {', '.join(known)}"
            )
        wanted = {"float": (int, float), "int": (int,), "bool": (bool,)}[known[key]]
        if not isinstance(value, wanted) or isinstance(value, bool) != (bool in wanted):
            raise ConfigError(f"data.task_args.{key} {value!r} is not of type {known[key]}")

    return TASKS[name](**args)
