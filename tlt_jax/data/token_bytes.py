"""The bytes that each token of a tokenizer adds to a text; knows no JAX."""

from __future__ import annotations

import json
import re
from typing import Any

from tlt_jax.errors import DataError

BLANK = "\u2581"  # blank of SentencePiece
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


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
