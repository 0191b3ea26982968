"""Array shapes in signatures, checked while JAX traces, at no cost afterwards; and how many examples a row may have."""

from __future__ import annotations

from beartype import beartype
from jaxtyping import jaxtyped

shaped = jaxtyped(typechecker=beartype)

FEWEST, TOKENS_EACH = 32, 256  # of most_segments


def most_segments(row_tokens: int) -> int:
    """Maximum examples of a packed row: one per 256 tokens, but at least 32.

    Library attention kernels need a bound, and memory in proportion to it. Rows are packed alike on every device.
    """
    return max(FEWEST, row_tokens // TOKENS_EACH)
