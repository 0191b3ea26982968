"""Cases of a matrix: those that cover every pair of values run in the gate, the others are `-m matrix`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def covering(axes: Sequence[Sequence], keep: Callable[..., bool] = lambda *case: True) -> list:
    """[(case, is it chosen)] of the product of the axes that `keep` accepts.

    The chosen cases contain every pair of values that occurs in a kept case. Greedy, hence the same in every run: the
    next case is the first of those with the most pairs that no chosen case contains.
    """
    cases = [places for places in itertools.product(*[range(len(axis)) for axis in axes])
             if keep(*(axis[place] for axis, place in zip(axes, places, strict=True)))]  # fmt: skip
    pairs = [set(itertools.combinations(enumerate(case), 2)) for case in cases]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda place: len(pairs[place] & missing))
        chosen.add(best)
        missing -= pairs[best]
    values = [tuple(axis[place] for axis, place in zip(axes, case, strict=True)) for case in cases]
    return [(value, place in chosen) for place, value in enumerate(values)]


def matrix(keep: Callable[..., bool] = lambda *case: True, **axes: Sequence) -> Any:
    """A parametrization over the product of named axes: pairwise in the gate, whole with `-m matrix` as well."""
    found = covering([list(axis) for axis in axes.values()], keep)
    return pytest.mark.parametrize(list(axes), marked(found))


def marked(cases: Sequence[tuple[Sequence, bool]]) -> list:
    """Parameters of (case, does the gate run it)."""
    return [
        pytest.param(*case, marks=[] if is_chosen else [pytest.mark.matrix])
        for case, is_chosen in cases
    ]
