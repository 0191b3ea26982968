"""The cases that the gate runs of a matrix contain every pair of values."""

from __future__ import annotations

import itertools

import pairwise
import pytest


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3, 4), (5, 2, 2), (3, 3, 3, 3), (4, 2, 3, 2, 2)])
def test_every_pair_is_chosen_with_few_cases_and_always_the_same(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    found = pairwise.covering(axes)
    assert [case for case, _ in found] == [*itertools.product(*axes)]
    chosen = [case for case, is_chosen in found if is_chosen]
    for a, b in itertools.combinations(range(len(axes)), 2):
        assert {(case[a], case[b]) for case in chosen} == {*itertools.product(axes[a], axes[b])}
    largest = sorted(sizes)[-2:]
    assert largest[0] * largest[1] <= len(chosen) <= 1.5 * largest[0] * largest[1]
    assert pairwise.covering(axes) == found


def test_pairs_that_no_kept_case_has_are_not_wanted():
    found = pairwise.covering([[1, 2, 3], [1, 2, 3], "xy"], lambda a, b, _: a != b)
    assert len(found) == 12 and all(a != b for (a, b, _), _ in found)
    assert {case[:2] for case, is_chosen in found if is_chosen} == {case[:2] for case, _ in found}


def test_the_rest_is_marked():
    mark = pairwise.matrix(a=[1, 2], b=[1, 2], c=[1, 2]).mark
    assert mark.args[0] == ["a", "b", "c"] and len(mark.args[1]) == 8
    marks = [[one.name for one in case.marks] for case in mark.args[1]]
    assert marks.count([]) == 4 and marks.count(["matrix"]) == 4
