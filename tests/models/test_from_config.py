"""What a configuration names fits together: the tokenizer and the model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tlt_jax.config import Config
from tlt_jax.data import tasks
from tlt_jax.models import from_config
from tlt_jax.train.setup import Setup

SIZES = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 1000,
}


@pytest.fixture
def tokenizer():
    return tasks.Fold(modulus=36).tokenizer()


@pytest.fixture
def model(tmp_path):
    """Writes the config.json of a model; returns a configuration that names its directory."""

    def model(**changes) -> Config:
        (tmp_path / "config.json").write_text(json.dumps(SIZES | changes))
        config = Config()
        data = replace(config.data, max_prompt_tokens=16)
        return replace(config, data=data, model=replace(config.model, path=str(tmp_path)))

    return model


@pytest.mark.parametrize("padding", [0, 1, 511])
def test_a_tokenizer_of_the_model_is_not_warned_of(model, tokenizer, padding, capsys):
    sizes = {"vocab_size": len(tokenizer) + padding, "eos_token_id": [0, tokenizer.eos_token_id]}
    from_config.warn_of_tokenizer(model(**sizes), tokenizer)
    from_config.warn_of_tokenizer(model(), None)
    from_config.warn_of_tokenizer(Config(), tokenizer)
    assert capsys.readouterr().err == ""


def test_a_tokenizer_of_another_model_is_warned_of_once_by_name(model, tokenizer, capsys):
    size, eos = len(tokenizer), tokenizer.eos_token_id
    for sizes, said in (
        ({"vocab_size": size + 512}, f"has {size} tokens, and the model has {size + 512} ("),
        ({"vocab_size": size - 1}, f"has {size} tokens, and the model has {size - 1} ("),
        (
            {"vocab_size": size, "eos_token_id": 0 if eos else 1},
            f"has EOS {tokenizer.eos_token!r} (id {eos}), and the model has EOS {0 if eos else 1} (",
        ),
    ):
        config = model(**sizes)
        Setup.of(
            replace(config, model=replace(config.model, tokenizer="someone/else")), tokenizer, None
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("warning: the tokenizer someone/else ") and said in line
