"""Agents that own their loop: their requests are one conversation of token ids, and other requests are refused by name."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import chat_templates
import pytest
from toy_environments import asked

from tlt_jax.config import Config
from tlt_jax.config.schema import Rollout
from tlt_jax.config.task import Environment
from tlt_jax.data import prompt_format
from tlt_jax.errors import EnvironmentsError

pytest.importorskip("starlette", reason="the serve extra")
pytest.importorskip("uvicorn", reason="the serve extra")
from tlt_jax.environments.agents import AgentServer  # noqa: E402

CHAT, IDS = "v1/chat/completions", "inference/v1/generate"


@pytest.fixture(scope="module")
def tokenizer():
    return chat_templates.tokenizer_of("qwen2.5")


@pytest.fixture
def begun(tokenizer, monkeypatch):
    """begun(agent, **row) -> the Agent, which its function may have as `own`, and its first reply."""
    monkeypatch.setattr(prompt_format, "tokenizer_of", lambda config: tokenizer)
    loop, servers, agents = asyncio.new_event_loop(), [], []
    threading.Thread(target=loop.run_forever, daemon=True).start()
    config = Config(environment=Environment(turns=2), rollout=Rollout(stop=["END"]))

    def begin(agent, **row):
        servers.append(AgentServer(config, SimpleNamespace(make=agent, loop=loop)).__enter__())
        agents.append(servers[-1].episode(row))
        return agents[-1], agents[-1].reset(row | {"own": agents[-1]}, seed=7)

    yield begin
    for agent in agents:
        agent.close()
    for server in servers:
        server.__exit__()
    loop.call_soon_threadsafe(loop.stop)


def letters(tokenizer, text: str) -> list[int]:
    """A text as tokens of one letter, which the tokenizer would join."""
    return [tokenizer(one)["input_ids"][0] for one in text]


def until(is_true):
    limit = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_an_answer_keeps_the_tokens_that_were_sampled(begun, tokenizer):
    async def agent(base_url, api_key, model, seed, question):
        messages = [{"role": "user", "content": f"{question} {seed}"}]
        body = {"model": model, "logprobs": True, "max_tokens": 9}
        found = await asyncio.to_thread(asked, base_url, api_key, CHAT, messages=messages, **body)
        choice = found["choices"][0]
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-0.5] * 6
        assert choice["finish_reason"] == "stop"
        messages += [choice["message"], {"role": "user", "content": "And now?"}]
        found = await asyncio.to_thread(asked, base_url, api_key, CHAT, messages=messages)
        assert found["choices"][0]["finish_reason"] == "length"
        return 0.5, {"said": len(found["choices"][0]["message"]["content"]), "word": "no number"}

    sampled = letters(tokenizer, "hello") + [tokenizer.eos_token_id]
    assert tokenizer("hello")["input_ids"] != sampled[:-1]
    agent, opened = begun(agent, question="Why?", other=1)
    assert "Why? 7" in tokenizer.decode(opened.tokens) and opened.most == 9
    reply = agent.step("", (), (sampled, [-0.5] * 6, "stop"))
    text = tokenizer.decode(reply.tokens)
    assert (
        text == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n" and not reply.done
    )
    assert agent.tokens == [*opened.tokens, *sampled, *reply.tokens]
    reply = agent.step("", (), (letters(tokenizer, "abc"), [0.0] * 3, "length"))
    assert (reply.done, reply.reward, reply.info) == (True, 0.5, {"said": 3})


def test_requests_that_are_no_conversation_are_refused(begun, tokenizer):
    start, said = letters(tokenizer, "start"), []

    def agent(base_url, api_key, own, seed):
        def answer(key=api_key, **body):
            return asked(base_url, key, IDS, **body)["choices"][0]["token_ids"]

        def refused(**body):
            with pytest.raises(RuntimeError) as error:
                answer(**body)
            said.append(str(error.value))

        refused(token_ids=start, sampling_params={"stop": ["END", "x"]})
        answers = []
        other = threading.Thread(target=lambda: answers.append(answer(token_ids=start)))
        other.start()
        until(lambda: own.told)
        refused(token_ids=start + start)
        may_answer.set()
        other.join()
        tokens = start + answers[0]
        refused(token_ids=start + start[::-1] + start)
        refused(token_ids=tokens)
        tokens += start
        tokens += answer(token_ids=tokens)
        refused(token_ids=tokens + start)
        refused(key="other", token_ids=start)
        raise OSError("no disk")

    may_answer, answer = threading.Event(), (start, [0.0] * 5, "stop")
    made, opened = begun(agent)
    assert list(opened.tokens) == start and may_answer.wait(10)
    assert list(made.step("", (), answer).tokens) == start
    with pytest.raises(OSError, match="no disk"):
        made.step("", (), answer)
    expected = (
        "400: stop .*'x'.*: answers of this run end at rollout.stop: add it there",
        "400: .* one answer at a time",
        "400: .* does not go on from the last answer",
        "400: .* does not go on from the last answer",
        "429: environment.turns 2: this conversation has had so many answers",
        "401: no conversation has this token",
    )
    for text, one in zip(said, expected, strict=True):
        assert re.match(one, text), text


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_request_that_comes_again_gets_the_answer_for_which_its_client_did_not_wait(
    begun, tokenizer, is_answered
):
    start, has_left = letters(tokenizer, "start"), threading.Event()

    def agent(base_url, api_key, own):
        connection = http.client.HTTPConnection(urlsplit(base_url).netloc)
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        connection.request("POST", f"/{IDS}", json.dumps({"token_ids": start}), headers)
        until(lambda: own.told)
        connection.close()
        until(lambda: own.has_left)
        has_left.set()
        until(lambda: own.answer or not is_answered)
        found = asked(base_url, api_key, IDS, token_ids=start)
        return float(found["choices"][0]["token_ids"] == start[::-1])

    made, opened = begun(agent)
    assert has_left.wait(10)
    until(lambda: is_answered or not made.has_left)
    assert made.step("", (), (start[::-1], [0.0] * 5, "stop")).reward == 1.0


def test_requests_of_an_agent_whose_answer_has_ended_are_refused(begun, tokenizer):
    said = []

    def agent(base_url, api_key, own):
        for _ in range(2):
            try:
                found = asked(base_url, api_key, IDS, token_ids=letters(tokenizer, "start"))
                said.append(found["choices"][0]["finish_reason"])
            except RuntimeError as error:
                said.append(str(error))

    made, _ = begun(agent)
    made.close()
    until(lambda: len(said) == 2)
    assert said[0] == "abort" and said[1].startswith("401: no conversation has this token")


def test_an_agent_that_asks_for_nothing_is_an_error(begun):
    with pytest.raises(EnvironmentsError, match="returned before it had asked"):
        begun(lambda base_url: 1.0)
