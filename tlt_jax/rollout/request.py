"""The request of a rollout: prompts, limits and keys, as plain arrays; and the sizes that its programs are compiled for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlt_jax.errors import ConfigError
from tlt_jax.spec_decode.interface import DecodingParams

FIRST_CACHE_BUCKET = 256
PREFILL_PROMPTS = (1, 4, 16)  # prompts of one prefill program
PREFILL_TOKENS = 16384  # most tokens of one prefill program (unless a single prompt has more)


@dataclass(frozen=True)
class RolloutRequest:
    """The same for every data group. The uid of a sequence is prompt * samples + sample.

    prompts: int32[P] each, with at least one token. max_new_tokens: limit of the answer to each prompt.
    keys: uint32[prompts * samples, 2], the key of each sequence's noise. rounds: most rounds of a
    chunk. in_flight: chunks that a group may have queued. capacity: most sequences of a group. rollouts_left:
    similar rollouts that the run still decodes after this one. records: answers keep the target's record of their tokens.
    """

    prompts: tuple[np.ndarray, ...]
    samples: int
    max_new_tokens: tuple[int, ...]
    keys: np.ndarray
    params: DecodingParams
    rounds: int
    in_flight: int
    capacity: int
    rollouts_left: float = 0
    records: bool = False


def check(
    prompts: Sequence[np.ndarray], max_new_tokens: int | Sequence[int], positions: int, vocab: int
) -> None:
    """Raises ConfigError for prompts that a model of `positions` positions and `vocab` tokens cannot decode."""
    if not prompts or min(len(prompt) for prompt in prompts) == 0:
        raise ConfigError(
            "a rollout needs at least one prompt, and at least one token in each prompt"
        )
    if np.size(max_new_tokens) not in (1, len(prompts)):
        raise ConfigError(
            f"{np.size(max_new_tokens)} answer limits for {len(prompts)} prompts: give one, or one for each"
        )
    limits = np.broadcast_to(max_new_tokens, len(prompts)).tolist()
    if min(limits) < 1:
        raise ConfigError(f"an answer of at most {min(limits)} tokens: allow at least one")
    lengths = [len(prompt) for prompt in prompts]
    if max(lengths) >= positions:
        raise ConfigError(
            f"prompt {np.argmax(lengths)} has {max(lengths)} tokens, and the model {positions} positions, of which an answer "
            f"needs one: drop it, or shorten it by {max(lengths) + 1 - positions} tokens"
        )
    longest, limit = max(
        ((len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)), key=sum
    )
    if longest + limit > positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and an answer of {limit} exceed the model's {positions} positions: "
            f"use at most {positions - longest} new tokens"
        )
    every = np.concatenate(prompts)
    if every.min() < 0 or every.max() >= vocab:
        worst = every.min() if every.min() < 0 else every.max()
        raise ConfigError(
            f"prompt token {worst} is outside the vocabulary of {vocab}: use ids from 0 to {vocab - 1}"
        )


def doubling(first: int, last: int) -> list[int]:
    """first, twice that, ... below last, and last."""
    return [*itertools.takewhile(lambda size: size < last, (first << i for i in range(64))), last]


def bucket_width(tokens: int) -> int:
    """Tokens of a prefill that holds all but the last token of a prompt: a power of two from 16."""
    return max(16, 1 << max(tokens - 2, 0).bit_length())


def block_size(prompts: int, width: int, most: int = PREFILL_TOKENS) -> int:
    """Prompts of the next prefill: the largest program of at most so many tokens that is more than half full."""
    sizes = [size for size in PREFILL_PROMPTS if size * width <= most] or [1]
    return max(size for size in sizes if size < 2 * prompts)


def admission_size(batch: int) -> int:
    """Sequences that one admission program adds to a batch of this size.

    The program writes their prompts and holds these twice: little memory next to the cache. Eight admissions fill all rows.
    """
    return min(batch, max(16, -(-batch // 8)))
