"""Dynamic sampling in rollouts of a simulated machine: the kept prompts are those of a NumPy reference, whatever comes when."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import scenarios
from pairwise import marked
from scenarios import Scenario, in_scenario
from test_idle import Work
from test_waiting import SlowPartner

from tlt_jax.distributed.board import POLL_S, LocalBoard
from tlt_jax.rollout.dialogue import Dialogue
from tlt_jax.rollout.idle import IdleDriver
from tlt_jax.rollout.recorder import Decided, Dispatched, Retired
from tlt_jax.rollout.run import kept
from tlt_jax.rollout.scheduler import driver, planner
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.queue import DealtQueue, WorkQueue
from tlt_jax.rollout.selection import Chooser, KeptPrompts, Selecting, Selection
from tlt_jax.simulate import simulator
from tlt_jax.tuner import goodput

WINDOW, SAMPLES, KEEP = 24, 4, 6
ARMS, NODE = ("2_2_4",), 1 / 200
BATCHES, SLOTS = (1, 4, 12), (256, 512, 1024)


def scores_of(seed: int, share: float) -> np.ndarray:
    """float[window, samples]: 0 and 1; about this share of the prompts have both."""
    draw = np.random.default_rng(seed)
    scores = np.repeat(draw.integers(0, 2, (WINDOW, 1)), SAMPLES, axis=1).astype(float)
    mixed = draw.random(WINDOW) < share
    scores[mixed, draw.integers(0, SAMPLES, mixed.sum())] = 1 - scores[mixed, 0]
    scores[mixed, 0], scores[mixed, 1] = 0.0, 1.0
    return scores


def reference(scores: np.ndarray, keep: int = KEEP) -> KeptPrompts:
    """The choice, from the scores of all answers to all prompts."""
    counts = scores.std(axis=1) > 0
    counting, others = np.flatnonzero(counts), np.flatnonzero(~counts)
    first = counting[:keep]
    tried = first[-1] + 1 if len(first) == keep else len(scores)
    prompts = np.sort(np.concatenate([first, others[: keep - len(first)]]))
    return KeptPrompts(tuple(prompts.tolist()), len(first), int(tried))


SHARES = (0.0, 0.2, 0.5, 0.9, 1.0)


# The choice alone


@pytest.mark.parametrize("share", SHARES)
def test_the_choice_is_that_of_all_scores_in_any_order_of_their_arrival(share):
    for seed in range(20):
        scores, order = scores_of(seed, share), random.Random(seed)
        expected = reference(scores)
        answers = [(prompt, sample) for prompt in range(WINDOW) for sample in range(SAMPLES)]
        order.shuffle(answers)
        chooser, came = Chooser(Selection(KEEP, dict), WINDOW, SAMPLES), set()
        for prompt, sample in answers:
            before = chooser.choice
            chooser.add(prompt, {sample: scores[prompt, sample]})
            came.add((prompt, sample))
            assert before is None or chooser.choice == before, "what is known stays"
            is_known = all((p, s) in came for p in range(expected.tried) for s in range(SAMPLES))
            assert (chooser.choice is not None) >= is_known
            assert expected.tried <= chooser.cap
        assert chooser.choice == expected


def test_prompts_are_begun_while_fewer_than_wanted_are_expected_to_count():
    """8 prompts to keep; half of the prompts count by the last steps."""
    chooser = Chooser(Selection(8, dict, share=0.5), 100, 1)
    assert chooser.bound == 16
    chooser = Chooser(Selection(8, dict, lambda scores: scores[0] > 0, share=1.0), 100, 1)
    assert chooser.bound == 8
    for prompt in range(4):  # none counts: (16 * 1 + 0) / (16 + 4) = 4 in 5
        chooser.add(prompt, {0: 0.0})
    assert chooser.bound == 4 + 10
    for prompt in range(6, 13):
        chooser.add(prompt, {0: 1.0})
    assert chooser.bound == 14 and chooser.cap == 100, "what was begun stays so; 7 count"
    chooser.add(13, {0: 1.0})
    assert chooser.bound == chooser.cap == 14, "8 count: no later prompt is needed"
    chooser.add(4, {0: 1.0})
    assert chooser.cap == 13 and chooser.choice is None, "prompt 5 is not decided"
    chooser.add(5, {0: 0.0})
    assert chooser.choice == KeptPrompts((4, 6, 7, 8, 9, 10, 11, 12), 8, 13)


def test_waves_begin_as_many_prompts_as_are_missing_once_all_are_decided():
    scores = scores_of(3, 0.4)
    counts = scores.std(axis=1) > 0
    chooser, ends = Chooser(Selection(KEEP, dict), WINDOW, SAMPLES, in_waves=True), []
    while chooser.choice is None:
        begun, end = ends[-1] if ends else 0, chooser.bound
        ends.append(end)
        for prompt in reversed(range(begun, end)):
            assert chooser.bound == end
            chooser.add(prompt, dict(enumerate(scores[prompt])))
    expected = [KEEP]
    while (missing := KEEP - counts[: expected[-1]].sum()) and expected[-1] < WINDOW:
        expected.append(min(WINDOW, expected[-1] + missing))
    assert ends == expected and chooser.choice == reference(scores)


# Whole rollouts of one or several processes, in virtual time


class Scores:
    """Scores that come some time after an answer has ended; `delay`: seconds of the longest wait."""

    def __init__(self, scores: np.ndarray, programs, delay: float, seed: int = 0):
        self.scores, self.programs, self.delay = scores, programs, delay
        self.random, self.due, self.asked = random.Random(seed), [], []

    def finished(self, answer) -> None:
        at = self.programs.clock.now() + self.delay * self.random.random()
        heapq.heappush(self.programs.due, (at, -1))
        self.due.append((at, answer.uid))
        self.asked.append(answer.uid)

    def new(self) -> dict[int, float]:
        now = self.programs.clock.now()
        found = {uid: self.scores.flat[uid] for at, uid in self.due if at <= now}
        self.due = [(at, uid) for at, uid in self.due if at > now]
        return found


class Messages(LocalBoard):
    """A board that counts what is written, and how often it is read, below each part of the rollout's scope."""

    def __init__(self):
        super().__init__()
        self.counted: dict[str, int] = {}

    def count(self, kind: str, key: str) -> None:
        name = f"{kind} {key.split('/')[1]}"
        self.counted[name] = self.counted.get(name, 0) + 1

    def write(self, key, text):
        self.count("write", key)
        super().write(key, text)

    def texts(self, prefix):
        self.count("read", prefix)
        return super().texts(prefix)


def machine(noise: int = 0):
    """Programs of a machine whose jitter has this seed; acceptance does not depend on it."""
    programs = in_scenario(
        Scenario(scenarios.gpu, 0.6, seed=noise, stalls=0.2 if noise else 0.0), scenarios.long_tailed(600)
    )  # fmt: skip
    programs.acceptance = Scenario(scenarios.gpu, 0.6, seed=0).trees
    return programs


class Played:
    """The rollout of `groups` groups in each of `processes` processes that keeps KEEP prompts."""

    def __init__(
        self, scores, groups=2, processes=1, delay=0.0, noise=0, capacity=8, in_waves=False, share=1.0
    ):  # fmt: skip
        programs, board = machine(noise), Messages()
        self.programs, self.clock, self.board = programs, programs.clock, board
        request = scenarios.request([64] * WINDOW, SAMPLES, 600, seed=5, capacity=capacity)
        tuner, count = goodput.goodput(ARMS, node_cost=NODE), groups * processes
        self.scores = [Scores(scores, programs, delay, noise + one) for one in range(processes)]
        self.selecting = [
            Selecting(Selection(KEEP, one.new, share=share), WINDOW, SAMPLES, in_waves, board, "s", index, processes)
            for index, one in enumerate(self.scores)
        ]  # fmt: skip
        self.rollouts, self.begun = [], []  # begun: prompts, and the state of the choice
        for process, selecting in enumerate(self.selecting):
            bound = lambda selecting=selecting: selecting.bound  # noqa: E731
            queue = WorkQueue(board, "s", WINDOW, SAMPLES, bound)
            table = planner.cost_table(NODE) if in_waves else None
            contexts = scenarios.contexts(programs, request, Planner(BATCHES, SLOTS, tuner), count)
            contexts = [
                replace(
                    one,
                    queue=DealtQueue(one.index, count, WINDOW, SAMPLES, bound)
                    if in_waves
                    else queue,
                    planner=Planner(BATCHES, SLOTS, tuner, cost_table=table),
                    is_in_order=in_waves,
                )
                for one in contexts[process * groups : (process + 1) * groups]
            ]
            note = lambda poll, one=selecting: self.note(one, poll)  # noqa: E731
            finish = selecting.finished(self.scores[process].finished)
            listeners = [selecting.listen, note]
            self.rollouts.append(driver.LocalGroups(contexts, listeners, finish, programs.clock))
        self.play()

    def note(self, selecting, poll) -> None:
        for event in poll.events:
            if isinstance(event, Decided):
                prompts = {uid // SAMPLES for uid in event.decision.joining}
                seen = selecting.bound, selecting.is_over, selecting.process
                self.begun += [(prompt, *seen) for prompt in prompts]

    def play(self) -> None:
        """Runs all processes to their ends."""
        for _ in range(200_000):
            happened = False
            for rollout, selecting in zip(self.rollouts, self.selecting, strict=True):
                happened |= any(poll.events for poll in rollout.poll())
                happened |= selecting.poll(self.clock.now(), rollout.is_decoding())
                if selecting.is_over:
                    rollout.stop()
            if all(map(driver.LocalGroups.is_done, self.rollouts)) and self.is_over:
                return
            if not happened:
                now = self.clock.now()
                self.clock.jump(
                    min([now + POLL_S, *(at for at, _ in self.programs.due if at > now)])
                )
        raise AssertionError("the rollout does not end")

    @property
    def is_over(self) -> bool:
        return all(selecting.is_over for selecting in self.selecting)

    @property
    def choices(self) -> set[KeptPrompts]:
        return {selecting.choice for selecting in self.selecting}

    @property
    def answers(self) -> dict[int, list[int]]:
        """The kept answers of all processes."""
        parts = [
            kept(rollout.result(), selecting.choice)
            for rollout, selecting in zip(self.rollouts, self.selecting, strict=True)
        ]
        return {one.uid: one.tokens.tolist() for part in parts for one in part.completions}


@pytest.fixture(scope="module")
def everything() -> dict[int, list[int]]:
    """All answers to all prompts, of a rollout that selects none."""
    programs = machine()
    request = scenarios.request([64] * WINDOW, SAMPLES, 600, seed=5, capacity=8)
    planner = Planner(BATCHES, SLOTS, goodput.goodput(ARMS, node_cost=NODE))
    contexts = scenarios.contexts(programs, request, planner, 2)
    result = simulator.simulate(driver.LocalGroups(contexts, clock=programs.clock), programs)
    return {one.uid: one.tokens.tolist() for one in result.completions}


def of(everything: dict[int, list[int]], choice: KeptPrompts) -> dict[int, list[int]]:
    """Those of all answers that belong to a choice."""
    prompts: Sequence[int] = choice.prompts
    return {uid: tokens for uid, tokens in everything.items() if uid // SAMPLES in prompts}


@pytest.mark.parametrize(
    "groups, processes, delay",
    marked([
        ((1, 1, 0.3), True), ((2, 1, 20.0), True), ((1, 2, 0.3), True), ((2, 3, 20.0), True), ((3, 1, 0.0), False),
        ((2, 3, 0.0), False),
    ]),
)  # fmt: skip
def test_the_kept_answers_are_those_of_a_run_that_decodes_everything(
    everything, groups, processes, delay
):
    for seed, share in enumerate((0.0, 0.3, 0.8)):
        scores = scores_of(seed, share)
        played = Played(scores, groups, processes, delay, noise=seed, capacity=6)
        assert played.choices == {reference(scores)}
        assert played.answers == of(everything, reference(scores))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_no_prompt_begins_beyond_the_bound_or_once_the_choice_is_known(share):
    for seed in range(2):
        played = Played(scores_of(seed, share), 2, delay=0.2, noise=seed)
        assert all(prompt < bound and not is_over for prompt, bound, is_over, _ in played.begun)
        assert {prompt for prompt, *_ in played.begun} >= set(
            range(reference(scores_of(seed, share)).tried)
        )


def test_answers_that_end_after_the_choice_are_not_scored_and_unfinished_ones_are_no_completions():
    scores = scores_of(1, 0.9)
    played = Played(scores, 2, share=0.4)  # more prompts begin than are needed
    (selecting,), (judge,) = played.selecting, played.scores
    result = played.rollouts[0].result()
    begun = {prompt for prompt, *_ in played.begun}
    assert max(begun) >= selecting.choice.tried, "some prompt was begun and not needed"
    assert result.partial, "some sequence was stopped"
    after = {one.uid for one in result.completions} - set(judge.asked)
    assert after and all(uid // SAMPLES >= selecting.choice.tried for uid in after)
    measured = sum(one.tokens for one in result.measurements)
    assert measured == result.stats["tokens"] > kept(result, selecting.choice).stats["kept_tokens"]


def test_groups_wait_for_slow_scores_without_memory_and_their_wait_is_measured():
    scores = scores_of(2, 0.4)
    fast, slow = Played(scores, 2), Played(scores, 2, delay=30.0)
    assert slow.clock.now() > fast.clock.now()
    assert fast.selecting[0].waited == 0.0
    assert 0 < slow.selecting[0].waited < slow.clock.now()


def test_an_answer_of_several_turns_that_joins_again_is_one_answer():
    scores, programs, polls = scores_of(2, 0.3), machine(), []
    judge = Scores(scores, programs, 0.0)
    selecting = Selecting(Selection(KEEP, judge.new), WINDOW, SAMPLES, False, LocalBoard(), "s")
    request = scenarios.request([64] * WINDOW, SAMPLES, 600, seed=5, capacity=8)
    partner = SlowPartner(programs, lambda uid, turn: 3.0 * (uid % 2), 1)
    dialogue = Dialogue(request, partner, can_append=True)
    planner = Planner(BATCHES, SLOTS, goodput.goodput(ARMS, node_cost=NODE))
    contexts = scenarios.contexts(programs, request, planner, 1, selecting=selecting)
    contexts = [replace(one, dialogue=dialogue) for one in contexts]
    listeners, finish = (
        [selecting.listen, polls.append, dialogue.listen],
        selecting.finished(judge.finished),
    )
    rollout = driver.LocalGroups(contexts, listeners, finish, programs.clock)
    simulator.simulate(rollout, programs, None, selecting)
    decided = [one.decision for poll in polls for one in poll.events if isinstance(one, Decided)]
    joined = [uid for decision in decided for uid in decision.joining]
    assert len(joined) > len({*joined}), "rows were lent"
    assert selecting.choice == reference(scores)


def test_groups_work_while_they_wait_for_prompts_and_decode_on_when_they_get_some(everything):
    scores, programs = scores_of(2, 0.3), machine()
    judge, work, polls = Scores(scores, programs, 20.0), Work(programs), []
    selecting = Selecting(Selection(KEEP, judge.new), WINDOW, SAMPLES, False, LocalBoard(), "s")
    request = scenarios.request([64] * WINDOW, SAMPLES, 600, seed=5, capacity=8)
    planner = Planner(BATCHES, SLOTS, goodput.goodput(ARMS, node_cost=NODE))
    contexts = scenarios.contexts(programs, request, planner, 2, selecting=selecting)
    listeners, finish = [selecting.listen, polls.append], selecting.finished(judge.finished)
    rollout = driver.LocalGroups(contexts, listeners, finish, programs.clock)
    background = IdleDriver(rollout, work, 2, 0.0, lambda: math.inf)
    result = kept(simulator.simulate(rollout, programs, background, selecting), selecting.choice)
    assert selecting.choice == reference(scores)
    found = {one.uid: one.tokens.tolist() for one in result.completions}
    assert found == of(everything, reference(scores))

    decodes = [one for one in result.spans if one.kind != "train"]
    last = {group: max(one.start for one in decodes if one.group == group) for group in range(2)}
    assert any(at < last[group] for at, group in work.dispatched), "a group decoded after its work"
    running: set[tuple[int, int]] = set()
    for poll in polls:  # no piece starts while a program of its group runs
        for event in poll.events:
            if isinstance(event, Dispatched) and event.kind == "train":
                assert poll.group not in {group for group, _ in running}
            elif isinstance(event, Dispatched):
                running.add((poll.group, event.number))
            elif isinstance(event, Retired):
                running.discard((poll.group, event.number))
    numbers = [(one.group, one.number) for one in result.spans]
    assert len(numbers) == len(set(numbers))


def test_a_process_sends_a_message_for_a_prompt_and_reads_one_key_at_a_time():
    played = Played(scores_of(2, 0.3), 2, 3, delay=0.5)
    counted, polls = played.board.counted, played.clock.now() / POLL_S
    sent = [process for *_, process in played.begun if process]
    assert counted["write scores"] <= len(sent) and counted["write selected"] <= WINDOW
    assert counted["read scores"] <= polls + 2 and counted["read selected"] <= 2 * polls + 2
    assert not played.board.texts("s/scores/"), "what was read is deleted"


def test_waves_take_the_same_decisions_however_the_machine_and_the_scores_are_delayed(everything):
    scores, seen = scores_of(4, 0.4), []
    for noise, delay in ((0, 0.0), (1, 0.5), (2, 10.0)):
        played = Played(scores, 3, 1, delay, noise, in_waves=True)
        assert played.choices == {reference(scores)}
        assert played.answers == of(everything, reference(scores))
        decisions = played.rollouts[0].result().decisions
        seen.append([[one for one in decisions if one.group == group] for group in range(3)])
    assert repr(seen[0]) == repr(seen[1]) == repr(seen[2])
    two = Played(scores, 1, 3, 0.5, 3, in_waves=True)
    apart = [rollout.result().decisions for rollout in two.rollouts]
    assert repr(apart) == repr(seen[0]), "three processes decide as three groups of one"
