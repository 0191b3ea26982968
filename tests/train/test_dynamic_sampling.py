"""Dynamic sampling in whole runs: what each step trains on is that of a NumPy reference that decodes everything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from idle_process import groups_train
from training_runs import (
    assert_same_bits,
    completions,
    having,
    preempt,
    raise_at,
    resumed,
    stopped_after,
)

from tlt_jax import cli
from tlt_jax.config import Config
from tlt_jax.data import dataset as datasets, prompt_format
from tlt_jax.errors import ConfigError
from tlt_jax.rewards import Scorer
from tlt_jax.rollout.selection import Selecting
from tlt_jax.train import dynamic_sampling, loop
from tlt_jax.train.dynamic_sampling import DynamicSampling

STEPS, KEEP, WINDOW, SAMPLES = 3, 2, 6, 3
DYNAMIC = {
    "train.steps": STEPS,
    "rollout.prompts": KEEP,
    "rollout.max_prompts": WINDOW,
    "rollout.samples": SAMPLES,
    "reward.terms": {"toy_rewards:often": 1.0},
    "eval.every": 0,
}
ADAPTIVE_KNOBS = {
    "speculation.drafter": "adaptive",
    "speculation.strategies": ["2_1_3"],
    "drafter_training.share": 0.0,
}


@pytest.fixture(scope="module")
def run(configure, shared):
    """run(name, knobs) -> the configuration of a finished run of these knobs, which is run once."""
    done: dict[str, Config] = {}

    def make(name: str, knobs: dict | None = None) -> Config:
        if name not in done:
            config = configure(shared / name, DYNAMIC | (knobs or {}))
            assert loop.train(config) == cli.DONE
            done[name] = config
        return done[name]

    return make


def lines(config: Config) -> list[dict]:
    """The metrics of each step."""
    found = (Path(config.run) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, found) if "groups/tried" in line]


def steps_of(config: Config) -> list[dict[int, list[tuple[str, str, float]]]]:
    """Of each step: prompt, answer and reward of every answer, by the prompt's place in the step's window."""
    found = []
    for _, answers in sorted(completions(config).items()):
        by_prompt: dict[int, list[tuple[str, str, float]]] = {}
        for one in answers:
            by_prompt.setdefault(one[8], []).append((one[2], one[3], one[4]))
        found.append(by_prompt)
    return found


def chosen(everything: dict[int, list[tuple[str, str, float]]]) -> tuple[list[int], int, int]:
    """Of the answers to all prompts of a window: the kept prompts, how many count, and how many were looked at."""
    rewards = np.array([[reward for *_, reward in everything[prompt]] for prompt in range(WINDOW)])
    counting = np.flatnonzero(rewards.std(axis=1) > 0)
    others = np.flatnonzero(rewards.std(axis=1) == 0)
    first = counting[:KEEP]
    tried = int(first[-1]) + 1 if len(first) == KEEP else WINDOW
    return sorted([*first, *others[: KEEP - len(first)]]), len(first), tried


def prompts(config: Config) -> list[str]:
    """The prompts of the data, in its order."""
    data = datasets.load(config, prompt_format.tokenizer_of(config))
    return [prompt.text for prompt in data.window(0, STEPS * WINDOW)]


@pytest.fixture(scope="module")
def still(run):
    """Runs of a policy that never changes: one that drops what a step did not need, and one that decodes all of each window."""
    rate = {"optim.learning_rate": 0.0}
    whole = {"rollout.max_prompts": 0, "rollout.prompts": WINDOW}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_sampling, "after", lambda config, step, *_: (step + 1) * WINDOW)
        dropping = run("drop", rate)
    return dropping, run("everything", rate | whole)


def test_a_step_trains_on_the_first_prompts_whose_answers_differ_of_all_answers_to_its_window(
    still,
):
    dropping, everything = still
    seen = set()
    assert [answers[0][0] for step in steps_of(everything) for answers in step.values()] == prompts(
        dropping
    )
    for ours, whole, line in zip(
        steps_of(dropping), steps_of(everything), lines(dropping), strict=True
    ):
        kept, counted, tried = chosen(whole)
        assert ours == {prompt: whole[prompt] for prompt in kept}
        assert line["groups/tried"] == tried and line["groups/filled"] == KEEP - counted
        assert line["groups/replaced"] == pytest.approx(1 - KEEP / tried)
        assert line["train/num_gen_batches"] == tried / KEEP
        assert line["groups/zero_variance"] == 1 - counted / KEEP
        assert 0 <= line["perf/wasted_ratio"] < 1
        seen.add((counted, tried))
    assert len(seen) > 1, "the steps need different numbers of prompts"


def test_a_step_starts_with_the_prompts_that_the_last_one_did_not_need(run):
    keeping, position = run("keep"), 0
    expected = prompts(keeping)
    for ours, line in zip(steps_of(keeping), lines(keeping), strict=True):
        for prompt, answers in ours.items():
            assert {text for text, *_ in answers} == {expected[position + prompt]}
        position += int(line["groups/tried"])
    assert position < STEPS * WINDOW, "some were kept for the next step"


@pytest.mark.parametrize(
    "knobs, seconds",
    [
        ({}, "0"),
        ({"speculation.drafter": "ngram", "speculation.strategies": ["2_1_3"], "rollout.slots": 2}, "0.02"),
        (ADAPTIVE_KNOBS, "0.01"),
    ],
)  # fmt: skip
def test_resumes_drafts_rows_slow_rewards_and_idle_training_change_no_bit(
    run, tmp_path, monkeypatch, knobs, seconds
):
    whole, collect, awaited = run("keep"), Scorer.collect, []

    def collected(scorer, interrupted):
        awaited.append(collect(scorer, interrupted))
        return awaited[-1]

    monkeypatch.setattr(Scorer, "collect", collected)
    monkeypatch.setenv("TOY_REWARD_SECONDS", seconds)
    groups_train(monkeypatch, least=1)
    resumed(whole, tmp_path / "run", 1, knobs)
    if not knobs:
        needed = 2 * [KEEP * SAMPLES]
        assert [len(scores) for scores in awaited] == needed, "no score is awaited in vain"


def test_another_number_of_groups_takes_the_same_answers(run):
    assert completions(run("alone", {"mesh.data": 1})) == completions(run("keep"))


def test_a_run_that_is_stopped_while_prompts_are_chosen_resumes_with_the_same_bits(
    run, configure, tmp_path, monkeypatch
):
    whole = run("keep")
    config = configure(tmp_path / "stopped", DYNAMIC)
    with monkeypatch.context() as patch:
        patch.setattr(Selecting, "is_over", property(lambda self: False))  # as if scores were slow
        raise_at(patch, DynamicSampling, "scores", 100, preempt)
        assert loop.train(config) == cli.PREEMPTED
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, whole)


def test_a_run_without_it_goes_on_with_it_from_where_it_was(run, still, configure, tmp_path):
    """A checkpoint of a run without dynamic sampling has no position."""
    whole = run("everything")
    before = stopped_after(1, whole, tmp_path / "run")
    config = having(before, override=True, rollout__max_prompts=WINDOW + 1)
    assert loop.train(config) == cli.DONE
    second, expected = steps_of(config)[1], prompts(whole)[WINDOW:]
    assert all(answers[0][0] == expected[prompt] for prompt, answers in second.items())


@pytest.mark.parametrize(
    "knobs, fix",
    [
        ({"rollout.max_prompts": KEEP}, "rollout.max_prompts 2 is not above rollout.prompts 2.*use 4 or more, or 0"),
        ({"train.steps": 0, "train.epochs": 1}, "set train.steps"),
        *(({"algorithm.advantage": "reinforce_pp", "rollout.samples": n},
           r"rollout.max_prompts \d+ with algorithm.advantage reinforce_pp.*use grpo, rloo or dr_grpo, or")
          for n in (1, 3)),
    ],
)  # fmt: skip
def test_prompts_to_try_that_cannot_be_are_refused_with_the_fix(configure, tmp_path, knobs, fix):
    with pytest.raises(ConfigError, match=fix):
        configure(tmp_path, DYNAMIC | knobs)
