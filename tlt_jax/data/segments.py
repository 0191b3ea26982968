"""How many examples a packed row holds at most, which packing keeps to and attention relies on; knows neither."""

from __future__ import annotations

FEWEST, TOKENS_EACH = 32, 256


def most_segments(row_tokens: int) -> int:
    """Examples that a row takes at most: one per 256 of its tokens, or 32 if that is more.

    A library's attention needs a bound, and memory in proportion to it; rows are packed alike on every device.
    """
    return max(FEWEST, row_tokens // TOKENS_EACH)
