"""Deterministic rollouts: prompts are assigned once, and no delay of the simulated machine changes a decision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scenarios
from scenarios import Scenario, in_scenario

from tlt_jax.rollout.scheduler import driver, planner
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.queue import DealtQueue
from tlt_jax.simulate import simulator
from tlt_jax.spec_decode.strategy import PLAIN, parse
from tlt_jax.tuner import goodput
from tlt_jax.tuner.interface import Measurement

ARMS, NODE = ("2_2_4", "6_4_16"), 1 / 200


@pytest.mark.parametrize("prompts, samples, groups", [(7, 3, 2), (1, 4, 3), (8, 8, 4)])
def test_every_sample_is_assigned_once_and_a_prompt_to_one_group(prompts, samples, groups):
    rng, dealt = np.random.default_rng(prompts), {}
    for group in range(groups):
        queue, kept = DealtQueue(group, groups, prompts, samples), set()
        while True:
            taken = queue.take(int(rng.integers(0, 5)), kept)
            for one in taken.samples:
                assert dealt.setdefault(one, group) == group
            kept = (kept | {prompt for prompt, _ in taken.samples}) - taken.started
            for prompt in taken.started:
                assert all((prompt, sample) in dealt for sample in range(samples))
            if taken.is_exhausted:
                break
        assert not kept, "every started prompt is reported once all its samples are started"
    assert dealt.keys() == {(p, s) for p in range(prompts) for s in range(samples)}
    assert all(group == prompt % groups for (prompt, _), group in dealt.items())


def test_the_cost_table_depends_only_on_the_shape_and_the_rounds():
    seen = Measurement(
        0, 8, 7.5, 512, parse("6_4_16"), 16, 120, 300, seconds=1.0, hits=np.zeros((6, 16, 4)), catch_up=3.0
    )  # fmt: skip
    with_table_seconds = planner.cost_table(NODE)
    other = seen._replace(seconds=9.0, uncertainty=5.0, catch_up=0.0, is_moved=True)
    assert (
        repr(with_table_seconds(seen)) == repr(with_table_seconds(other))
        and with_table_seconds(seen).is_timed
    )
    assert with_table_seconds(seen._replace(rounds=32)).seconds == pytest.approx(
        2 * with_table_seconds(seen).seconds
    )
    plain = with_table_seconds(seen._replace(strategy=PLAIN))
    assert with_table_seconds(seen).seconds > plain.seconds
    assert with_table_seconds(plain._replace(batch=64)).seconds > plain.seconds


def decided(noise: int, is_in_order: bool) -> list[str]:
    """Decisions of a rollout in three groups, on a machine whose jitter, stalls and bursts have this seed."""
    lengths, tuner = scenarios.long_tailed(600), goodput.goodput(ARMS, node_cost=NODE)
    programs = in_scenario(
        Scenario(scenarios.gpu, 0.6, seed=noise, stalls=0.2, bursts=noise > 0), lengths
    )
    trees = Scenario(scenarios.gpu, 0.6, seed=0).trees  # acceptance does not depend on the noise
    programs.acceptance = trees
    request = scenarios.request([64] * 18, 4, 600, seed=5, capacity=12)
    compile_cost = planner.cost_table(NODE) if is_in_order else None
    shared = Planner((1, 4, 12), (256, 512, 1024), tuner)
    contexts = scenarios.contexts(programs, request, shared, groups=3)
    if is_in_order:
        contexts = [
            replace(
                one,
                queue=DealtQueue(one.index, 3, 18, 4),
                planner=Planner((1, 4, 12), (256, 512, 1024), tuner, cost_table=compile_cost),
                is_in_order=True,
            )
            for one in contexts
        ]
    result = simulator.simulate(driver.LocalGroups(contexts, clock=programs.clock), programs)
    assert len(result.completions) == 72
    return sorted(repr((one.group, number, one)) for number, one in numbered(result.decisions))


def numbered(decisions):
    """The decisions of each group with their numbers."""
    counts: dict[int, int] = {}
    for one in decisions:
        counts[one.group] = counts.get(one.group, 0) + 1
        yield counts[one.group], one


def test_no_delay_changes_a_decision():
    first, *others = (decided(noise, True) for noise in range(4))
    assert all(other == first for other in others)
    assert any("6_4_16" in one or "topk=4" in one for one in first), "some chunk drafted"
    assert decided(0, False) != decided(1, False), "out of order the clock changes decisions"
