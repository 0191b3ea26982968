"""Environments that reply late, in virtual time: whom they delay."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
import scenarios
from scenarios import Scenario, in_scenario

from tlt_jax.rollout.dialogue import Dialogue
from tlt_jax.rollout.scheduler.driver import LocalGroups
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.simulate import simulator
from tlt_jax.tuner import baselines

ROUND_S, ROUNDS, IN_FLIGHT, TURNS = 0.02, 8, 2, 4
BATCHES, SLOTS = (1, 4, 16, 64), (512, 1024, 2048)


class SlowPartner:
    """Replies `wait(uid, turn)` seconds after it has heard a turn, and ends a sequence after TURNS turns."""

    def __init__(self, programs, wait, groups):
        self.programs, self.wait, self.groups = programs, wait, groups
        self.turns, self.due = {}, []

    def most(self, uid):
        return 0

    def hear(self, uid, turn, logprobs):
        count = self.turns[uid] = self.turns.get(uid, 0) + 1
        at = self.programs.clock.now() + self.wait(uid, count)
        heapq.heappush(self.due, (at, uid, count))
        for group in range(self.groups):  # which looks for replies then
            heapq.heappush(self.programs.due, (at, group))

    def replies(self):
        found = {}
        while self.due and self.due[0][0] <= self.programs.clock.now():
            _, uid, count = heapq.heappop(self.due)
            found[uid] = np.zeros(12, np.int32) if count < TURNS else None
        return found


def play(wait, count=16, rows=16, groups=1, only=None):
    """(seconds, seconds in which groups waited for replies, uid -> its end, tokens) of conversations, or of `only` one."""
    scenario = Scenario(lambda batch, slots, arm: 1e3 * ROUND_S, 0.5, noise=0.0, stalls=0.0)
    programs = in_scenario(scenario, scenarios.long_tailed(400))
    request = scenarios.request(
        [64] * count, 1, 1900, seed=0, capacity=rows, rounds=ROUNDS, in_flight=IN_FLIGHT
    )
    if only is not None:
        request = replace(request, prompts=request.prompts[:1], keys=request.keys[only : only + 1])
    partner = SlowPartner(
        programs, wait if only is None else lambda _, turn: wait(only, turn), groups
    )
    planner = Planner(BATCHES, SLOTS, baselines.fixed("off"), None)
    dialogue, ends = Dialogue(request, partner, can_append=True), {}
    contexts = scenarios.contexts(programs, request, planner, groups)
    rollout = LocalGroups(
        [replace(one, dialogue=dialogue) for one in contexts],
        [dialogue.listen],
        lambda answer: ends.update({answer.uid: programs.clock.now()}),
        programs.clock,
    )
    stats = simulator.simulate(rollout, programs).stats
    return stats["seconds"], rollout.awaited, ends, stats["tokens"]


def long_tail(uid, turn):
    """0, 1 or 10 seconds."""
    return float(np.random.default_rng([uid, turn]).choice([0, 1, 10], p=[0.6, 0.3, 0.1]))


@pytest.mark.parametrize(
    "count, rows, groups", [(16, 16, 1), (32, 32, 1), (64, 8, 1), (64, 16, 1), (64, 8, 2)]
)
def test_a_rollout_takes_as_long_as_its_longest_conversation_or_its_rounds(count, rows, groups):
    """Within a tenth; where both matter, as long as without waits."""
    seconds, _, ends, tokens = play(long_tail, count, rows, groups)
    alone = max(play(long_tail, count, 1, only=uid)[0] for uid in range(count))
    whole = rows * groups
    rounds = tokens / whole * ROUND_S
    unwaited = play(lambda uid, turn: 0.0, count, rows, groups)[0]
    bound = unwaited if whole < count < 8 * whole else max(alone, rounds)
    assert len(ends) == count and seconds < 1.1 * bound


def test_a_slow_environment_delays_its_own_sequence_and_no_other():
    _, _, ends, _ = play(lambda uid, turn: 0.0)
    _, _, slow, _ = play(lambda uid, turn: 50.0 * (uid == 3))
    late = slow.pop(3) - ends.pop(3)
    slack = TURNS * ROUNDS * IN_FLIGHT * ROUND_S  # a turn waits for the chunks that run
    assert abs(late - 50.0 * TURNS) < 2 * slack
    for uid, end in ends.items():
        assert abs(slow[uid] - end) < slack


def test_seconds_in_which_everything_waits_for_replies_are_counted_alone():
    seconds, awaited, _, _ = play(lambda uid, turn: 10.0, only=5)
    assert awaited == pytest.approx(10 * TURNS, abs=0.01)
    assert seconds == pytest.approx(awaited + play(lambda uid, turn: 0.0, only=5)[0], abs=0.5)
    assert play(lambda uid, turn: 2.0 * (uid == 3))[1] == 0.0
