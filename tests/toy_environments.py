"""Environments for tests of runs; imported by worker processes."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
import zlib

from tlt_jax.data import tasks


class Echo:
    """Says a part of what it heard, up to three times; its reward is a hash of the turn. Some fail, crash or hang."""

    def reset(self, seed: int, prompt: str = "") -> str:
        self.seed, self.turns = seed, 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool, dict[str, float]]:
        self.turns += 1
        kind, number = os.environ.get("TOY_ENVIRONMENT", ""), zlib.crc32(text.encode())
        if kind and number % 5 == 0:
            if kind == "raise":
                raise RuntimeError("this world is broken")
            if kind == "crash":
                os._exit(3)
            time.sleep(60)
        return text[:2] + "1:", number % 100 / 100, self.turns > number % 4, {"heard": len(text)}


def asked(base_url: str, api_key: str, route: str, **body) -> dict:
    """What the server of an agent says to a request."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    url, data = f"{base_url.removesuffix('/v1')}/{route}", json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as one:
            return json.loads(one.read())
    except urllib.error.HTTPError as error:
        message = json.loads(error.read())["error"]["message"]
        raise RuntimeError(f"{error.code}: {message}") from error


def echo_agent(base_url: str, api_key: str, model: str, seed: int, prompt: str, task: dict):
    """Echo as an agent that owns its loop, with token ids."""
    tokenizer, world, rewards, is_over = tasks.make("fold", task).tokenizer(), Echo(), [], False
    world.reset(seed, prompt)
    tokens = tokenizer(prompt)["input_ids"]
    while not is_over and len(rewards) < 3:
        found = asked(base_url, api_key, "inference/v1/generate", model=model, token_ids=tokens)
        answer = found["choices"][0]["token_ids"]
        said = tokenizer.decode(answer, skip_special_tokens=True)
        words, reward, is_over, info = world.step(said)
        rewards.append(reward)
        tokens = tokens + answer + tokenizer(words)["input_ids"]
    return sum(rewards), info


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b
