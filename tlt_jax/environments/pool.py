"""A pool of workers that hold environments; workers that hang or crash are replaced. No JAX."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tlt_jax.config import Config, extension
from tlt_jax.distributed import workers
from tlt_jax.environments.protocol import CLOSE_S, Call, Reply, Sampled
from tlt_jax.errors import EnvironmentsError

SILENT_S = 15.0  # seconds without a beat, beyond the limit of a turn, after which a worker as a whole hangs
MOST_HUNG = 3  # workers with hung turns, for each one that takes environments


@dataclass(eq=False)
class Host:
    """A worker process and its environments. A thread sends what is in `outbox`, another one receives."""

    process: subprocess.Popen
    pipe: Connection
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    live: dict[int, Hashable] = field(default_factory=dict)  # serial number -> key
    receiver: threading.Thread | None = None
    is_ready: bool = False
    is_ending: bool = False
    hung: int = 0  # turns over their time limit


@dataclass(eq=False)
class Seat:
    """An environment of the caller. `host`: None until a worker has room for it."""

    serial: int
    host: Host | None = None
    is_busy: bool = True  # a turn is under way


class Environments:
    """Environments of config.environment in worker processes, while the caller does other work.

    A context manager. Workers are new interpreters that import this package and the user's code, never the caller's main
    module, so they import no JAX; each holds many environments and plays their turns in threads. Replies come by `news`,
    which is to be polled. Raises EnvironmentsError when the environments cannot be loaded, or workers repeatedly fail to
    start.
    """

    def __init__(self, config: Config):
        for name in (config.environment.path, *config.environment.tools):
            if isinstance(name, extension.Local):
                raise EnvironmentsError(
                    f"environment {name!r} is a function or class of a notebook or script, which other processes cannot "
                    "import: put it in a module"
                )
        self.config = config
        self.schemas: list[dict[str, Any]] = []  # JSON schemas of the tools
        self.are_agents = False
        self._changed = threading.Condition()
        self._serials = itertools.count()
        self._seats: dict[Hashable, Seat] = {}
        self._waiting: deque[tuple[Hashable, bytes]] = deque()  # environments to begin
        self._news: dict[Hashable, Reply] = {}
        self._fatal = ""
        self._is_closing = False
        self._failed_starts = 0

        self._alive = os.pipe()  # the write end closes when this process ends, however it ends
        self._count = config.environment.workers or workers.by_cores()
        self._hosts: list[Host] = []
        with self._changed:
            self._settle()
            while not self._fatal and sum(host.is_ready for host in self._hosts) < self._count:
                self._changed.wait()
        if self._fatal:
            self.close()
            raise EnvironmentsError(self._fatal)

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def begin(self, key: Hashable, row: Mapping[str, Any], seed: int) -> None:
        """Makes an environment and resets it; its opening Reply is news. Raises ValueError for a key that is in use."""
        serial = next(self._serials)
        job = pickle.dumps(("begin", serial, pickle.dumps(dict(row)), seed))
        with self._changed:
            if key in self._seats or key in self._news:
                raise ValueError(f"environment {key!r} has already begun")
            self._seats[key] = Seat(serial)
            self._waiting.append((key, job))
            self._settle()

    def act(
        self, key: Hashable, text: str, calls: Sequence[Call] = (), sampled: Sampled | None = None
    ) -> None:
        """One turn of the policy: its text, and the tool calls that were parsed from it; for an agent its tokens.

        Without effect when the environment has crashed and `news` will say so. Raises ValueError for a key that is not live
        or has a turn under way.
        """
        with self._changed:
            seat = self._seats.get(key)
            if seat is None and key in self._news:
                return
            if seat is None or seat.is_busy:
                raise ValueError(
                    f"environment {key!r} {'has a turn under way' if seat else 'is not live'}"
                )
            seat.is_busy = True
            turn = (text, tuple(calls), sampled)[: 3 if self.are_agents else 2]
            seat.host.outbox.put(pickle.dumps(("act", seat.serial, *turn)))

    def news(self) -> dict[Hashable, Reply]:
        """The replies since the last call, by key; never waits. A key is free after a reply that is done.

        A crash also comes to environments without a turn under way. Raises EnvironmentsError when workers cannot run.
        """
        with self._changed:
            if self._fatal:
                raise EnvironmentsError(self._fatal)
            news, self._news = self._news, {}
        return news

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Closes these environments, of which there is no more news; keys that are not live are ignored."""
        keys = set(keys)
        with self._changed:
            self._waiting = deque(job for job in self._waiting if job[0] not in keys)
            for key in keys:
                self._news.pop(key, None)
                seat = self._seats.pop(key, None)
                if seat and seat.host:
                    del seat.host.live[seat.serial]
                    seat.host.outbox.put(pickle.dumps(("drop", seat.serial)))

    def close(self) -> None:
        """Closes all environments, for which they have CLOSE_S seconds, and ends the workers. Idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            hosts = list(self._hosts)
            for host in hosts:
                host.outbox.put(pickle.dumps(("end",)))
        limit = time.monotonic() + CLOSE_S + 1
        for host in hosts:
            grace_s = limit - time.monotonic() if host.is_ready and not self._fatal else 0.0
            workers.end(host.process, max(0.0, grace_s))
        for host in hosts:
            host.receiver.join()
        for end in self._alive:
            os.close(end)

    def _settle(self) -> None:
        """Starts the workers that are missing, and gives waiting environments to workers, with the lock.

        A worker with hung turns takes none, and another one replaces it.
        """
        if self._is_closing or self._fatal:
            return
        staying = [host for host in self._hosts if not host.is_ending]
        fit = [host for host in staying if not host.hung]
        is_full = len(staying) >= (MOST_HUNG + 1) * self._count
        for _ in range(len(fit) if not is_full else self._count, self._count):
            self._start()

        able = [
            host for host in (staying if is_full else fit) if host.is_ready and not host.is_ending
        ]
        while able and self._waiting:
            key, job = self._waiting.popleft()
            host = min(able, key=lambda one: len(one.live))
            seat = self._seats[key]
            seat.host, host.live[seat.serial] = host, key
            host.outbox.put(job)

    def _start(self) -> None:
        try:
            process, pipe = workers.start(
                "tlt_jax.environments.worker", self.config, self._alive[0]
            )
        except OSError as error:
            self._fatal = f"no process for environments can be started: {error}"
            return
        host = Host(process, pipe)
        self._hosts.append(host)
        threading.Thread(target=self._send, args=(host,), daemon=True).start()
        host.receiver = threading.Thread(target=self._receive, args=(host,), daemon=True)
        host.receiver.start()

    def _send(self, host: Host) -> None:
        """The thread that sends: it may wait for a worker that hangs as a whole."""
        with contextlib.suppress(OSError):  # the receiving thread sees it too
            while (job := host.outbox.get()) is not None:
                host.pipe.send_bytes(job)

    def _receive(self, host: Host) -> None:
        """The thread that receives, until the worker ends."""
        is_silent = False
        with contextlib.suppress(EOFError, OSError, ValueError):
            while host.pipe.poll(self._patience_s(host)):
                self._take(host, read(host.pipe.recv_bytes(workers.LONGEST)))
            is_silent = True
        code = workers.end(host.process, grace_s=0.0 if is_silent or host.is_ending else 1.0)
        host.outbox.put(None)
        with self._changed:
            self._lost(host, code, is_silent)
            self._settle()
            self._changed.notify_all()

    def _patience_s(self, host: Host) -> float:
        return SILENT_S + self.config.environment.timeout_s if host.is_ready else workers.START_S

    def _take(self, host: Host, message: list[Any]) -> None:
        """Takes one message of a worker."""
        kind, *content = message
        with self._changed:
            if kind == "ready":
                host.is_ready, self._failed_starts = True, 0
                self.schemas, self.are_agents = content
            elif kind == "refused":
                self._fatal = content[0]
            elif kind == "beat":
                self._look(host, *content)
            else:
                serial, *reply = content
                self._answer(
                    host,
                    serial,
                    Reply(*reply)._replace(messages=tuple(reply[0]), tokens=tuple(reply[6])),
                )
            if kind != "reply":
                self._settle()
                self._changed.notify_all()

    def _look(self, host: Host, hung: int, turns: int) -> None:
        """Ends a worker that has nothing to do but to hang, or nothing at all while there are more than enough.

        `turns`: all, also those that hang and environments that close.
        """
        host.hung = hung
        is_spare = sum(not (one.hung or one.is_ending) for one in self._hosts) > self._count
        if turns == hung and not host.live and (hung or is_spare):
            host.is_ending = True
            host.process.kill()

    def _answer(self, host: Host, serial: int, reply: Reply) -> None:
        if serial not in host.live:
            return  # it was dropped
        key = host.live[serial]
        self._news[key], self._seats[key].is_busy = reply, False
        if reply.done:
            del host.live[serial], self._seats[key]

    def _lost(self, host: Host, code: int, is_silent: bool) -> None:
        """Ends the environments of a worker that has ended, with the lock."""
        self._hosts.remove(host)
        if self._is_closing or host.is_ending:
            return
        silent = f"its worker said nothing for {self._patience_s(host):g} s"
        for serial, key in list(host.live.items()):
            failure = "timeout" if is_silent and self._seats[key].is_busy else "crash"
            detail = silent if is_silent else workers.cause(code)
            self._answer(host, serial, Reply(done=True, failure=failure, detail=detail))
        self._failed_starts += not host.is_ready
        if self._failed_starts >= workers.MAX_FAILED_STARTS and not self._fatal:
            self._fatal = (
                f"the workers of environments do not start: {silent if is_silent else workers.cause(code)}, "
                f"{self._failed_starts} times in a row"
            )


def read(message: bytes) -> list[Any]:
    """A worker's message: its kind and content. Raises ValueError for any other form."""
    found = json.loads(message)
    match found:
        case ["ready", list(), bool()] | ["refused", str()] | ["beat", int(), int()]:
            return found
        case [
            "reply",
            int(),
            list(said),
            float(),
            bool(),
            str(),
            str(),
            dict(info),
            list(tokens),
            int(),
        ] if (
            all(isinstance(one, dict) for one in said)
            and all(isinstance(value, float) for value in info.values())
            and all(type(one) is int and 0 <= one < 2**31 for one in tokens)
        ):
            return found
    raise ValueError("not a message of a worker")
