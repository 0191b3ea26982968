"""Ends all processes of a job when one of them dies, raises or hangs, with one line that says which and where."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from jax.errors import JaxRuntimeError

from tlt_jax.config import Config
from tlt_jax.distributed import job as jobs
from tlt_jax.distributed.job import Job
from tlt_jax.errors import FAILED, MISTAKE, UserError

BEAT_S = 1.0  # from one beat to the next


class Watch:
    """Tells the others of a job where this process is, and looks where they are, in a thread of its own.

    A process whose beats stay away for `lost_s` seconds is dead; one that beats, but was not told
    to be `alive` for `stuck_s` seconds, hangs.
    """

    def __init__(
        self,
        job: Job,
        lost_s: float = math.inf,
        stuck_s: float = math.inf,
        leave: Callable[[str, int, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.job, self.lost_s, self.stuck_s = job, lost_s, stuck_s
        self.leave, self.clock = leave or leave_at_once, clock
        self.phase, self.steps, self.beats = "start", 0, 0
        # Of the others: what they told last, and when that changed, for beats and for progress.
        self.told: dict[int, tuple[int, int, str]] = {}
        self.heard: dict[int, float] = dict.fromkeys(range(job.count), clock())
        self.moved = dict(self.heard)
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)

    def alive(self, phase: str = "") -> None:
        """This process makes progress: in this phase, or the one before."""
        self.phase, self.steps = phase or self.phase, self.steps + 1

    def run(self) -> None:
        """Beats and looks until the job is closed."""
        while not self.closing.wait(BEAT_S):
            try:
                self.beat()
                reason, code = self.wrong()
            except JaxRuntimeError:
                reason = "process 0, which all others talk to, cannot be reached: it died, or its machine did"
                code = FAILED
            if reason and not self.closing.is_set():
                self.leave(reason, code, self.pause)

    def beat(self) -> None:
        """Tells the others."""
        self.beats += 1
        told = json.dumps((self.beats, self.steps, self.phase))
        self.job.board.write(f"beat/{self.job.index}", told)

    def wrong(self) -> tuple[str, int]:
        """What is wrong with another process and where it was, empty when nothing is; the exit code for it."""
        now = self.clock()
        for key, text in self.job.board.texts("failed/").items():
            index = int(key.rpartition("/")[2])
            if index != self.job.index:
                phase, message, code = json.loads(text)
                return f"process {index} failed in phase {phase}: {message}", code
        for key, text in self.job.board.texts("beat/").items():
            index, (beats, steps, phase) = int(key.rpartition("/")[2]), json.loads(text)
            before = self.told.get(index, (-1, -1, ""))
            self.told[index] = beats, steps, phase
            if beats != before[0]:
                self.heard[index] = now
            if steps != before[1]:
                self.moved[index] = now
        for index in range(self.job.count):
            phase = self.told.get(index, (0, 0, "start"))[2]
            if now - self.heard[index] > self.lost_s:
                ago = f"{now - self.heard[index]:.0f} s ago in phase {phase}"
                return (
                    f"process {index} was last heard of {ago}: it died, or its machine did",
                    FAILED,
                )
            if now - self.moved[index] > self.stuck_s:
                hung = f"{now - self.moved[index]:.0f} s in phase {phase}"
                return f"process {index} has hung for {hung}", FAILED
        return "", 0

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the others of an error, and ends this process with its message."""
        is_mistake = isinstance(error, UserError)
        message = str(error) if is_mistake else f"{type(error).__name__}: {error}"
        first = (message.strip().splitlines() or [""])[0]
        code = MISTAKE if is_mistake else FAILED
        self.job.board.write(f"failed/{self.job.index}", json.dumps((self.phase, first, code)))
        if not is_mistake:
            traceback.print_exception(error)
        self.leave(message, code, self.pause)
        raise error

    @property
    def pause(self) -> float:
        """Seconds before this process leaves: process 0 holds the board, which the others have to read."""
        return 2 * BEAT_S if self.job.is_first else 0.0

    def close(self) -> None:
        """All processes are done."""
        self.closing.set()
        self.thread.join()


@contextmanager
def joined(config: Config) -> Iterator[Watch]:
    """Context of the processes of this command, which end together; before JAX makes its devices.

    Raises ConfigError as `job.join` does.
    """
    job = jobs.join(config)
    watch = Watch(job, config.processes.lost_s, config.processes.stuck_s)
    if job.count == 1:
        yield watch
        return
    watch.thread.start()
    try:
        yield watch
    except BaseException as error:  # whatever ends this process, Ctrl-C too, has to end the others
        watch.fail(error)
    job.decided(True)  # nobody leaves before process 0, on whose board the others are
    watch.close()


def leave_at_once(message: str, code: int, pause: float) -> NoReturn:
    """Ends the process after so many seconds, without waiting for others as JAX's own exit would."""
    print(f"error: {message}", file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    time.sleep(pause)
    os._exit(code)
