"""Metrics of a step: speculation rates, times and counts from the measured chunks, and the accounts of groups."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tlt_jax.config import Config
from tlt_jax.metrics import names
from tlt_jax.rollout.recorder import Span
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.train import step_metrics
from tlt_jax.train.health import Health
from tlt_jax.tuner.interface import Measurement

TREE = strategies.parse("2_2_4")
STATS = {
    "accept_length": 2.5,
    "speculated_tokens": 60,
    "tokens": 100,
    "declined": 4,
    "pool_programs": 3,
    "pool_bytes": 2**21,
}


def chunk(
    strategy=TREE, batch=4, seconds=0.5, rounds=10, deep=(12, 3), predicted=math.nan, number=0
) -> Measurement:
    """A chunk of four live rows in which deep[d] trees were accepted to depth d + 1."""
    hits = np.zeros((strategy.depth, strategy.nodes, strategy.topk), int)
    if strategy != PLAIN:
        hits[0, 0, 0], hits[1, 1, 1] = deep
    tokens = 4 * rounds + int(hits.sum())
    return Measurement(
        0, batch, 4.0, 256, strategy, rounds, 4 * rounds, tokens, seconds, hits, number, predicted, "kept"
    )  # fmt: skip


def metrics(*measurements: Measurement) -> dict[str, float]:
    spans = [Span(0, "catch_up", 1.0, 1.25, 4, 0), Span(0, "decode", 2.0, 9.0, 4, 1)]
    rollout = SimpleNamespace(measurements=list(measurements), stats=STATS, spans=spans)
    return step_metrics.of_drafting("eagle3", rollout)


def test_drafting_is_reported_by_kind_depth_and_batch_under_names_of_the_list():
    measured = [chunk(), chunk(seconds=0.7, deep=(20, 5)), chunk(seconds=9.0), chunk(batch=1)]
    plain = chunk(PLAIN, seconds=0.2), chunk(PLAIN, batch=64, seconds=0.3)
    found = metrics(*measured, *plain)
    for name in found:
        assert names.find(name, "scalar")
    expected = {
        "accept_length": 2.5, "accept_length/eagle3": 2.5, "accept_rate@1": (12 + 20 + 12 + 12) / 160,
        "round_ms@4": 70, "plain_round_ms@4": 20, "nodes@4": (3 * 4 + 1) / 4, "nodes@64": 1,
        "pool_programs": 3, "pool_mib": 2,
    }  # fmt: skip
    assert {name: found[f"speculation/{name}"] for name in expected} == pytest.approx(expected)
    for name in ("round_ms@64", "plain_round_ms@1", "prediction_error"):
        assert f"speculation/{name}" not in found
    assert metrics(chunk(PLAIN)) == {}
    found = metrics(chunk(predicted=2 * 55 / 0.5), chunk())
    assert found["speculation/prediction_error"] == pytest.approx(math.log(2))


def test_switches_count_by_group_and_explorations_by_their_seconds():
    tried = chunk(seconds=0.7, number=1)._replace(is_exploring=True)
    first = [chunk(PLAIN), tried, chunk(PLAIN, number=2), chunk(PLAIN, number=3)]
    found = metrics(*reversed(first), chunk(number=7)._replace(group=1))
    assert found["speculation/switches"] == 2
    assert found["speculation/explored_s"] == 0.7 and found["speculation/catch_up_s"] == 0.25


def test_others_share_of_the_processors_is_a_mean_over_seconds():
    seen = [chunk(seconds=1.0)._replace(taken=0.5), chunk(seconds=3.0)]
    assert step_metrics.taken(seen) == 0.125 and step_metrics.taken([]) == 0.0


def test_chunks_become_lines_whose_accepted_rounds_add_up():
    rollout = SimpleNamespace(measurements=[chunk(number=7, predicted=90.0), chunk(PLAIN)])
    assert step_metrics.chunks("none", rollout) == []
    drafted, plain = step_metrics.chunks("ngram", rollout)
    assert drafted.accepted == [28, 9, 3]
    assert sum(n * count for n, count in enumerate(drafted.accepted)) == 12 + 3
    assert (drafted.number, drafted.predicted) == (7, 90.0)
    assert drafted.measured == pytest.approx(55 / 0.5)
    assert (plain.accepted, plain.predicted, plain.strategy) == ([], None, "off")


def test_padding_is_the_share_of_row_rounds_without_a_live_sequence():
    measured = [chunk(batch=16, rounds=10), chunk(PLAIN, batch=4, rounds=40)]
    rollout = SimpleNamespace(measurements=measured)
    assert step_metrics.padding(rollout) == pytest.approx(1 - (40 + 160) / (160 + 160))
    assert step_metrics.padding(SimpleNamespace(measurements=[])) == 0


def test_the_seconds_of_every_group_add_up_to_the_rollout_under_names_of_the_list():
    spans = [SimpleNamespace(group=0, kind="decode", start=1.0, end=6.0),
             SimpleNamespace(group=1, kind="decode", start=4.0, end=5.0)]  # fmt: skip
    rollout = SimpleNamespace(
        spans=spans, compile_waits=dict.fromkeys((0, 1), [(0.0, 2.0)]), stats={"seconds": 8.0}
    )
    found = step_metrics.of_groups(rollout, 2)
    assert found == {
        "group/busy_s@0": 4, "group/compile_wait_s@0": 2, "group/idle_s@0": 2,
        "group/busy_s@1": 1, "group/compile_wait_s@1": 2, "group/idle_s@1": 5,
    }  # fmt: skip
    rollout.stats["awaited"] = 4.0  # with environments
    assert step_metrics.of_groups(rollout, 2) == found | {"idle/environment": 0.25}
    for name in [*found, "idle/environment"]:
        names.find(name, "scalar")


def test_of_a_thousand_groups_the_scalars_are_ten():
    spans = [SimpleNamespace(group=group, kind="decode", start=0.0, end=1.0 + group % 7 + (group == 83))
             for group in range(1000)]  # fmt: skip
    rollout = SimpleNamespace(spans=spans, compile_waits={}, stats={"seconds": 16.0})
    found = step_metrics.of_groups(rollout, 1000)
    assert len(found) == 10 and found["group/latest"] == 83
    assert found["group/busy_s/max"] == 8.0 and found["group/idle_s/max"] == 15.0
    assert sum(found[f"group/{kind}_s/mean"] for kind in ("busy", "compile_wait", "idle")) == 16
    for name in found:
        names.find(name, "scalar")


def test_means_over_several_minibatches_are_weighted_by_what_they_are_means_of():
    """Of 30 and 10 tokens in 2 and 6 answers; the third minibatch counts no token."""
    steps = [
        {"tokens": 30, "answers": 2, "entropy": 1.0, "ratio_max": 3.0, "loss": 2.0, "empty_updates": 0},
        {"tokens": 10, "answers": 6, "entropy": 5.0, "ratio_max": 2.0, "loss": 8.0, "empty_updates": 1},
        {"tokens": 0, "answers": 0, "entropy": 0.0, "ratio_max": 0.0, "loss": 0.0, "empty_updates": 1},
    ]  # fmt: skip
    more = {"rollout_corr/rollout_is_mean": (1.0, 2.0, 0.0), "sequence_ratio_mean": (1.0, 3.0, 0.0)}
    for name, values in more.items():
        for step, value in zip(steps, values, strict=True):
            step[name] = value
    rewards, advantages = np.zeros((1, 2)), np.zeros(2)
    found = step_metrics.of_update(steps, rewards, advantages, 1.0)
    expected = {
        "actor/entropy": 2.0, "actor/ratio_max": 3.0, "actor/loss": 5.0, "actor/empty_updates": 2,
        "rollout_corr/rollout_is_mean": 1.25, "actor/sequence_ratio_mean": 2.5,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert "actor/tokens" not in found and "actor/answers" not in found
    alone = step_metrics.of_update(steps[2:], rewards, advantages, 1.0)
    assert alone["actor/entropy"] == 0 and alone["actor/empty_updates"] == 1


def test_what_is_compiled_is_that_of_the_process_that_took_longest_for_it():
    laps = [
        {"timing_s/rollout": 3.0, "perf/compiles": 2, "perf/compile_s": 0.5, "perf/compile_s/update": 0.5},
        {"timing_s/rollout": 3.1, "perf/compiles": 1, "perf/compile_s": 2.0, "perf/compile_s/rollout": 2.0},
    ]  # fmt: skip
    assert step_metrics.most_compiling(laps) == {
        "perf/compiles": 1, "perf/compile_s": 2.0, "perf/compile_s/rollout": 2.0, "perf/compile_s/update": 0.0,
    }  # fmt: skip
    assert step_metrics.most_compiling(laps[:1]).items() <= laps[0].items()


def test_a_difference_between_rollout_and_update_that_grows_is_warned_of_once():
    """Of three times that of the first three steps, and above 0.02; then of three times as much again."""
    health = Health(Config())
    given = [0.01, 0.02, 0.03, 0.05, None, 0.06, 0.061, 0.18, 0.19, math.nan]
    assert [bool(health.grown(one)) for one in given] == [False] * 6 + [True, False, True, False]
    small = Health(Config())
    assert not any(small.grown(one) for one in (1e-6, 1e-6, 1e-6, 0.019))
