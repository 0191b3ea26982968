"""The partner of a rollout: prompts, tools, malformed calls, and failures, with real environments and tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import chat_templates
import numpy as np
import pytest

from tlt_jax.config import Config
from tlt_jax.config.task import Data, Environment
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.environments.pool import Environments
from tlt_jax.errors import EnvironmentsError
from tlt_jax.train.environment import Play

SAMPLES = 2
LOGPROBS = np.zeros(1)  # which only agents get


@pytest.fixture(scope="module")
def tokenizer():
    return chat_templates.tokenizer_of("qwen2.5")


@pytest.fixture(scope="module")
def calculator():
    knobs = Environment(tools=["toy_environments:add"], turns=3, workers=1, timeout_s=20)
    config = Config(environment=knobs, data=Data(chat_template=True, max_prompt_tokens=2000))
    with Environments(config) as pool:
        yield config, pool


def said(play: Play) -> dict:
    """The next replies."""
    limit = time.monotonic() + 30
    while not (found := play.replies()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def play_of(calculator, tokenizer) -> tuple[Play, list[Prompt]]:
    play = Play(*calculator, tokenizer, [tokenizer.eos_token_id], SAMPLES, 3, 0)
    rows = [
        {"tlt_id": str(n), "prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(2)
    ]
    return play, play.open([Prompt(np.zeros(1, np.int32), row) for row in rows])


def turn(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer(text + tokenizer.eos_token)["input_ids"], np.int32)


def test_a_tool_is_described_called_and_answers_in_the_format_of_the_template(
    calculator, tokenizer
):
    play, prompts = play_of(calculator, tokenizer)
    with play:
        text = tokenizer.decode(prompts[1].tokens)
        assert '"name": "add"' in text and "What is 1 + 1?" in text
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
        play.hear(2, turn(tokenizer, call), LOGPROBS)
        assert "<tool_response>\n2\n</tool_response>" in tokenizer.decode(said(play)[2])
        play.hear(2, turn(tokenizer, call.replace("}}", "}")), LOGPROBS)
        assert play.replies() and play.played[2].numbers == {"tool_errors": 1}
        play.hear(2, turn(tokenizer, call.replace("}}", "}") + call), LOGPROBS)
        text = tokenizer.decode(said(play)[2])
        assert "<tool_response>\n2\na call is not valid" in text and play.played[2].numbers == {
            "tool_errors": 2
        }
        play.hear(2, turn(tokenizer, "It is 2."), LOGPROBS)
        assert said(play) == {2: None}
        assert play.rewards(2) == [0, 0, 0, 0]
        outcome = play.outcome(SimpleNamespace(uid=2))
        assert outcome == {
            "reward": 0,
            "failure": "",
            "numbers": {"tool_errors": 2, "turns": 4, "cut_turns": 0},
        }


def test_answers_to_one_prompt_have_environments_of_their_own_and_turns_have_a_limit(
    calculator, tokenizer
):
    play, _ = play_of(calculator, tokenizer)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %d}}</tool_call>'
    with play:
        for count in range(3):
            for uid in (0, 1):
                play.hear(uid, turn(tokenizer, call % (uid + count)), LOGPROBS)
            found = {}
            while len(found) < 2:
                found |= said(play)
            for uid in (0, 1):
                if count < 2:
                    assert f"\n{2 + uid + count}\n" in tokenizer.decode(found[uid])
                else:
                    assert found[uid] is None


def test_a_prompt_that_grows_too_long_is_named(calculator, tokenizer):
    config, pool = calculator
    short = replace(config, data=replace(config.data, max_prompt_tokens=10))
    with pytest.raises(EnvironmentsError, match="row 0 has .*max_prompt_tokens is 10: raise it"):
        play_of((short, pool), tokenizer)
