"""Packing of prompts with answers into rows, balanced over data groups; the places are a function of uids and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Integer

from tlt_jax.config import Config
from tlt_jax.shapes import most_segments

if TYPE_CHECKING:
    from jax import Array

ROW_MULTIPLE = 128  # tokens


class PackedRows(NamedTuple):
    """Packed rows, from the packing of answers to every loss of policy and drafter; a pytree. None: absent.

    R rows of T tokens are one accumulation step; on the host there are A steps of them, [A, R, T]. `segments` numbers the
    examples of a row from 1; 0 is padding. Values of an answer token are at the position that predicts it, one before the
    token: `targets` holds its id there, and `is_answer` says where an answer's token is to be predicted. There, floats
    are 0 elsewhere. A log-prob is named after whose it is: of the rollout that drew the token, of the old policy before the
    first minibatch (None: those of the update itself, so that ratios are 1), of the frozen reference, of a teacher (with
    `teacher_ids` of the tokens that it finds most likely), and of the policy in its update, which exist in its loss alone.
    `weights`: of each target in the policy's loss, above 0 where this counts it. `experts`: those that each token had in the
    rollout, see moe.record. `support`: ids of the tokens from which each target was drawn, -1 after the last; log-probs are
    then of these tokens and the target alone. `features`: the policy's hidden states that the drafter reads; `states`: its
    normed last hidden states.

    A segment of a drafter's rows may start at any position of its sequence; attention does not reach tokens before it.
    """

    tokens: Int32[Array, "R T"]
    positions: Int32[Array, "R T"]
    segments: Int32[Array, "R T"]
    targets: Int32[Array, "R T"] | None = None
    is_answer: Bool[Array, "R T"] | None = None
    weights: Float[Array, "R T"] | None = None
    advantages: Float[Array, "R T"] | None = None
    rollout_logprobs: Float[Array, "R T"] | None = None
    old_logprobs: Float[Array, "R T"] | None = None
    reference_logprobs: Float[Array, "R T"] | None = None
    update_logprobs: Float[Array, "R T"] | None = None
    features: Float[Array, "R T F"] | None = None
    states: Float[Array, "R T D"] | None = None
    experts: Integer[Array, "R T W"] | None = None
    teacher_logprobs: Float[Array, "R T *K"] | None = None
    teacher_ids: Int32[Array, "R T K"] | None = None
    support: Int32[Array, "R T S"] | None = None

    @property
    def mask(self) -> Bool[Array, "R T"]:
        """Where the policy's loss counts the target."""
        return self.weights > 0


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
    """Token ids of a prompt and its answer; `uid` orders examples of equal length. Others: as of recorder.Completion.

    Of `own` None all tokens are the policy's.
    """

    uid: int
    prompt: np.ndarray
    answer: np.ndarray
    record: np.ndarray | None = None
    own: np.ndarray | None = None
    support: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Spans:
    """Where the answers of examples lie in packed rows of `shape` (A, R, T), in the given order of the examples.

    `places` [n, 3]: accumulation step, row, and first target position; `lengths` [n]: tokens of the answers; `counts` [n]:
    of them the policy's.
    """

    shape: tuple[int, int, int]
    places: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray

    def spread(self, values: Sequence[float] | Sequence[np.ndarray]) -> np.ndarray:
        """float64[A, R, T]: one value per example, or one for each of its targets, at these; 0 elsewhere."""
        return self.place(
            [np.full(n, value) for n, value in zip(self.lengths, values, strict=True)]
        )

    def place(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """float64[A, R, T]: one value per answer token, at its target; 0 elsewhere."""
        placed = np.zeros(self.shape, np.float64)
        for (step, row, first), length, array in zip(
            self.places, self.lengths, arrays, strict=True
        ):
            placed[step, row, first : first + length] = array
        return placed


def pack(
    examples: Sequence[Example], row_tokens: int, rows: int, groups: int = 1
) -> tuple[PackedRows, Spans]:
    """The examples, packed into `rows` rows of `row_tokens` tokens per accumulation step, and where their answers lie.

    First-fit decreasing: longest first, equal lengths by uid; at most most_segments(row_tokens) per row. `groups`
    data groups get equal numbers of rows. Raises ValueError as `arrange`.
    """
    places = arrange(examples, row_tokens, rows, groups)
    shape = (1 + max(place.step for place in places), rows, row_tokens)
    tokens, positions, segments, targets = (np.zeros(shape, np.int32) for _ in range(4))
    is_answer, answers = np.zeros(shape, bool), np.zeros((len(examples), 3), np.int64)
    experts = None
    if (record := examples[0].record) is not None:
        experts = np.full((*shape, record.shape[1]), np.iinfo(record.dtype).max, record.dtype)
    support = None
    if (kept := examples[0].support) is not None:
        support = np.full((*shape, kept.shape[1]), -1, np.int32)
    for index, step, row, segment, start in places:
        example = examples[index]
        end, first = start + example.length, start + len(example.prompt) - 1
        tokens[step, row, start:end] = np.concatenate([example.prompt, example.answer])
        positions[step, row, start:end] = np.arange(example.length)
        segments[step, row, start:end] = segment
        targets[step, row, first : end - 1] = example.answer
        is_answer[step, row, first : end - 1] = True if example.own is None else example.own
        answers[index] = step, row, first
        if support is not None:
            support[step, row, first : end - 1] = example.support
        if experts is not None:
            experts[step, row, start : start + len(example.record)] = example.record

    lengths = np.array([len(example.answer) for example in examples])
    counts = [len(one.answer) if one.own is None else int(one.own.sum()) for one in examples]
    packed = PackedRows(
        tokens, positions, segments, targets, is_answer, experts=experts, support=support
    )
    return packed, Spans(shape, answers, lengths, np.array(counts))


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
    """The places of all examples in `pack`; they depend on lengths and uids only.

    Raises ValueError for no examples, an empty or too long example, or rows that the groups do not divide.
    """
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
