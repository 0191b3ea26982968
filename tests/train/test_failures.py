"""The failures of docs/pods.md with real processes: one raises, and all end soon and say who, where and why."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest
from failing_process import REASON
from jobs import Job
from training_runs import completions, having, saved_steps, stopped_after

from tlt_jax import cli
from tlt_jax.train import loop

# From the failure to the end of the last process: less than JAX takes to notice by itself.
MOST_S = 90.0
FOUR_GROUPS = {"mesh.data": 4, "mesh.fake_devices": 4, "rollout.prompts": 4}


@pytest.fixture(scope="module")
def whole(configure, shared):
    """A finished run of one process, every step saved."""
    config = configure(shared / "whole", FOUR_GROUPS | {"checkpoint.export": True})
    assert loop.train(config) == cli.DONE
    return config


def failing(config, processes: int, index: int, phase: str, nth: int, mark="") -> Job:
    """A job of which a process fails when this phase begins for the nth time."""
    return Job(
        config, processes, "failing_process", FAILS_AS=str(index), FAILS_IN=phase, FAILS_NTH=str(nth), FAILS_MARK=str(mark),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "phase", "nth"),
    [
        (4, "start", 1),
        (2, "rollout", 1),
        (2, "save_checkpoint", 3),  # with checkpoint.keep 1 the second save deletes something
        *(pytest.param(2, one, 1, marks=pytest.mark.matrix) for one in ("resume", "reward", "update", "eval", "export")),
    ],
)  # fmt: skip
def test_a_process_that_raises_ends_all_soon_with_who_where_and_why(
    processes, phase, nth, whole, tmp_path
):
    config = having(whole, run=str(tmp_path / "run"), checkpoint__keep=1)
    if phase == "resume":
        stopped_after(2, whole, tmp_path / "run")
    fails, mark = 1, tmp_path / "mark"
    with failing(config, processes, fails, phase, nth, mark) as job:
        codes = job.wait()
    seconds = time.time() - float(mark.read_text())
    outputs = job.all_said
    assert codes == [cli.DIVERGED] * processes, outputs
    assert seconds < MOST_S, outputs

    why = f"failed in phase {phase}: RuntimeError: {REASON}"
    assert (
        outputs[fails].count(f"error: RuntimeError: {REASON}") == 1
        and "Traceback" in outputs[fails]
    )
    for index in set(range(processes)) - {fails}:
        where = f"error: process {fails} failed in phase {phase}: "
        assert outputs[index].count(where) == 1 and "Traceback" not in outputs[index], outputs
        assert (REASON in outputs[index]) == (index == 0)
    log = tmp_path / "run" / "log.txt"
    if log.exists():
        text = log.read_text()
        assert text.count(f"process {fails} {why}") == 1 and text.count("Traceback") == 1, text
    else:
        assert phase in ("start", "resume"), "nothing had started"


def test_a_port_that_another_program_has_ends_all_with_a_line_that_names_it(whole, tmp_path):
    config = replace(whole, run=str(tmp_path / "run"))
    with socket.create_server(("localhost", 0)) as other:  # it takes connections, and says nothing
        port = other.getsockname()[1]
        with Job(config, 2, "failing_process", port=port, ANSWER_S="3") as job:
            assert job.wait() == [cli.MISTAKE] * 2, job.all_said
    assert job.said(0).count(f"error: port {port} of process 0 (localhost:{port}) is taken") == 1
    assert job.said(1).count(f"another program than process 0 answers at localhost:{port}") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.matrix  # in the gate test_checkpoint.py has two processes on a board, and test_train.py a run
def test_two_processes_set_a_damaged_checkpoint_aside_together_and_continue(whole, tmp_path):
    """Only one of the two finds the damage, as when it is in that process's part of the arrays."""
    config = stopped_after(3, whole, tmp_path / "run")
    with failing(config, 2, 1, "damage", 3) as job:
        assert job.wait() == [cli.DONE] * 2, job.all_said
    assert "3 is corrupt (DATA_LOSS: " in job.said() and "it is set aside" in job.said()
    assert (tmp_path / "run" / "checkpoints" / "damaged" / "3").is_dir()
    assert saved_steps(config) == [1, 2, 3, 4] and completions(config) == completions(whole)


def test_a_signal_while_another_process_waits_for_scores_loses_no_score(whole, tmp_path):
    """The signal goes to the process whose rewards take longest, while they run: the state before the step is saved."""
    config = replace(whole, run=str(tmp_path / "run"))
    with Job(config, 2, TOY_REWARD_SECONDS="0.2") as job:
        job.wait_for(lambda: "step 1/" in job.said())
        # 12 answers a step: most of it is the reward phase.
        time.sleep(float(np.random.default_rng().uniform(0.1, 0.8)))
        job.send(signal.SIGTERM, 1)
        assert job.wait() == [cli.PREEMPTED] * 2, job.all_said
    step = max(saved_steps(config))
    stopped = f"was stopped, and is saved in {config.run}/checkpoints/{step}: "
    assert job.said().count(stopped) == "".join(job.all_said).count("was stopped") == 1
    assert loop.train(config) == cli.DONE
    assert completions(config) == completions(whole)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB. Making one needs root: skipped without."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kind", ["checkpoints", "completions and events"])
def test_a_full_disk_is_one_line_that_names_the_folder_what_is_missing_and_the_last_step(
    kind, whole, configure, tmp_path, small_disk
):
    """Saves fill it, or another program does during a rollout; then it is freed, and the run resumes."""
    every = 1 if kind == "checkpoints" else 2
    knobs = {"checkpoint.every": every, "checkpoint.keep": 99, "train.steps": 60}
    config = configure(tmp_path / "run", FOUR_GROUPS | knobs)  # the programs of `whole`
    config = replace(config, run=str(small_disk / "run"))
    filler = small_disk / "filler"
    with Job(config, place=tmp_path / "run") as job:
        if kind != "checkpoints":
            job.wait_for((small_disk / "run/checkpoints/2").is_dir)
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        codes, shown = job.wait(), job.said()
    assert codes == [cli.DIVERGED], shown
    assert "Traceback" not in shown and shown.count("error: ") == 1, shown
    last = max(
        int(one.name)
        for one in (small_disk / "run" / "checkpoints").glob("[0-9]*")
        if one.name.isdigit()
    )
    assert re.search(
        rf"error: {small_disk}\S* is full: \d+ bytes are (free|needed, \d+ of them are missing); "
        rf"the last checkpoint, of step {last}, is whole: free the disk, and the same command resumes from there\n",
        shown.replace(" (a quota?)", ""),
    ), shown
    filler.unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert loop.train(having(config, train__steps=last + 1)) == cli.DONE
    assert max(saved_steps(config)) == last + 1
