"""Ends all processes of a job when one dies, raises or hangs, with one line that names the process and its phase."""

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

BEAT_S = 1.0  # seconds between two heartbeats


# The reason of process 0's failure, in the other processes.
UNREACHABLE = "cannot be reached, and it holds the board of all others: it died, or its machine did"


class Failure(NamedTuple):
    """The failure of a process: an error that it raised in `phase`; with an empty phase, what the others observed."""

    process: int
    phase: str
    reason: str  # in one line
    code: int  # the exit code of all

    def __str__(self) -> str:
        did = f"failed in phase {self.phase}: " if self.phase else ""
        return f"process {self.process} {did}{self.reason}"

    @property
    def pointer(self) -> str:
        """The short text for processes other than the failed one and process 0, so that the reason is not printed N times."""
        if not self.phase or self.process == 0:
            return str(self)
        return f"process {self.process} failed in phase {self.phase}: process 0 and log.txt say why"


class Watch:
    """Sends this process's heartbeats, and checks those of the others, in a background thread.

    A process without heartbeats for `lost_s` seconds is dead; one with heartbeats, but without a call
    of `alive` for `stuck_s` seconds, hangs. Process 0 checks all others, and these check only process
    0, so that the messages per second are linear in the number of processes. The first failure is
    written once, and is the reason with which every process exits.
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
        # Of the watched processes: the last heartbeat (count, steps, phase), and the times of the last beat and progress.
        watched = range(job.count) if job.is_first else range(1)
        self.last_beat: dict[int, tuple[int, int, str]] = {}
        self.beat_at: dict[int, float] = dict.fromkeys(watched, clock())
        self.progress_at = dict(self.beat_at)
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)

    def alive(self, phase: str = "") -> None:
        """Notes progress of this process, in this phase or, without one, in the current phase."""
        self.phase, self.steps = phase or self.phase, self.steps + 1

    def run(self) -> None:
        """Sends heartbeats and checks the others until the watch is closed."""
        while not self.closing.wait(BEAT_S):
            try:
                self.beat()
                failure = self.find_failure()
            except JaxRuntimeError:
                failure = Failure(0, "", UNREACHABLE, FAILED)
            if failure and not self.closing.is_set():
                self.end(failure)

    def beat(self) -> None:
        """Writes this process's heartbeat."""
        self.beats += 1
        text = json.dumps((self.beats, self.steps, self.phase))
        place = "watch/first" if self.job.is_first else f"beat/{self.job.index}"
        self.job.board.write(place, text)

    def find_failure(self) -> Failure | None:
        """The failure of another process, the same in all; None without one, or when this process has failed itself."""
        found = self.job.board.texts("watch/")
        if self.has_failed:
            return None
        if "watch/failure" in found:
            return Failure(*json.loads(found["watch/failure"]))
        if self.job.is_first:
            self.note_beats({self.job.index: found.get("watch/first", "")})
            beats = self.job.board.texts("beat/")
            self.note_beats({int(key.rpartition("/")[2]): text for key, text in beats.items()})
        elif "watch/first" in found:
            self.note_beats({0: found["watch/first"]})
        failure = self.dead_or_stuck()
        return failure and Failure(*json.loads(self.first(failure)))

    def note_beats(self, beats: Mapping[int, str]) -> None:
        """Notes the heartbeats of processes, and when each changed."""
        now = self.clock()
        for index, text in beats.items():
            if not text:
                continue
            count, steps, phase = json.loads(text)
            before = self.last_beat.get(index, (-1, -1, ""))
            self.last_beat[index] = count, steps, phase
            if count != before[0]:
                self.beat_at[index] = now
            if steps != before[1]:
                self.progress_at[index] = now

    def dead_or_stuck(self) -> Failure | None:
        """The failure of the first process that is dead or hangs."""
        now = self.clock()
        for index in self.beat_at:
            phase = self.last_beat.get(index, (0, 0, "start"))[2]
            if (ago := now - self.beat_at[index]) > self.lost_s:
                reason = f"was last heard of {ago:.0f} s ago in phase {phase}: it died, or its machine did"
                return Failure(index, "", reason, FAILED)
            if (ago := now - self.progress_at[index]) > self.stuck_s:
                return Failure(index, "", f"has hung for {ago:.0f} s in phase {phase}", FAILED)
        return None

    def first(self, failure: Failure) -> str:
        """Writes the failure unless one exists; the first failure of the job, as JSON."""
        return self.job.board.first("watch/failure", json.dumps(failure))

    def fail(self, error: BaseException) -> NoReturn:
        """Reports an error to the other processes, and ends this process with the job's first failure."""
        if is_consequence(error) and self.lost_s < math.inf:
            # A killed process breaks the collectives of the others at once, and is found dead later. Its death is the
            # reason, with which this watch's thread ends the process during this wait.
            self.closing.wait(self.lost_s + 2 * BEAT_S)
        self.has_failed = True
        message, trace = described(error)
        line = (message.strip().splitlines() or [""])[0]
        code = error.code if isinstance(error, UserError) else FAILED
        failure = first = Failure(self.job.index, self.phase, line, code)
        with contextlib.suppress(JaxRuntimeError):  # process 0 is dead: the error is printed here
            # The traceback before the failure, upon which process 0 reads it.
            self.job.board.write(f"traceback/{failure.process}", trace)
            first = Failure(*json.loads(self.first(failure)))
        if first != failure:
            self.end(first)
        print(trace, end="", file=sys.stderr)
        if self.job.is_first:
            self.record(f"{failure}\n{trace}")
        self.leave(message, code, self.pause)
        raise error

    def end(self, failure: Failure) -> None:
        """Ends this process because of another's failure; process 0 prints and records it in full."""
        if self.job.is_first:
            traces = self.job.board.texts("traceback/")
            self.record(f"{failure}\n{traces.get(f'traceback/{failure.process}', '')}")
        message = str(failure) if self.job.is_first else failure.pointer
        self.leave(message, failure.code, self.pause)

    @property
    def pause(self) -> float:
        """Seconds to wait before exiting: process 0 holds the board, which the others must still read."""
        return 2 * BEAT_S if self.job.is_first else 0.0

    def close(self) -> None:
        """Stops the watch: all processes are done."""
        self.closing.set()
        self.thread.join()


@contextmanager
def joined(config: Config, record: Callable[[str], None] = lambda text: None) -> Iterator[Watch]:
    """Context that joins the processes of this command, which end together; enter it before JAX makes its devices.

    `record` is called with the job's failure, once, in process 0. Raises ConfigError as `job.join` does.
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
    except BaseException as error:  # any exception, also Ctrl-C, must end the others
        watch.fail(error)
    job.decided(True)  # process 0 holds the board: all wait for it before they exit
    watch.close()


def is_consequence(error: BaseException) -> bool:
    """Whether the error may be due to another process's death: a collective's error, not one of this process's memory."""
    return isinstance(error, JaxRuntimeError) and not str(error).startswith(
        ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
    )


def described(error: BaseException) -> tuple[str, str]:
    """The message of an error, and its traceback; without one for errors that the user can correct."""
    if isinstance(error, UserError):
        return str(error), ""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


LEAVING = threading.Lock()  # the main thread and the watch may both exit: only one prints


def leave_at_once(message: str, code: int, pause: float) -> NoReturn:
    """Ends the process after `pause` seconds, without waiting for the others as JAX's exit would."""
    LEAVING.acquire()
    print(f"error: {message}", file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    time.sleep(pause)
    os._exit(code)
