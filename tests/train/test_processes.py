"""The command as several processes: the same tokens and policy as one process, whatever happens to them."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from idle_process import LEAST, groups_train
from jobs import Job
from test_adaptive_runs import ADAPTIVE
from training_runs import assert_close, completions, evaluated, events, saved_steps, stopped_after

from tlt_jax import cli, open_run, run_folder
from tlt_jax.config import Config
from tlt_jax.train import loop

GROUPS, STEPS = 4, 3
KNOBS = ADAPTIVE | {
    "train.steps": STEPS,
    "speculation.strategies": ["2_1_3"],
    "mesh.data": GROUPS,
    "mesh.fake_devices": GROUPS,
    "rollout.prompts": 8,
    "rollout.slots": 4,  # a data group waits for rows, and others take what it has not started
    "eval.every": 2,
    "checkpoint.export": True,
    "processes.lost_s": 5.0,
    "algorithm.overlong": "filtered",
    "reward.overlong_buffer": 20,
}


@pytest.fixture(scope="module")
def alone(configure, shared):
    """The run as one process."""
    config = configure(shared / "alone", KNOBS)
    with pytest.MonkeyPatch.context() as patch:
        groups_train(patch)
        assert loop.train(config) == cli.DONE
    return config


def assert_same(config: Config, alone: Config) -> None:
    """Same answers and rewards, same policy up to the order of sums, every step written once."""
    assert completions(config) == completions(alone) and evaluated(config) == evaluated(alone)
    assert_close(config, alone)
    for step in range(1, STEPS + 1):
        ours, theirs = (open_run(one.run).completions(step) for one in (config, alone))
        sums = [[answer["logprob"] for answer in answers] for answers in (ours, theirs)]
        np.testing.assert_allclose(*sums, rtol=0, atol=1e-3)
        assert all(0 <= answer["accepted"] < answer["length"] for answer in ours)
    lines = (Path(config.run) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(STEPS + 1)]
    ours, theirs = events(config), events(alone)
    assert [step for step, _ in ours["reward/mean"]] == [*range(1, STEPS + 1)]
    for name in (
        "reward/mean",
        "reward/terms/overlong_reward",
        "response_length/mean",
        "eval/mean@2",
    ):
        assert ours[name] == theirs[name], name
    assert any(value for _, value in ours["response_length/clip_ratio"]), (
        "the loss leaves answers out"
    )
    assert run_folder.drafter_export(config).is_dir() and run_folder.export(config).is_dir()


def launched(config: Config, processes: int, **environment: str) -> Job:
    return Job(config, processes, "idle_process", by_launcher=True, **environment)


def test_a_job_that_is_killed_and_goes_on_as_two_ends_as_one_process_does(
    alone, configure, tmp_path
):
    config = configure(tmp_path / "two", KNOBS)
    with launched(config, 2) as job:
        job.wait_for((Path(config.run) / "checkpoints" / "1").exists)
        time.sleep(np.random.default_rng().uniform(0, 1))  # anywhere in a step
        job.send(signal.SIGKILL, 1)
        (code,) = job.wait()
        if code != cli.DONE:  # else the run was done before
            assert code == 128 + signal.SIGKILL
            assert "error: process 1 was ended by signal 9" in job.said()
            assert re.search(
                r"\[0\] error: process 1 was last heard of \d+ s ago in phase \w+", job.said()
            )
    # What they saved is there, and two steps are left: in the first of a process nothing is trained.
    config = stopped_after(1, config, tmp_path / "last")
    assert saved_steps(config)[-1] == 1 == STEPS - 2
    with launched(config, 2) as job:
        assert job.wait() == [cli.DONE], job.said()
    assert_same(config, alone)
    trained = dict(events(config)["drafter/steps"])
    assert trained[STEPS] >= GROUPS * LEAST, "every group's, in every process"


def test_a_process_that_raises_ends_all_with_its_name_and_error(configure, tmp_path):
    knobs = {"mesh.fake_devices": 2, "reward.terms": {"toy_rewards:digits": 1.0}}
    config = configure(tmp_path / "raises", knobs)
    with launched(config, 2, TOY_REWARD_RAISES="1") as job:
        assert job.wait() == [cli.MISTAKE], "that of the process which raised"
        said = job.said()
    assert "[1] error: " in said and "only process 0 has this reward" in said
    assert re.search(r"\[0\] error: process 1 failed in phase \w+: .*only process 0", said), said
