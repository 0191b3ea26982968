"""Deterministic rollouts: prompts are dealt once, and no delay of the simulated machine changes a decision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tlt_jax.rollout import deterministic, driver, simulated
from tlt_jax.rollout.deterministic import DealtQueue
from tlt_jax.rollout.planner import Planner
from tlt_jax.rollout.simulated import in_world
from tlt_jax.spec_decode.strategy import PLAIN, parse
from tlt_jax.tuner import goodput, worlds
from tlt_jax.tuner.interface import Measurement
from tlt_jax.tuner.worlds import World

ARMS, NODE = ("2_2_4", "6_4_16"), 1 / 200


@pytest.mark.parametrize("prompts, samples, groups", [(7, 3, 2), (1, 4, 3), (8, 8, 4)])
def test_every_sample_is_dealt_once_and_a_prompt_to_one_group(prompts, samples, groups):
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
        assert not kept, "every prompt that was begun is known to be started as a whole"
    assert dealt.keys() == {(p, s) for p in range(prompts) for s in range(samples)}
    assert all(group == prompt % groups for (prompt, _), group in dealt.items())


def test_the_table_knows_the_shape_and_the_rounds_alone():
    seen = Measurement(
        0, 8, 7.5, 512, parse("6_4_16"), 16, 120, 300, seconds=1.0, hits=np.zeros((6, 16, 4)), catch_up=3.0
    )  # fmt: skip
    priced = deterministic.pricing(NODE)
    other = seen._replace(seconds=9.0, doubt=5.0, catch_up=0.0, is_moved=True)
    assert repr(priced(seen)) == repr(priced(other)) and priced(seen).is_timed
    assert priced(seen._replace(rounds=32)).seconds == pytest.approx(2 * priced(seen).seconds)
    plain = priced(seen._replace(strategy=PLAIN))
    assert priced(seen).seconds > plain.seconds
    assert priced(plain._replace(batch=64)).seconds > plain.seconds


def decided(noise: int, is_in_order: bool) -> list[str]:
    """Decisions of a rollout in three groups, of a machine whose jitter, stalls and bursts have this seed."""
    law, tuner = simulated.long_tailed(600), goodput.goodput(ARMS, node_cost=NODE)
    programs = in_world(World(worlds.gpu, 0.6, seed=noise, stalls=0.2, bursts=noise > 0), law)
    trees = World(worlds.gpu, 0.6, seed=0).trees  # what drafts are worth is the same
    programs.acceptance = trees
    request = simulated.request([64] * 18, 4, 600, seed=5, capacity=12)
    price = deterministic.pricing(NODE) if is_in_order else None
    shared = Planner((1, 4, 12), (256, 512, 1024), tuner)
    contexts = simulated.contexts(programs, request, shared, groups=3)
    if is_in_order:
        contexts = [
            replace(
                one,
                queue=DealtQueue(one.index, 3, 18, 4),
                planner=Planner((1, 4, 12), (256, 512, 1024), tuner, pricing=price),
                is_in_order=True,
            )
            for one in contexts
        ]
    result = simulated.simulate(driver.start(contexts, clock=programs.clock), programs)
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
    assert decided(0, False) != decided(1, False), "which the clock does otherwise"
