"""What processes tell each other of a rollout is all of it, and several results are as one."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import numpy as np
import pytest
import toys
from test_group import PROMPTS, RULES, SAMPLES, TABLE, programs

from tlt_jax.rollout import exchange
from tlt_jax.rollout.events import Decision
from tlt_jax.rollout.recorder import Completion, Span
from tlt_jax.spec_decode import strategy
from tlt_jax.tuner.interface import Measurement


@pytest.fixture(scope="module")
def result():
    """A rollout, with what only others have."""
    with jax.enable_x64(True):  # as the programs that it shares were compiled
        found = toys.play(programs(), TABLE, PROMPTS, SAMPLES, RULES)
    drafted = [
        one._replace(strategy=strategy.parse("merged:2_2_4"), group=index % 2)
        for index, one in enumerate(found.measurements)
    ]
    decisions = [replace(one, joining=(3, 1)) for one in found.decisions]
    return replace(
        found,
        measurements=drafted,
        decisions=decisions,
        partial={7: np.arange(3, dtype=np.int32)},
        compile_waits={0: [(0.0, 0.5)], 1: [(0.0, 0.5)]},
        stats=found.stats | {"programs": 3},
    )


def same(one, other) -> bool:
    """Equality of everything in it, arrays with their dtypes."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, (Completion, Span, Decision)):
        return type(one) is type(other) and same(vars(one), vars(other))
    if isinstance(one, Measurement):
        return isinstance(other, Measurement) and same(one._asdict(), other._asdict())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def test_a_result_is_unpacked_as_it_was_packed(result):
    found = exchange.unpacked(exchange.packed(result))
    for field in fields(result):
        assert same(getattr(result, field.name), getattr(found, field.name)), field.name


def test_the_results_of_two_processes_are_one(result):
    halves = []
    for group in (1, 0):
        own = {
            name: [one for one in getattr(result, name) if one.group == group]
            for name in ("spans", "decisions", "measurements")
        }
        completions = [one for one in result.completions if one.uid % 2 == group]
        tokens = sum(len(one.tokens) for one in completions)
        stats = {name: 0 for name in result.stats} | {
            "tokens": tokens, "speculated_tokens": tokens, "seconds": 2.0 + group, "programs": 3, "rounds": 4,
        }  # fmt: skip
        halves.append(
            replace(
                result, **own, completions=completions, stats=stats, partial={},
                compile_waits={group: [(0.0, float(group))]}, reliability=result.reliability / 2,
            )
        )  # fmt: skip
    found = exchange.merged(halves)
    assert same(found.completions, result.completions), "in order of uid"
    assert [one.group for one in found.spans] == sorted(one.group for one in result.spans)
    assert len(found.measurements) == len(result.measurements)
    np.testing.assert_allclose(found.reliability, result.reliability)
    assert found.compile_waits == {0: [(0.0, 0.0)], 1: [(0.0, 1.0)]}
    tokens = sum(len(one.tokens) for one in result.completions)
    rounds = sum(one.row_rounds for one in result.measurements)
    assert (found.stats["tokens"], found.stats["seconds"], found.stats["programs"]) == (
        tokens,
        3.0,
        3,
    )
    assert found.stats["rounds"] == 8
    assert (
        found.stats["tokens_per_second"] == tokens / 3
        and found.stats["accept_length"] == tokens / rounds
    )
    assert exchange.merged(halves[:1]) is halves[0]
