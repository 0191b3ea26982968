"""The sizes that programs are compiled for: rows, cache slots, prompts of a prefill, rows of an admission."""

from __future__ import annotations

import itertools

FIRST_CACHE_BUCKET = 256


def doubling(first: int, last: int) -> list[int]:
    """first, twice that, ... below last, and last."""
    return [*itertools.takewhile(lambda size: size < last, (first << i for i in range(64))), last]


PREFILL_PROMPTS = (1, 4, 16)  # prompts of one prefill program
PREFILL_TOKENS = 16384  # most tokens of one prefill program (unless a single prompt has more)


def bucket_width(tokens: int) -> int:
    """Tokens of a prefill that holds all but the last token of a prompt: a power of two from 16."""
    return max(16, 1 << max(tokens - 2, 0).bit_length())


def block_size(prompts: int, width: int) -> int:
    """Prompts of the next prefill: the largest program that is more than half full."""
    sizes = [size for size in PREFILL_PROMPTS if size * width <= PREFILL_TOKENS] or [1]
    return max(size for size in sizes if size < 2 * prompts)


def admission_size(batch: int) -> int:
    """Sequences that one admission program adds to a batch of this size.

    The program writes their prompts and holds these twice: little memory next to the cache. Eight admissions fill all rows.
    """
    return min(batch, max(16, -(-batch // 8)))
