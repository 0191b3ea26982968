"""Accept lengths that were measured or published follow from acceptance by depth."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tlt_jax.simulate.acceptance import NEW, PRESETS, Acceptances, Curve
from tlt_jax.spec_decode.strategy import parse

ROOT = Path(__file__).parents[2]


def levels_of(lengths):
    """Acceptance by depth of chains with these accept lengths by depth, equal between two depths that were measured."""
    levels, reached, before = [], 1.0, (0, 1.0)
    for depth, length in sorted(lengths.items()):
        steps, gained = depth - before[0], length - before[1]
        tried = np.linspace(0.001, 0.9999, 20000)
        sums = reached * sum(tried**power for power in range(1, steps + 1))
        level = float(tried[np.argmin(np.abs(sums - gained))])
        levels += [level] * steps
        reached, before = reached * level**steps, (depth, length)
    return tuple(levels)


def measured(name):
    """Accept lengths by strategy of the learned drafter in a file of measurements."""
    with (ROOT / "benchmarks/results" / name).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["strategy"] != "plain"]
    found = {row["strategy"].removeprefix("learned:"): float(row["accept_length"]) for row in rows}
    return {text: length for text, length in found.items() if ":" not in text}


@pytest.mark.parametrize(
    ("name", "trees"),
    [
        ("speculation_trees.csv", ("3_4_16", "5_2_8", "7_2_16", "7_4_32", "11_4_16", "15_4_32")),
        ("drafter_depths.csv", ("6_4_16",)),
    ],
)
def test_measured_trees_follow_from_measured_chains(name, trees):
    """Of a drafter that nearly always hits (a chain of 7: 6.9 tokens) and of one that rarely does (of 6: 1.54): within 10 %."""
    found = measured(name)
    chains = {parse(text).depth: length for text, length in found.items() if "_1_" in text}
    levels = levels_of(chains)
    accepted = Acceptances(NEW.ngram, Curve(levels, levels))
    for text in trees:
        length = 1 + accepted.trees(parse(text), 0.0).accepted.mean()
        assert length == pytest.approx(found[text], rel=0.1), text


@pytest.mark.parametrize("name", ["nemo_rl_think", "nemo_rl_zero"])
def test_chains_of_nemo_rl_have_the_published_accept_length(name):
    """Levels of a chain of 3: the product sums to the published length."""
    levels = PRESETS[name].levels("", 0.0, 3)
    published = {"nemo_rl_zero": 2.47, "nemo_rl_think": 2.05}[name]
    assert 1 + np.cumprod(levels).sum() == pytest.approx(published, abs=0.002)
