"""Every launcher runs the command of the README, and can print what it would start."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

LAUNCH = Path(__file__).parents[1] / "launch"
ARGS = ["--config", "x.yaml", "--data.prompt_suffix", "two words; `a` $b"]


def heed_signals() -> None:
    """In a child before it starts: nohup and a shell's background jobs let it inherit that SIGHUP and SIGINT are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def dry(script: str, *arguments: str) -> list[str]:
    """The lines that a dry run prints."""
    environment = os.environ | {"DRY_RUN": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        [LAUNCH / script, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("count", ["", "0", "x"])
def test_the_local_launcher_says_how_it_is_used(count):
    done = subprocess.run(
        [LAUNCH / "local.sh", *filter(None, [count])], capture_output=True, text=True
    )
    assert done.returncode == 2 and "write launch/local.sh N ARGS" in done.stderr


def test_local_processes_are_numbered_and_share_one_address():
    lines = dry("local.sh", "2", *ARGS)
    assert len(lines) == 2
    for index, line in enumerate(lines):
        assert f"JAX_PROCESS_ID={index}" in line and "JAX_NUM_PROCESSES=2" in line
        assert line.endswith(
            "-m tlt_jax.train --config x.yaml --data.prompt_suffix two words; `a` $b"
        )
    assert len({re.search(r"ADDRESS=(\S+)", line)[1] for line in lines}) == 1


def fake_python(folder: Path, before: str, start: str) -> str:
    """A program that prints a port for `-c`, after `before`; and else runs `start` and then for ever."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/bash\n[[ "$1" == -c ]] && {{ {before}echo 4567; exit; }}\n{start}\n'
        "while true; do sleep 0.02; done\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_local_launcher_reaches_all_and_their_code_is_its_own(tmp_path, number):
    python = fake_python(tmp_path, "", "trap 'echo saved; exit 75' TERM; echo started")
    with subprocess.Popen(
        [LAUNCH / "local.sh", "2", *ARGS], env=os.environ | {"PYTHON": python},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_signals,
    ) as job:  # fmt: skip
        lines = [job.stdout.readline() for _ in range(2)]
        job.send_signal(number)
        try:
            rest, _ = job.communicate(timeout=30)
        finally:
            job.kill()
    assert sorted(lines) == ["[0] started\n", "[1] started\n"]
    assert job.returncode == 75 and sorted(rest.splitlines()) == ["[0] saved", "[1] saved"]


def of_a_job(mark: str) -> list[str]:
    """The processes with a mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_at_any_moment_from_the_start_leaves_no_process(tmp_path, number):
    """From before the launcher has read its first line until after all run; each process starts slowly."""
    python = fake_python(tmp_path, "sleep 0.05; ", "trap 'exit 75' TERM")
    for turn, pause in enumerate([0.0, 0.002, 0.01, 0.03, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3]):
        mark = f"LAUNCH_TEST={os.getpid()}-{number}-{turn}"
        job = subprocess.Popen(
            [LAUNCH / "local.sh", "4", *ARGS],
            env=os.environ | {"PYTHON": python, "GRACE_S": "5", **dict([mark.split("=")])},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_signals,
        )  # fmt: skip
        time.sleep(pause)
        job.send_signal(number)
        try:
            code = job.wait(60)
        finally:
            job.kill()
        assert code in (75, -number), f"after {pause} s"
        until = time.monotonic() + 30
        while left := of_a_job(mark):
            assert time.monotonic() < until, (pause, left)
            time.sleep(0.01)


def test_slurm_starts_a_step_of_the_command():
    (line,) = dry("slurm.sh", *ARGS)
    assert (
        line.startswith("srun ") and f"{sys.executable} -u -m tlt_jax.train --config x.yaml" in line
    )


def test_slurm_queues_the_job_again_when_the_run_was_preempted(tmp_path):
    for name, body in (("srun", 'exit "$CODE"'), ("scontrol", 'echo "$@" > "$NOTED"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    noted = tmp_path / "noted"
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "NOTED": str(noted),
    }
    for code, expected in ((0, None), (2, None), (75, "requeue 7\n")):
        noted.unlink(missing_ok=True)
        environment = os.environ | variables | {"CODE": str(code)}
        done = subprocess.run([LAUNCH / "slurm.sh", *ARGS], env=environment)
        assert done.returncode == code
        assert (noted.read_text() if noted.exists() else None) == expected


def test_a_tpu_pod_gets_the_command_on_every_host_with_its_arguments_whole():
    (line,) = dry("tpu_pod.sh", "pod", "us-east5-a", *ARGS)
    words = shlex.split(line)
    assert words[:7] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone"]
    assert words[words.index("--worker") + 1] == "all"
    remote = shlex.split(words[words.index("--command") + 1])
    assert remote[-len(ARGS) :] == ARGS
    assert remote[-len(ARGS) - 4 : -len(ARGS)] == [".venv/bin/python", "-u", "-m", "tlt_jax.train"]
    done = subprocess.run([LAUNCH / "tpu_pod.sh", "pod"], capture_output=True, text=True)
    assert done.returncode == 2 and "NAME ZONE ARGS" in done.stderr


def test_the_job_set_runs_the_command_in_a_pod_for_each_host():
    found = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    *command, config = container["command"][:6]
    assert command == ["python", "-u", "-m", "tlt_jax.train", "--config"]
    assert (LAUNCH.parent / config).is_file()
    chips = container["resources"]["limits"]["google.com/tpu"]
    topology = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    x, y, z = map(int, topology.split("x"))
    assert job["parallelism"] == job["completions"] and job["parallelism"] * chips == x * y * z
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_an_image_is_well_formed_and_its_pins_are_what_the_package_asks_for(device):
    done = subprocess.run(
        ["hadolint", f"Dockerfile.{device}"], cwd=LAUNCH, capture_output=True, text=True,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

    lines = (LAUNCH / f"requirements-{device}.txt").read_text().splitlines()[1:]
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines)
    assert len(pins) == len(lines)
    project = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["project"]
    python = default_environment() | {"python_version": "3.12", "python_full_version": "3.12.11"}
    wanted = [*project["dependencies"], *project["optional-dependencies"][device]]
    for one in map(Requirement, wanted):
        if one.marker is None or one.marker.evaluate(python):
            assert one.specifier.contains(pins[one.name.lower().replace("_", "-")]), one
