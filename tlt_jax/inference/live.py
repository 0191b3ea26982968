"""An engine that continues sequences of tokens as they come, beside each other: what `tlt serve` asks."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tlt_jax.errors import Interrupted
from tlt_jax.keys import GENERATE_STREAM, sequence_keys
from tlt_jax.rollout.recorder import FINISH, Emitted, Poll
from tlt_jax.rollout.scheduler.queue import OpenQueue
from tlt_jax.spec_decode.decode_state import RUNNING
from tlt_jax.spec_decode.interface import Sampling

IDLE_S = 5.0  # until a session ends that has nothing to do
POLL_S = 0.2  # between two looks for its successor
CANCELLED = "cancelled"  # finish reason
Told = Callable[[list[int], list[float], str], None]


if TYPE_CHECKING:
    from tlt_jax.inference.chat import Model


class Live:
    """Sequences share the rows of one rollout after the other. `submit` and `cancel` may be called from any thread.

    `longest`: most tokens of a prompt and its answer; `sampling`: of all sequences, since programs are compiled for it. The
    noise of a sequence depends on train.seed and on how many came before it, unless it has a seed.
    """

    def __init__(self, model: Model, name: str):
        self.rollouts, self.model = model.rollouts, name
        config, sizes = model.config, model.rollouts.model
        self.sampling, self.vocab = Sampling.of(config.rollout), sizes.vocab_size
        self.stops, self.known = None, OrderedDict()
        usual = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        self.longest = min(sizes.longest, usual)
        self.lock, self.awake = threading.Lock(), threading.Event()
        self.numbers = itertools.count()
        self.queue: OpenQueue | None = None
        self.later: list[tuple[int, np.ndarray, int, Told, np.ndarray]] = []  # for the next session
        self.told: dict[int, tuple[int, Told]] = {}  # uid of the session -> handle, and who is told
        self.uids: dict[int, int] = {}

    def submit(
        self, prompt: np.ndarray, most: int, told: Told, seed: tuple[int, int] | None = None
    ) -> int:
        """Starts a sequence: int32[P] prompt, at most `most` new tokens; its handle. `seed`: as Backend.submit.

        `told` gets new tokens, their log-probs, and "" or the finish reason: stop, length, nonfinite or cancelled.
        """
        with self.lock:
            handle = next(self.numbers)
            first, number = (self.rollouts.config.train.seed, handle) if seed is None else seed
            key = sequence_keys(first, GENERATE_STREAM, 0, [number])[0]
            self.later.append((handle, prompt, most, told, key))
            self.admit()
        self.awake.set()
        return handle

    def cancel(self, handle: int) -> None:
        """Ends a sequence for whoever is told of it; its row is free once the sequence has ended by itself."""
        with self.lock:
            found = self.told.pop(self.uids.pop(handle, -1), None)
            waiting = [one for one in self.later if one[0] == handle]
            self.later = [one for one in self.later if one[0] != handle]
        for told in [found[1]] if found else [one[3] for one in waiting]:
            told([], [], CANCELLED)

    def admit(self) -> None:
        """Gives what waits to the session, if there is one; with the lock."""
        while self.queue and self.later:
            handle, prompt, most, told, key = self.later[0]
            uid = self.queue.add(prompt, most, key)
            if uid is None:
                return
            self.told[uid], self.uids[handle] = (handle, told), uid
            del self.later[0]

    def listen(self, poll: Poll) -> None:
        """Tells of new tokens."""
        for event in poll.events:
            if not isinstance(event, Emitted):
                continue
            is_over = event.finish != RUNNING
            if is_over:
                self.queue.ended(event.uid)
            with self.lock:
                found = self.told.pop(event.uid, None) if is_over else self.told.get(event.uid)
                if found and is_over:
                    self.uids.pop(found[0], None)
            if found:
                logprobs = [float(one) for one in event.logprobs]
                found[1](event.tokens.tolist(), logprobs, FINISH.get(event.finish, ""))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Decodes what comes until `is_over`; in the thread that owns the devices."""
        while not is_over():
            if not self.later:
                self.awake.wait(POLL_S)
                self.awake.clear()
                continue
            with suppress(Interrupted):
                self.session(is_over)

    def session(self, is_over: Callable[[], bool]) -> None:
        """One rollout, which takes what comes until it has nothing to do. Raises Interrupted."""
        engine = self.rollouts.engine
        first, most = [np.zeros(1, np.int32)], self.longest - 1  # as long as any, and not decoded
        request = engine.request(
            first, 1, self.sampling, most, stream=GENERATE_STREAM, step=0, rollouts_left=1
        )
        request = replace(
            request, prompts=[*request.prompts], max_new_tokens=[*request.max_new_tokens],
            keys=[*request.keys], capacity=engine.capacity,
        )  # fmt: skip
        with self.lock:
            self.queue = OpenQueue(request, IDLE_S)
            self.admit()
        try:
            _, self.rollouts.tuner = engine.run(
                request, self.rollouts.weights, self.rollouts.tuner, listeners=[self.listen], arrivals=self.queue,
                interrupted=is_over,
            )  # fmt: skip
        finally:
            with self.lock:
                self.queue = None
