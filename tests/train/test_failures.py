"""The failures of docs/pods.md with real processes: one raises, and all end soon and say who, where and why."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from failing_process import REASON
from training_runs import completions, saved_steps, stopped_after

from tlt_jax import cli
from tlt_jax.config import Config, load as configuration
from tlt_jax.train import loop

MOST_S = 30.0  # from the failure to the end of the last process
# Phases, and their number of occurrence: with checkpoint.keep 1 the second save is the first to delete something.
EARLY, LATE = 1, 3
PHASES = ("start", "resume", "rollout", "reward", "update", "save_checkpoint", "eval", "export")
# Cases of the default selection; the rest is `-m slow`.
DAILY = {
    (2, "start", EARLY), (2, "resume", LATE), (2, "rollout", LATE), (2, "save_checkpoint", LATE),
    (4, "reward", EARLY),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=[] if case in DAILY else [pytest.mark.slow])
    for case in [(n, phase, at) for n in (2, 4) for phase in PHASES for at in (EARLY, LATE)]
    if case[1:] != ("export", EARLY)  # it comes once, at the end
]


def started(
    config: Config, processes: int, port: int | None = None, **environment: str
) -> list[subprocess.Popen]:
    """Starts the command as several processes, as on a pod; the output of each is in RUN.INDEX.log."""
    path = Path(f"{config.run}.yaml")
    path.write_text(configuration.to_yaml(config))
    if port is None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
    found = []
    for index in range(processes):
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        module = "failing_process" if "FAILS_IN" in environment else "tlt_jax.train"
        with Path(f"{config.run}.{index}.log").open("w") as out:
            command = [sys.executable, "-m", module, "--config", str(path)]
            found.append(
                subprocess.Popen(
                    command, env=os.environ | variables | environment, stdout=out, stderr=out
                )
            )
    return found


def ended(processes: list[subprocess.Popen], seconds: float = 240.0) -> list[int]:
    """The exit codes of all; processes that do not end are killed, and have none."""
    until = time.monotonic() + seconds
    try:
        return [one.wait(max(0.1, until - time.monotonic())) for one in processes]
    except subprocess.TimeoutExpired:
        return [one.poll() for one in processes]
    finally:
        for one in processes:
            one.kill()


def printed(config: Config, index: int) -> str:
    """The output of a process."""
    return Path(f"{config.run}.{index}.log").read_text()


@pytest.fixture(scope="module")
def whole(configure, shared):
    """A finished run of one process, every step saved."""
    knobs = {
        "checkpoint.export": True,
        "mesh.data": 4,
        "mesh.fake_devices": 4,
        "rollout.prompts": 4,
    }
    config = configure(shared / "whole", knobs)
    assert loop.train(config) == cli.DONE
    return config


@pytest.mark.parametrize(("processes", "phase", "at"), CASES)
def test_a_process_that_raises_ends_all_soon_with_who_where_and_why(
    processes, phase, at, whole, tmp_path
):
    config = replace(whole, run=str(tmp_path / "run"), checkpoint=replace(whole.checkpoint, keep=1))
    nth = at
    if phase == "resume" or (phase == "start" and at == LATE):
        stopped_after(
            2, whole, tmp_path / "run"
        )  # and two checkpoints, one more than checkpoint.keep
        nth = 1
    elif phase == "eval":
        nth = 1 if at == EARLY else 3  # before the first step, and after the last one
    elif phase == "export":
        nth = 1
    fails, mark = at % processes, tmp_path / "mark"
    running = started(
        config, processes, FAILS_AS=str(fails), FAILS_IN=phase, FAILS_NTH=str(nth), FAILS_MARK=str(mark),
    )  # fmt: skip
    codes = ended(running)
    seconds = time.time() - float(mark.read_text())
    outputs = [printed(config, index) for index in range(processes)]
    assert codes == [cli.DIVERGED] * processes, outputs
    assert seconds < MOST_S, outputs

    why = f"failed in phase {phase}: RuntimeError: {REASON}"
    assert (
        outputs[fails].count(f"error: RuntimeError: {REASON}") == 1
        and "Traceback" in outputs[fails]
    )
    for index in set(range(processes)) - {fails}:
        where = f"error: process {fails} failed in phase {phase}: "
        assert outputs[index].count(where) == 1 and "Traceback" not in outputs[index], outputs[
            index
        ]
        assert (REASON in outputs[index]) == (0 in (index, fails))
    log = tmp_path / "run" / "log.txt"
    if log.exists():
        text = log.read_text()
        assert text.count(f"process {fails} {why}") == 1 and text.count("Traceback") == 1, text
    else:
        assert phase in ("start", "resume"), "nothing had started"


def test_a_port_that_another_program_has_ends_all_with_a_line_that_names_it(whole, tmp_path):
    config = replace(whole, run=str(tmp_path / "run"))
    began = time.monotonic()
    with socket.create_server(
        ("localhost", 0)
    ) as other:  # it accepts connections, and sends nothing
        port = other.getsockname()[1]
        codes = ended(started(config, 2, port), 90)
    assert time.monotonic() - began < 60 and codes == [cli.MISTAKE] * 2
    place = f"localhost:{port}"
    expected = (
        f"error: port {port} of process 0 ({place}) is taken by another program: name another"
    )
    assert printed(config, 0).count(expected) == 1
    expected = (
        f"error: another program than process 0 answers at {place}: name another port for all"
    )
    assert printed(config, 1).count(expected) == 1
    assert not (tmp_path / "run").exists()


def test_two_processes_set_a_damaged_checkpoint_aside_together_and_continue(whole, tmp_path):
    """Only one of the two finds the damage, as when it is in that process's part of the arrays."""
    config = stopped_after(3, whole, tmp_path / "run")
    config = replace(config, checkpoint=replace(config.checkpoint, resume="last_good"))
    knobs = {"FAILS_AS": "1", "FAILS_IN": "damage", "FAILS_NTH": "3", "FAILS_MARK": ""}
    assert ended(started(config, 2, **knobs)) == [cli.DONE] * 2, [
        printed(config, i) for i in range(2)
    ]
    assert "3 is corrupt (DATA_LOSS: " in printed(config, 0) and "it is set aside" in printed(
        config, 0
    )
    assert (tmp_path / "run" / "checkpoints" / "damaged" / "3").is_dir()
    assert saved_steps(config) == [1, 2, 3, 4] and completions(config) == completions(whole)


def test_a_signal_while_another_process_waits_for_scores_loses_no_score(whole, tmp_path):
    """The signal goes to the process whose rewards take longest, while they run: the state before the step is saved."""
    config = replace(whole, run=str(tmp_path / "run"))
    running = started(config, 2, TOY_REWARD_SECONDS="0.5")
    until = time.monotonic() + 120
    while "step 1/" not in printed(config, 0) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(
        float(np.random.default_rng().uniform(0.2, 2.0))
    )  # 12 answers a step: most of it is the reward phase
    running[1].send_signal(signal.SIGTERM)
    assert ended(running) == [cli.PREEMPTED] * 2, [printed(config, i) for i in range(2)]
    step = max(saved_steps(config))
    assert f"was stopped, and is saved in {config.run}/checkpoints/{step}: " in printed(config, 0)
    assert ended(started(config, 2)) == [cli.DONE] * 2
    assert completions(config) == completions(whole)


def test_two_processes_read_the_reference_that_this_run_made(configure, tmp_path):
    """The first process renames it slowly, and one of an earlier attempt exists."""
    knobs = {
        "mesh.data": 2,
        "mesh.fake_devices": 2,
        "algorithm.kl_coef": 0.1,
        "sft.steps": 1,
        "sft.solution_column": "prompt",
        "train.steps": 1,
        "eval.every": 0,
    }
    config = configure(tmp_path / "run", knobs)
    slow = {"FAILS_AS": "0", "FAILS_IN": "slow rename", "FAILS_NTH": "1", "FAILS_MARK": ""}
    (tmp_path / "run" / "reference").mkdir(parents=True)
    (tmp_path / "run" / "reference" / "config.json").write_text("{}")
    assert ended(started(config, 2, **slow)) == [cli.DONE] * 2, [
        printed(config, i) for i in range(2)
    ]
    kept = json.loads((tmp_path / "run" / "reference" / "made_from.json").read_text())
    assert kept["source"]["train.seed"] == "0" and kept["leaves"]
    assert json.loads((tmp_path / "run" / "reference" / "config.json").read_text())["hidden_size"]


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
    kind, configure, tmp_path, small_disk
):
    """Saves fill it, or another program does during a rollout; then it is freed, and the run resumes."""
    every = 1 if kind == "checkpoints" else 2
    config = configure(
        tmp_path / "run", {"checkpoint.every": every, "checkpoint.keep": 99, "train.steps": 60}
    )
    config = replace(config, run=str(small_disk / "run"))
    path, filler = tmp_path / "run.yaml", small_disk / "filler"
    path.write_text(configuration.to_yaml(config))
    command = [sys.executable, "-m", "tlt_jax.train", "--config", str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if kind != "checkpoints":
        until = time.monotonic() + 120
        while not (small_disk / "run/checkpoints/2").is_dir() and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    shown, _ = process.communicate(timeout=180)
    assert process.returncode == cli.DIVERGED, shown
    assert "Traceback" not in shown and shown.count("error: ") == 1, shown
    last = max(
        int(one.name)
        for one in (small_disk / "run" / "checkpoints").glob("[0-9]*")
        if one.name.isdigit()
    )
    assert re.search(
        rf"error: {small_disk}\S* is full: \d+ bytes are (free there|needed, \d+ of them are missing); "
        rf"the last checkpoint, of step {last}, is whole: free the disk, and the same command resumes from there\n",
        shown.replace(" (a quota?)", ""),
    ), shown
    filler.unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert loop.train(replace(config, train=replace(config.train, steps=last + 1))) == cli.DONE
    assert max(saved_steps(config)) == last + 1
