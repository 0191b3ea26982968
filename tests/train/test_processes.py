"""The command as several processes: the same tokens and policy as one process, whatever happens to them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import pytest
from test_adaptive_runs import ADAPTIVE, STEPS
from training_runs import completions, events, saved_steps, state_of, stopped_after

from tlt_jax import cli, run_folder
from tlt_jax.config import Config, load as configuration
from tlt_jax.train import loop

LOCAL = Path(__file__).parents[2] / "launch" / "local.sh"
GROUPS = 4
KNOBS = ADAPTIVE | {
    "mesh.data": GROUPS,
    "mesh.fake_devices": GROUPS,
    "rollout.prompts": 8,
    "rollout.slots": 4,  # a data group waits for rows, and others take what it has not started
    "rollout.batch_buckets": [4],
    "eval.every": 2,
    "checkpoint.export": True,
    "processes.lost_s": 5.0,
}
# Sums over data groups on several processes may be taken in another order.
TOLERANCE = 1e-5


@dataclass
class Job:
    """The command as several processes, and their output."""

    processes: int
    config: Config
    environment: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Job:
        run = Path(self.config.run)
        path = run.with_name(f"{run.name}.yaml")
        path.write_text(configuration.to_yaml(self.config))
        self.output = run.with_name(f"{run.name}.log")
        variables = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHON": sys.executable,
            "GRACE_S": "30",
        }
        with self.output.open("w") as out:
            self.started = subprocess.Popen(
                [str(LOCAL), str(self.processes), "--config", str(path)],
                env=os.environ | variables | self.environment, stdout=out, stderr=out,
            )  # fmt: skip
        return self

    def __exit__(self, *_) -> None:
        self.started.kill()

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def wait(self) -> int:
        """The exit code."""
        return self.started.wait(180)

    def signalled(self, index: int, number: signal.Signals, step: int, pause: float = 0.0) -> int:
        """The exit code after this process got a signal, `pause` seconds after the checkpoint of a step existed."""
        until, place = time.monotonic() + 150, Path(self.config.run) / "checkpoints" / str(step)
        while not place.exists() and self.started.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(pause)
        os.kill(self.pid(index), number)
        return self.wait()

    def pid(self, index: int) -> int:
        """The process with this index."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            wanted = f"{self.config.run}.yaml".encode()
            if b"tlt_jax.train" in command and wanted in command:
                if f"JAX_PROCESS_ID={index}".encode() in environment:
                    return int(folder.name)
        raise AssertionError(f"process {index} does not exist: {self.printed}")


@pytest.fixture(scope="module")
def alone(configure, shared):
    """The run as one process."""
    config = configure(shared / "alone", KNOBS)
    assert loop.train(config) == cli.DONE
    return config


def assert_same(config: Config, alone: Config) -> None:
    """Same answers and rewards, same policy up to the order of sums, every step written once."""
    assert completions(config) == completions(alone)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE),
        *(jax.tree.map(np.asarray, state_of(one).params) for one in (config, alone)),
    )
    ours, theirs = events(config), events(alone)
    assert [step for step, _ in ours["reward/mean"]] == [*range(1, STEPS + 1)]
    for name in ("reward/mean", "response_length/mean", "eval/mean@2"):
        assert ours[name] == theirs[name], name
    assert run_folder.drafter_export(config).is_dir() and run_folder.export(config).is_dir()


def test_a_job_of_two_that_is_stopped_and_killed_ends_as_one_process_does(
    alone, configure, tmp_path
):
    config = configure(tmp_path / "two", KNOBS)
    with Job(2, config) as job:
        assert job.signalled(1, signal.SIGTERM, step=1) == cli.PREEMPTED
        printed = job.printed
    assert 1 <= max(saved_steps(config)) < STEPS, "it saved, and stopped there"
    before = max(saved_steps(config))
    stopped = f"[0] {config.run} was stopped, and is saved in {config.run}/checkpoints/{before}: the same command resumes"
    assert printed.count(stopped) == printed.count("was stopped") == 1

    with Job(2, config) as job:
        pause = float(np.random.default_rng().uniform(0, 1))  # anywhere in a step
        code = job.signalled(1, signal.SIGKILL, step=before + 1, pause=pause)
        if code != cli.DONE:  # else the run had finished
            assert code == 128 + signal.SIGKILL
            assert "error: process 1 was ended by signal 9" in job.printed
            assert re.search(
                r"\[0\] error: process 1 was last heard of \d+ s ago in phase \w+", job.printed
            )
    with Job(2, config) as job:
        assert job.wait() == cli.DONE, job.printed
    assert_same(config, alone)
    trained = dict(events(config)["drafter/steps"])
    assert trained[STEPS] >= GROUPS * ADAPTIVE["idle_training.floor"], (
        "every group's, in every process"
    )


def test_a_run_resumes_with_another_number_of_processes(alone, tmp_path):
    config = stopped_after(2, alone, tmp_path / "four")
    with Job(4, config) as job:
        assert job.wait() == cli.DONE, job.printed
    assert_same(config, alone)


def test_a_process_that_raises_ends_all_with_its_name_and_error(configure, tmp_path):
    config = configure(tmp_path / "raises", KNOBS | {"reward.terms": {"toy_rewards:digits": 1.0}})
    with Job(2, config, {"TOY_REWARD_RAISES": "1"}) as job:
        assert job.wait() == cli.MISTAKE, "the code of the process that raised"
        printed = job.printed
    assert "[1] error: " in printed and "only process 0 has this reward" in printed
    assert re.search(r"\[0\] error: process 1 failed in phase \w+: .*only process 0", printed), (
        printed
    )
