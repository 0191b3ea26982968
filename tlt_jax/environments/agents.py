"""Agents that own their loop: functions that ask this process for answers over HTTP, as they would ask any engine.

The requests of an agent are one conversation, which is a sequence of the rollout: what a request has after the last answer is
what an environment says, as token ids, and what the agent returns is the reward.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np

from tlt_jax.config import Config
from tlt_jax.data import prompt_format
from tlt_jax.distributed.process import skip_warnings
from tlt_jax.environments.protocol import ADDRESS, Maker, Reply, Sampled, fitting, number, numbers
from tlt_jax.errors import EnvironmentsError
from tlt_jax.serving.backend import CANCELLED, Told
from tlt_jax.serving.forms import Refused
from tlt_jax.serving.server import Server

MODEL = "policy"  # its name for clients


class AgentServer(Server):
    """The server of the agents of a worker, on a free port of the loopback address. Each agent has a token of its own."""

    def __init__(self, config: Config, maker: Maker):
        skip_warnings()
        tokenizer = prompt_format.tokenizer_of(config)
        super().__init__(None, tokenizer, port=0, template_kwargs=config.data.chat_template_kwargs)
        self.config, self.maker = config, maker
        self.agents: dict[str, Agent] = {}

    def episode(self, row: Mapping[str, Any]) -> Agent:
        """As Maker.episode."""
        return Agent(self.maker.make, self)

    def backend_of(self, token: str) -> Agent:
        """The agent with this token. Raises Refused."""
        if token not in self.agents:
            raise Refused(
                "no conversation has this token, or it has ended: send the agent's api_key", 401
            )
        return self.agents[token]


class Agent:
    """A run of an agent: the backend of its requests, and an environment whose turns are these requests.

    It gets those of `base_url`, `api_key`, `model`, `seed` and the row's columns that it names, and environment.args.
    """

    model = MODEL

    def __init__(self, function: Callable[..., Any], server: AgentServer):
        config = server.config
        self.function, self.server, self.args = function, server, config.environment.args
        self.vocab, self.sampling, self.stops = (
            len(server.tokenizer),
            config.rollout,
            config.rollout.stop,
        )
        self.most_prompt = config.data.max_prompt_tokens
        self.most_new = max(config.rollout.max_new_tokens, config.eval.max_new_tokens)
        self.turns = self.left = config.environment.turns
        self.token = secrets.token_urlsafe()
        self.known: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self.lock = threading.Lock()
        self.prompt = 0  # tokens of the first request
        self.tokens: list[int] = []  # of the conversation, as far as it is known here
        self.told: Told | None = None  # who waits for an answer
        self.answer: Sampled | None = None  # to the last request
        self.has_left = False  # the client of the last request, before it had the answer
        self.asked: SimpleQueue[tuple[list[int], int] | None] = (
            SimpleQueue()
        )  # None: the agent has returned
        self.future: Future | None = None

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer."""
        return (self.prompt or self.most_prompt) + self.most_new

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        """Starts the agent; its first request. Raises what the agent raises."""
        self.server.agents[self.token] = self
        given = {
            ADDRESS: f"{self.server.url}/v1",
            "api_key": self.token,
            "model": MODEL,
            "seed": seed,
        }
        given = fitting(self.function, {**row, **given}) | self.args
        if inspect.iscoroutinefunction(self.function):
            made = self.function(**given)
            self.future = asyncio.run_coroutine_threadsafe(made, self.server.maker.loop)
        else:
            self.future = Future()
            threading.Thread(target=self._run, args=(given,), daemon=True).start()
        self.future.add_done_callback(lambda _: self.asked.put(None))
        reply = self._next()
        if reply.done:
            raise EnvironmentsError("the agent returned before it had asked for an answer")
        return reply

    def step(self, text: str, calls: Sequence[Any] = (), sampled: Sampled | None = None) -> Reply:
        """Gives the agent its answer, `sampled`; its next request, or its return with the reward."""
        with self.lock:
            self.tokens = self.tokens + sampled[0]
            told, self.told, self.answer = self.told, None, sampled
        told(*sampled)
        return self._next()

    def close(self) -> None:
        """Ends the conversation; the agent's requests are refused from now on."""
        self.server.agents.pop(self.token, None)
        if self.future:
            self.future.cancel()
        if told := self.told:
            told([], [], CANCELLED)

    def submit(
        self, prompt: np.ndarray, most: int, told: Told, seed: tuple[int, int] | None = None
    ) -> int:
        """As Backend.submit. Raises Refused for what is not the next request of the conversation, and for a seed."""
        if seed is not None:
            raise Refused("answers of a run depend on train.seed: leave seed out")
        given = prompt.tolist()
        with self.lock:
            size = len(self.tokens) - len(self.answer[0] if self.answer else ())
            if self.has_left and given == self.tokens[:size]:  # once more, since its client gave up
                self.has_left = False
                if self.answer:
                    told(*self.answer)
                else:
                    self.told = told
                return 0
            if self.told:
                raise Refused("in a run an agent asks for one answer at a time")
            if not self.left:
                raise Refused(
                    f"environment.turns {self.turns}: this conversation has had so many answers",
                    429,
                )
            if given[: len(self.tokens)] != self.tokens or len(given) == len(self.tokens):
                raise Refused(
                    "in a run the requests of an agent are one conversation: this one does not go on from the last answer"
                )
            new = given[len(self.tokens) :]
            self.prompt, self.tokens, self.told = self.prompt or len(given), given, told
            self.left, self.answer, self.has_left = self.left - 1, None, False
        self.asked.put((new, most))
        return 0

    def cancel(self, handle: int) -> None:
        """As Backend.cancel: the client has left, and may send the same request again."""
        with self.lock:
            self.has_left = True

    def _run(self, given: Mapping[str, Any]) -> None:
        """The thread of an agent that is no coroutine."""
        self.future.set_running_or_notify_cancel()
        try:
            self.future.set_result(self.function(**given))
        except BaseException as error:
            self.future.set_exception(error)

    def _next(self) -> Reply:
        """What the agent does next. Raises what it raises."""
        if (asked := self.asked.get()) is not None:
            tokens, most = asked
            return Reply(tokens=tuple(tokens), most=most)
        found = self.future.result()
        value, info = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        return Reply(reward=number("the agent", value), done=True, info=numbers(info))
