"""What clients send and what they get back, in the forms of vLLM and OpenAI, and where an answer is cut. Knows no network."""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from tlt_jax.config.changes import short
from tlt_jax.data import tool_calls
from tlt_jax.data.files import ASSISTANT
from tlt_jax.data.prompt_format import SAMPLING, TextStream
from tlt_jax.serving.backend import CANCELLED, STOP, Backend

GENERATE, TEXT, CHAT = "generate", "text", "chat"  # routes
OBJECTS = {TEXT: ("cmpl", "text_completion"), CHAT: ("chatcmpl", "chat.completion")}
ABORT = "abort"  # vLLM's word for an answer that was cancelled
MOST_CHOICES = 128  # answers of a request
LEAST = -9998.0  # log-prob; clients of vLLM read -9999 as a missing one
KINDS = {int: "a whole number", str: "a text", bool: "true or false", list: "a list"}
# What begins a call, where text may be before it.
MARKS = {tool_calls.HERMES: tool_calls.OPEN, tool_calls.MISTRAL: tool_calls.LIST}
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
    """A request: n answers to each of the prompts, which are token ids, at most `most` tokens long (None: as there is room).

    seed: of the noise of each answer, with its number; None: the backend's. usage: counts end a stream. ids: tokens are
    returned. numbers: tokens are named by their ids in log-probs. messages, template and calls are a chat's: `template` has
    the tools and the arguments of the chat template as JSON, and `calls` is how calls of tools are written, None when none
    are looked for.
    """

    route: str
    backend: Backend
    prompts: list[list[int]]
    n: int
    most: int | None
    seed: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    logprobs: bool
    stream: bool
    usage: bool
    ids: bool
    numbers: bool
    id: str
    messages: Sequence[dict[str, Any]] = ()
    template: str = ""
    calls: tool_calls.Format | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def query(
    route: str, body: dict[str, Any], prompts: list[Any], backend: Backend, **of_chat: Any
) -> Query:
    """The request in a body. Raises Refused."""
    is_tokens = route == GENERATE
    settings = get(body, "sampling_params", dict, {}) if is_tokens else body
    for name in SAMPLING:
        given, served = settings.get(name), getattr(backend.sampling, name)
        given = 0 if name == "top_k" and given == -1 else given
        is_close = isinstance(given, float) and math.isclose(given, served)
        if given is not None and (isinstance(given, bool) or not (is_close or given == served)):
            raise Refused(
                f"{name} {short(given)}: this server samples with {name} {served:g}, for which its programs are "
                f"compiled: leave {name} out"
            )
    for name, neutral in UNSUPPORTED.items():
        for given in (settings.get(name), body.get(name)):
            if given and given != neutral:
                raise Refused(f"{name} {short(given)} is not supported: leave it out")
    check_prompts(prompts, backend)

    n, most = get(settings, "n", int, 1), get(settings, "max_tokens", int, None)
    most = get(settings, "max_completion_tokens", int, most)
    seed = get(settings, "seed", int, None)
    if seed is not None and not 0 <= seed < 2**32:
        raise Refused(f"seed {seed}: give 0 to {2**32 - 1}")
    if most is not None and most < 1:
        raise Refused(f"max_tokens {most}: give at least 1")
    if not 1 <= n * len(prompts) <= MOST_CHOICES:
        raise Refused(f"n {n} for {len(prompts)} prompts: ask for 1 to {MOST_CHOICES} answers")
    stops = settings.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise Refused(f"stop {short(stops)}: give texts")
    if backend.stops is not None and (others := sorted({*stops} - {*backend.stops})):
        raise Refused(
            f"stop {short(others)}: answers of this run end at rollout.stop: add it there"
        )
    ends = get(settings, "stop_token_ids", list, [])
    if not set(map(type, ends)) <= {int}:
        raise Refused(f"stop_token_ids {short(ends)}: give token ids")

    name = "top_logprobs" if route == CHAT else "logprobs"
    count = get(settings, name, int, None)
    if count is not None and not 0 <= count <= 1:
        raise Refused(f"{name} {count}: only the sampled token's log-prob is known: ask for 1")
    return Query(
        route, backend, prompts, n, most, seed, tuple(stops), frozenset(ends),
        logprobs=get(body, "logprobs", bool, False) if route == CHAT else count is not None,
        stream=get(body, "stream", bool, False),
        usage=bool(get(body, "stream_options", dict, {}).get("include_usage")),
        ids=get(body, "return_token_ids", bool, is_tokens),
        numbers=is_tokens or get(body, "return_tokens_as_token_ids", bool, False),
        id=get(body, "request_id", str, "") or uuid.uuid4().hex, **of_chat,
    )  # fmt: skip


def check_prompts(prompts: Sequence[Any], backend: Backend) -> None:
    """Raises Refused for what are no token ids, and for more than there is room for."""
    for prompt in prompts:
        if not isinstance(prompt, list) or not prompt or set(map(type, prompt)) != {int}:
            raise Refused(f"the prompt is {short(prompt)}: give a list of token ids, at least one")
        if min(prompt) < 0 or max(prompt) >= backend.vocab:
            raise Refused(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}: give 0 to {backend.vocab - 1}"
            )
        if len(prompt) >= backend.longest:
            raise Refused(
                f"the prompt has {len(prompt)} tokens, and the maximum context length is {backend.longest} tokens "
                "with the answer: shorten it", code="context_length_exceeded",
            )  # fmt: skip


def get(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A value of a body; the default for none. Raises Refused for one of another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused(f"{name} is {short(value)}: give {KINDS.get(kind, 'an object')}")
    return value


def messages_of(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: contents are texts, and arguments of calls are objects. Raises Refused."""
    found = []
    for one in given:
        try:
            message = {"role": one["role"], "content": one.get("content") or ""}
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
            message |= {name: one[name] for name in ("name", "tool_call_id") if one.get(name)}
            calls = [(call.get("id"), call["function"]) for call in one.get("tool_calls") or []]
            if calls:
                message["tool_calls"] = [
                    {
                        "id": id,
                        "type": "function",
                        "function": {"name": call["name"], "arguments": json.loads(call["arguments"] or "{}")},
                    }
                    for id, call in calls
                ]  # fmt: skip
            if not (isinstance(message["role"], str) and isinstance(message["content"], str)):
                raise TypeError("role and content are no texts")
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise Refused(
                f"the message {short(one)} cannot be read ({error!r}): give it in OpenAI's form, and only text"
            ) from error
        found.append(message)
    return found


def key_of(template: str, messages: Sequence[dict[str, Any]]) -> bytes:
    """What stands for a conversation."""
    return hashlib.sha256(json.dumps([template, *messages], sort_keys=True).encode()).digest()


@dataclass
class Part:
    """Some tokens of an answer, or all; `start`: characters before its text; `finish`: "" while the answer goes on.

    reason: the stop text that ended it, or the token of stop_token_ids.
    """

    start: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str
    reason: int | str | None = None


class Continuation:
    """An answer as it is told, cut after the token that completes a stop text or is one of stop_token_ids.

    all: what is known of it; its text once it has finished.
    """

    def __init__(self, index: int, asked: Query, tokenizer: Any):
        self.index, self.asked, self.tokenizer = index, asked, tokenizer
        self.prompt = asked.prompts[index // asked.n]
        self.all = Part(0, [], [], "", "")
        self.held, self.texts, self.size = "", [], 0  # text that may begin a stop text; the other
        has_text = asked.route != GENERATE or asked.stops
        self.stream = TextStream(tokenizer, self.hear) if has_text else None

    def hear(self, text: str) -> None:
        """Takes the next part of the text."""
        self.held += text

    def add(self, tokens: list[int], logprobs: list[float], finish: str) -> Part:
        """What these add to the answer."""
        whole, begin, text = self.all, len(self.all.tokens), ""
        ends = (size for size, token in enumerate(tokens, 1) if token in self.asked.stop_ids)
        if size := next(ends, 0):
            tokens, finish, whole.reason = tokens[:size], STOP, tokens[size - 1]
        whole.tokens += tokens
        if self.stream:
            self.stream.add(tokens)
            if finish:
                self.stream.flush()
            text = self.show(begin, bool(finish))
            finish = STOP if isinstance(whole.reason, str) else finish
        new = whole.tokens[begin:]
        logprobs = [max(one, LEAST) for one in logprobs[: len(new)]]
        whole.logprobs += logprobs
        whole.finish = finish
        if finish:
            whole.text = "".join(self.texts)
        return Part(self.size - len(text), new, logprobs, text, finish, whole.reason)

    def show(self, begin: int, is_end: bool) -> str:
        """The text in which no stop text can begin any more; one that is complete cuts the tokens from `begin` on."""
        whole, held, stops = self.all, self.held, self.asked.stops
        if found := [(held.index(stop), stop) for stop in stops if stop in held]:
            place, whole.reason = min(found)
            least = self.size + place + len(whole.reason)

            def has_it(size: int) -> bool:
                said = self.tokenizer.decode(whole.tokens[:size], skip_special_tokens=True)
                return len(said) >= least and whole.reason in said

            sizes = range(len(whole.tokens) + 1)
            del whole.tokens[bisect_left(sizes, True, begin, key=has_it) :]
        else:
            starts = (
                size for stop in stops for size in range(1, len(stop)) if held.endswith(stop[:size])
            )
            place = len(held) - (0 if is_end else max(starts, default=0))
        text, self.held = held[:place], held[place:]
        self.texts.append(text)
        self.size += len(text)
        return text

    def form(self, part: Part, is_delta: bool) -> dict[str, Any]:
        """What a response says of the whole answer, or an event of a part of it."""
        asked = self.asked
        out: dict[str, Any] = {"index": self.index, "stop_reason": part.reason}
        out["finish_reason"] = ABORT if part.finish == CANCELLED else part.finish or None
        out["logprobs"] = self.logprobs(part) if asked.logprobs else None
        if asked.ids or asked.route == GENERATE:
            out["token_ids"] = part.tokens
        if asked.route == TEXT:
            out |= {"text": part.text} | ({"prompt_token_ids": self.prompt} if asked.ids else {})
        if asked.route == CHAT:
            is_text = is_delta and asked.calls is None
            message = {"role": ASSISTANT} | ({"content": part.text} if is_text else {})
            if part.finish and not is_text:  # calls are known at the end
                message = self.message
            if part.finish == STOP and "tool_calls" in message:
                out["finish_reason"] = "tool_calls"
            out["delta" if is_delta else "message"] = message
        return out

    @cached_property
    def message(self) -> dict[str, Any]:
        """The message that the finished answer is, with the calls of tools in it."""
        form, text, calls = self.asked.calls, self.all.text, []
        if form is not None:
            calls, _ = tool_calls.parse_calls(self.tokenizer.decode(self.all.tokens), form)
        if not calls:
            return {"role": ASSISTANT, "content": text}
        thought, end, rest = text.rpartition(tool_calls.THOUGHT)
        if isinstance(form, str):
            before, mark, _ = rest.partition(MARKS.get(form, tool_calls.PYTHON))
            rest = before if mark else ""  # a mark that is a special token has no text
        functions = [{"name": name, "arguments": json.dumps(values)} for name, values in calls]
        return {
            "role": ASSISTANT,
            "content": (thought + end + rest).strip() or None,
            "tool_calls": [  # ids of nine letters and digits, as templates of Mistral want them
                {"index": number, "id": uuid.uuid4().hex[:9], "type": "function", "function": one}
                for number, one in enumerate(functions)
            ],
        }

    def logprobs(self, part: Part) -> dict[str, Any]:
        """The log-probs of a part's tokens."""
        names = [f"token_id:{one}" for one in part.tokens]
        if not self.asked.numbers:
            names = [self.tokenizer.decode([one]) for one in part.tokens]
        if self.asked.route == TEXT:
            offsets = list(accumulate(map(len, names), initial=part.start))[:-1]
            out = {"tokens": names, "token_logprobs": part.logprobs, "text_offset": offsets}
            return out | {"top_logprobs": [None] * len(names)}
        rows = zip(part.tokens, names, part.logprobs, strict=True)
        return {
            "content": [
                {"token_id": token, "token": name, "bytes": list(name.encode()), "logprob": one, "top_logprobs": []}
                for token, name, one in rows
            ]
        }  # fmt: skip


def head(asked: Query, has_prompt: bool) -> dict[str, Any]:
    """The start of a response, or of an event."""
    out: dict[str, Any] = {"model": asked.backend.model, "created": asked.created}
    if asked.route == GENERATE:
        out["request_id"] = asked.id
    else:
        prefix, kind = OBJECTS[asked.route]
        is_chunk = asked.stream and asked.route == CHAT
        out |= {"id": f"{prefix}-{asked.id}", "object": f"{kind}.chunk" if is_chunk else kind}
    if has_prompt and asked.ids and asked.route != TEXT:
        out["prompt_token_ids"] = asked.prompts[0]
    return out


def usage(asked: Query, choices: Sequence[Continuation]) -> dict[str, int]:
    """The numbers of tokens of a request."""
    read, made = sum(map(len, asked.prompts)), sum(len(one.all.tokens) for one in choices)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def failure(error: Exception) -> dict[str, Any]:
    """An error in OpenAI's form."""
    status = getattr(error, "status", 400)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = error.code if isinstance(error, Refused) else None
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
