"""A pool of workers that score completions; workers that hang or crash are replaced. No JAX."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from tlt_jax.config import Config
from tlt_jax.config.task import is_at_least
from tlt_jax.distributed import workers as processes
from tlt_jax.distributed.workers import LONGEST, MAX_FAILED_STARTS, START_S
from tlt_jax.errors import RewardError
from tlt_jax.rewards import terms
from tlt_jax.rewards.worker import start_thread

# Reward terms, with verl's names: the penalty, and whether there is one.
PENALTY, IS_PENALIZED, LENGTH_PENALTY = "overlong_reward", "overlong", "length_penalty"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """The weighted sum of the reward terms, and the terms; or a failure.

    On failure `value` is reward.failure_score, `failure` its kind and `detail` its reason.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # "timeout" | "crash" | "error"
    detail: str = ""


@dataclass(eq=False)
class Worker:
    """A worker, a process or a thread, and its current job.

    `deadline` (time.monotonic): of its start until it is ready, then of its job.
    """

    process: subprocess.Popen | threading.Thread
    pipe: Connection
    deadline: float
    is_ready: bool = False
    job: tuple[Hashable, bytes] | None = None
    term: str = ""  # the reward that is running; empty before the first one starts


def workers(config: Config, is_local: bool = False) -> int:
    """The scoring processes of a run's process: reward.workers, or by the cores that this process may use; one local thread."""
    if config.reward.workers:
        return config.reward.workers
    return 1 if is_local else processes.by_cores()


class Scorer:
    """Scores completions in `workers` processes while the caller does other work.

    A context manager. The workers are new interpreters that import this package and the rewards,
    never the caller's main module, so they import no JAX. One more waits, and takes over at once for
    one that was killed. When a reward is a function that only this process has, they are threads,
    which is said. A background thread exchanges jobs and scores with them; it never calls JAX. Raises
    RewardError when reward.terms is empty, a reward cannot be loaded, or workers repeatedly fail to
    start.
    """

    def __init__(self, config: Config):
        if not config.reward.terms:
            raise RewardError(
                "reward.terms is empty: name at least one reward, for example {task: 1.0}"
            )
        self.config = config
        if names := terms.local(config):
            log.warning(
                "%s: a function that only this process has, so rewards run in its threads, which contain no hang and no crash; "
                "put it in a module for processes of their own",
                ", ".join(names),
            )
        self._is_local = bool(names)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Hashable, bytes]] = deque()
        self._unfinished: dict[Hashable, tuple[Hashable, bytes]] = {}  # key -> its job
        self._scores: dict[Hashable, Score] = {}
        self._new: list[Hashable] = []  # keys of scores that `news` has not returned
        self._fatal = ""
        self._is_closing = False
        self._failed_starts = 0

        self._alive = os.pipe()  # the write end closes when this process ends, however it ends
        self._awake, self._wake = Pipe(duplex=False)
        self._count = workers(config, self._is_local)  # of those that score at a time
        self._has_spare = not self._is_local  # one process more
        self._workers = [self._start() for _ in range(self._count)]

        self._thread = threading.Thread(target=self._serve, name="reward-scorer", daemon=True)
        self._thread.start()

        with self._changed:
            while not self._fatal and self._ready() < self._count:
                self._wait()
        if self._fatal:
            self.close()
            raise RewardError(self._fatal)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(self, key: Hashable, prompt: str, completion: str, row: dict[str, Any]) -> None:
        """Queues one completion for scoring under `key`.

        Raises ValueError when the key is being scored, or has a score that was not collected.
        """
        job = key, pickle.dumps((prompt, completion, row))
        with self._changed:
            if key in self._unfinished or key in self._scores:
                raise ValueError(f"completion {key!r} is already being scored")
            self._unfinished[key] = job
            self._waiting.append(job)
        self._wake.send_bytes(b".")

    def news(self) -> dict[Hashable, Score]:
        """The scores computed since the last call, by key; never waits. `collect` returns them too.

        Raises RewardError when workers cannot run.
        """
        with self._changed:
            if self._fatal:
                raise RewardError(self._fatal)
            new, self._new = self._new, []
            return {key: self._scores[key] for key in new}

    def drop_others(self, needed: Container[Hashable]) -> None:
        """Drops all scores and unscored completions but those with a needed key; what a worker is scoring ends unnoticed."""
        with self._changed:
            self._waiting = deque(job for job in self._waiting if job[0] in needed)
            self._unfinished = {k: job for k, job in self._unfinished.items() if k in needed}
            self._scores = {key: score for key, score in self._scores.items() if key in needed}
            self._new = [key for key in self._new if key in needed]

    def collect(self, interrupted: Callable[[], bool] = lambda: False) -> dict[Hashable, Score]:
        """The scores of all completions submitted since the last call, by key; waits for them.

        `interrupted` is called about every second; when true, returns the scores computed so far.
        Raises RewardError when workers cannot run.
        """
        with self._changed:
            while self._unfinished and not self._fatal and not interrupted():
                self._wait()
            if self._fatal:
                raise RewardError(self._fatal)
            scores, self._scores, self._new = self._scores, {}, []
        return scores

    def close(self) -> None:
        """Ends the workers; scores that were not collected are lost. Idempotent."""
        if self._is_closing:
            return

        self._is_closing = True
        self._wake.send_bytes(b".")
        self._thread.join()

        for worker in self._workers:
            _end(worker)
        self._wake.close()
        self._awake.close()
        for end in self._alive:
            os.close(end)

    def _wait(self) -> None:
        """Waits for a change, with the lock held; at most one second, to notice that the scoring thread died."""
        self._changed.wait(1.0)
        if not (self._thread.is_alive() or self._is_closing or self._fatal):
            raise RuntimeError("the scoring thread died: its error is printed above")

    def _start(self) -> Worker:
        """A new worker: a process, or a thread for rewards that only this process has."""
        deadline = time.monotonic() + START_S
        if self._is_local:
            ours, theirs = Pipe()
            return Worker(start_thread(theirs, self.config), ours, deadline)
        process, pipe = processes.start("tlt_jax.rewards.worker", self.config, self._alive[0])
        return Worker(process, pipe, deadline)

    def _serve(self) -> None:
        """The scoring thread: assigns jobs to idle workers and receives results until `close` or a fatal error."""
        while not self._is_closing and not self._fatal:
            pipes = {worker.pipe: worker for worker in self._workers}
            nearest = min((worker.deadline for worker in self._workers), default=math.inf)
            patience = None if nearest == math.inf else max(0.0, nearest - time.monotonic())

            for pipe in wait([self._awake, *pipes], patience):
                if pipe is self._awake:
                    self._awake.recv_bytes()
                else:
                    self._receive(pipes[pipe])

            now = time.monotonic()
            for worker in list(self._workers):
                if worker.deadline <= now:
                    self._replace(worker, "timeout")

            if self._has_spare and self._ready() == len(self._workers) == self._count:
                self._workers.append(self._start())
            self._assign()

    def _assign(self) -> None:
        for worker in list(self._workers):
            with self._changed:
                is_full = sum(one.job is not None for one in self._workers) >= self._count
                if is_full or not (self._waiting and worker.is_ready and worker.job is None):
                    continue
                worker.job = self._waiting.popleft()
            worker.term, worker.deadline = "", time.monotonic() + self.config.reward.timeout_s
            try:
                worker.pipe.send_bytes(worker.job[1])
            except OSError:
                self._replace(worker, "crash")

    def _ready(self) -> int:
        return sum(worker.is_ready for worker in self._workers)

    def _receive(self, worker: Worker) -> None:
        """Receives one message of a worker."""
        try:
            kind, *content = read(worker.pipe.recv_bytes(LONGEST))
        except (EOFError, OSError, ValueError):
            self._replace(worker, "crash")
            return

        if kind == "ready":
            with self._changed:
                worker.is_ready, worker.deadline, self._failed_starts = True, math.inf, 0
                self._changed.notify_all()
        elif kind == "refused":
            if self._gives_up(worker, content[0]):
                _end(worker)
            else:
                self._fail(content[0])
        elif kind == "term":
            worker.term = content[0]
        elif kind == "score":
            (parts,), weights = content, self.config.reward.terms
            value = math.fsum(weight * parts[name] for name, weight in weights.items())
            self._finish(worker, Score(value, parts))
        else:
            self._finish(worker, self._failed("error", worker, content[0]))

    def _replace(self, worker: Worker, failure: str) -> None:
        """Kills a worker, scores its job as failed, and starts another one.

        A job whose worker crashed before any reward started is queued again. Workers that fail to
        start MAX_FAILED_STARTS times in a row are a fatal error.
        """
        code = _end(worker, grace_s=1.0 if failure == "crash" else 0.0)
        detail = processes.cause(code)
        if failure == "timeout":
            detail = f"no answer after {self.config.reward.timeout_s if worker.is_ready else START_S:g} s"

        if worker.job is not None and failure == "crash" and not worker.term:
            with self._changed:  # no reward had started: not the fault of the job
                if self._is_wanted(worker.job):
                    self._waiting.appendleft(worker.job)
        elif worker.job is not None:
            self._finish(worker, self._failed(failure, worker, detail))
        elif not worker.is_ready:
            if self._gives_up(worker, detail):
                return
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                times = f"{self._failed_starts} times in a row"
                self._fail(f"the reward workers do not start: {detail}, {times}")
                return

        self._workers[self._workers.index(worker)] = self._start()

    def _gives_up(self, worker: Worker, reason: str) -> bool:
        """Whether a worker that does not start is not needed, and is dropped: the others suffice, without a spare one."""
        if self._ready() < self._count:
            return False
        log.warning("no spare scoring process: %s", reason)
        self._has_spare = False
        self._workers.remove(worker)
        return True

    def _failed(self, failure: str, worker: Worker, detail: str) -> Score:
        detail = f"{worker.term}: {detail}" if worker.term else detail
        return Score(self.config.reward.failure_score, {}, failure, detail)

    def _finish(self, worker: Worker, score: Score) -> None:
        with self._changed:
            job, worker.job, worker.deadline = worker.job, None, math.inf
            if self._is_wanted(job):
                key, _ = job
                del self._unfinished[key]
                self._scores[key] = score
                self._new.append(key)
            self._changed.notify_all()

    def _is_wanted(self, job: tuple[Hashable, bytes]) -> bool:
        """Whether the job was not dropped, with the lock held; another one may have its key by now."""
        return self._unfinished.get(job[0]) is job

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._fatal = reason
            self._changed.notify_all()


def read(message: bytes) -> list[Any]:
    """A worker's message: its kind and content. Raises ValueError for any other form."""
    found = json.loads(message)
    match found:
        case ["ready"] | ["refused" | "term" | "error", str()]:
            return found
        case ["score", dict(parts)] if all(isinstance(part, float) for part in parts.values()):
            return found
    raise ValueError("not a message of a worker")


def _end(worker: Worker, grace_s: float = 0.0) -> int:
    """Kills the process and its children; returns the exit code.

    Waits `grace_s` seconds first, in which the process may exit by itself. A thread ends with its current reward.
    """
    if isinstance(worker.process, threading.Thread):
        worker.pipe.close()
        return 0
    code = processes.end(worker.process, grace_s)
    worker.pipe.close()
    return code


def penalty(length: int, longest: int, buffer: int, factor: float) -> float:
    """What the length of an answer adds to its reward: min((longest - buffer - length) / buffer * factor, 0).

    The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), times `factor`. All lengths in tokens; `longest`: of
    any answer.
    """
    return min((longest - buffer - length) / buffer * factor, 0.0)


def penalized(
    config: Config, scores: Mapping[int, Score], lengths: Mapping[int, int]
) -> dict[int, Score]:
    """The scores that training uses, by uid: with the penalty of reward.overlong_buffer, which is a term of its own.

    `lengths`: tokens of the answers, by uid. A score that failed stays reward.failure_score.
    """
    reward, longest = config.reward, config.rollout.max_new_tokens
    if not reward.overlong_buffer:
        return dict(scores)

    found = {}
    for uid, score in scores.items():
        found[uid] = score
        if not score.failure:
            lost = penalty(lengths[uid], longest, reward.overlong_buffer, reward.overlong_factor)
            parts = dict(score.parts) | {PENALTY: lost, IS_PENALIZED: float(lost < 0)}
            found[uid] = replace(score, value=score.value + lost, parts=parts)
    return found


def shortened(
    config: Config, scores: Mapping[int, Score], lengths: Mapping[int, int]
) -> dict[int, Score]:
    """The scores, by uid, in which right answers to a prompt lose reward.length_penalty by their length, as a term of its own.

    (length - shortest) / (longest - shortest) of it, of the right answers to one prompt: the length reward of Kimi k1.5
    (arXiv 2501.12599, section 2.3.3) for right answers, less its constant.
    """
    weight, samples, found = config.reward.length_penalty, config.rollout.samples, dict(scores)
    if not weight:
        return found
    groups: dict[int, list[int]] = {}
    for uid, score in scores.items():
        if is_at_least(score.value, config.eval.correct_at) and not score.failure:
            groups.setdefault(uid // samples, []).append(uid)
    for uids in groups.values():
        shortest, longest = (pick(lengths[uid] for uid in uids) for pick in (min, max))
        for uid in uids:
            lost = -weight * (lengths[uid] - shortest) / max(longest - shortest, 1)
            parts = dict(scores[uid].parts) | {LENGTH_PENALTY: lost}
            found[uid] = replace(scores[uid], value=scores[uid].value + lost, parts=parts)
    return found
