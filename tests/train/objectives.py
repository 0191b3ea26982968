"""Algorithms of updates, as a recipe has them."""

from __future__ import annotations

from tlt_jax.config.schema import NONE, Algorithm


def algorithm(**knobs) -> Algorithm:
    """What a loss minimizes; by default without importance weights."""
    return Algorithm(**({"importance": NONE} | knobs))
