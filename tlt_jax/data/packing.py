"""Packing of prompts with answers into rows, balanced over data groups.

The places are a function of uids and lengths. Knows no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tlt_jax.config import Config
from tlt_jax.data.segments import most_segments

ROW_MULTIPLE = 128  # tokens


def longest(config: Config) -> int:
    """Tokens of the longest prompt and answer of a rollout."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def row_tokens(config: Config) -> int:
    """T, tokens of a packed row: train.row_tokens, or by default the longest example.

    The default is rounded up to a multiple of ROW_MULTIPLE. It is doubled when train.rows has its
    default too: one long row has less padding than two short ones.
    """
    whole = -(-longest(config) // ROW_MULTIPLE) * ROW_MULTIPLE
    return config.train.row_tokens or (whole if config.train.rows else 2 * whole)


def rows(config: Config) -> int:
    """R, rows of one accumulation step on the mesh: train.rows, or by default one per data group."""
    return config.train.rows or config.mesh.data


def steps(config: Config, lengths: Sequence[int]) -> int:
    """Accumulation steps of an update on examples of these lengths, in order of the answers, as `pack` packs each minibatch.

    At least 1 for each minibatch.
    """
    capacity, found = row_tokens(config), 0
    for part in np.array_split(np.minimum(lengths, capacity), config.algorithm.minibatches):
        fitting = sorted(part.tolist(), reverse=True)
        packed = len(first_fit(fitting, capacity, most_segments(capacity)))
        found += max(-(-packed // rows(config)), 1)
    return found


def step_tokens(config: Config) -> int:
    """Tokens of an accumulation step on the mesh, padding included."""
    return rows(config) * row_tokens(config)


class Example(NamedTuple):
    """Token ids of a prompt and its answer; `uid` orders examples of equal length."""

    uid: int
    prompt: np.ndarray
    answer: np.ndarray

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Packed:
    """Packed rows of examples: A accumulation steps of R rows of T tokens.

    Token arrays are int32[A, R, T]; `segments` numbers the examples of a row from 1; 0 is padding.
    Values of an answer token are at the position that predicts it, one before the token; `targets`
    holds its id there. `spans` [n, 3]: (step, row, first target position) of each example, in the
    given order.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    targets: np.ndarray
    spans: np.ndarray
    answer_lengths: np.ndarray

    @property
    def fill(self) -> float:
        """Share of tokens that are not padding."""
        return float(np.mean(self.segments > 0))

    def spread(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """float64[A, R, T]: one value per example at all its targets; 0 elsewhere."""
        return self.place(
            [np.full(n, value) for n, value in zip(self.answer_lengths, values, strict=True)]
        )

    def place(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """float64[A, R, T]: one value per answer token, at its target; 0 elsewhere."""
        placed = np.zeros(self.tokens.shape, np.float64)
        for (step, row, first), length, array in zip(
            self.spans, self.answer_lengths, arrays, strict=True
        ):
            placed[step, row, first : first + length] = array
        return placed


def pack(examples: Sequence[Example], row_tokens: int, rows: int, groups: int = 1) -> Packed:
    """The examples, packed into `rows` rows of `row_tokens` tokens per accumulation step.

    First-fit decreasing: longest first, equal lengths by uid; at most most_segments(row_tokens) per row. `groups`
    data groups get equal numbers of rows. Raises ValueError as `check`.
    """
    places = arrange(examples, row_tokens, rows, groups)
    shape = (1 + max(place.step for place in places), rows, row_tokens)
    arrays = {
        name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segments", "targets")
    }
    spans = np.zeros((len(examples), 3), np.int64)
    for index, step, row, segment, start in places:
        example = examples[index]
        end, first = start + example.length, start + len(example.prompt) - 1
        text = np.concatenate([example.prompt, example.answer])
        arrays["tokens"][step, row, start:end] = text
        arrays["positions"][step, row, start:end] = np.arange(example.length)
        arrays["segments"][step, row, start:end] = segment
        arrays["targets"][step, row, first : end - 1] = example.answer
        spans[index] = step, row, first

    lengths = np.array([len(example.answer) for example in examples])
    return Packed(**arrays, spans=spans, answer_lengths=lengths)


class Place(NamedTuple):
    """Where an example is packed: its index, the accumulation step, the row, its number in the row from 1, its first token."""

    example: int
    step: int
    row: int
    segment: int
    start: int


def arrange(
    examples: Sequence[Example], row_tokens: int, rows: int, groups: int = 1
) -> list[Place]:
    """The places of all examples in `pack`; they depend on lengths and uids only."""
    check(examples, row_tokens, rows, groups)

    order = sorted(range(len(examples)), key=lambda i: (-examples[i].length, examples[i].uid))
    lengths = [examples[i].length for i in order]
    filled = first_fit(lengths, row_tokens, most_segments(row_tokens))
    tokens_per_row = [sum(examples[order[j]].length for j in row) for row in filled]

    steps, share, places = -(-len(filled) // rows), rows // groups, []
    for group, members in enumerate(balance(tokens_per_row, groups, steps * share)):
        for index, member in enumerate(members):
            step, row, start = index // share, group * share + index % share, 0
            for segment, j in enumerate(filled[member], start=1):
                places.append(Place(order[j], step, row, segment, start))
                start += examples[order[j]].length
    return places


def check(examples: Sequence[Example], row_tokens: int, rows: int, groups: int) -> None:
    """Raises ValueError for no examples, an empty or too long example, or rows that the groups do not divide."""
    if not examples:
        raise ValueError("no examples to pack")
    if rows < 1 or rows % groups:
        raise ValueError(
            f"{rows} rows do not divide over {groups} data groups: set train.rows to a multiple"
        )

    for example in examples:
        if len(example.prompt) == 0 or len(example.answer) == 0:
            raise ValueError(
                f"example {example.uid} has an empty prompt or answer: nothing to predict"
            )
        if example.length > row_tokens:
            raise ValueError(
                f"example {example.uid} has {example.length} tokens, a row {row_tokens}: set train.row_tokens to at "
                f"least {example.length}"
            )


def first_fit(lengths: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """Rows of at most `most` indices into `lengths`: each, in order, in the first row with space for it."""
    free = np.full(len(lengths), capacity)
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        row = int(np.argmax(free[: len(rows) + 1] >= length))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        free[row] = free[row] - length if len(rows[row]) < most else 0
    return rows


def balance(tokens: Sequence[int], groups: int, limit: int) -> list[list[int]]:
    """Rows of each group, at most `limit`, with similar numbers of tokens.

    Greedy: the next row by number of tokens goes to the group with the fewest tokens.
    """
    members: list[list[int]] = [[] for _ in range(groups)]
    held = [0] * groups
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        group = min(
            (g for g in range(groups) if len(members[g]) < limit), key=lambda g: (held[g], g)
        )
        members[group].append(row)
        held[group] += tokens[row]
    return members
