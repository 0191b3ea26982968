"""The bytes of a tokenizer's tokens, against its own decoding."""

from __future__ import annotations

import numpy as np
import pytest

from tlt_jax.data import tasks
from tlt_jax.data.token_bytes import token_bytes
from tlt_jax.errors import DataError

TEXT = "It costs 12 €, naïve café; \n\n  two  blanks\t名前 🙂 " * 20


def byte_level():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>"]),
    )
    return wrapped(backend)


def sentencepiece():
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {"<end>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("\u2581", "\u2581two", "co", "sts", "a", "f", "é", "\u2581\u2581"):
        vocab[piece] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<end>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return wrapped(backend)


def wrapped(backend):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("make", [byte_level, sentencepiece, tasks.Fold().tokenizer])
def test_bytes_of_tokens_are_those_that_decoding_gives(make):
    tokenizer = make()
    spelled, rng = token_bytes(tokenizer), np.random.default_rng(0)
    assert len(spelled) == len(tokenizer)
    assert spelled[tokenizer.eos_token_id] == tokenizer.eos_token.encode()
    for _ in range(200):
        ids = rng.integers(0, len(tokenizer), 8).tolist()
        if make is sentencepiece:  # its decoder has another form for bytes that are not UTF-8
            start = rng.integers(len(TEXT) - 8)
            ids = tokenizer.encode(TEXT[start : start + 8], add_special_tokens=False)
        expected = tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(spelled[i] for i in ids).decode(errors="replace") == expected


def test_texts_are_spelled_whole():
    tokenizer = byte_level()
    spelled = token_bytes(tokenizer)
    assert b"".join(spelled[i] for i in tokenizer.encode(TEXT)).decode() == TEXT


def test_other_tokenizers_are_refused():
    from tokenizers import Tokenizer, models

    with pytest.raises(DataError, match="rollout.stop needs a byte-level or SentencePiece"):
        token_bytes(wrapped(Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))))
