"""The engine over HTTP, in front of a backend that tells what a script says: shapes, refusals, cuts, many clients."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import chat_templates
import numpy as np
import pytest

from tlt_jax.errors import ConfigError

pytest.importorskip("starlette", reason="the serve extra")
pytest.importorskip("uvicorn", reason="the serve extra")
from tlt_jax.serving.server import Server  # noqa: E402

VOCAB, LONGEST = 400, 600
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@dataclass
class Backend:
    """Tells the answer of `script` to a prompt, `piece` tokens at a time, every `pause` seconds; its own thread tells it."""

    script: object = lambda prompt: [int(token) for token in prompt[::-1]]
    piece: int = 2
    pause: float = 0.0
    end: str = "stop"
    model: str = "tiny"
    vocab: int = VOCAB
    longest: int = LONGEST
    stops: object = None
    known: object = field(default_factory=OrderedDict)
    sampling: object = field(
        default_factory=lambda: SimpleNamespace(temperature=0.7, top_k=0, top_p=1.0)
    )

    def __post_init__(self):
        self.running, self.cancelled, self.submitted, self.most_running = {}, [], [], 0
        self.seeds = []
        self.lock, self.ended = threading.Lock(), False
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def submit(self, prompt, most, told, seed=None):
        assert isinstance(prompt, np.ndarray) and prompt.dtype == np.int32
        with self.lock:
            handle = len(self.submitted)
            self.submitted.append((prompt.tolist(), most))
            self.seeds.append(seed)
            answer = self.script(prompt)
            end = self.end if len(answer) <= most else "length"
            self.running[handle] = [answer[:most], end, told]
            self.most_running = max(self.most_running, len(self.running))
        return handle

    def cancel(self, handle):
        with self.lock:
            if self.running.pop(handle, None):
                self.cancelled.append(handle)

    def loop(self):
        while not self.ended:
            time.sleep(self.pause or 1e-3)
            with self.lock:
                for handle, row in list(self.running.items()):
                    new, row[0] = row[0][: self.piece], row[0][self.piece :]
                    if not row[0]:
                        del self.running[handle]
                    row[2](new, [-token / 100 for token in new], "" if row[0] else row[1])


@pytest.fixture(scope="module")
def tokenizer():
    return chat_templates.tokenizer_of("qwen2.5")


@pytest.fixture
def serve(tokenizer):
    """Starts servers, and stops them with their backends."""
    open_ones = []

    def start(tokenizer=tokenizer, token=None, **script):
        backend = Backend(**script)
        server = Server(backend, tokenizer, port=0, token=token)
        open_ones.append((server.__enter__(), backend))
        return server, backend

    yield start
    for server, backend in open_ones:
        server.__exit__(None, None, None)
        backend.ended = True


def connect(server):
    return http.client.HTTPConnection(*server.socket.getsockname()[:2], timeout=20)


def ask(server, path, body=None, headers=None, status=200):
    connection = connect(server)
    kind = {} if body is None else {"Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(
        "GET" if body is None else "POST",
        path,
        None if body is None else data,
        {**kind, **(headers or {})},
    )
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == status, text
    connection.close()
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return list(map(json.loads, events[:-1]))
    return json.loads(text)


def generate(server, tokens, status=200, body=None, **settings):
    path = "/inference/v1/generate"
    return ask(
        server,
        path,
        {"token_ids": tokens, "sampling_params": settings, **(body or {})},
        status=status,
    )


def chat(server, *messages, status=200, **body):
    given = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    return ask(server, "/v1/chat/completions", {"messages": given, **body}, status=status)


def until(is_true):
    begin = time.monotonic()
    while not is_true():
        assert time.monotonic() < begin + 10
        time.sleep(0.005)


def says(tokenizer, text):
    return lambda prompt: tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_training_client_of_verifiers_finds_all_that_it_reads(serve):
    """Its request, as renderers 0.1.12 sends it, and the checks that it makes of the response."""
    server, backend = serve()
    (card,) = ask(server, "/v1/models")["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", LONGEST)
    prompt = [5, 6, 7]
    settings = {
        "temperature": 0.7, "top_p": 1.0, "max_tokens": 64, "routed_experts_prompt_start": 3,
        "stop_token_ids": [399, 398], "logprobs": 1, "skip_special_tokens": False,
    }  # fmt: skip
    body = {"model": "tiny", "token_ids": prompt, "sampling_params": settings, "cache_salt": "1"}
    found = ask(server, "/inference/v1/generate", body, {"Authorization": "Bearer EMPTY"})
    (choice,) = found["choices"]
    assert choice["token_ids"] == [7, 6, 5] and choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == ["token_id:7", "token_id:6", "token_id:5"]
    assert [one["logprob"] for one in content] == [-0.07, -0.06, -0.05]
    assert [one["token_id"] for one in content] == choice["token_ids"]  # vLLM's own form
    assert found["prompt_token_ids"] == prompt and found["request_id"]
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert backend.submitted == [(prompt, 64)]


def test_tokens_need_no_tokenizer_and_log_probs_come_on_request(serve):
    server, _ = serve(tokenizer=None)
    (choice,) = generate(server, [1, 2])["choices"]
    assert choice["token_ids"] == [2, 1] and choice["logprobs"] is None
    error = chat(server, "Hi", status=400)["error"]
    assert "no tokenizer" in error["message"]


def test_an_answer_ends_at_a_stop_token_and_the_rest_is_cancelled(serve):
    server, backend = serve(script=lambda prompt: [1, 2, 3, 4, 5, 6] * 50, piece=4, pause=0.01)
    (choice,) = generate(server, [9], stop_token_ids=[3, 2], logprobs=1)["choices"]
    assert choice["token_ids"] == [1, 2] and len(choice["logprobs"]["content"]) == 2
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 2)
    until(lambda: backend.cancelled == [0])


def test_max_tokens_and_the_room_that_is_left_limit_an_answer(serve):
    server, backend = serve(script=lambda prompt: [1] * 1000)
    assert generate(server, [2] * 5, max_tokens=3)["choices"][0]["finish_reason"] == "length"
    for body in ({}, {"max_tokens": 5000}):
        generate(server, [2] * (LONGEST - 4), **body)
    assert [most for _, most in backend.submitted] == [3, 4, 4]


def test_n_answers_come_by_index_and_streams_add_up_to_them(serve):
    server, _ = serve(script=lambda prompt: list(range(1, 8)))
    events = generate(
        server,
        [3],
        n=3,
        logprobs=1,
        body={"stream": True, "stream_options": {"include_usage": True}},
    )
    assert events[0]["prompt_token_ids"] == [3] and "prompt_token_ids" not in events[1]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 21
    for index in range(3):
        mine = [one for event in events for one in event["choices"] if one["index"] == index]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert sum((one["token_ids"] for one in mine), []) == list(range(1, 8))
        assert sum(len(one["logprobs"]["content"]) for one in mine) == 7


def test_chat_is_written_by_the_template_and_returns_the_tokens_on_request(serve, tokenizer):
    server, backend = serve(script=says(tokenizer, "Five.<|im_end|>"))
    found = chat(server, "What are 2 and 3?", logprobs=True, return_token_ids=True)
    (choice,), prompt = found["choices"], found["prompt_token_ids"]
    wanted = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWhat are 2 and 3?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt) == wanted and backend.submitted[0][0] == prompt
    assert choice["message"] == {"role": "assistant", "content": "Five."}
    assert choice["token_ids"] == backend.script(None)
    assert "".join(one["token"] for one in choice["logprobs"]["content"]) == "Five.<|im_end|>"
    plain = chat(server, "What?")
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None and plain["object"] == "chat.completion"


def test_text_streams_without_halves_of_characters(serve, tokenizer):
    server, _ = serve(script=says(tokenizer, "Zwölf – 🙂 é<|im_end|>"), piece=1)
    events = chat(server, "Hi", stream=True)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(one["content"] for one in deltas) == "Zwölf – 🙂 é"
    assert not any("\N{REPLACEMENT CHARACTER}" in one["content"] for one in deltas)
    assert events[0]["object"] == "chat.completion.chunk"
    half = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    server, _ = serve(script=lambda prompt: half, end="length")
    events = chat(server, "Hi", stream=True)
    assert events[-1]["choices"][0]["delta"]["content"] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_text_and_tokens(serve, tokenizer, piece, stream):
    text = "The answer: 5 ## and more to say" + " more" * 50
    server, backend = serve(script=says(tokenizer, text), piece=piece, pause=0.002)
    body = {"stop": ["## a", "more to"], "return_token_ids": True, "stream": stream}
    found = chat(server, "Hi", **body)
    events = found if stream else [found]
    kind = "delta" if stream else "message"
    choices = [one for event in events for one in event["choices"]]
    assert "".join(one[kind]["content"] for one in choices) == "The answer: 5 "
    tokens = sum((one["token_ids"] for one in choices), [])
    assert tokens == backend.script(None)[: len(tokens)]
    said = tokenizer.decode(tokens)
    assert "## a" in said and "## a" not in tokenizer.decode(tokens[:-1])
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "## a")
    assert piece == 100 or backend.cancelled == [0]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_parsed(serve, tokenizer, stream):
    server, backend = serve(script=says(tokenizer, f"I add.\n{CALL}<|im_end|>"))
    found = chat(server, "2 and 3?", tools=chat_templates.TOOLS, stream=stream)
    assert '"name": "add"' in tokenizer.decode(backend.submitted[0][0])
    choice = (found[-1] if stream else found)["choices"][0]
    message = choice["delta" if stream else "message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "I add."
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add" and call["id"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    if stream:
        assert not any("content" in one["choices"][0]["delta"] for one in found[:-1])


def test_an_answer_that_comes_back_keeps_its_tokens(serve, tokenizer):
    """Its text, encoded again, has other tokens than were sampled: here a word in single letters."""
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "answer"]
    sampled = letters + [tokenizer.eos_token_id]
    server, backend = serve(script=lambda prompt: sampled)
    first = chat(server, "Hi", return_token_ids=True)
    reply = first["choices"][0]["message"]
    chat(server, "Hi", {**reply, "refusal": None}, "And now?")
    chat(server, "Ho", reply, "And now?")  # another conversation
    _, kept, encoded = [prompt for prompt, _ in backend.submitted]
    before = first["prompt_token_ids"] + sampled
    assert kept[: len(before)] == before
    after = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(kept[len(before) :]) == after
    assert encoded == tokenizer(tokenizer.decode(encoded))["input_ids"]
    assert kept != tokenizer(tokenizer.decode(kept))["input_ids"]


def test_calls_and_their_results_come_back(serve, tokenizer):
    sampled = tokenizer(CALL, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    server, backend = serve(script=lambda prompt: sampled)
    first = chat(server, "2 and 3?", tools=chat_templates.TOOLS, return_token_ids=True)
    reply = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "5"}
    chat(server, "2 and 3?", reply, result, tools=chat_templates.TOOLS)
    prompt = backend.submitted[1][0]
    before = first["prompt_token_ids"] + sampled
    assert prompt[: len(before)] == before
    assert "<tool_response>\n5\n</tool_response>" in tokenizer.decode(prompt[len(before) :])


def test_texts_and_tokens_are_completed(serve, tokenizer):
    server, backend = serve(script=says(tokenizer, "and three"))
    path = "/v1/completions"
    found = ask(server, path, {"prompt": "two", "logprobs": 1, "return_token_ids": True})
    (choice,) = found["choices"]
    assert choice["text"] == "and three" and choice["token_ids"] == backend.script(None)
    assert choice["prompt_token_ids"] == tokenizer("two")["input_ids"]
    table = choice["logprobs"]
    assert "".join(table["tokens"]) == "and three" and table["text_offset"][0] == 0
    assert table["text_offset"][1] == len(table["tokens"][0])
    found = ask(server, path, {"prompt": [[1, 2], [3]], "n": 2})
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    assert [prompt for prompt, _ in backend.submitted[1:]] == [[1, 2], [1, 2], [3], [3]]
    ask(server, path, {"prompt": [1, 2]})
    assert backend.submitted[-1][0] == [1, 2]


GENERATE, CHAT, TEXT = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
WRONG = {
    "temperature": (CHAT, {**HI, "temperature": 1.0}, "temperature 0.7"),
    "top-k": (GENERATE, {"token_ids": [1], "sampling_params": {"top_k": 5}}, "top_k 0"),
    "penalty": (CHAT, {**HI, "presence_penalty": 0.5}, "presence_penalty 0.5 is not supported"),
    "no JSON": (CHAT, b"{", "send a JSON object"),
    "a list": (CHAT, [1], "no JSON object"),
    "no tokens": (GENERATE, {"token_ids": []}, "at least one"),
    "no ids": (GENERATE, {"token_ids": [1, "2"]}, "list of token ids"),
    "beyond": (GENERATE, {"token_ids": [1, VOCAB]}, f"give 0 to {VOCAB - 1}"),
    "negative": (GENERATE, {"token_ids": [-1]}, f"give 0 to {VOCAB - 1}"),
    "too long": (GENERATE, {"token_ids": [1] * LONGEST}, f"maximum context length is {LONGEST}"),
    "none at all": (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "at least 1"),
    "kind": (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": "9"}}, "a whole number"),
    "many": (GENERATE, {"token_ids": [1], "sampling_params": {"n": 1000}}, "1 to 128 answers"),
    "log-probs": (CHAT, {**HI, "logprobs": True, "top_logprobs": 5}, "ask for 1"),
    "message": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
    "own": (CHAT, {"messages": [{"role": "assistant", "content": "5"}]}, "assistant"),
    "choice": (CHAT, {**HI, "tools": [{1: 2}], "tool_choice": "required"}, "tool_choice"),
    "own template": (CHAT, {**HI, "chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}, "template"),
    "argument": (CHAT, {**HI, "chat_template_kwargs": {"tokenize": True}}, "the chat template rejects"),
    "huge": (CHAT, {**HI, "top_k": 10**400}, "top_k 0"),
    "half": (TEXT, {"prompt": "\ud800"}, "surrogate"),
    "prompt": (TEXT, {"prompt": {}}, "give a text"),
    "stop": (TEXT, {"prompt": "a", "stop": [3]}, "give texts"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_with_the_fix(serve, case):
    server, backend = serve()
    path, body, words = WRONG[case]
    error = ask(server, path, body, status=400)["error"]
    assert words in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert (error["code"] == "context_length_exceeded") == (case == "too long")
    assert not backend.submitted


def test_settings_that_the_backend_has_are_taken(serve):
    server, backend = serve()
    generate(
        server, [1], temperature=0.7, top_k=-1, top_p=1, seed=3, min_p=0, repetition_penalty=1.0
    )
    generate(server, [1], n=2, seed=4)
    generate(server, [1])
    assert backend.seeds == [(3, 0), (4, 0), (4, 1), None]


def test_other_models_paths_and_types_of_bodies_are_refused(serve):
    server, _ = serve()
    error = generate(server, [1], status=404, body={"model": "huge"})["error"]
    assert "'huge'" in error["message"] and error["code"] == "model_not_found"
    assert "/v2" in ask(server, "/v2", status=404)["error"]["message"]
    ask(server, GENERATE, status=405)
    kind = {"Content-Type": "text/plain"}  # as a page of a browser can send
    assert (
        "application/json"
        in ask(server, GENERATE, {"token_ids": [1]}, kind, 400)["error"]["message"]
    )


def test_strangers_are_refused(serve):
    server, backend = serve(token="secret")
    for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Bearer \xe9"}):
        ask(server, GENERATE, {"token_ids": [1]}, headers, status=401)
        ask(server, "/v1/models", headers=headers, status=401)
    assert not backend.submitted
    ask(server, "/health")
    ask(server, GENERATE, {"token_ids": [1]}, {"Authorization": "Bearer secret"})


def test_the_token_may_come_from_the_environment(serve, monkeypatch):
    monkeypatch.setenv("TLT_JAX_TOKEN", "hidden")
    server, _ = serve()
    ask(server, "/v1/models", status=401)
    ask(server, "/v1/models", headers={"Authorization": "Bearer hidden"})


def test_addresses_that_cannot_be_served_are_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("TLT_JAX_TOKEN", raising=False)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ConfigError, match="--token"):
            Server(SimpleNamespace(), None, host, 0)
    Server(SimpleNamespace(), None, "0.0.0.0", 0, "secret").socket.close()
    Server(SimpleNamespace(), None, "localhost", 0).socket.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="is taken: give another --port"):
            Server(SimpleNamespace(), None, "127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot be served"):
        Server(SimpleNamespace(), None, "no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="give 0 to 65535"):
        Server(SimpleNamespace(), None, "127.0.0.1", 99_999)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_sequences(serve, stream):
    server, backend = serve(script=lambda prompt: [1] * 500, pause=0.02)
    connection = connect(server)
    body = {"token_ids": [1], "sampling_params": {"n": 3}, "stream": stream}
    connection.request("POST", GENERATE, json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        connection.getresponse().readline()
    until(lambda: len(backend.running) == 3)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    until(lambda: sorted(backend.cancelled) == [0, 1, 2])
    assert generate(server, [1], max_tokens=2)["choices"][0]["token_ids"] == [1, 1]


def test_two_hundred_streams_run_at_once(serve):
    server, backend = serve(script=lambda prompt: [int(prompt[0])] * 20, pause=0.1)

    def one(number):
        events = generate(server, [number], body={"stream": True}, max_tokens=20)
        return sum((event["choices"][0]["token_ids"] for event in events), [])

    with ThreadPoolExecutor(200) as threads:
        assert list(threads.map(one, range(200))) == [[number] * 20 for number in range(200)]
    assert backend.most_running > 150


def test_an_open_connection_answers_at_once(serve):
    """A server that waits for packets to be confirmed takes 40 ms each time."""
    server, _ = serve(piece=100)
    connection, seconds = connect(server), []
    for _ in range(9):
        begin = time.monotonic()
        body = json.dumps({"token_ids": [1]})
        connection.request("POST", GENERATE, body, {"Content-Type": "application/json"})
        connection.getresponse().read()
        seconds.append(time.monotonic() - begin)
    assert min(seconds[1:]) < 0.03


def test_what_the_backend_ends_is_said(serve):
    server, _ = serve(end="cancelled")
    assert generate(server, [1])["choices"][0]["finish_reason"] == "abort"
    server, _ = serve(end="nonfinite")
    assert "not finite" in generate(server, [1], status=500)["error"]["message"]
    *_, last = generate(server, [1], body={"stream": True})
    assert last["error"]["type"] == "server_error"


def test_a_backend_that_takes_none_says_why(serve):
    server, backend = serve()

    def submit(*_):
        raise ConfigError("this engine is closed: open another one")

    backend.submit = submit
    assert "engine is closed" in generate(server, [1], status=400)["error"]["message"]


def test_it_stops_while_clients_wait(serve, tokenizer):
    backend = Backend(script=lambda prompt: [1] * 500, pause=0.05)
    with ThreadPoolExecutor(2) as threads:
        with Server(backend, tokenizer, port=0) as server:
            waiting = threads.submit(generate, server, [1], 503)
            stream = threads.submit(generate, server, [1], body={"stream": True})
            until(lambda: len(backend.running) == 2)
            begin = time.monotonic()
        assert time.monotonic() < begin + 3
        assert not server.thread.is_alive() and sorted(backend.cancelled) == [0, 1]
        assert waiting.result()["error"]["message"] == stream.result()[-1]["error"]["message"]
    backend.ended = True
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])))
