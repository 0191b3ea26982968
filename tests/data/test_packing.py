"""Laws of packing: nothing lost, nothing mixed, and the same rows in whatever order the examples come."""

from __future__ import annotations

import numpy as np
import pytest

from tlt_jax.data import packing
from tlt_jax.data.packing import Example


def random_examples(seed: int, count: int, longest: int) -> list[Example]:
    random = np.random.default_rng(seed)
    uids = random.permutation(10 * count)[:count]
    lengths = 2 + np.minimum(random.geometric(0.1, count), longest - 2)
    made = []
    for uid, length in zip(uids, lengths, strict=True):
        tokens = random.integers(1, 1000, length)
        split = int(random.integers(1, length))
        made.append(Example(int(uid), tokens[:split], tokens[split:]))
    return made


CASES = [(0, 1, 2, 1), (1, 7, 4, 2), (2, 40, 4, 4), (3, 100, 6, 3), (4, 64, 2, 1), (5, 33, 8, 2)]
ROW = 48


@pytest.mark.parametrize(("seed", "count", "rows", "groups"), CASES)
def test_every_example_stands_whole_in_one_row_with_its_own_positions_and_segment(
    seed, count, rows, groups
):
    examples = random_examples(seed, count, ROW)
    packed = packing.pack(examples, ROW, rows, groups)
    assert packed.tokens.shape[1:] == (rows, ROW)
    for example, (step, row, first) in zip(examples, packed.spans, strict=True):
        start = first + 1 - len(example.prompt)
        whole = (step, row, slice(start, start + example.length))
        np.testing.assert_array_equal(packed.tokens[whole], [*example.prompt, *example.answer])
        np.testing.assert_array_equal(packed.positions[whole], np.arange(example.length))
        assert len(set(packed.segments[whole])) == 1 and packed.segments[whole][0] > 0
        answer = (step, row, slice(first, first + len(example.answer)))
        np.testing.assert_array_equal(packed.targets[answer], example.answer)
    assert (packed.segments > 0).sum() == sum(example.length for example in examples)
    assert packed.spread(np.ones(count)).sum() == sum(len(example.answer) for example in examples)
    starts = np.diff(packed.segments, axis=-1)
    assert set(np.unique(starts[starts > 0])) <= {
        1
    }  # segments of a row are numbered from 1 without gaps


@pytest.mark.parametrize(("seed", "count", "rows", "groups"), CASES)
def test_rows_do_not_depend_on_the_order_of_the_examples(seed, count, rows, groups):
    examples = random_examples(seed, count, ROW)
    shuffled = np.random.default_rng(seed + 1).permutation(count)
    first = packing.pack(examples, ROW, rows, groups)
    second = packing.pack([examples[i] for i in shuffled], ROW, rows, groups)
    for name in ("tokens", "positions", "segments", "targets"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    np.testing.assert_array_equal(first.spans[shuffled], second.spans)
    values = np.arange(count) + 1.0
    np.testing.assert_array_equal(first.spread(values), second.spread(values[shuffled]))


@pytest.mark.parametrize(("seed", "count", "rows", "groups"), CASES)
def test_rows_are_well_filled_padded_to_a_power_of_two_and_balanced(seed, count, rows, groups):
    packed = packing.pack(random_examples(seed, count, ROW), ROW, rows, groups)
    tokens = (packed.segments > 0).sum(axis=-1)
    used = np.sort(tokens[tokens > 0])
    assert (used <= ROW / 2).sum() <= 1  # first fit would have joined two of them
    assert packed.count == -(-len(used) // rows)
    assert len(packed.tokens) == 2 ** int(np.ceil(np.log2(packed.count)))
    assert not tokens[packed.count :].any()
    per_group = tokens.reshape(len(tokens), groups, -1).sum(axis=(0, 2))
    assert per_group.max() - per_group.min() <= ROW
    assert packed.fill == pytest.approx(tokens.sum() / (packed.count * rows * ROW))


def test_first_fit_decreasing_is_that_worked_by_hand():
    def example(uid: int, length: int) -> Example:
        return Example(uid, np.array([uid]), np.full(length - 1, uid))

    examples = [
        example(1, 3),
        example(2, 6),
        example(3, 4),
        example(4, 6),
        example(5, 4),
        example(6, 2),
    ]
    packed = packing.pack(examples, row_tokens=10, rows=2, groups=2)
    # lengths 6 (uid 2), 6 (4), 4 (3), 4 (5), 3 (1), 2 (6): rows [2, 3], [4, 5], [1, 6]
    assert packed.count == 2
    np.testing.assert_array_equal(packed.tokens[0, 0], [2] * 6 + [3] * 4)
    np.testing.assert_array_equal(packed.tokens[0, 1], [4] * 6 + [5] * 4)
    np.testing.assert_array_equal(packed.tokens[1, 0], [1] * 3 + [6] * 2 + [0] * 5)
    np.testing.assert_array_equal(packed.segments[1, 0], [1] * 3 + [2] * 2 + [0] * 5)
    np.testing.assert_array_equal(packed.tokens[1, 1], 0)


def test_values_of_answer_tokens_stand_where_the_token_is_predicted():
    examples = [Example(0, np.array([7, 8]), np.array([9, 10, 11]))]
    packed = packing.pack(examples, row_tokens=6, rows=1)
    np.testing.assert_array_equal(packed.targets[0, 0], [0, 9, 10, 11, 0, 0])
    np.testing.assert_array_equal(packed.spread([0.5])[0, 0], [0, 0.5, 0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(
        packed.place([np.array([-1.0, -2.0, -3.0])])[0, 0], [0, -1, -2, -3, 0, 0]
    )


def test_what_cannot_be_packed_is_refused():
    one, two = np.array([1]), np.array([1, 2])
    with pytest.raises(ValueError, match="example 5 has 4 tokens, a row 3"):
        packing.pack([Example(5, two, two)], row_tokens=3, rows=1)
    with pytest.raises(ValueError, match="example 6 has an empty prompt or answer"):
        packing.pack([Example(6, one, one[:0])], row_tokens=3, rows=1)
    with pytest.raises(ValueError, match="3 rows do not divide over 2 data groups"):
        packing.pack([Example(7, one, one)], row_tokens=3, rows=3, groups=2)
    with pytest.raises(ValueError, match="no examples"):
        packing.pack([], row_tokens=3, rows=1)
