"""What teams use instead of drafting: equal to plain decoding where nothing overlaps, else as counted by hand, and bounded."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tlt_jax.config import Config
from tlt_jax.config.schema import Data, Rollout, Train
from tlt_jax.errors import ConfigError
from tlt_jax.rollout.events import Dispatched, Emitted, Look, Retired
from tlt_jax.simulate import acceptance, alternatives, report, run
from tlt_jax.simulate.alternatives import AHEAD, simulate
from tlt_jax.simulate.continuing import ContinuingSteps
from tlt_jax.simulate.cost_table import CostTable, Row
from tlt_jax.simulate.devices import Devices
from tlt_jax.simulate.lengths import Drawn, LogNormal
from tlt_jax.simulate.off_policy import OffPolicy, off_policy
from tlt_jax.simulate.one_step_off import OneStepOff
from tlt_jax.simulate.world import Step, World
from tlt_jax.simulate.written import Written
from tlt_jax.spec_decode.stopping import RUNNING, STOPPED

CALLS = {"publish": 0.25, "reward": 0.5, "other": 0.125}
ROUNDS = [Row("round", 0.01 + 2e-5 * rows, "measured", rows, 1024) for rows in (1, 4, 32)]
TABLE = CostTable(
    (
        *ROUNDS,
        *(Row(name, seconds, "measured") for name, seconds in CALLS.items()),
        Row("update", 1.0, "measured", tokens=1e4),
    )
)


def configuration(**rollout):
    """Plain rollouts have no longer chunks than those that continue."""
    knobs = {"prompts": 8, "samples": 2, "max_new_tokens": 400, "chunk": 64} | rollout
    return Config(rollout=Rollout(**knobs), data=Data(max_prompt_tokens=32), train=Train(steps=6))


CONFIG = configuration()


ANSWERS = LogNormal(100, 0.8)


def world(table=TABLE, answers=ANSWERS, steps=3, groups=1, compiles=False):
    return World(table, answers, acceptance.NEW, steps, groups, compiles)


def plain_steps(given):
    return run.simulate(CONFIG, "plain", world=given)


class OneAnswer:
    """Steps of a prompt with one answer each, of these tokens."""

    def __init__(self, *answers):
        self.answers = answers

    def draw(self, step, prompts, samples, seed):
        return Drawn(np.full(1, 20), np.full((1, 1), self.answers[step]))

    def describe(self):
        return "given"


def nothing(step):
    """Is told of steps."""


def continuing(given, devices, ahead, config=CONFIG):
    steps = ContinuingSteps(config, given, devices, ahead, nothing, run.plain_run)
    return steps, steps.run()


# Nothing overlaps


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("are_shared", [True, False])
def test_steps_whose_answers_never_continue_are_those_of_plain_decoding(groups, are_shared):
    """Partial rollouts with no prompt begun ahead, and asynchronous ones, which wait for each update, on as many groups."""
    begin = Row("begin", 0.5 if are_shared else 1e-9, "measured")
    given = world(CostTable((*TABLE.rows, begin)), steps=2, groups=groups)
    plain = plain_steps(given)
    _, found = continuing(given, Devices(groups, groups, are_shared), 0.0)
    for one, other in zip(plain, found, strict=True):
        assert other.seconds == pytest.approx(one.seconds, rel=1e-3)
        assert other.tokens == one.tokens and other.off_policy == OffPolicy()
        if are_shared:
            assert other.bubble == pytest.approx(one.bubble, abs=1e-3) and not other.split


def test_a_rollout_overlaps_with_the_update_before_it_and_with_nothing_else():
    """Each step takes what its rollout on 2 groups needs beyond the update of the step before on the 1 other group."""
    given = world(steps=3, groups=3)
    rollouts = [one.seconds["rollout"] for one in plain_steps(world(steps=3, groups=2))]
    found = OneStepOff(CONFIG, given, Devices(2, 1), nothing, run.plain_run).run()
    before = 0.0
    updates = [one.seconds["update"] for one in plain_steps(world(steps=3, groups=1))]
    for rollout, update, step in zip(rollouts, updates, found, strict=True):
        after = update + CALLS["reward"] + CALLS["other"]
        assert step.seconds["update"] == pytest.approx(update)
        assert step.total == pytest.approx(CALLS["publish"] + max(rollout - before, 0) + after)
        before = after
    ages = [step.off_policy for step in found]
    assert ages == [OffPolicy(), *2 * [OffPolicy(1.0, 1, 1.0)]]
    assert found[-1].split == "2+1" and 0 < found[-1].bubble < 1


# Answers continue


def test_a_partial_rollout_is_resumed_under_the_new_policy():
    """Two rows, a round a chunk. The answer of 100 tokens begins with the first of 40, and is trained on in the third step:

    40 of its tokens are of the first policy, 40 of the second, 20 of the third, which is trained.
    """
    config = configuration(
        prompts=1,
        samples=1,
        slots=2,
        chunk=1,
        max_new_tokens=127,
        batch_buckets=[2],
        cache_buckets=[256],
    )
    costs = CostTable((Row("round", 0.01, "measured", 2, 256), Row("publish", 0.25, "measured")))
    given = world(costs, OneAnswer(40, 100, 40, 40, 40), steps=4)
    _, found = continuing(given, Devices(1, 1, are_shared=True), 1.0, config)
    assert [step.tokens for step in found] == [40, 40, 100, 40]
    assert [step.off_policy.most for step in found] == [0, 0, 2, 1]
    assert found[2].off_policy.mean == pytest.approx((2 * 40 + 40) / 100, abs=0.06)
    assert all(step.recomputing > 0 for step in found[1:3])


@pytest.mark.parametrize("devices", [Devices(3, 3, are_shared=True), Devices(2, 1)])
def test_no_more_prompts_begin_than_the_bound_allows_and_none_is_trained_twice(devices):
    given, taken, begun = world(steps=4, groups=3), [], []
    steps = ContinuingSteps(CONFIG, given, devices, 0.5, nothing, run.plain_run)
    take, add = steps.written.take, steps.written.add

    def watched(prompts):
        taken.append(take(prompts))
        return taken[-1]

    def added(prompt, *rest):
        begun.append((prompt, steps.version))
        add(prompt, *rest)

    steps.written.take, steps.written.add = watched, added
    found = steps.run()
    assert all(prompt < (version + 1.5) * 8 for prompt, version in begun)
    assert max(prompt for prompt, _ in begun) >= 8 * 4, "some prompts are begun ahead"
    trained = sum(taken, [])
    assert len(trained) == len(set(trained)) == 4 * 8
    answers = np.array([steps.one.answers[uid] for uid in range(len(steps.one.answers))]).clip(
        max=400
    )
    expected = [answers.reshape(-1, 2)[prompts].sum() for prompts in taken]
    assert [step.tokens for step in found] == expected


def test_prompts_begun_ahead_shorten_a_step_and_make_its_tokens_older():
    """On three groups, the mean of the last three of six steps."""
    given, found = world(steps=6, groups=3), {}
    for ahead in (0.0, 1.0):
        _, steps = continuing(given, Devices(3, 3, are_shared=True), ahead)
        found[ahead] = report.summary(report.late(steps))
    assert found[1.0]["step"] < 0.8 * found[0.0]["step"]
    assert found[1.0]["bubble"] < found[0.0]["bubble"]
    assert 0.3 < found[1.0]["age"] < 2 and found[1.0]["older"] > 0.3 and found[0.0]["age"] == 0


# Splits, ages and tables


@pytest.mark.parametrize(
    ("groups", "best"), [(2, 1), (3, 2), (16, 1), (16, 5), (16, 15), (64, 12), (1000, 62)]
)
def test_the_split_with_the_fewest_seconds_is_found_in_few_tries(groups, best):
    """Of more than 16 groups to a 16th of them; each halving tries two splits, and three are left."""
    tried = []

    def steps(rollout, given):
        tried.append(rollout)
        return [report_step(10.0 + abs(rollout - best))] * given.steps

    assert alternatives.best_split("async", world(groups=groups), steps) == best
    assert len(tried) == len(set(tried)) <= 2 * np.log2(min(groups, 16)) + 1
    with pytest.raises(ConfigError, match="--arms async .* use --groups 2 or more"):
        alternatives.best_split("async", world(groups=1), steps)


def report_step(seconds):
    return Step({"rollout": seconds}, 1, 0.0, 0.0, 0.0, 0.0, {}, 0.0)


def test_ages_are_those_counted_by_hand():
    assert (
        off_policy({0: 6, 1: 2, 3: 2}) == pytest.approx((0.8, 3, 0.4))
        and off_policy({}) == OffPolicy()
    )
    written = Written(samples=2, groups=1)

    def look(*events):
        written.listen(Look(0, 0.0, 0.0, events))

    look(Dispatched(1, "decode", 2, 8))
    written.version[0] = 1
    look(
        Retired(1, "decode"),
        Emitted(4, np.zeros(5), np.zeros(5), RUNNING),
        Dispatched(2, "decode", 2, 8),
    )
    assert not written.complete
    look(
        Retired(2, "decode"),
        Emitted(4, np.zeros(3), np.zeros(3), STOPPED),
        Emitted(5, np.zeros(2), np.zeros(2), STOPPED),
    )
    written.complete.add(9)
    assert written.take(1) == [2] and written.take(2) == [9] and written.take(1) == []
    assert written.ages([2], 3) == {3: 5, 2: 5}, (
        "chunk 1 was dispatched with the weights before any update"
    )


def test_the_table_names_ages_and_splits_only_where_an_arm_has_them():
    plain = [report_step(10.0)] * 2
    assert "mean age" not in report.table({"plain": plain})
    late = [report_step(4.0)] * 2
    for one in late:
        one.off_policy, one.split = OffPolicy(0.5, 2, 0.25), "3+1"
    lines = report.table({"plain": plain, "async": late}).splitlines()
    assert re.split("  +", lines[1].strip())[-4:] == ["mean age", "most age", "older", "groups"]
    assert lines[2].split()[-5:] == ["1.00", "0.00", "0", "0%", "all"]
    assert lines[3].split()[-5:] == ["2.50", "0.50", "2", "25%", "3+1"]


@pytest.mark.parametrize("name", ["one_step_off", "async", "partial"])
def test_an_arm_repeats_to_the_bit(name):
    given = world(groups=2, steps=2, compiles=True)
    first, again = (
        simulate(CONFIG, name, world=given, plain=run.simulate, make=run.plain_run, ahead=AHEAD)
        for _ in range(2)
    )
    assert repr(first) == repr(again) and len(first) == 2
