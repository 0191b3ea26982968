"""Processes exchange complete rollout results, and several results merge into one."""

from __future__ import annotations

import threading
from dataclasses import fields, replace

import jax
import numpy as np
import pytest
import toys
from test_group import PROMPTS, RULES, SAMPLES, TABLE, programs

from tlt_jax.distributed.job import Job
from tlt_jax.rollout import exchange
from tlt_jax.rollout.recorder import Completion, Decision, Span
from tlt_jax.spec_decode import strategy
from tlt_jax.tuner.interface import Measurement

CONTENT = "tokens", "logprobs", *exchange.OPTIONAL


@pytest.fixture(scope="module")
def result():
    """A rollout's result, with values in every field."""
    with jax.enable_x64(True):  # as the shared programs were compiled
        found = toys.play(programs(), TABLE, PROMPTS, SAMPLES, RULES)
    drafted = [
        one._replace(strategy=strategy.parse("merged:2_2_4"), group=index % 2)
        for index, one in enumerate(found.measurements)
    ]
    decisions = [replace(one, joining=(3, 1)) for one in found.decisions]
    random = np.random.default_rng(0)
    recorded = [
        replace(
            one,
            record=random.integers(0, 9, (4 + len(one.tokens), 6), np.uint8),
            replies=((0, 1),) * (one.uid % 2),
            support=random.integers(-1, 99, (len(one.tokens), 3), np.int32),
        )
        for one in found.completions
    ]
    return replace(
        found,
        completions=recorded,
        measurements=drafted,
        decisions=decisions,
        partial={7: np.arange(3, dtype=np.int32)},
        compile_waits={0: [(0.0, 0.5)], 1: [(0.0, 0.5)]},
        stats=found.stats | {"programs": 3},
    )


def same(one, other) -> bool:
    """Deep equality, for arrays with their dtypes."""
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


def test_packing_and_unpacking_a_result_preserves_it(result):
    found = exchange.unpacked(exchange.packed(result))
    zeros = [
        replace(one, **{name: 0 * getattr(one, name) for name in CONTENT})
        for one in result.completions
    ]
    for field in fields(result):
        expected = zeros if field.name == "completions" else getattr(result, field.name)
        assert same(expected, getattr(found, field.name)), field.name
    absent = [getattr(one, name) for one in found.completions for name in CONTENT]
    assert not any(any(array.strides) for array in absent), "they take no memory"


class Together(Job):
    """A process simulated by a thread, whose collective is a barrier; `sent`: the bytes of each."""

    barrier, sent, kept = threading.Barrier(3), {}, []

    def gather(self, data, wanted=None):
        """As Job.gather."""
        self.sent[self.index] = data
        self.barrier.wait(30)
        parts = [self.sent[index] for index in range(3)]
        self.barrier.wait(30)
        if wanted is not None:
            parts = [
                b"".join(part[a:b] for a, b in spans)
                for part, spans in zip(parts, wanted, strict=True)
            ]
            self.kept.append(sum(map(len, parts)))
        return parts


@pytest.mark.parametrize("kind", ["everything", "nothing", "some"])
def test_a_process_gets_the_answers_that_it_wants_and_the_lengths_of_all(result, kind):
    """Three processes have each decoded a third; process p wants the answers with uid % 4 in (p, 3)."""
    Together.kept, found = [], {}
    some = [
        lambda answers, p=p: {one.uid for one in answers if one.uid % 4 in (p, 3)} for p in range(3)
    ]
    wanted = {
        "everything": [exchange.everything] * 3,
        "nothing": [exchange.nothing] * 3,
        "some": some,
    }[kind]

    def run(p):
        own = [one for one in result.completions if one.uid % 3 == p]
        part = replace(result, completions=own, partial={})
        found[p] = exchange.exchanged(Together(p, 3), part, wanted[p])

    threads = [threading.Thread(target=run, args=(p,)) for p in range(3)]
    [one.start() for one in threads], [one.join(60) for one in threads]
    for p in range(3):
        uids = wanted[p](result.completions) | {
            one.uid for one in result.completions if one.uid % 3 == p
        }
        for ours, whole in zip(found[p].completions, result.completions, strict=True):
            if whole.uid not in uids:
                whole = replace(whole, **{name: 0 * getattr(whole, name) for name in CONTENT})
            assert same(ours, whole)
    bytes_of_all = sum(map(exchange.size_of, result.completions))
    if kind == "nothing":
        assert not Together.kept
    else:
        most = 2 * bytes_of_all  # three processes, each without its own third
        assert sum(Together.kept) == most if kind == "everything" else sum(Together.kept) < most


def test_the_results_of_two_processes_merge_into_one(result):
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
    expected = {"tokens": tokens, "seconds": 3.0, "programs": 3, "rounds": 8}
    expected |= {"tokens_per_second": tokens / 3, "accept_length": tokens / rounds}
    assert expected.items() <= found.stats.items()
    assert exchange.merged(halves[:1]) is halves[0]
