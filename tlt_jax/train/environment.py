"""The environments of a rollout: they open its prompts, reply to the policy's turns, and reward them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tlt_jax.config import Config
from tlt_jax.config.task import SUM
from tlt_jax.data.conversation import Conversation
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.data.tool_calls import format_of, parse_calls
from tlt_jax.distributed.job import Job
from tlt_jax.environments.pool import Environments
from tlt_jax.environments.protocol import TOOL_ERRORS, Call, Reply, Sampled
from tlt_jax.errors import DataError, EnvironmentsError
from tlt_jax.keys import environment_seed
from tlt_jax.rollout.recorder import Completion

PAUSE_S = 2e-3  # between two looks at environments that open
STOP, LENGTH = "stop", "length"  # how a turn ended, for agents
OTHER = "an environment opened otherwise with the same row and seed"


def are_used(config: Config) -> bool:
    """Whether answers have several turns: with environments or tools."""
    return bool(config.environment.path or config.environment.tools)


@contextmanager
def environments(config: Config) -> Iterator[Environments | None]:
    """Context of the environments of a process; None without any."""
    if not are_used(config):
        yield None
        return
    with Environments(config) as pool:
        yield pool


def check_alike(job: Job, prompts: Sequence[Prompt]) -> None:
    """Raises EnvironmentsError in all processes when they have opened other prompts."""
    if job.count == 1:
        return
    digest = hashlib.sha256(b"|".join(prompt.tokens.tobytes() for prompt in prompts)).digest()
    if len({*job.gather(digest)}) > 1:
        raise EnvironmentsError(
            "environment.path: with the same row and seed reset says something else in another process: let it depend on these"
        )


def is_other(reply: Reply, opened: Reply) -> bool:
    """Whether an environment has opened otherwise than one with the same row and seed."""
    return (reply.messages, reply.tokens, reply.most) != (
        opened.messages,
        opened.tokens,
        opened.most,
    )


@dataclass
class Played:
    """What has happened between an environment and one answer."""

    key: Hashable
    last: np.ndarray | None = None  # the policy's last turn
    waiting: tuple | None = None  # a turn for an environment that still opens
    most: int = 0  # tokens of the next turn of an agent's conversation
    rewards: list[float] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)  # the last of each; of errors the sum
    cut: int = 0  # turns that ended at environment.turn_tokens
    failure: str = ""
    is_heard: bool = False  # a turn of the policy waits for its reply
    unread: str = ""  # what is wrong with calls of the last turn that cannot be read

    def add(self, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of a turn."""
        errors = self.numbers.get(TOOL_ERRORS, 0) + numbers.get(TOOL_ERRORS, 0)
        self.numbers |= {**numbers, **({TOOL_ERRORS: errors} if errors else {})}


class Play:
    """The partner of one rollout, see rollout.dialogue: an environment for each answer of the local groups.

    A context manager. The seeds of environments depend on train.seed, `stream`, `step` and the prompt, so that all answers to
    a prompt begin alike. An environment that fails ends its answer, which then has no score.
    """

    def __init__(
        self,
        config: Config,
        pool: Environments,
        tokenizer: Any,
        eos_ids: Sequence[int],
        samples: int,
        stream: int,
        step: int,
    ):
        self.config, self.pool, self.tokenizer = config, pool, tokenizer
        self.samples, self.stream, self.step = samples, stream, step
        self.talk = Conversation(config, tokenizer, pool.schemas, eos_ids)
        self.format = format_of(tokenizer) if pool.schemas else None
        self.prompts: Sequence[Prompt] = ()
        self.opened: list[Reply] = []
        self.played: dict[int, Played] = {}
        self.keys: dict[Hashable, int] = {}  # of live environments -> uid
        self.ended: dict[int, np.ndarray | None] = {}

    def open(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with what their environments say first.

        Raises EnvironmentsError when none opens, or one says more than a prompt may have.
        """
        self.prompts, found = prompts, {}
        for index, prompt in enumerate(prompts):
            self.begin(index * self.samples, prompt)
        while len(found) < len(prompts):
            found |= {
                self.keys[key] // self.samples: reply for key, reply in self.pool.news().items()
            }
            time.sleep(PAUSE_S)
        self.opened = [found[index] for index in range(len(prompts))]
        for index, opened in enumerate(self.opened):
            self.played[index * self.samples].most = opened.most
        if all(reply.failure for reply in self.opened):
            first = self.opened[0]
            raise EnvironmentsError(
                f"no environment opened: {first.failure}: {first.detail or 'see above'}: correct environment.path or its data"
            )
        made = [self.prompt(*pair) for pair in zip(prompts, self.opened, strict=True)]
        most = self.config.data.max_prompt_tokens
        for one in made:
            if len(one.tokens) > most:
                raise EnvironmentsError(
                    f"the prompt of row {one.id} has {len(one.tokens)} tokens with what its environment says, and "
                    f"data.max_prompt_tokens is {most}: raise it"
                )
        return made

    def prompt(self, prompt: Prompt, opened: Reply) -> Prompt:
        """A prompt with the messages of an environment after it; two of one role are joined."""
        said = self.talk.quoted(opened.messages)
        given = prompt.row["prompt"]
        if opened.tokens:
            tokens = np.asarray(opened.tokens, np.int32)
            return replace(prompt, tokens=tokens, text=self.tokenizer.decode(tokens))
        if opened.failure and not given:  # its answers have no score
            return replace(prompt, tokens=np.array([self.tokenizer.eos_token_id], np.int32))
        if not (said or given):
            raise EnvironmentsError(
                f"row {prompt.id} has no prompt, and its environment says nothing at its start: let reset return text, or set "
                "data.prompt_column"
            )
        if not (said or self.pool.schemas):
            return prompt
        before = [{"role": "user", "content": given}] if isinstance(given, str) else [*given]
        before = [message for message in before if message["content"]]
        if before and said and before[-1]["role"] == said[0]["role"]:
            last, first = before.pop(), said.pop(0)
            joint = "\n" if self.config.data.chat_template else ""
            said.insert(0, first | {"content": joint.join((last["content"], first["content"]))})
        return self.talk.opening([*before, *said], prompt.row)

    def begin(self, uid: int, prompt: Prompt) -> Played:
        """Begins the environment of an answer."""
        key = id(self), uid
        self.keys[key] = uid
        self.played[uid] = played = Played(key)
        prompt_seed = self.stream, self.step, uid // self.samples
        seed = environment_seed(self.config.train.seed, *prompt_seed)
        self.pool.begin(key, prompt.row, seed)
        return played

    def most(self, uid: int) -> int:
        """As Partner.most."""
        return (self.played.get(uid) or self.opened[uid // self.samples]).most

    def hear(self, uid: int, turn: np.ndarray, logprobs: np.ndarray) -> None:
        """As Partner.hear: the environment plays the turn."""
        opened = self.opened[uid // self.samples]
        played = self.played.get(uid)
        if is_new := played is None:
            played = self.begin(uid, self.prompts[uid // self.samples])
        played.last, played.is_heard = turn, True
        played.cut += self.talk.is_cut(turn)
        if opened.failure:
            played.failure = f"{opened.failure}: {opened.detail}"
        if played.failure:  # it may have crashed while the policy spoke
            self.end(uid)
            return
        text, calls = self.tokenizer.decode(turn, skip_special_tokens=True), []
        if self.format is not None:
            found, errors = parse_calls(self.tokenizer.decode(turn), self.format)
            calls = [Call(*call) for call in found]
            played.unread = "; ".join(errors)
            if errors:
                played.add({TOOL_ERRORS: len(errors)})
            if errors and not calls:
                played.rewards.append(0.0)
                if len(played.rewards) < self.config.environment.turns:
                    self.reply(uid, [])
                else:
                    self.end(uid)
                return
        said = text, calls, self.sampled(turn, logprobs) if self.pool.are_agents else None
        if is_new:
            played.waiting = said
        else:
            self.pool.act(played.key, *said)

    def sampled(self, turn: np.ndarray, logprobs: np.ndarray) -> Sampled:
        """A turn as agents get it."""
        finish = LENGTH if self.talk.is_cut(turn) else STOP
        return turn.tolist(), logprobs.tolist(), finish

    def replies(self) -> dict[int, np.ndarray | None]:
        """As Partner.replies."""
        for key, reply in self.pool.news().items():
            if (uid := self.keys.get(key)) is None:
                continue
            played = self.played[uid]
            if reply.failure:
                played.failure = f"{reply.failure}: {reply.detail}"
                if played.is_heard:
                    self.end(uid)
            elif played.waiting:
                if is_other(reply, self.opened[uid // self.samples]):
                    played.failure = f"error: {OTHER}"
                    self.end(uid)
                    continue
                said, played.waiting = played.waiting, None
                self.pool.act(key, *said)
            else:
                played.rewards.append(reply.reward)
                played.add(reply.info)
                played.most = reply.most
                if reply.done:
                    self.end(uid)
                elif reply.tokens:
                    self.ended[uid], played.is_heard = np.asarray(reply.tokens, np.int32), False
                else:
                    self.reply(uid, reply.messages)
        found, self.ended = self.ended, {}
        return found

    def reply(self, uid: int, messages: Sequence[dict[str, Any]]) -> None:
        """Lets the answer go on after these messages, and what is wrong with its calls."""
        unread, messages = self.played[uid].unread, [*messages]
        if unread and messages:  # templates may reject a user's message after a tool's
            last = messages[-1]
            messages[-1] = last | {"content": f"{last['content']}\n{unread}"}
        elif unread:
            messages = [{"role": "user", "content": unread}]
        try:
            tokens = self.talk.continuation(self.played[uid].last, messages)
        except DataError as error:
            self.played[uid].failure = f"error: {error}"
            self.end(uid)
            return
        self.ended[uid] = tokens if len(tokens) else None
        self.played[uid].is_heard = False

    def end(self, uid: int) -> None:
        """Ends an answer."""
        self.ended[uid] = None

    def rewards(self, uid: int) -> list[float]:
        """The reward of each turn of an answer that its environment has played."""
        return self.played[uid].rewards if uid in self.played else []

    def outcome(self, answer: Completion) -> dict[str, Any]:
        """What the reward `environment` reads of an answer that has ended; its environment is closed."""
        played = self.played.get(answer.uid) or Played(None)
        self.pool.drop([played.key])
        self.keys.pop(played.key, None)
        rewards = played.rewards
        total = sum(rewards) if self.config.environment.reward == SUM else sum(rewards[-1:])
        numbers = played.numbers | {"turns": len(rewards), "cut_turns": played.cut}
        return {"reward": total, "failure": played.failure, "numbers": numbers}

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_) -> None:
        """Closes the environments that are left."""
        self.pool.drop(self.keys)
