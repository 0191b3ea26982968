"""The expected time of a rollout: by hand, against a plain reference, and with a thousand groups."""

from __future__ import annotations

import numpy as np
import pytest
import scenarios

from tests import references
from tlt_jax.rollout.idle import ExpectedTime, Lengths
from tlt_jax.rollout.scheduler.state import GroupState, Running
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.tuner.interface import Measurement

GROUPS, ROWS, LIMIT = 1000, 64, 16384


def measured(group, tokens, row_rounds, rounds, seconds):
    hits = np.zeros((1, 1, 1))
    return Measurement(group, 4, 2, 64, PLAIN, rounds, row_rounds, tokens, seconds, hits)


def expected_tokens(so_far, most, lengths):
    return Lengths(lengths).expected_tokens(np.array([so_far]), np.array([most])).tolist()[0]


def test_expected_tokens_worked_by_hand():
    lengths = [10, 20, 60, 100]
    assert expected_tokens(20, 1000, lengths) == 60.0  # of 60 and 100: 40 and 80
    assert expected_tokens(20, 30, lengths) == 30.0
    assert expected_tokens(100, 1000, lengths) == 100.0  # none was longer
    assert expected_tokens(500, 1000, lengths) == 500.0
    assert expected_tokens(0, 1000, []) == 1.0


def test_lengths_added_one_by_one_give_the_result_of_the_plain_reference():
    rng = np.random.default_rng(0)
    lengths = Lengths()
    so_far, most = np.arange(301), rng.integers(0, 200, 301)
    every: list[int] = []
    for count in (1, 0, 7, 3, 100):
        new = rng.integers(0, 250, count).tolist()
        every += new
        lengths.add(new)
        plain = [references.expected_tokens(int(n), int(m), every) for n, m in zip(so_far, most, strict=True)]  # fmt: skip
        assert lengths.expected_tokens(so_far, most).tolist() == plain


def test_expected_seconds_are_those_of_the_row_that_takes_longest():
    request = scenarios.request([4], 8, 100, seed=0, capacity=4)
    states = {
        0: GroupState(rows=(Running(0, 14, 104), None)),  # 10 tokens answered
        1: GroupState(rows=(Running(1, 24, 104), Running(2, 4, 104))),  # 20, and none
        2: GroupState(rows=(Running(3, 50, 104),)),  # not measured yet
    }
    chunks = [
        measured(0, 20, 20, 10, 9.0),
        measured(0, 20, 20, 10, 1.0),
        measured(1, 40, 20, 10, 4.0),
    ]
    # Group 0: 10 tokens a second of a row, 1: 2 tokens a round, 5 a second.
    expected = ExpectedTime(request, [30])
    assert expected.seconds(states, [], []) == 0.0
    assert expected.seconds(states, chunks[:1], []) == pytest.approx(20 / (10 / 9))
    assert expected.seconds(states, chunks, []) == pytest.approx(max(20 / 10, 10 / 5, 30 / 5))
    assert expected.seconds(states, chunks, [70]) == pytest.approx(max(40 / 10, 50 / 5))
    states[1] = GroupState(rows=(None, Running(2, 5, 104)))
    assert expected.seconds(states, chunks, [70]) == pytest.approx(49 / 5)
    assert expected.seconds({0: GroupState(rows=(None,))}, chunks, [70]) == 0.0


class Counted(list):
    """A list that counts the elements that were read."""

    reads = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        Counted.reads += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self):
        Counted.reads += len(self)
        return super().__iter__()


class Row(Running):
    """A row that counts its attribute reads."""

    looks = 0

    def __getattribute__(self, name):
        if name == "tokens":
            Row.looks += 1
        return super().__getattribute__(name)


def test_the_expected_time_of_a_thousand_groups_reads_only_what_is_new():
    """64,000 answers: known answers and unchanged rows are not read again."""
    request = scenarios.request([4], GROUPS * ROWS, LIMIT, seed=0, capacity=ROWS)
    earlier = np.random.default_rng(0).integers(1, LIMIT, GROUPS * ROWS).tolist()
    expected = ExpectedTime(request, earlier)
    rows = [tuple(Row(group * ROWS + row, 4 + row, 4 + LIMIT) for row in range(ROWS)) for group in range(GROUPS)]  # fmt: skip
    states = {group: GroupState(rows=one) for group, one in enumerate(rows)}
    chunks = Counted(measured(group, 40, 20, 10, 4.0) for group in range(GROUPS))
    ended = Counted(earlier[: 32 * GROUPS])
    first = expected.seconds(states, chunks, ended)
    assert first > 0 and Row.looks <= 2 * GROUPS * ROWS

    Counted.reads = Row.looks = 0
    assert expected.seconds(states, chunks, ended) == first
    assert Counted.reads == Row.looks == 0
    ended.append(LIMIT)
    chunks.append(measured(3, 80, 20, 10, 4.0))
    states[3] = GroupState(rows=rows[3][1:])
    expected.seconds(states, chunks, ended)
    assert Counted.reads == 2 and Row.looks <= 2 * ROWS
