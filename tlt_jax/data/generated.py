"""What generated tasks share: rows, splits, random bits that are a function of a key, a tokenizer of characters.

Knows no task, no file, no model and no JAX.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# The splits have different random streams; "sft" draws from the problems of "train".
SPLITS = {"train": 0, "eval": 1, "sft": 2}
EVAL_SHARE = 4  # one problem in four belongs to the evaluation split


@dataclass(frozen=True)
class Row:
    """One problem. The verifier expects `answer`; `solution` ends with it."""

    id: str
    prompt: str
    solution: str
    answer: str


def mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finalizer with its increment: a bijection that mixes uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), uniform for uniform uint64."""
    return (bits >> np.uint64(11)) * 2.0**-53


def row_keys(seed: int, indices: np.ndarray, split: str) -> np.ndarray:
    """One key uint64[R] for each row: a function of (seed, index, split)."""
    return mix(mix(mix(np.array([seed % 2**64], np.uint64)) + np.uint64(SPLITS[split])) + indices)


def is_eval(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool[R], true for problems of the evaluation split: a fixed hash of a problem's numbers.

    `values` int[R, K], in which the numbers past `lengths` int[R] are 0 for every row.
    """
    state = mix(lengths.astype(np.uint64))
    for column in values.T:
        state = mix(state + column.astype(np.uint64))
    return state % np.uint64(EVAL_SHARE) == 0


def character_tokenizer(characters: Iterable[str]):
    """A transformers fast tokenizer with one token for each of these characters, EOS and padding.

    Byte-level (a blank is "Ġ"), because next to a Qwen2 config.json AutoTokenizer replaces the
    pre-tokenizer and decoder of any tokenizer by those of Qwen2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, EOS, UNKNOWN, *characters]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=UNKNOWN)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
