"""The worker: holds many environments and plays their turns in threads, so that none waits for a slow one. No JAX."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tlt_jax.config import Config
from tlt_jax.distributed.workers import LONGEST, describe, tell
from tlt_jax.environments.protocol import CLOSE_S, Maker, Reply
from tlt_jax.errors import UserError

THREADS = 256  # most turns at a time, besides those over their time limit
STACK = 2**21  # bytes of a thread's stack: together they count as memory of the process
BEAT_S = 0.2  # seconds between two looks at the time limits


@dataclass(eq=False)
class Turn:
    """A start, a step or a closing of an environment. `begun` (time.monotonic): None while it waits for others."""

    serial: int
    play: Callable[[], Reply] | None  # None: the environment is closed
    begun: float | None = None
    is_answered: bool = False
    is_dropped: bool = False


def serve(pipe: Connection, config: Config) -> None:
    """Plays the turns that the parent sends until it says "end" or closes its end of the socket.

    Messages to the parent: ["ready", schemas, whether these are agents] or ["refused", reason]; then
    ["reply", serial, *Reply], and every BEAT_S seconds ["beat", turns over their limit, all turns].
    """
    threading.stack_size(STACK)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        maker = Maker(config)
        make = maker.episode
        if maker.is_agent:
            from tlt_jax.environments.agents import AgentServer  # which needs the extra `serve`

            make = AgentServer(config, maker).__enter__().episode
    except UserError as error:
        tell(pipe, "refused", str(error))
        return
    except Exception as error:  # a user's module may raise anything
        tell(pipe, "refused", f"environment.path {config.environment.path!r}: {describe(error)}")
        return
    tell(pipe, "ready", maker.schemas, maker.is_agent)
    Stage(pipe, make, config.environment.timeout_s).listen()


class Stage:
    """The environments of a worker, by serial number, and their turns: at most one of each at a time."""

    def __init__(self, pipe: Connection, make: Callable[..., Any], timeout_s: float):
        self.pipe, self.make, self.timeout_s = pipe, make, timeout_s
        self.episodes: dict[int, Any] = {}  # each an Episode or an Agent
        self.turns: dict[int, Turn] = {}
        self.waiting: deque[Turn] = deque()
        self.hung = 0
        self.lock, self.sending = threading.Lock(), threading.Lock()

    def listen(self) -> None:
        """Does what the parent says."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        while True:
            kind, *content = pickle.loads(self.pipe.recv_bytes())
            if kind == "begin":
                self._add(Turn(content[0], partial(self._begin, *content)))
            elif kind == "act":
                serial, *turn = content
                self._add(Turn(serial, partial(self.episodes[serial].step, *turn)))
            elif kind == "drop":
                self._drop(content)
            else:
                self._end()

    def _begin(self, serial: int, pickled: bytes, seed: int) -> Reply:
        row = pickle.loads(
            pickled
        )  # here, since its values may be of a class that cannot be imported
        episode = self.episodes[serial] = self.make(row)
        return episode.reset(row, seed)

    def _add(self, *turns: Turn) -> None:
        with self.lock:
            self.turns |= {turn.serial: turn for turn in turns}
            self.waiting.extend(turns)
            self._start()

    def _drop(self, serials: list[int]) -> None:
        """Closes environments, after the turns that are under way."""
        with self.lock:
            for serial in serials:
                if serial in self.turns:
                    self.turns[serial].is_dropped = True
            idle = [one for one in serials if one in self.episodes and one not in self.turns]
        self._add(*(Turn(serial, None, is_answered=True) for serial in idle))

    def _start(self) -> None:
        """Starts turns that wait, with the lock held."""
        while self.waiting and len(self.turns) - len(self.waiting) - self.hung < THREADS:
            turn = self.waiting.popleft()
            turn.begun = time.monotonic()
            threading.Thread(target=self._run, args=(turn,), daemon=True).start()

    def _run(self, turn: Turn) -> None:
        """The thread of a turn. After the last one it closes the environment, which may take as long as a turn."""
        reply = Reply(done=True)
        if turn.play and not turn.is_dropped:
            reply = self._played(turn.play)
        with self.lock:
            is_wanted = not (turn.is_answered or turn.is_dropped)
            is_over = reply.done or not is_wanted
            turn.is_answered, turn.begun = True, time.monotonic()
            if not is_over:
                del self.turns[turn.serial]
        if is_wanted:
            self._reply(turn.serial, reply)

        episode = self.episodes.pop(turn.serial, None) if is_over else None
        if episode is not None:
            with contextlib.suppress(Exception):  # nobody waits for what it says
                episode.close()
        with self.lock:
            if is_over:
                del self.turns[turn.serial]
            self._start()

    def _played(self, play: Callable[[], Reply]) -> Reply:
        try:
            return play()
        except (Exception, SystemExit) as error:  # the boundary where an environment runs
            return _failed("error", describe(error))

    def _reply(self, serial: int, reply: Reply) -> None:
        try:
            text = json.dumps(["reply", serial, *reply], allow_nan=False)
            if (size := len(text.encode())) > LONGEST:
                raise ValueError(f"the messages of a turn have {size} bytes, more than {LONGEST}")
        except (TypeError, ValueError) as error:
            text = json.dumps(["reply", serial, *_failed("error", describe(error))])
        self._tell(text)

    def _tell(self, text: str) -> None:
        with self.sending, contextlib.suppress(OSError):  # the parent is gone, and so are we soon
            self.pipe.send_bytes(text.encode())

    def _watch(self) -> None:
        """Ends turns that take too long; their threads go on."""
        while True:
            time.sleep(BEAT_S)
            with self.lock:
                limit = time.monotonic() - self.timeout_s
                overdue = [
                    turn for turn in self.turns.values() if turn.begun and turn.begun < limit
                ]
                late = [turn for turn in overdue if not turn.is_answered]
                for turn in late:
                    turn.is_answered = True
                self.hung = len(overdue)
                self._start()
                beat = ["beat", self.hung, len(self.turns)]
            self._tell(json.dumps(beat))
            for turn in late:
                if not turn.is_dropped:
                    detail = f"no answer after {self.timeout_s:g} s"
                    self._reply(turn.serial, _failed("timeout", detail))

    def _end(self) -> None:
        """Closes all environments, and ends the process."""
        with self.lock:
            self.waiting.clear()
            self.turns = {serial: turn for serial, turn in self.turns.items() if turn.begun}
        self._drop(list(self.episodes))
        limit = time.monotonic() + CLOSE_S
        while len(self.turns) > self.hung and time.monotonic() < limit:
            time.sleep(BEAT_S / 10)
        os._exit(0)


def _failed(failure: str, detail: str) -> Reply:
    return Reply(done=True, failure=failure, detail=detail)
