"""`python -m tlt_jax.generate`: its output, with and without a tokenizer, and one line for each mistake."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tlt_jax import generate
from tlt_jax.data import tasks
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import hf, transformer
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.rollout.engine import Engine


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two directories of one random model: with the generated task's tokenizer, and without any."""
    tokenizer = tasks.make("fold", {}).tokenizer()
    eos_ids = (tokenizer.eos_token_id,)
    config = ModelConfig(
        "qwen2",
        len(tokenizer),
        16,
        2,
        4,
        2,
        4,
        32,
        64,
        qkv_bias=True,
        tied=True,
        init_std=0.4,
        eos_ids=eos_ids,
    )
    mesh = meshes.make_mesh(1, 1)
    params = transformer.init(config, mesh, jax.random.key(0), "float32")
    folder = tmp_path_factory.mktemp("models")
    hf.save(params, config, folder / "text", mesh, tokenizer, "float32")
    hf.save(params, config, folder / "ids", mesh, None, "float32")
    return folder


@pytest.fixture(autouse=True)
def no_home(monkeypatch, tmp_path_factory):
    """The default compile cache is a folder of this session."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def run(capsys, *words: object) -> dict:
    assert generate.main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_and_ids_of_a_prompt_give_the_same_answers(models, capsys, tmp_path):
    tokenizer = tasks.make("fold", {}).tokenizer()
    ids = tokenizer.encode("12 3")
    common = ("--max-new-tokens", 8, "--seed", 3, "--num-samples", 2, "--top-k", 5)
    text = run(capsys, "--model", models / "text", "--prompt", "12 3", *common)
    bare = run(capsys, "--model", models / "ids", "--prompt-ids", ",".join(map(str, ids)), *common)
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "12 3"}}\n{{"prompt_ids": {ids}}}\n')
    both = run(capsys, "--model", models / "text", "--prompts", tmp_path / "p.jsonl", *common)
    for one, other in zip(text["completions"], bare["completions"], strict=True):
        assert one["token_ids"] == other["token_ids"] and one["logprobs"] == other["logprobs"]
        assert other["text"] is None and one["text"] == tokenizer.decode(
            one["token_ids"], skip_special_tokens=True
        )
        assert len(one["logprobs"]) == len(one["token_ids"]) <= 8 and max(one["logprobs"]) <= 0
        assert one["finish_reason"] in ("stop", "length")
    assert [(one["prompt_index"], one["sample"]) for one in both["completions"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [one["token_ids"] for one in both["completions"][:2]] == [
        one["token_ids"] for one in text["completions"]
    ]
    assert text["tokens_per_second"] > 0 and text["tokens"] == sum(
        len(one["token_ids"]) for one in text["completions"]
    )


def test_the_speed_leaves_out_what_was_waited_for_and_nothing_else(models, capsys, monkeypatch):
    """A day of background compilation changes nothing."""
    run_of = Engine.run

    def with_waits(self, *args, **knobs):
        result, tuner = run_of(self, *args, **knobs)
        result = replace(result, compile_waits={0: [(0.0, 1.5), (3.0, 4.0)]})
        result.stats.update(seconds=10.0, compile_seconds=86_400.0)
        return result, tuner

    monkeypatch.setattr(Engine, "run", with_waits)
    found = run(capsys, "--model", models / "ids", "--prompt-ids", "1,2", "--max-new-tokens", 4)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / 7.5)
    assert (found["seconds"], found["compile_seconds"]) == (7.5, 2.5)


def test_plain_output_shows_text_ids_logprobs_and_speed(models, capsys):
    assert (
        generate.main(["--model", str(models / "text"), "--prompt", "1 2", "--max-new-tokens", "4"])
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "token ids:" in out
        and "log-probs:" in out
        and "tokens/s" in out
        and "prompt 0 sample 0" in out
    )


@pytest.mark.parametrize("words, message", [
    (("--prompt", "1 2"), "no tokenizer"),
    (("--prompt-ids", "1,x"), "are no token ids"),
    (("--prompt-ids", "1,999", "--max-new-tokens", "4"), "token 999 is outside the vocabulary"),
    (("--prompt-ids", "1", "--max-new-tokens", "64"), "use at most 63 new tokens"),
    (("--prompt-ids", "1", "--top-p", "2"), "top_p 2.0 is too large"),
    (("--prompt-ids", "1", "--temperature", "hot"), "temperature"),
    (("--prompts", "nowhere.jsonl"), "no such file"),
    (("--prompt-ids", "1", "--prompt", "1"), "not allowed with"),
    ((), "one of the arguments"),
])  # fmt: skip
def test_mistakes_are_one_line(models, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", str(models / "ids"), *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error


def test_bad_lines_of_a_prompt_file_are_named(models, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [1]}\n{"question": "1"}\n')
    with pytest.raises(SystemExit):
        generate.main(["--model", str(models / "ids"), "--prompts", str(tmp_path / "p.jsonl")])
    assert "p.jsonl:2: no prompt" in capsys.readouterr().err


@pytest.mark.parity
def test_greedy_equals_transformers(models, capsys):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "ids", dtype=torch.float64)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9]]
    for prompt in prompts:
        ours = run(
            capsys, "--model", models / "ids", "--prompt-ids", ",".join(map(str, prompt)), "--temperature", 0,
            "--max-new-tokens", 30,
        )["completions"][0]  # fmt: skip
        inputs = torch.tensor([prompt])
        theirs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=30
        )
        np.testing.assert_array_equal(ours["token_ids"], theirs[0, len(prompt) :])


def test_a_drafter_that_learns_in_training_is_refused_before_anything_is_read(capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", "nowhere", "--prompt", "1", "--drafter", "adaptive"])
    assert stopped.value.code == 2
    assert "speculation.drafter adaptive is trained during an RL run" in capsys.readouterr().err
