"""Generated reasoning tasks: unlimited seeded rows, worked solutions, a verifier.

Knows no file, no model and no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tlt_jax.config import extension
from tlt_jax.data.generated import Row, character_tokenizer, is_eval, mix, row_keys, unit
from tlt_jax.data.word_problems import WordProblems
from tlt_jax.errors import ConfigError

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
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


METHODS = ("rows", "verify", "longest_row", "tokenizer")


@dataclass(frozen=True)
class ListTask:
    """The sum of the digits of a list modulo `modulus`.

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
            hurries = (
                unit(mix(mix(np.asarray(indices, np.uint64)) + np.uint64(seed % 2**64)))
                < self.hasty
            )

        rows = []
        for index, length, text, total, hurry in zip(
            indices, lengths.tolist(), texts, sums, hurries, strict=True
        ):
            text, total = text[:length].tobytes().decode(), total[:length].tobytes().decode()
            solution = f"={total[-1]}" if hurry else self.solve(text, total)
            rows.append(Row(f"{split}-{index}", self.ask(text), solution, total[-1]))
        return rows

    def ask(self, text: str) -> str:
        """The prompt of a list."""
        return f"{text}:"

    def solve(self, text: str, sums: str) -> str:
        """The worked solution of a list, given its running sums."""
        raise TypeError("ListTask is the base of the tasks in TASKS")

    def verify(self, completion: str, answer: str) -> float:
        """Reward: 1 when the text after the last "=" is the answer, else 0."""
        _, mark, last = completion.rpartition("=")
        return float(bool(mark) and last.strip() == answer)

    def longest_row(self) -> Row:
        """A problem with the longest prompt and solution of the task."""
        digits = DIGITS[1] * self.max_length
        return Row("longest", self.ask(digits), self.solve(digits, digits), digits[-1])

    def tokenizer(self):
        """A transformers fast tokenizer with one token per character, EOS and padding."""
        return character_tokenizer([*DIGITS[: self.modulus], "Ġ", "=", ":", *self.labels])

    @property
    def labels(self) -> str:
        """Characters that label the entries of a list."""
        return ""

    @cached_property
    def _length_cdf(self) -> np.ndarray:
        weights = (
            np.arange(1, self.max_length - self.min_length + 2, dtype=np.float64) ** -self.tail
        )
        return np.cumsum(weights / weights.sum())

    def _lists(self, seed: int, indices: np.ndarray, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Digits int64[R, max_length] (zero past the length) and lengths int[R].

        Rejects lists of the other split and draws them again.
        """
        keys = row_keys(seed, indices, split)

        uniform = unit(mix(keys))
        steps = np.searchsorted(self._length_cdf[:-1], uniform, side="right")
        lengths = self.min_length + steps

        positions = np.arange(self.max_length, dtype=np.uint64)
        digits = np.zeros((len(indices), self.max_length), dtype=np.int64)
        missing, attempt = np.arange(len(indices)), 1

        while missing.size:
            counters = np.uint64(attempt * self.max_length) + positions
            draw = (
                (mix(keys[missing, None] + counters) >> np.uint64(33)) % np.uint64(self.modulus)
            ).astype(np.int64)
            draw *= positions < lengths[missing, None]
            digits[missing] = draw
            held_out = is_eval(draw, lengths[missing])
            missing, attempt = missing[held_out != (split == "eval")], attempt + 1
        return digits, lengths


class Fold(ListTask):
    """Replaces the first two digits by their sum and copies the rest, until one digit is left.

    A solution has about length**2 / 2 tokens. "3725:" -> "025 25=7" modulo 10.
    """

    def solve(self, text: str, sums: str) -> str:
        lines = [sums[i] + text[i + 1 :] for i in range(1, len(text))]
        return " ".join(lines[:-1]) + "=" + lines[-1]


class Scan(ListTask):
    """Writes the running sums, about one token per digit. "3725:" -> "02=7" modulo 10."""

    def solve(self, text: str, sums: str) -> str:
        return sums[1:-1] + "=" + sums[-1]


class Ledger(ListTask):
    """Writes the running sum of labelled entries, two tokens per entry.

    "A3B7C2:" -> "A3B0C2=2" modulo 10. The labels tell which entry is next, so a small policy learns
    lists of all lengths equally well.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.max_length > len(LABELS):
            raise ConfigError(
                f"data.task_args.max_length {self.max_length} is above the {len(LABELS)} labels of a ledger"
            )
        if set(LABELS) & set(DIGITS[: self.modulus]):
            raise ConfigError(
                f"data.task_args.modulus {self.modulus} is above 10: a ledger's labels are letters"
            )

    @property
    def labels(self) -> str:
        return LABELS

    def ask(self, text: str) -> str:
        return "".join(map("".join, zip(LABELS, text, strict=False))) + ":"

    def solve(self, text: str, sums: str) -> str:
        return "".join(map("".join, zip(LABELS, sums, strict=False))) + "=" + sums[-1]


TASKS = {"fold": Fold, "ledger": Ledger, "scan": Scan, "word_problems": WordProblems}


def make(name: str, args: dict[str, Any]) -> Task:
    """The task of this name with these arguments (data.task, data.task_args).

    For module:function the Task that function(**args) returns. Raises ConfigError.
    """
    if extension.is_own(name):
        return _own(name, args)
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
        wanted = (int, float) if known[key] == "float" else int
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(f"data.task_args.{key} {value!r} is not of type {known[key]}")

    return TASKS[name](**args)


def _own(name: str, args: dict[str, Any]) -> Task:
    maker = extension.load("data.task", name)
    if reason := extension.misfit(maker, **args):
        raise ConfigError(f"data.task_args {args} do not fit {name!r}: {reason}")
    task = maker(**args)
    if missing := [method for method in METHODS if not callable(getattr(task, method, None))]:
        raise ConfigError(
            f"data.task {name!r} gave a {type(task).__name__} without {', '.join(missing)}: see Task in tlt_jax/data/tasks.py"
        )
    return task
