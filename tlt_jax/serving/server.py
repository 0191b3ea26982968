"""The routes of an engine over HTTP: tokens in and out, and OpenAI's chat and text completions.

What answers is a `Backend`; how it decodes, and which programs run, is not known here. Imports no JAX.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import ipaddress
import json
import math
import os
import socket
import threading
import time
import uuid
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from tlt_jax.config import Config, parse
from tlt_jax.config.changes import short
from tlt_jax.data import files, tool_calls
from tlt_jax.data.conversation import Conversation
from tlt_jax.data.prompt_format import SAMPLING, TextStream
from tlt_jax.errors import ConfigError, DataError, UserError
from tlt_jax.serving.backend import CANCELLED, NONFINITE, STOP, Backend

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise ConfigError(f"serving needs {error.name}: pip install 'tlt-jax[serve]'") from error

TOKEN = "TLT_JAX_TOKEN"  # environment variable
GENERATE, TEXT, CHAT = "generate", "text", "chat"  # routes
ABORT = "abort"  # vLLM's word for an answer that was cancelled
MOST_CHOICES = 128  # sequences of a request
STOPPING = "the server stops"
WAITING = 2048  # connections that may wait to be accepted
KNOWN, CONVERSATIONS = 4096, 64  # answers whose tokens are kept; sets of tools
KINDS = {
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
MARKS = {
    tool_calls.HERMES: tool_calls.OPEN,
    tool_calls.MISTRAL: tool_calls.LIST,
    tool_calls.LLAMA: tool_calls.PYTHON,
}
GRACE_S = 5  # for connections that are open when the server stops
LEAST = -9998.0  # log-prob: clients of vLLM read -9999 as missing
# Settings that change answers, or what is returned of them, with the value that changes none.
UNSUPPORTED: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "best_of": 1, "output_mode": "tokens",
    "response_format": {"type": "text"},
    **dict.fromkeys(
        ("min_p", "min_tokens", "logit_bias", "allowed_token_ids", "logprob_token_ids", "bad_words", "ignore_eos",
         "structured_outputs", "prompt_logprobs", "truncate_prompt_tokens", "echo", "suffix", "use_beam_search",
         "include_stop_str_in_output", "continue_final_message", "features", "content_parts"),
    ),
}  # fmt: skip


class Refused(Exception):
    """A request that is answered with an error: its HTTP status and, for programs, a code."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Query:
    """A request. `prompts`: token ids; each has n answers, at most `most` tokens long (None: as there is room)."""

    route: str  # GENERATE, TEXT or CHAT
    id: str
    model: str
    prompts: list[list[int]]
    n: int
    most: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    logprobs: bool
    stream: bool
    usage: bool  # at the end of a stream
    ids: bool  # return the tokens
    numbers: bool  # name tokens by their ids in log-probs
    messages: list[dict[str, Any]] = field(default_factory=list)
    template: str = ""  # tools and arguments of the chat template, as JSON
    calls: tool_calls.Format | None = (
        None  # how calls of tools are written; None: none are looked for
    )
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class Part:
    """New tokens of an answer, or all; `start`: characters before its text. finish: "" while the answer goes on."""

    index: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str
    reason: int | str | None = None  # the stop text or the token of stop_token_ids that ended it


class Choice:
    """A sequence as it is told, cut after the token that completes a stop text or is one of stop_token_ids."""

    def __init__(self, index: int, asked: Query, tokenizer: Any):
        self.asked, self.tokenizer = asked, tokenizer
        self.all = Part(index, 0, [], [], "", "")
        self.held, self.size, self.parts = (
            "",
            0,
            [],
        )  # text that may begin a stop text; that is shown
        has_text = asked.route != GENERATE or asked.stops
        self.stream = TextStream(tokenizer, self.hear) if has_text else None

    def hear(self, text: str) -> None:
        """Takes the next part of the text."""
        self.held += text

    def add(self, tokens: list[int], logprobs: list[float], finish: str) -> Part:
        """What these add to the answer."""
        whole, begin, text = self.all, len(self.all.tokens), ""
        for size, token in enumerate(tokens, 1):
            if token in self.asked.stop_ids:
                tokens, finish, whole.reason = tokens[:size], STOP, token
                break
        whole.tokens += tokens
        if self.stream:
            self.stream.add(tokens)
            if finish:
                self.stream.flush()
            text = self.show(begin, bool(finish))
            if isinstance(whole.reason, str):
                finish = STOP
        new = whole.tokens[begin:]
        logprobs = [max(one, LEAST) for one in logprobs[: len(new)]]
        whole.logprobs += logprobs
        whole.finish = finish
        if finish:
            whole.text = "".join(self.parts)
        return Part(whole.index, self.size - len(text), new, logprobs, text, finish, whole.reason)

    def show(self, begin: int, is_end: bool) -> str:
        """The text in which no stop text can begin any more; one that is complete cuts the tokens from `begin` on."""
        whole, stops = self.all, self.asked.stops
        if found := [(self.held.index(stop), stop) for stop in stops if stop in self.held]:
            text, whole.reason = self.held[: min(found)[0]], min(found)[1]
            least = self.size + len(text) + len(whole.reason)

            def has_it(size: int) -> bool:
                said = self.tokenizer.decode(whole.tokens[:size], skip_special_tokens=True)
                return len(said) >= least and whole.reason in said

            sizes = range(len(whole.tokens) + 1)
            del whole.tokens[bisect_left(sizes, True, begin, key=has_it) :]
        else:
            sizes = [
                k for stop in stops for k in range(1, len(stop)) if self.held.endswith(stop[:k])
            ]
            size = 0 if is_end else max(sizes, default=0)
            text, self.held = self.held[: len(self.held) - size], self.held[len(self.held) - size :]
        self.parts.append(text)
        self.size += len(text)
        return text


class Server:
    """Serves a backend at `url`, in a thread of its own between entry and exit; requests that are open then get an error.

    `tokenizer`: None to serve token ids alone; no other thread may use it. `token`: what clients send as bearer token,
    by default the environment variable TLT_JAX_TOKEN; without one only loopback addresses are served. `port` 0: a free one.
    `template_kwargs`: arguments of the chat template.
    Raises ConfigError for an address that cannot be served.
    """

    def __init__(
        self, backend: Backend, tokenizer: Any, host: str = "127.0.0.1", port: int = 8000,
        token: str | None = None, template_kwargs: Mapping[str, Any] = {},
    ):  # fmt: skip
        self.backend, self.tokenizer, self.template_kwargs = backend, tokenizer, template_kwargs
        self.token = token or os.environ.get(TOKEN, "")
        self.socket = listen(host, port, bool(self.token))
        port = self.socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.open: set[asyncio.Queue] = set()  # what the sequences of each request are told
        # Prompt and answer of conversations, by `key_of` with the message of the answer.
        self.known: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self.conversation = lru_cache(CONVERSATIONS)(self._conversation)
        self.is_stopping = False
        routes = {
            "/v1/models": ("GET", self.models), "/inference/v1/generate": ("POST", self.generate),
            "/v1/chat/completions": ("POST", self.chat), "/v1/completions": ("POST", self.complete),
        }  # fmt: skip
        found = [
            Route(path, partial(self.guarded, do), methods=[how])
            for path, (how, do) in routes.items()
        ]
        app = Starlette(
            routes=[Route("/health", health), *found],
            exception_handlers={HTTPException: no_route},
        )
        options = uvicorn.Config(
            app, lifespan="off", ws="none", access_log=False, log_level="warning", log_config=None,
            timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        self.uvicorn = uvicorn.Server(options)
        self.thread = threading.Thread(target=self.run, name="serving", daemon=True)

    def __enter__(self) -> Server:
        self.thread.start()
        while not self.uvicorn.started and self.thread.is_alive():
            time.sleep(1e-3)
        return self

    def __exit__(self, *_) -> None:
        self.is_stopping = True
        if self.uvicorn.started and self.thread.is_alive():
            self.loop.call_soon_threadsafe(lambda: [queue.put_nowait(None) for queue in self.open])
        self.uvicorn.should_exit = True
        self.thread.join()
        self.socket.close()

    def run(self) -> None:
        """The thread."""

        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self.uvicorn.serve(sockets=[self.socket])

        asyncio.run(serve())

    async def guarded(self, do: Callable[..., Any], request: Request) -> Response:
        """The response of a handler, or an error in OpenAI's form."""
        try:
            given = request.headers.get("authorization", "").encode("latin-1")
            if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise Refused("send the server's token: Authorization: Bearer TOKEN", 401)
            if request.method == "GET":
                return await do(request)
            return await do(request, await read_body(request, self.backend.model))
        except ClientDisconnect:
            return Response(status_code=499)
        except (Refused, UserError) as error:
            return answered(failure(error), getattr(error, "status", 400))

    async def models(self, request: Request) -> Response:
        """The only model."""
        card = {"id": self.backend.model, "object": "model", "created": 0, "owned_by": "tlt_jax"}
        card["max_model_len"] = self.backend.longest
        return answered({"object": "list", "data": [card]})

    async def generate(self, request: Request, body: dict[str, Any]) -> Response:
        """Tokens for tokens, as vLLM's route of this name."""
        settings = get(body, "sampling_params", dict, {})
        most = get(settings, "max_tokens", int, None)
        logprobs = few_logprobs(settings, "logprobs")
        asked = self.asked(
            GENERATE, body, settings, [body.get("token_ids")], most, logprobs,
            id=get(body, "request_id", str, uuid.uuid4().hex), ids=get(body, "return_token_ids", bool, True),
            numbers=True,
        )  # fmt: skip
        return await self.respond(request, asked)

    async def complete(self, request: Request, body: dict[str, Any]) -> Response:
        """Continues texts or token ids."""
        given = body.get("prompt")
        if isinstance(given, str) or (isinstance(given, list) and type((given or [0])[0]) is int):
            given = [given]
        if not isinstance(given, list):
            raise Refused(f"prompt {short(given)}: give a text, token ids, or a list of these")
        prompts = [
            self.encoded(one, special=True) if isinstance(one, str) else one for one in given
        ]
        logprobs = few_logprobs(body, "logprobs")
        asked = self.asked(TEXT, body, body, prompts, get(body, "max_tokens", int, None), logprobs)
        return await self.respond(request, asked)

    async def chat(self, request: Request, body: dict[str, Any]) -> Response:
        """Answers a conversation."""
        few_logprobs(body, "top_logprobs")
        if (choice := body.get("tool_choice")) not in (None, "auto", "none"):
            raise Refused(f'tool_choice {short(choice)} is not supported: use "auto" or "none"')
        most = get(body, "max_completion_tokens", int, get(body, "max_tokens", int, None))
        calls = None
        if (tools := get(body, "tools", list, [])) and choice != "none":
            calls = tool_calls.format_of(self.text_tokenizer())
        messages = messages_of(get(body, "messages", list, []))
        if not messages or messages[-1]["role"] == files.ASSISTANT:
            raise Refused(
                "the conversation has to end with a message of another role than the assistant's"
            )
        values = {**self.template_kwargs, **get(body, "chat_template_kwargs", dict, {})}
        template = json.dumps([tools, values], sort_keys=True)
        asked = self.asked(
            CHAT, body, body, [self.prompt(messages, template)], most, get(body, "logprobs", bool, False),
            messages=messages, template=template, calls=calls,
        )  # fmt: skip
        return await self.respond(request, asked)

    def asked(
        self, route: str, body: dict[str, Any], settings: dict[str, Any], prompts: list[Any], most: int | None,
        logprobs: bool, **others: Any,
    ) -> Query:  # fmt: skip
        """The request, checked. Raises Refused."""
        for name in SAMPLING:
            given, served = settings.get(name), getattr(self.backend.sampling, name)
            given = 0 if name == "top_k" and given == -1 else given
            is_number = isinstance(given, int | float) and not isinstance(given, bool)
            if given is not None and not (is_number and math.isclose(given, served)):
                raise Refused(
                    f"{name} {short(given)}: this server samples with {name} {served:g}, which its programs are compiled "
                    f"for: leave {name} out"
                )
        for name, neutral in UNSUPPORTED.items():
            for given in (settings.get(name), body.get(name)):
                if given and given != neutral:
                    raise Refused(f"{name} {short(given)} is not supported: leave it out")
        longest = self.backend.longest
        for prompt in prompts:
            if not isinstance(prompt, list) or not prompt or set(map(type, prompt)) != {int}:
                raise Refused(f"the prompt {short(prompt)}: give a list of token ids, at least one")
            if min(prompt) < 0 or max(prompt) >= self.backend.vocab:
                raise Refused(
                    f"the prompt has the token ids {min(prompt)} to {max(prompt)}: give 0 to {self.backend.vocab - 1}"
                )
            if len(prompt) >= longest:
                raise Refused(
                    f"the prompt has {len(prompt)} tokens, and the maximum context length is {longest} tokens with the "
                    "answer: shorten it", code="context_length_exceeded",
                )  # fmt: skip
        n = get(settings, "n", int, 1)
        if most is not None and most < 1:
            raise Refused(f"max_tokens {most}: give at least 1")
        if not 1 <= n * len(prompts) <= MOST_CHOICES:
            raise Refused(f"{len(prompts)} prompts with n {n}: ask for 1 to {MOST_CHOICES} answers")
        stops = settings.get("stop") or []
        stops = tuple([stops] if isinstance(stops, str) else stops)
        if not all(isinstance(one, str) and one for one in stops):
            raise Refused(f"stop {short(stops)}: give texts")
        ends = get(settings, "stop_token_ids", list, [])
        if not set(map(type, ends)) <= {int}:
            raise Refused(f"stop_token_ids {short(ends)}: give token ids")
        if stops:
            self.text_tokenizer()
        ending = get(body, "stream_options", dict, {}).get("include_usage")
        found = {
            "id": uuid.uuid4().hex, "ids": get(body, "return_token_ids", bool, False), "usage": bool(ending),
            "stop_ids": frozenset(ends), "stream": get(body, "stream", bool, False),
            "numbers": get(body, "return_tokens_as_token_ids", bool, False),
        }  # fmt: skip
        return Query(
            route,
            model=self.backend.model,
            prompts=prompts,
            n=n,
            most=most,
            stops=stops,
            logprobs=logprobs,
            **found | others,
        )

    def text_tokenizer(self) -> Any:
        """The tokenizer. Raises Refused without one."""
        if self.tokenizer is None:
            raise Refused("this model has no tokenizer: send token ids to /inference/v1/generate")
        return self.tokenizer

    def encoded(self, text: str, special: bool) -> list[int]:
        """The token ids of a text; `special`: with those that the tokenizer adds. Raises Refused."""
        if lone := files.lone_surrogate(text):
            raise Refused(f"the prompt has {files.HALF} ({lone}): {files.WHOLE}")
        return self.text_tokenizer()(text, add_special_tokens=special)["input_ids"]

    def _conversation(self, key: str) -> Conversation:
        """The chat template with these tools and arguments."""
        tools, values = json.loads(key)
        tree = {"data.chat_template": True, "data.chat_template_kwargs": values}
        return Conversation(parse.build(Config, tree), self.text_tokenizer(), tools)

    def prompt(self, messages: list[dict[str, Any]], template: str) -> list[int]:
        """The tokens of a conversation, in which an answer of this server keeps its own. Raises Refused or DataError."""
        conversation = self.conversation(template)
        last = max(
            (n for n, one in enumerate(messages) if one["role"] == files.ASSISTANT), default=-1
        )
        if known := self.known.get(key_of(template, messages[: last + 1])):
            before, answer = known
            with suppress(DataError):  # a template that cannot write the rest alone writes all
                after = conversation.continuation(answer, messages[last + 1 :])
                return np.concatenate([before, answer, after]).tolist()
        try:
            return self.encoded(conversation.encoder.render(messages), special=False)
        except (TemplateError, TypeError) as error:
            raise Refused(f"the chat template rejects the messages: {error}") from error

    def remember(self, asked: Query, answer: Part, message: dict[str, Any]) -> None:
        """Keeps the tokens of an answer for the requests that continue its conversation."""
        if isinstance(answer.reason, str):
            return  # its text is shorter than its tokens
        key = key_of(asked.template, [*asked.messages, *messages_of([message])])
        prompt = np.asarray(asked.prompts[0], np.int32)
        self.known[key] = prompt, np.asarray(answer.tokens, np.int32)
        if len(self.known) > KNOWN:
            self.known.popitem(last=False)

    async def respond(self, request: Request, asked: Query) -> Response:
        """The answers, as they grow or at their end."""
        if asked.stream:
            return StreamingResponse(self.events(request, asked), media_type="text/event-stream")
        answers = self.answers(asked)
        async for _ in self.parts(request, asked, answers):
            pass
        choices = [self.choice(asked, one.all) for one in answers]
        return answered(head(asked, True) | {"choices": choices, "usage": usage(asked, answers)})

    async def events(self, request: Request, asked: Query) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        answers, is_first = self.answers(asked), True
        try:
            async with aclosing(self.parts(request, asked, answers)) as parts:
                async for part in parts:
                    choice = self.choice(asked, part, answers[part.index])
                    yield event(head(asked, is_first) | {"choices": [choice]})
                    is_first = False
            if asked.usage:
                yield event(head(asked, False) | {"choices": [], "usage": usage(asked, answers)})
        except (Refused, UserError) as error:
            yield event(failure(error))
        yield "data: [DONE]\n\n"

    def answers(self, asked: Query) -> list[Choice]:
        """The answers of a request, by prompt and sample, before they begin."""
        count = asked.n * len(asked.prompts)
        return [Choice(index, asked, self.tokenizer) for index in range(count)]

    async def parts(
        self, request: Request, asked: Query, answers: Sequence[Choice]
    ) -> AsyncIterator[Part]:
        """What the answers get, until all have finished; they are cancelled when the client leaves. Raises Refused."""
        queue: asyncio.Queue = asyncio.Queue()
        self.open.add(queue)
        watch = asyncio.create_task(tell_end(request, queue))
        handles: dict[int, int] = {}
        try:
            if self.is_stopping:
                raise Refused(STOPPING, 503)
            for index in range(len(answers)):
                prompt = np.asarray(asked.prompts[index // asked.n], np.int32)
                room = self.backend.longest - len(prompt)
                most = min(asked.most or room, room)
                handles[index] = self.backend.submit(prompt, most, partial(self.tell, queue, index))
            while handles:
                if (told := await queue.get()) is None:
                    raise Refused(STOPPING, 503)
                index, tokens, logprobs, finish = told
                if index not in handles:
                    continue
                if finish == NONFINITE:
                    raise Refused(
                        "the policy's logits are not finite: its weights are damaged", 500
                    )
                part = answers[index].add(tokens, logprobs, finish)
                if part.finish:
                    handle = handles.pop(index)
                    if not finish:
                        self.backend.cancel(handle)
                yield part
        finally:
            watch.cancel()
            self.open.discard(queue)
            for handle in handles.values():
                self.backend.cancel(handle)

    def tell(self, queue: asyncio.Queue, *told: Any) -> None:
        """Passes on what a backend tells in one of its threads."""
        with suppress(RuntimeError):  # the server has stopped
            self.loop.call_soon_threadsafe(queue.put_nowait, told)

    def choice(self, asked: Query, part: Part, growing: Choice | None = None) -> dict[str, Any]:
        """What a response says of an answer; of a `growing` one, of its new part."""
        out: dict[str, Any] = {"index": part.index, "stop_reason": part.reason, "logprobs": None}
        out["finish_reason"] = ABORT if part.finish == CANCELLED else part.finish or None
        if asked.logprobs:
            out["logprobs"] = self.logprobs(asked, part)
        if asked.ids or asked.route == GENERATE:
            out["token_ids"] = part.tokens
        if asked.route == TEXT:
            out["text"] = part.text
            if asked.ids:
                out["prompt_token_ids"] = asked.prompts[part.index // asked.n]
        elif asked.route == CHAT:
            message = {"role": files.ASSISTANT, "content": part.text}
            if part.finish:
                whole = growing.all if growing else part
                message = self.message(asked, whole)
                if "tool_calls" in message and part.finish == STOP:
                    out["finish_reason"] = "tool_calls"
                self.remember(asked, whole, message)
                if growing and asked.calls is None:
                    message = message | {"content": part.text}
            elif asked.calls is not None:
                del message["content"]  # it may be a call
            out["delta" if growing else "message"] = message
        return out

    def message(self, asked: Query, answer: Part) -> dict[str, Any]:
        """The message that an answer is, with the calls of tools in it."""
        out: dict[str, Any] = {"role": files.ASSISTANT, "content": answer.text}
        if asked.calls is None:
            return out
        calls, _ = tool_calls.parse_calls(self.tokenizer.decode(answer.tokens), asked.calls)
        if calls:
            thought, end, rest = answer.text.rpartition(tool_calls.THOUGHT)
            mark = MARKS.get(asked.calls) if isinstance(asked.calls, str) else None
            if mark:
                rest = rest.partition(mark)[0] if mark in rest else ""
            out["content"] = (thought + end + rest).rstrip() or None
            out["tool_calls"] = [
                {
                    "index": number,
                    "id": uuid.uuid4().hex[:9],
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for number, (name, arguments) in enumerate(calls)
            ]
        return out

    def logprobs(self, asked: Query, part: Part) -> dict[str, Any]:
        """The log-probs of the tokens of a part, in the form of the route."""
        names = [
            f"token_id:{one}" if asked.numbers else self.tokenizer.decode([one])
            for one in part.tokens
        ]
        if asked.route == TEXT:
            starts = accumulate(map(len, names), initial=part.start)
            return {
                "tokens": names,
                "token_logprobs": part.logprobs,
                "top_logprobs": [None] * len(names),
                "text_offset": list(starts)[:-1],
            }
        return {
            "content": [
                {"token": name, "token_id": token, "bytes": list(name.encode()), "logprob": logprob, "top_logprobs": []}
                for name, token, logprob in zip(names, part.tokens, part.logprobs, strict=True)
            ]
        }  # fmt: skip


async def tell_end(request: Request, queue: asyncio.Queue) -> None:
    """Tells None when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait(None)


async def read_body(request: Request, model: str) -> dict[str, Any]:
    """The JSON object of a request for this model. Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if (
        kind != "application/json"
    ):  # what a page of a browser sends without asking is of another type
        raise Refused(
            f"the body is {kind or 'of no type'}: send the header Content-Type: application/json"
        )
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON ({error}): send a JSON object") from error
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object: send one")
    if (asked := body.get("model")) not in (None, model):
        raise Refused(
            f"there is no model {short(asked)}: ask for {model!r}", 404, "model_not_found"
        )
    return body


def get(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A value of a body; the default for none. Raises Refused for one of another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused(f"{name} {short(value)}: give {KINDS[kind]}")
    return value


def few_logprobs(body: dict[str, Any], name: str) -> bool:
    """Whether a number of log-probs is asked for. Raises Refused for more than that of the sampled token."""
    if (count := get(body, name, int, None)) is not None and not 0 <= count <= 1:
        raise Refused(
            f"{name} {count}: the log-prob of the sampled token is known alone: ask for 1"
        )
    return count is not None


def messages_of(given: list[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: contents are texts, and arguments of calls are objects. Raises Refused."""
    found = []
    for one in given:
        content = one.get("content") or "" if isinstance(one, dict) else None
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str) or not isinstance(one.get("role"), str):
            raise Refused(f'the message {short(one)}: give {{"role": text, "content": text}}')
        message = {"role": one["role"], "content": content}
        message |= {name: one[name] for name in ("name", "tool_call_id") if one.get(name)}
        calls = []
        for call in one.get("tool_calls") or []:
            try:
                function = call["function"]
                arguments = function["arguments"]
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                function = {"name": function["name"], "arguments": arguments}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise Refused(
                    f"the call {short(call)} of a message has no name or arguments in JSON"
                ) from error
            calls.append({"id": call.get("id"), "type": "function", "function": function})
        found.append(message | ({"tool_calls": calls} if calls else {}))
    return found


def key_of(template: str, messages: list[dict[str, Any]]) -> bytes:
    """What stands for a conversation."""
    return hashlib.sha256(json.dumps([template, messages], sort_keys=True).encode()).digest()


def head(asked: Query, has_prompt: bool) -> dict[str, Any]:
    """The start of a response, or of an event."""
    out: dict[str, Any] = {"model": asked.model, "created": asked.created}
    if asked.route == GENERATE:
        out["request_id"] = asked.id
    elif asked.route == TEXT:
        out |= {"id": f"cmpl-{asked.id}", "object": "text_completion"}
    else:
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        out |= {"id": f"chatcmpl-{asked.id}", "object": kind}
    if has_prompt and asked.ids and asked.route != TEXT:
        out["prompt_token_ids"] = asked.prompts[0]
    return out


def usage(asked: Query, answers: Sequence[Choice]) -> dict[str, int]:
    """The numbers of tokens of a request."""
    read, made = sum(map(len, asked.prompts)), sum(len(one.all.tokens) for one in answers)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def answered(content: dict[str, Any], status: int = 200) -> Response:
    """A response of JSON."""
    return Response(json.dumps(content), status, media_type="application/json")


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def failure(error: Exception) -> dict[str, Any]:
    """An error in OpenAI's form."""
    status, code = getattr(error, "status", 400), getattr(error, "code", None)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = code if isinstance(code, str) else None
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


async def health(request: Request) -> Response:
    """That the server runs; without a token."""
    return answered({})


async def no_route(request: Request, error: HTTPException) -> Response:
    """Another path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return answered(failure(Refused(message, error.status_code)), error.status_code)


def listen(host: str, port: int, has_token: bool) -> socket.socket:
    """A socket that listens at the address. Raises ConfigError."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port}: give 0 to {2**16 - 1}")
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, *_, address = min(found, key=lambda one: one[0])
        is_local = all(ipaddress.ip_address(one[-1][0]).is_loopback for one in found)
        if not has_token and not is_local:
            raise ConfigError(
                f"--host {host} can be reached by others: give a --token (or {TOKEN}), or serve 127.0.0.1"
            )
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(WAITING)
        except BaseException:
            listening.close()
            raise
        return listening
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = f"port {port} of {host} is taken: give another --port, or 0 for a free one"
        else:
            fix = f"{host}:{port} cannot be served ({error}): give another --host or --port"
        raise ConfigError(fix) from error
