"""An engine over HTTP: a server with the routes of vLLM and OpenAI, in a thread beside the engine's loop.

What answers is a `Backend`; how it decodes, and which programs run, is not known here. Imports no JAX.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from tlt_jax.config import Config, parse
from tlt_jax.config.changes import short
from tlt_jax.data import files, tool_calls
from tlt_jax.data.conversation import Conversation
from tlt_jax.errors import ConfigError, DataError, UserError
from tlt_jax.serving import forms
from tlt_jax.serving.backend import NONFINITE, Backend
from tlt_jax.serving.forms import CHAT, GENERATE, TEXT, Continuation, Part, Query, Refused, get

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
GRACE_S = 5  # for clients that do not read, when the server stops
WAITING = 2048  # connections that may wait to be accepted
KNOWN, CONVERSATIONS = 4096, 64  # answers whose tokens are kept; sets of tools
STOPPING = "the server stops"


class Server:
    """Serves a backend at `url`, in a thread of its own between entry and exit; requests that are open then get an error.

    `tokenizer`: None to serve token ids alone; no other thread may use it. `token`: what clients send as bearer token,
    by default the environment variable TLT_JAX_TOKEN; without one only loopback addresses are served. `port` 0: a free one.
    `template_kwargs`: arguments of the chat template. Raises ConfigError for an address that cannot be served.
    """

    def __init__(
        self, backend: Backend, tokenizer: Any, host: str = "127.0.0.1", port: int = 8000,
        token: str | None = None, template_kwargs: Mapping[str, Any] = {},
    ):  # fmt: skip
        self.backend, self.tokenizer, self.template_kwargs = backend, tokenizer, template_kwargs
        self.token = token or os.environ.get(TOKEN, "")
        self.socket = listen(host, port, bool(self.token))
        name, port = f"[{host}]" if ":" in host else host, self.socket.getsockname()[1]
        self.url = f"http://{name}:{port}"
        self.open: set[asyncio.Queue] = set()  # what the sequences of each request are told
        self.conversation = lru_cache(CONVERSATIONS)(self._conversation)
        self.is_stopping = False
        routes = {
            "/v1/models": self.models, "/inference/v1/generate": self.generate,
            "/v1/chat/completions": self.chat, "/v1/completions": self.complete,
        }  # fmt: skip
        found = [
            Route(path, partial(self.guarded, do), methods=["GET" if do == self.models else "POST"])
            for path, do in routes.items()
        ]
        app = Starlette(
            routes=[Route("/health", health), *found], exception_handlers={HTTPException: no_route}
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
        with suppress(RuntimeError):  # its loop has closed
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

    def backend_of(self, token: str) -> Backend:
        """What answers a client that sends this bearer token. Raises Refused."""
        if self.token and not hmac.compare_digest(token.encode("latin-1"), self.token.encode()):
            raise Refused("send the server's token: Authorization: Bearer TOKEN", 401)
        return self.backend

    async def guarded(self, do: Callable[..., Any], request: Request) -> Response:
        """The response of a route to those who know the token, or an error."""
        try:
            given = request.headers.get("authorization", "")
            backend = self.backend_of(given.removeprefix("Bearer "))
            if request.method == "POST":
                return await do(request, backend, await read_body(request, backend.model))
            return await do(request, backend)
        except ClientDisconnect:
            return Response(status_code=499)
        except (Refused, UserError) as error:
            return answered(forms.failure(error), getattr(error, "status", 400))

    async def models(self, request: Request, backend: Backend) -> Response:
        """The only model."""
        card = {"id": backend.model, "object": "model", "created": 0, "owned_by": "tlt_jax"}
        card["max_model_len"] = backend.longest
        return answered({"object": "list", "data": [card]})

    async def generate(self, request: Request, backend: Backend, body: dict[str, Any]) -> Response:
        """Tokens for tokens, as vLLM's route of this name."""
        asked = forms.query(GENERATE, body, [body.get("token_ids")], backend)
        if asked.stops:
            self.text_tokenizer()
        return await self.respond(request, asked)

    async def complete(self, request: Request, backend: Backend, body: dict[str, Any]) -> Response:
        """Continues texts or token ids."""
        self.text_tokenizer()
        given = body.get("prompt")
        if isinstance(given, str) or (isinstance(given, list) and type((given or [0])[0]) is int):
            given = [given]
        if not isinstance(given, list):
            raise Refused(f"prompt is {short(given)}: give a text, token ids, or a list of these")
        prompts = [self.encoded(one) if isinstance(one, str) else one for one in given]
        return await self.respond(request, forms.query(TEXT, body, prompts, backend))

    async def chat(self, request: Request, backend: Backend, body: dict[str, Any]) -> Response:
        """Answers a conversation."""
        tokenizer, tools = self.text_tokenizer(), get(body, "tools", list, [])
        if (choice := body.get("tool_choice")) not in (None, "auto", "none"):
            raise Refused(f'tool_choice {short(choice)} is not supported: give "auto" or "none"')
        calls = None
        if tools and choice != "none":
            calls = tool_calls.format_of(tokenizer)
        messages = forms.messages_of(get(body, "messages", list, []))
        if not messages or messages[-1]["role"] == files.ASSISTANT:
            raise Refused("the conversation ends without a message for the assistant: add one")
        values = {**self.template_kwargs, **get(body, "chat_template_kwargs", dict, {})}
        if "chat_template" in values:
            raise Refused("a chat template of your own is not supported: leave it out")
        template = json.dumps([tools, values], sort_keys=True)
        asked = forms.query(
            CHAT, body, [self.prompt(backend, messages, template)], backend, messages=messages,
            template=template, calls=calls,
        )  # fmt: skip
        return await self.respond(request, asked)

    def text_tokenizer(self) -> Any:
        """The tokenizer. Raises Refused without one."""
        if self.tokenizer is None:
            raise Refused("this model has no tokenizer: send token ids to /inference/v1/generate")
        return self.tokenizer

    def encoded(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text; `special`: with those that the tokenizer adds. Raises Refused."""
        if lone := files.lone_surrogate(text):
            raise Refused(f"the prompt has {files.HALF} ({lone}): {files.WHOLE}")
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]

    def prompt(
        self, backend: Backend, messages: Sequence[dict[str, Any]], template: str
    ) -> list[int]:
        """The tokens of a conversation, in which an answer of this server keeps its own. Raises Refused or DataError."""
        roles = [message["role"] for message in messages]
        past = len(roles) - (roles[::-1] + [files.ASSISTANT]).index(files.ASSISTANT)
        try:
            conversation = self.conversation(template)
            if known := backend.known.get(forms.key_of(template, messages[:past])):
                with suppress(DataError):  # a template that cannot write the rest alone writes all
                    after = conversation.continuation(known[1], messages[past:])
                    return np.concatenate([*known, after]).tolist()
            return self.encoded(conversation.encoder.render(messages), special=False)
        except UserError:
            raise
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"the chat template rejects the messages: {error}") from error

    def _conversation(self, template: str) -> Conversation:
        tools, values = json.loads(template)
        tree = {"data.chat_template": True, "data.chat_template_kwargs": values}
        return Conversation(parse.build(Config, tree), self.tokenizer, tools)

    def remember(self, choice: Continuation) -> None:
        """Keeps the tokens of an answer for requests that continue its conversation."""
        asked, answer = choice.asked, choice.all
        if asked.route == CHAT and not isinstance(answer.reason, str):  # a stop text cut the text
            messages = [*asked.messages, *forms.messages_of([choice.message])]
            tokens = np.asarray(choice.prompt, np.int32), np.asarray(answer.tokens, np.int32)
            known = asked.backend.known
            known[forms.key_of(asked.template, messages)] = tokens
            if len(known) > KNOWN:
                known.popitem(last=False)

    async def respond(self, request: Request, asked: Query) -> Response:
        """The answers: as they grow, or at their end."""
        count = asked.n * len(asked.prompts)
        choices = [Continuation(index, asked, self.tokenizer) for index in range(count)]
        if asked.stream:
            events = self.events(request, asked, choices)
            return StreamingResponse(events, media_type="text/event-stream")
        async for _ in self.parts(request, choices):
            pass
        found = [one.form(one.all, is_delta=False) for one in choices]
        out = {"choices": found, "usage": forms.usage(asked, choices)}
        return answered(forms.head(asked, has_prompt=True) | out)

    async def events(
        self, request: Request, asked: Query, choices: Sequence[Continuation]
    ) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        is_first = True
        try:
            async with aclosing(self.parts(request, choices)) as parts:
                async for choice, part in parts:
                    found = [choice.form(part, is_delta=True)]
                    yield event(forms.head(asked, has_prompt=is_first) | {"choices": found})
                    is_first = False
            if asked.usage:
                out = {"choices": [], "usage": forms.usage(asked, choices)}
                yield event(forms.head(asked, has_prompt=False) | out)
        except (Refused, UserError) as error:
            yield event(forms.failure(error))
        yield "data: [DONE]\n\n"

    async def parts(
        self, request: Request, choices: Sequence[Continuation]
    ) -> AsyncIterator[tuple[Continuation, Part]]:
        """What the answers get, until all have finished; they are cancelled when the client leaves. Raises Refused."""
        queue: asyncio.Queue = asyncio.Queue()
        watch = asyncio.create_task(tell_end(request, queue))
        handles: dict[int, int] = {}
        self.open.add(queue)
        try:
            if self.is_stopping:
                raise Refused(STOPPING, 503)
            for choice in choices:
                backend = choice.asked.backend
                room = backend.longest - len(choice.prompt)
                handles[choice.index] = backend.submit(
                    np.asarray(choice.prompt, np.int32),
                    min(choice.asked.most or room, room),
                    partial(self.tell, queue, choice),
                    None if choice.asked.seed is None else (choice.asked.seed, choice.index),
                )
            while handles:
                if (told := await queue.get()) is None:
                    raise Refused(STOPPING, 503)
                choice, tokens, logprobs, finish = told
                if choice.index not in handles:
                    continue
                if finish == NONFINITE:
                    raise Refused(
                        "the policy's logits are not finite: its weights are damaged", 500
                    )
                part = choice.add(tokens, logprobs, finish)
                if part.finish:
                    handle = handles.pop(choice.index)
                    if not finish:
                        choice.asked.backend.cancel(handle)
                    self.remember(choice)
                yield choice, part
        finally:
            watch.cancel()
            self.open.discard(queue)
            for index, handle in handles.items():
                choices[index].asked.backend.cancel(handle)

    def tell(self, queue: asyncio.Queue, *told: Any) -> None:
        """Passes on what a backend tells in one of its threads."""
        with suppress(RuntimeError):  # the server has stopped
            self.loop.call_soon_threadsafe(queue.put_nowait, told)


async def tell_end(request: Request, queue: asyncio.Queue) -> None:
    """Tells None when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait(None)


async def read_body(request: Request, model: str) -> dict[str, Any]:
    """The JSON object of a request for this model. Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages in a browser may send other types to any address
        raise Refused(f"the body is {kind or 'untyped'}: send Content-Type: application/json")
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON ({error}): send a JSON object") from error
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object: send one")
    if (asked := body.get("model")) not in (None, model):
        raise Refused(f"there is no model {short(asked)}: ask for {model}", 404, "model_not_found")
    return body


def answered(content: dict[str, Any], status: int = 200) -> Response:
    """A response of JSON."""
    return Response(json.dumps(content), status, media_type="application/json")


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


async def health(request: Request) -> Response:
    """That the server runs; without a token."""
    return answered({})


async def no_route(request: Request, error: HTTPException) -> Response:
    """Another path or method."""
    refused = Refused(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    return answered(forms.failure(refused), refused.status)


def listen(host: str, port: int, has_token: bool) -> socket.socket:
    """A socket that listens at the address; without a token at a loopback one alone. Raises ConfigError."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port}: give 0 to {2**16 - 1}")
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, *_, address = min(found, key=lambda one: one[0])
        if not has_token and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"--host {host} can be reached by others: give a --token ({TOKEN}), or serve 127.0.0.1"
            )
        # asyncio sends small packets at once on sockets whose protocol is named.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(WAITING)
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        what = f"cannot be served ({error}): give another --host or --port"
        if error.errno == errno.EADDRINUSE:
            what = "is taken: give another --port, or 0 for a free one"
        raise ConfigError(f"port {port} of {host} {what}") from error
