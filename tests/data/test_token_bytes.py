"""The bytes of a tokenizer's tokens, and the text of tokens that come one by one, against its own decoding."""

from __future__ import annotations

import numpy as np
import pytest

from tlt_jax.data import tasks
from tlt_jax.data.prompt_format import TextStream, token_bytes
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


def sentencepiece(*last):
    """A tokenizer of Gemma's kind; with `last`, a decoder that comes last: of Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {"<end>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("\u2581", "\u2581two", "co", "sts", "a", "f", "é", "\u2581\u2581"):
        vocab[piece] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<end>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
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
    with pytest.raises(DataError, match="rollout.stop needs a byte-level or SentencePiece"):
        token_bytes(words())


def llama_2():
    from tokenizers import decoders

    return sentencepiece(decoders.Strip(" ", 1, 0))


def metaspace():
    from tokenizers import Tokenizer, decoders, models

    words = ["<end>", "\u2581", "\u2581\u2581", "a", "\u2581a", "b\u2581", "\u540d"]
    backend = Tokenizer(models.WordLevel({one: at for at, one in enumerate(words)}, "<end>"))
    backend.decoder = decoders.Metaspace()
    return wrapped(backend)


def words():
    from tokenizers import Tokenizer, models

    return wrapped(Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>")))


class Counted:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.reads = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, tokens, **options):
        self.reads += len(tokens)
        return self.tokenizer.decode(tokens, **options)


def streamed(tokenizer, parts):
    """The parts of the text of tokens that come in these parts, and how many tokens were decoded for them."""
    shown, counted = [], Counted(tokenizer)
    stream = TextStream(counted, shown.append)
    for part in parts:
        stream.add(part)
    stream.flush()
    return shown, counted.reads


MAKERS = [byte_level, sentencepiece, llama_2, metaspace, words, tasks.Fold().tokenizer]


@pytest.mark.parametrize("make", MAKERS)
def test_a_streamed_text_is_that_of_all_its_tokens(make):
    tokenizer, rng = make(), np.random.default_rng(0)
    alone = [tokenizer.decode([one], skip_special_tokens=True) for one in range(len(tokenizer))]
    kinds = [
        np.arange(len(tokenizer) + 3),  # a policy may have more ids than its tokenizer
        [one for one, text in enumerate(alone) if not text.strip()],  # special, or blank
        [one for one, text in enumerate(alone) if "\ufffd" in text] + [1],  # parts of characters
        [*tokenizer.encode("\u00e3", add_special_tokens=False), tokenizer.eos_token_id],
    ]
    for trial in range(160):
        ids = rng.choice(kinds[trial % 4], 24)
        parts = [part.tolist() for part in np.split(ids, np.unique(rng.integers(0, 24, 12)))]
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert "".join(streamed(tokenizer, parts)[0]) == text, ids


@pytest.mark.parametrize("make", MAKERS)
def test_streaming_reads_each_token_a_few_times(make):
    """Of any answer, also one that repeats a token which is no character, or none at all."""
    tokenizer, length = make(), 256
    answers = [[token] * length for token in range(0, len(tokenizer), 1 + len(tokenizer) // 16)]
    answers.append(np.random.default_rng(0).integers(0, len(tokenizer), length).tolist())
    for answer in answers:
        shown, reads = streamed(tokenizer, [[token] for token in answer])
        assert "".join(shown) == tokenizer.decode(answer, skip_special_tokens=True)
        assert reads <= 8 * length, answer[0]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_streamed_text_is_shown_by_whole_characters_as_soon_as_they_are_known(make):
    tokenizer = make()
    ids = tokenizer.encode("co é\U0001f600 two", add_special_tokens=False)
    shown, _ = streamed(tokenizer, [[token] for token in ids])
    assert "".join(shown) == "co é\U0001f600 two" and not any("\ufffd" in part for part in shown)
    assert len(shown) >= 4, "in parts"
