"""Maximum examples of a packed row, a bound that packing keeps and attention needs."""

from __future__ import annotations

FEWEST, TOKENS_EACH = 32, 256


def most_segments(row_tokens: int) -> int:
    """Maximum examples of a row: one per 256 tokens, but at least 32.

    Library attention kernels need a bound, and memory in proportion to it. Rows are packed alike on every device.
    """
    return max(FEWEST, row_tokens // TOKENS_EACH)
