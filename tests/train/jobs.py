"""The training command in processes of its own: how tests start them, send them signals, and read what they print."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from tlt_jax import cli
from tlt_jax.config import Config, load as configuration
from tlt_jax.train import __main__ as train

LAUNCHER = Path(__file__).parents[2] / "launch" / "local.sh"
# Nobody waits so long, but on a machine with much else to do.
PATIENCE_S = 300.0


class Job:
    """The command as `processes` processes, each started alone as on a pod, or all by launch/local.sh on cores of their own.

    What a process prints is in RUN.INDEX.log, or RUN.log of the launcher; `place` stands for RUN when given. With
    `failing_process` and the like as `module` something goes wrong. All are killed at the end of the context.
    """

    def __init__(
        self, config: Config, processes: int = 1, module: str = "tlt_jax.train", *, port: int | None = None,
        by_launcher: bool = False, place: Path | None = None, **environment: str,
    ):  # fmt: skip
        self.config, self.by_launcher, self.module = config, by_launcher, module
        self.place = place or Path(config.run)
        path = self.yaml
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(configuration.to_yaml(config))
        inherited = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
        words = ["--config", str(path)]
        if by_launcher:
            own = {"PYTHON": sys.executable, "GRACE_S": "30", "MODULE": module}
            commands = [([str(LAUNCHER), str(processes), *words], own)]
        else:
            shared = f"localhost:{port or free_port()}"
            commands = [
                ([sys.executable, "-u", "-m", module, *words], address(shared, processes, index))
                for index in range(processes)
            ]
        self.started = []
        for index, (command, own) in enumerate(commands):
            with self.log(index).open("w") as out:
                self.started.append(
                    subprocess.Popen(command, env=inherited | own, stdout=out, stderr=out)
                )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        for one in self.started:
            one.kill()
            one.wait()

    @property
    def yaml(self) -> Path:
        return Path(f"{self.place}.yaml")

    def log(self, index: int) -> Path:
        return Path(f"{self.place}.log" if self.by_launcher else f"{self.place}.{index}.log")

    def said(self, index: int = 0) -> str:
        """What a process, or the launcher for all, has printed."""
        return self.log(index).read_text()

    @property
    def all_said(self) -> list[str]:
        return [self.said(index) for index in range(len(self.started))]

    def wait(self, seconds: float = PATIENCE_S) -> list[int | None]:
        """The exit codes of all, or of the launcher; None of one that has not ended by then."""
        until = time.monotonic() + seconds
        try:
            return [one.wait(max(0.1, until - time.monotonic())) for one in self.started]
        except subprocess.TimeoutExpired:
            return [one.poll() for one in self.started]

    def wait_for(self, sign: Callable[[], object]) -> None:
        """Returns once something is so, or a process has ended."""
        until = time.monotonic() + PATIENCE_S
        while not sign() and all(one.poll() is None for one in self.started):
            assert time.monotonic() < until, self.all_said
            time.sleep(0.01)

    def send(self, number: signal.Signals, index: int = 0) -> None:
        """A signal to the process with this index."""
        if self.by_launcher:
            os.kill(self.pid(index), number)
        else:
            self.started[index].send_signal(number)

    def pid(self, index: int) -> int:
        """The process with this index, of those that the launcher started."""
        wanted = str(self.yaml).encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if self.module.encode() in command and wanted in command:
                if f"JAX_PROCESS_ID={index}".encode() in environment:
                    return int(folder.name)
        raise AssertionError(f"process {index} is not running: {self.all_said}")


def command(plant: Callable[[], None]) -> int:
    """`python -m tlt_jax.train`, with what `plant` changes once JAX may be imported; the exit code."""
    prepared = cli.prepared

    @contextmanager
    def changed(*arguments, **named):
        with prepared(*arguments, **named):
            plant()
            yield

    cli.prepared = changed
    return train.main()


def address(shared: str, processes: int, index: int) -> dict[str, str]:
    """The environment of a process of several; nothing for one alone."""
    if processes == 1:
        return {}
    return {
        "JAX_COORDINATOR_ADDRESS": shared,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(index),
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def run_until(
    config: Config, first_sign: str, number: signal.Signals, seconds: float = 0.0
) -> int | None:
    """The exit code of the command that gets a signal `seconds` after a file of the run exists. Its rewards are slow."""
    with Job(config, TOY_REWARD_SECONDS="0.1") as job:
        job.wait_for(lambda: list(Path(config.run).glob(first_sign)))
        time.sleep(seconds)
        job.send(number)
        return job.wait()[0]
