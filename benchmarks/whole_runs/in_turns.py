"""Runs of `python -m tlt_jax.train` that take turns, so that a slow minute of the machine slows all of them.

As a program this is the training command, which stops itself (SIGSTOP) after its start and after every step, until it is
woken (SIGCONT). Its clocks stand still meanwhile, so that it does not measure the pause.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

FOLDER = "TLT_JAX_TURNS"  # environment: where the processes of a run report that they stopped
INDEX, COUNT = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"
POLL_S = 0.005  # between two polls of a run
WAIT_S = 3600  # seconds that a step may take, or a start
QUIET_S = 0.05  # seconds without a message to other processes before one is stopped


class Turns:
    """A run of `count` processes, which is stopped outside its turns.

    `folder` belongs to it alone; `seconds` it ran, without the pauses.
    """

    def __init__(self, start: Sequence[str], environment: dict[str, str], count: int, folder: Path):
        folder.mkdir(parents=True)
        self.folder, self.count, self.seconds, self.turn = folder, count, 0.0, 0
        self.output, own = folder / "output", environment | {FOLDER: str(folder)}
        with self.output.open("wb") as output:
            self.run = subprocess.Popen(
                start, env=own, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.wait(time.perf_counter())

    def go_on(self) -> bool:
        """Wakes it for a step; true when it stopped after the step, false when it ended."""
        begin = time.perf_counter()
        (self.folder / "go").write_text(str(self.turn))
        self.send(signal.SIGCONT)
        return self.wait(begin)

    def wait(self, begin: float) -> bool:
        self.turn += 1
        while self.run.poll() is None and not self.has_stopped():
            if time.perf_counter() - begin > WAIT_S:
                raise TimeoutError(f"a step took more than {WAIT_S} s: see {self.output}")
            time.sleep(POLL_S)
        has_stopped = self.run.returncode is None
        quiet = 2 * QUIET_S if has_stopped and self.count > 1 else 0.0
        self.seconds += time.perf_counter() - begin - quiet
        return has_stopped

    def has_stopped(self) -> bool:
        """Whether all of its processes are past this turn, and stopped."""
        reported = [self.folder / f"{index}.stopped" for index in range(self.count)]
        if not all(path.exists() for path in reported):
            return False
        texts = [path.read_text().split() for path in reported]
        if not all(int(turn) == self.turn for _, turn in texts):
            return False
        pids = ",".join(pid for pid, _ in texts)
        states = subprocess.run(["ps", "-o", "state=", "-p", pids], capture_output=True, text=True)
        return states.stdout.split() == ["T"] * self.count

    def send(self, number: int) -> None:
        """Sends a signal to all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.run.pid, number)

    def end(self) -> None:
        """Kills it."""
        self.send(signal.SIGKILL)
        self.run.wait()


def stopping(folder: Path, index: int, count: int, talking: Lock) -> Callable[[], None]:
    """A function that stops this process until its turn; the clocks of `time` do not count the time that it was stopped.

    To be called before other imports, which might store such a clock. A message to a stopped one of the `count` processes
    would count as lost: so the first, to which all others talk, is the last to stop, and none stops while `talking`.
    """
    stopped, turn, clock, sleep = 0.0, 0, time.perf_counter, time.sleep

    def running(of: Callable[[], float]) -> Callable[[], float]:
        return lambda: of() - stopped

    for name in ("time", "monotonic", "perf_counter"):
        setattr(time, name, running(getattr(time, name)))

    def stop() -> None:
        nonlocal stopped, turn
        begin, turn = clock(), turn + 1
        with talking:
            if count > 1:
                sleep(QUIET_S)
            if count > 1 and index == 0:
                while not all(map(is_stopping, range(1, count))):
                    sleep(POLL_S)
                sleep(QUIET_S)
            pause()
        stopped += clock() - begin

    def is_stopping(other: int) -> bool:
        """Whether another process is about to stop after this turn."""
        path = folder / f"{other}.stopped"
        return path.exists() and path.read_text().split()[1] == str(turn)

    def pause() -> None:
        partial = folder / f"{index}.partial"
        partial.write_text(f"{os.getpid()} {turn}")
        partial.replace(folder / f"{index}.stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
        go = folder / "go"
        while not (go.exists() and go.read_text() == str(turn)):  # it may arrive before the stop
            sleep(0.001)

    return stop


def main() -> int:
    """The training command, which takes turns; its exit code."""
    place = int(os.environ.get(INDEX, "0")), int(os.environ.get(COUNT, "1"))
    talking = Lock()
    stop = stopping(Path(os.environ[FOLDER]), *place, talking)
    from tlt_jax import cli
    from tlt_jax.train import __main__ as command

    prepared = cli.prepared

    @contextmanager
    def prepared_to_stop(*args, **knobs) -> Iterator[None]:
        with prepared(*args, **knobs):
            from tlt_jax.distributed import watch  # imports JAX: not before the process is prepared
            from tlt_jax.train import loop

            class Quiet(watch.Watch):
                def beat(self) -> None:
                    with talking:
                        super().beat()

                def find_failure(self) -> tuple[str, int]:
                    with talking:
                        return super().find_failure()

            watch.Watch = Quiet

            class Stopping(loop.Stopwatch):
                def lap(self) -> dict[str, float]:
                    found = super().lap()
                    stop()
                    return found

            loop.Stopwatch = Stopping
            yield

    cli.prepared = prepared_to_stop
    return command.main()


if __name__ == "__main__":
    raise SystemExit(main())
