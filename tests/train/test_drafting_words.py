"""What a run says about drafting: once when it begins or ceases, with the measured speed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_step_metrics import TREE, chunk

from tlt_jax.config.schema import Speculation
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.train import drafting_words
from tlt_jax.train.drafting_words import DraftingWords
from tlt_jax.tuner import make

WHY = "its programs cost more than the rest of this run can gain"
PLAIN_CHUNK = chunk(PLAIN, seconds=0.2, rounds=10)  # 20 ms a round
# 55 tokens of four rows in 10 rounds: as many as in 13.75 plain rounds, which take 0.275 s.
DRAFTED = chunk(TREE, seconds=0.25, rounds=10, deep=(12, 3))


def said(words: DraftingWords, *steps) -> list[str]:
    """What is said after each step, given its chunks."""
    return [words.after(number, chunks, WHY) for number, chunks in enumerate(steps, 1)]


def test_the_begin_of_drafting_is_said_once_with_the_measured_speed():
    words = DraftingWords(60)
    found = said(words, [PLAIN_CHUNK], [PLAIN_CHUNK, DRAFTED], [DRAFTED], [DRAFTED])
    assert found == [
        "",
        "drafts from step 2: 1.1 times as fast as plain decoding, 58% of the tokens",
        "",
        "",
    ]
    assert words.gain([DRAFTED]) == pytest.approx(0.275 / 0.25)
    assert words.gain([DRAFTED._replace(catch_up=0.025)]) == pytest.approx(1.0)


def test_a_speed_is_never_said_from_times_that_are_not_reliable_or_of_other_shapes():
    untimed = DRAFTED._replace(uncertainty=float("inf"))
    words = DraftingWords(60)
    assert said(words, [PLAIN_CHUNK], [untimed], [DRAFTED])[1:] == [
        "", "drafts from step 2: 1.1 times as fast as plain decoding, 100% of the tokens",
    ]  # fmt: skip
    other = [chunk(PLAIN, batch=8), DRAFTED]
    assert said(DraftingWords(60), other, other, other) == [
        "", "", "drafts from step 1: 1.4 tokens a round, 58% of the tokens",
    ]  # fmt: skip


def test_a_run_that_does_not_draft_says_so_once_after_a_few_steps():
    steps = [[PLAIN_CHUNK]] * 6
    assert said(DraftingWords(60), *steps) == ["", "", f"not drafting: {WHY}", "", "", ""]
    assert said(DraftingWords(1), [PLAIN_CHUNK]) == [f"not drafting: {WHY}"]


def test_explored_strategies_and_single_steps_change_nothing():
    explored = [PLAIN_CHUNK, DRAFTED._replace(is_exploring=True)]
    assert said(DraftingWords(60), explored, explored, explored)[2] == f"not drafting: {WHY}"
    drafting, plain = [PLAIN_CHUNK, DRAFTED], [PLAIN_CHUNK]
    found = said(DraftingWords(60), drafting, plain, plain, drafting, plain, plain, plain, drafting)
    assert [one[:20] for one in found] == [
        "drafts from step 1: ", "", "", "", "", "", "not drafting since s", "drafts from step 8: ",
    ]  # fmt: skip
    assert found[6] == f"not drafting since step 5: {WHY}"


@pytest.mark.parametrize("tuner, pool, expected", [
    ("goodput", 0, WHY), ("goodput", 2, "plain decoding is expected to be as fast"),
    ("threshold:3", 0, "more than 3 live"),
])  # fmt: skip
def test_the_reason_is_that_of_the_tuner(tuner, pool, expected):
    speculation = Speculation(drafter="ngram", tuner=tuner, strategies=["2_2_4"])
    made = make.make_tuner(speculation, make.arms(speculation), is_cpu=True)
    engine = SimpleNamespace(tuner=made, cost_table=None)
    state, choice = made.choose(made.init(), 4, 4, 256, (PLAIN,))
    rollout = SimpleNamespace(
        measurements=[PLAIN_CHUNK._replace(reason=choice.reason)], stats={"pool_programs": pool}
    )
    assert drafting_words.reason(engine, state, rollout) == expected


def test_without_a_trained_drafter_there_is_nothing_to_draft_with():
    speculation = Speculation(drafter="adaptive", strategies=["2_2_4"])
    made = make.make_tuner(speculation, make.arms(speculation), is_cpu=True)
    engine = SimpleNamespace(tuner=made, cost_table=None)
    rollout = SimpleNamespace(measurements=[PLAIN_CHUNK], stats={"pool_programs": 0})
    assert drafting_words.reason(engine, made.init(), rollout) == "no drafter is trained"
