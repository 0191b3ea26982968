"""Ends all processes of a job when one of them dies, raises or hangs, with one line that says which and where."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from jax.errors import JaxRuntimeError

from tlt_jax.config import Config
from tlt_jax.distributed import job as jobs
from tlt_jax.distributed.job import Job
from tlt_jax.errors import FAILED, UserError

BEAT_S = 1.0  # from one beat to the next


# Of process 0, as the others see it.
UNREACHABLE = (
    "cannot be reached, and all others talk to each other by it: it died, or its machine did"
)


class Failure(NamedTuple):
    """What is wrong with a process: an error that it raised in a phase, or, with an empty phase, what others see."""

    process: int
    phase: str
    reason: str  # one line
    code: int  # the exit code of all

    def __str__(self) -> str:
        did = f"failed in phase {self.phase}: " if self.phase else ""
        return f"process {self.process} {did}{self.reason}"

    @property
    def pointer(self) -> str:
        """The same in the output of a process that is neither the failed one nor process 0: no reason stands there N times."""
        if not self.phase or self.process == 0:
            return str(self)
        return f"process {self.process} failed in phase {self.phase}: process 0 and log.txt say why"


class Watch:
    """Tells the others of a job where this process is, and looks where they are, in a thread of its own.

    A process whose beats stay away for `lost_s` seconds is dead; one that beats, but was not told
    to be `alive` for `stuck_s` seconds, hangs. Process 0 looks at all others, and these at process 0
    alone, so that the messages of a second grow with the processes, not with their square. What is
    wrong first is written once, and is the reason that every process leaves with.
    """

    def __init__(
        self,
        job: Job,
        lost_s: float = math.inf,
        stuck_s: float = math.inf,
        leave: Callable[[str, int, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[str], None] = lambda text: None,
    ):
        self.job, self.lost_s, self.stuck_s = job, lost_s, stuck_s
        self.leave, self.clock, self.record = leave or leave_at_once, clock, record
        self.phase, self.steps, self.beats, self.has_failed = "start", 0, 0, False
        job.alive = self.alive
        # Of the processes that this one looks at: what they told last, and when that changed, for beats and for progress.
        watched = range(job.count) if job.is_first else range(1)
        self.told: dict[int, tuple[int, int, str]] = {}
        self.heard: dict[int, float] = dict.fromkeys(watched, clock())
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
                failure = self.wrong()
            except JaxRuntimeError:
                failure = Failure(0, "", UNREACHABLE, FAILED)
            if failure and not self.closing.is_set():
                self.end(failure)

    def beat(self) -> None:
        """Tells the others."""
        self.beats += 1
        told = json.dumps((self.beats, self.steps, self.phase))
        place = "watch/first" if self.job.is_first else f"beat/{self.job.index}"
        self.job.board.write(place, told)

    def wrong(self) -> Failure | None:
        """What is wrong with another process, the same for all; None when nothing is, or this one has failed itself."""
        found = self.job.board.texts("watch/")
        if self.has_failed:
            return None
        if "watch/failure" in found:
            return Failure(*json.loads(found["watch/failure"]))
        if self.job.is_first:
            self.hear({self.job.index: found.get("watch/first", "")})
            beats = self.job.board.texts("beat/")
            self.hear({int(key.rpartition("/")[2]): text for key, text in beats.items()})
        elif "watch/first" in found:
            self.hear({0: found["watch/first"]})
        failure = self.silent()
        return failure and Failure(*json.loads(self.first(failure)))

    def hear(self, beats: Mapping[int, str]) -> None:
        """Notes what processes told, and when it changed."""
        now = self.clock()
        for index, text in beats.items():
            if not text:
                continue
            count, steps, phase = json.loads(text)
            before = self.told.get(index, (-1, -1, ""))
            self.told[index] = count, steps, phase
            if count != before[0]:
                self.heard[index] = now
            if steps != before[1]:
                self.moved[index] = now

    def silent(self) -> Failure | None:
        """The first process that is dead or hangs."""
        now = self.clock()
        for index in self.heard:
            phase = self.told.get(index, (0, 0, "start"))[2]
            if (ago := now - self.heard[index]) > self.lost_s:
                reason = f"was last heard of {ago:.0f} s ago in phase {phase}: it died, or its machine did"
                return Failure(index, "", reason, FAILED)
            if (ago := now - self.moved[index]) > self.stuck_s:
                return Failure(index, "", f"has hung for {ago:.0f} s in phase {phase}", FAILED)
        return None

    def first(self, failure: Failure) -> str:
        """The failure that was written first, as JSON: this one, unless another one stands."""
        return self.job.board.first("watch/failure", json.dumps(failure))

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the others of an error, and ends this process with the first one of the job."""
        if is_consequence(error) and self.lost_s < math.inf:
            # A process that was killed breaks the collectives of the others at once, and is found to be gone later: its
            # fate is the reason, with which the thread of this watch ends the process meanwhile.
            self.closing.wait(self.lost_s + 2 * BEAT_S)
        self.has_failed = True
        message, trace = described(error)
        line = (message.strip().splitlines() or [""])[0]
        code = error.code if isinstance(error, UserError) else FAILED
        own = first = Failure(self.job.index, self.phase, line, code)
        with contextlib.suppress(JaxRuntimeError):  # process 0 is gone: the error is said here
            # The traceback before the failure, on which process 0 looks for it.
            self.job.board.write(f"traceback/{own.process}", trace)
            first = Failure(*json.loads(self.first(own)))
        if first != own:
            self.end(first)
        print(trace, end="", file=sys.stderr)
        if self.job.is_first:
            self.record(f"{own}\n{trace}")
        self.leave(message, code, self.pause)
        raise error

    def end(self, failure: Failure) -> None:
        """Ends this process for what is wrong with another one; process 0 says and records it in full."""
        if self.job.is_first:
            traces = self.job.board.texts("traceback/")
            self.record(f"{failure}\n{traces.get(f'traceback/{failure.process}', '')}")
        said = str(failure) if self.job.is_first else failure.pointer
        self.leave(said, failure.code, self.pause)

    @property
    def pause(self) -> float:
        """Seconds before this process leaves: process 0 holds the board, which the others have to read."""
        return 2 * BEAT_S if self.job.is_first else 0.0

    def close(self) -> None:
        """All processes are done."""
        self.closing.set()
        self.thread.join()


@contextmanager
def joined(config: Config, record: Callable[[str], None] = lambda text: None) -> Iterator[Watch]:
    """Context of the processes of this command, which end together; before JAX makes its devices.

    `record` keeps why the job failed, once, in process 0. Raises ConfigError as `job.join` does.
    """
    job = jobs.join(config)
    watch = Watch(job, config.processes.lost_s, config.processes.stuck_s, record=record)
    if job.count == 1:
        try:
            yield watch
        except Exception as error:
            message, trace = described(error)
            record(f"failed in phase {watch.phase}: {message}\n{trace}")
            raise
        return
    watch.thread.start()
    try:
        yield watch
    except BaseException as error:  # whatever ends this process, Ctrl-C too, has to end the others
        watch.fail(error)
    job.decided(True)  # nobody leaves before process 0, on whose board the others are
    watch.close()


def is_consequence(error: BaseException) -> bool:
    """Whether the error may come from another process that is gone: one of a collective, not of this process's memory."""
    return isinstance(error, JaxRuntimeError) and not str(error).startswith(
        ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
    )


def described(error: BaseException) -> tuple[str, str]:
    """The message of an error, and its traceback, which one that the user can correct does not need."""
    if isinstance(error, UserError):
        return str(error), ""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


LEAVING = threading.Lock()  # the main thread and that of the watch may both want to: one is heard


def leave_at_once(message: str, code: int, pause: float) -> NoReturn:
    """Ends the process after so many seconds, without waiting for others as JAX's own exit would."""
    LEAVING.acquire()
    print(f"error: {message}", file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    time.sleep(pause)
    os._exit(code)
