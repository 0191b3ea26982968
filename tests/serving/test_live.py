"""Sequences that come while others are decoded: each gets the tokens that it would get alone."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

from tlt_jax.data import tasks
from tlt_jax.distributed import mesh as meshes
from tlt_jax.inference import chat, live
from tlt_jax.inference.live import Live
from tlt_jax.models import architecture, hf
from tlt_jax.models.architecture import ModelConfig


@pytest.fixture(scope="module", params=["none", "ngram"])
def model(request, tmp_path_factory):
    tokenizer = tasks.make("fold", {}).tokenizer()
    config = ModelConfig(
        "qwen2", len(tokenizer), 16, 2, 4, 2, 4, 32, 96, qkv_bias=True, tied=True, init_std=0.4,
        eos_ids=(tokenizer.eos_token_id,),
    )  # fmt: skip
    mesh, folder = meshes.make_mesh(1, 1), tmp_path_factory.mktemp("model")
    params = architecture.init(config, mesh, jax.random.key(0), "float32")
    hf.save(params, config, folder, mesh, tokenizer, "float32")
    pairs = [("speculation.drafter", request.param), ("rollout.temperature", "0"), ("rollout.slots", "3"),
             ("data.max_prompt_tokens", "16"), ("rollout.max_new_tokens", "24")]  # fmt: skip
    return chat.Model(chat.configuration_of(str(folder), pairs))


def test_tokens_do_not_depend_on_what_else_is_asked_and_sessions_follow_each_other(
    model, monkeypatch
):
    monkeypatch.setattr(live, "IDLE_S", 0.2)
    served = Live(model, "toy")
    random = np.random.default_rng(0)
    prompts = [random.integers(0, served.vocab, 1 + n % 9) for n in range(14)]
    found: dict[int, tuple[list[int], list[float], str]] = {}

    def told(number: int):
        def tell(tokens, logprobs, finish):
            before = found.get(number, ([], [], ""))
            assert len(tokens) == len(logprobs) and not before[2]
            found[number] = before[0] + tokens, before[1] + logprobs, finish

        return tell

    def ask() -> None:
        for number, prompt in enumerate(prompts):
            served.submit(np.asarray(prompt, np.int32), 4 + number, told(number))
            time.sleep(0.7 if number == 9 else 0.02)  # once longer than a session waits

    asking = threading.Thread(target=ask)
    asking.start()
    limit = time.monotonic() + 120
    is_done = lambda: len(found) == 14 and all(one[2] for one in found.values())  # noqa: E731
    served.run(lambda: is_done() or time.monotonic() > limit)
    asking.join()
    assert is_done()
    for number, prompt in enumerate(prompts):
        (alone,) = model.generate([prompt.tolist()], max_new_tokens=4 + number)
        tokens, logprobs, finish = found[number]
        assert (tokens, finish) == (alone["token_ids"], alone["finish_reason"])
        np.testing.assert_allclose(logprobs, alone["logprobs"], atol=1e-5)


def test_the_noise_of_a_sequence_with_a_seed_depends_on_it_alone(model):
    served, prompt = Live(model, "toy"), np.array([1], np.int32)
    for seed in (None, (3, 0), (3, 1), (4, 0), (3, 0), None):
        served.submit(prompt, 5, lambda *told: None, seed)
    keys = [one[-1].tobytes() for one in served.later]
    assert keys[1] == keys[4] and len({*keys}) == 5


def test_a_cancelled_sequence_is_told_so_once(model):
    served, heard = Live(model, "toy"), []
    handle = served.submit(np.array([1, 2], np.int32), 5, lambda *told: heard.append(told))
    served.cancel(handle)
    served.cancel(handle)
    assert heard == [([], [], "cancelled")]
    served.run(lambda: True)
