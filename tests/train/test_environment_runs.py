"""Runs whose answers have several turns: drafts, groups, resuming and failures of environments."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from idle_process import LEAST, groups_train
from jobs import Job
from training_runs import (
    TASK,
    assert_close,
    completions,
    events,
    resumed,
)

from tlt_jax import cli
from tlt_jax.data.files import ID
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.environments import Reply
from tlt_jax.errors import ConfigError, EnvironmentsError
from tlt_jax.train import loop, startup
from tlt_jax.train.environment import Play

TALK = {
    "environment.path": "toy_environments:Echo", "environment.turns": 3, "rollout.stop": ["1", "2"],
    "reward.terms": {"environment": 1.0}, "reward.environment": ["TOY_ENVIRONMENT"], "rollout.max_new_tokens": 24,
    "environment.timeout_s": 5, "environment.workers": 1, "data.max_prompt_tokens": 12, "eval.samples": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def talked(configure, shared):
    config = configure(shared / "talked", TALK)
    assert loop.train(config) == cli.DONE
    return config


def lines(config, step: int) -> list[dict]:
    path = Path(config.run) / "completions" / f"{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_have_several_turns_and_the_rewards_of_their_environment(talked):
    found = events(talked)
    turns = [value for _, value in found["reward/terms/environment/turns"]]
    assert 1 < np.mean(turns) <= 3
    assert "reward/terms/environment/heard" in found
    assert [value for _, value in found["eval/mean@1"]]
    for one in lines(talked, 1):
        assert one["reward"] == pytest.approx(one["parts"]["environment"])


def test_a_resumed_run_whose_drafter_learns_ends_with_the_same_bits(talked, tmp_path, monkeypatch):
    groups_train(monkeypatch)
    drafting = {
        "speculation.drafter": "adaptive", "speculation.tuner": "fixed", "speculation.strategies": ["2_1_3"],
        "drafter_training.share": 0.0,
    }  # fmt: skip
    found = events(resumed(talked, tmp_path / "drafted", 2, drafting))
    assert max(value for _, value in found["speculation/accept_length"]) > 1
    assert sum(value for _, value in found["drafter/steps"]) >= LEAST


def test_an_agent_that_owns_its_loop_samples_the_tokens_of_the_same_environment(
    configure, talked, tmp_path
):
    """One whose answer has been cut by rollout.max_new_tokens has not returned, and has no reward."""
    knobs = TALK | {
        "environment.path": "toy_environments:echo_agent", "environment.args": {"task": TASK}, "train.steps": 1,
        "eval.every": 0,
    }  # fmt: skip
    config = configure(tmp_path / "agent", knobs)
    assert loop.train(config) == cli.DONE
    found, same = lines(config, 1), lines(talked, 1)
    assert [one["completion"] for one in found] == [one["completion"] for one in same]
    assert [one["logprob"] for one in found] == [one["logprob"] for one in same]
    for one, two in zip(found, same, strict=True):
        is_cut = one["finish"] == "length"
        assert one["reward"] == pytest.approx(0 if is_cut else two["reward"])
    assert not all(one["finish"] == "length" for one in found)


def test_two_processes_are_one(configure, tmp_path):
    knobs = TALK | {"mesh.fake_devices": 2, "train.steps": 2, "eval.every": 0}
    alone, two = (configure(tmp_path / name, knobs) for name in ("alone", "two"))
    assert loop.train(alone) == cli.DONE
    with Job(two, 2, by_launcher=True) as job:
        assert job.wait() == [cli.DONE], job.said()
    assert_close(two, alone)
    first = min(completions(alone))
    assert completions(two)[first] == completions(alone)[first]


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("raise", "error: RuntimeError: this world is broken"),
        ("crash", "crash"),
        ("hang", "timeout"),
    ],
)
def test_an_environment_that_fails_ends_its_answer_and_the_run_goes_on(
    configure, tmp_path, monkeypatch, capsys, kind, reason
):
    monkeypatch.setenv("TOY_ENVIRONMENT", kind)
    knobs = TALK | {"train.steps": 2, "eval.every": 0, "environment.timeout_s": 1}
    config = configure(tmp_path / kind, knobs)
    assert loop.train(config) == cli.DONE
    failed = [one for step in (1, 2) for one in lines(config, step) if one["failure"]]
    assert failed and all(one["failure"] == "error" and one["reward"] == 0 for one in failed)
    said = capsys.readouterr()
    assert f"the environment failed: {reason}" in said.out + said.err


def test_rows_may_begin_with_what_the_environment_says(configure, tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "compiles_early", lambda engine: True)  # also without prompts
    knobs = TALK | {
        "data.task": "environment", "data.task_args": {}, "environment.path": "tlt_jax.environments.games:GuessNumber",
        "environment.turn_tokens": 4, "train.steps": 2, "eval.every": 2, "sft.steps": 0, "rollout.stop": [],
    }  # fmt: skip
    config = configure(tmp_path / "guess", knobs)
    assert loop.train(config) == cli.DONE
    found = [one for step in (1, 2) for one in lines(config, step)]
    assert {one["prompt"] for one in found} == {"guess 1-9:"}
    assert any("no guess 1-9:" in one["completion"] for one in found), "a cut turn is played"
    assert max(value for _, value in events(config)["reward/terms/environment/cut_turns"]) > 1
    silent = configure(tmp_path / "silent", knobs | {"environment.path": TALK["environment.path"]})
    with pytest.raises(EnvironmentsError, match="says nothing at its start: let reset return text"):
        loop.train(silent)


def test_a_row_without_a_prompt_whose_environment_failed_is_decoded_from_the_eos_alone():
    tokenizer = SimpleNamespace(eos_token_id=7)
    play = SimpleNamespace(talk=SimpleNamespace(quoted=list), tokenizer=tokenizer)
    failed = Reply(done=True, failure="error", detail="ValueError: no level 9")
    row = Prompt(np.zeros(0, np.int32), {"prompt": "", ID: "a:1"})
    assert Play.prompt(play, row, failed).tokens.tolist() == [7]


def test_knobs_that_conflict_are_refused(configure, tmp_path):
    rows = {"data.task": "environment", "data.task_args": {}, "sft.steps": 0}
    for change, message in (
        (rows | {"environment.path": "", "reward.terms": {"task": 1.0}}, "set environment.path"),
        (rows | {"reward.terms": {"task": 1.0}}, "set reward.terms {environment: 1.0}"),
        (rows | {"sft.steps": 2}, "set sft.steps 0"),
        ({"rollout.deterministic": True}, "rollout.deterministic with an environment"),
        ({"environment.path": ""}, "names 'environment', and environment.path .* empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            configure(tmp_path / "run", TALK | change)
