"""The bytes that each token of a tokenizer adds to a text, and the text of tokens that come one by one; knows no JAX."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tlt_jax.errors import DataError

BLANK = "\u2581"  # blank of SentencePiece
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
LONGEST = 4  # tokens of a character: it has at most so many bytes


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of each token by id; those of a special token are its name.

    For byte-level BPE (GPT-2, Qwen, Llama 3) and SentencePiece (Llama 2, Gemma). Raises DataError for other tokenizers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend else None
    decoder = json.dumps(decoder or {}, ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        letters = byte_letters()
    elif BLANK in decoder or '"Metaspace"' in decoder:
        letters = None
    else:
        raise DataError(
            "rollout.stop needs a byte-level or SentencePiece tokenizer, and this is another kind: leave rollout.stop empty"
        )

    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    found = []
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if number in added or token is None:
            found.append(added.get(number, "").encode())
        elif letters:
            found.append(bytes(letters[letter] for letter in token))
        elif byte := BYTE.fullmatch(token):
            found.append(bytes([int(byte[1], 16)]))
        else:
            found.append(token.replace(BLANK, " ").encode())
    return found


def byte_letters() -> dict[str, int]:
    """Letter -> byte of a byte-level vocabulary: printable bytes are their own letters, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + position): byte for position, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class TextStream:
    """Text of an answer that grows: `write` gets each part once, and no part of a character.

    All parts together are the text of all tokens, without special tokens. Each token is decoded a few times, however many
    there are: with the one before it, since tokenizers may decode the first token in another way.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        self.tokenizer, self.write = tokenizer, write
        added = tokenizer.added_tokens_decoder
        self.special = {number for number, token in added.items() if token.special}
        self.last: list[int] = []  # the last token whose text is written
        self.new: list[int] = []  # the tokens after it
        self.due = 0  # their number at which they are decoded
        # Whether the newest is a byte of SentencePiece: one that does not fit would change the text of all bytes before it.
        self.is_byte = False

    def add(self, tokens: list[int]) -> None:
        """Adds the next tokens; writes their text once no later token can change it."""
        names = self.tokenizer.convert_ids_to_tokens(tokens)
        for token, name in zip(tokens, names, strict=True):
            if name is not None and token not in self.special:  # others have no text
                self.new.append(token)
                self.is_byte = BYTE.fullmatch(name) is not None
        if len(self.new) < self.due or self.is_byte:
            return
        if (text := self.text(self.last + self.new)).endswith("\N{REPLACEMENT CHARACTER}"):
            self.due = 2 * len(self.new) if len(self.new) > LONGEST else 0
        else:
            self.show(text)

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def show(self, text: str) -> None:
        """Writes what is new in the text of the last and the new tokens."""
        if new := text[len(self.text(self.last)) :]:
            self.write(new)
        self.last, self.new, self.due = (self.last + self.new)[-1:], [], 0

    def flush(self) -> None:
        """Writes what was not written yet: the answer has ended."""
        self.show(self.text(self.last + self.new))
