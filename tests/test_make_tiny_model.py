"""The tiny model directory: a tokenizer that round-trips any text, weights that load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tlt_jax import make_tiny_model
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.models import hf, hf_config

ROWS = [
    {"question": f"How many are {i} and {i + 1} ducks?", "answer": f"{i} + {i + 1} = {2 * i + 1}"}
    for i in range(60)
]


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(source: Path, out: Path, *more: str) -> int:
    sizes = ["--vocab-size", "300", "--hidden-size", "16", "--layers", "1", "--mlp-size", "32"]
    return make_tiny_model.main(["--data", str(source), "--out", str(out), *sizes, *more])


@pytest.mark.parametrize("like", [*make_tiny_model.LIKE, "phi3"])
def test_a_model_like_others_has_their_type_and_loads(like, source, tmp_path):
    assert run(source, tmp_path / "a", "--like", like, "--layers", "2") == 0
    config = hf_config.read_config(tmp_path / "a")
    assert config.family == like and hf.load(tmp_path / "a", config, make_mesh(1, 1), "float32")


def test_another_type_is_refused(source, tmp_path, capsys):
    assert run(source, tmp_path / "a", "--like", "gpt2") == 2
    assert "model_type 'gpt2' is not supported: use qwen2" in capsys.readouterr().err


def test_the_directory_loads_as_it_was_made(source, tmp_path):
    from safetensors.numpy import load_file
    from transformers import AutoConfig, AutoTokenizer

    assert run(source, tmp_path / "a") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert 259 < len(tokenizer) <= 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == (make_tiny_model.END, make_tiny_model.PAD)
    text = "How many ducks, 123? It's 5-3 über 漢字\n\n  x"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    trained = make_tiny_model.train_tokenizer(
        make_tiny_model.read_texts(str(source), ["question", "answer"]), 300
    )
    assert trained(text)["input_ids"] == ids
    assert len(tokenizer("123")["input_ids"]) == 3
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    config = AutoConfig.from_pretrained(tmp_path / "a")
    assert (config.model_type, config.vocab_size, config.num_hidden_layers) == (
        "qwen2",
        len(tokenizer),
        1,
    )
    eos = json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"]
    assert set(eos) == set(
        tokenizer.convert_tokens_to_ids([make_tiny_model.END, make_tiny_model.PAD])
    )
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (len(tokenizer), 16)
    assert all(np.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (
            ["--columns", "question,text"],
            "no text in column 'text': choose --columns among 'question', 'answer'",
        ),
        (["--vocab-size", "200"], "--vocab-size 200 is below 259"),
        (["--data", "gone.jsonl"], "gone.jsonl: no such file or folder: correct --data"),
    ],
)
def test_mistakes_end_in_one_message(source, tmp_path, capsys, more, part):
    assert run(source, tmp_path / "a", *more) == 2
    assert part in capsys.readouterr().err
