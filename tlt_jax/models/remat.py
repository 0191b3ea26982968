"""What each layer of a policy keeps for its backward pass; the rest is computed again. It knows no memory.

A level names the results that `jax.checkpoint` keeps beside the layer's input. From most to least:
"none"      everything that JAX saves: nothing is computed again
"products"  the results of matrix products and of attention: norms, rotations and activations are computed again
"attention" queries, keys, values and attention's result: the MLP's products too are computed again
"full"      nothing but the input
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import jax
from jax.ad_checkpoint import checkpoint_name

from tlt_jax.kernels import numerics

NONE, PRODUCTS, ATTENTION, FULL = "none", "products", "attention", "full"
HEADS, ATTENDED, MLP = "queries, keys, values", "layer after attention", numerics.MLP  # names
KEPT = {
    PRODUCTS: (HEADS, *numerics.KEPT, ATTENDED, MLP),
    ATTENTION: (HEADS, *numerics.KEPT),
    FULL: (),
}
Remat = tuple[str, ...]  # the level of each layer; () is NONE for all


def named(x: jax.Array, name: str) -> jax.Array:
    """x, which levels with this name keep."""
    return checkpoint_name(x, name)


def keeping(level: str, body: Callable) -> Callable:
    """`body` with a backward pass that keeps what the level says. Raises ValueError for another word than a level."""
    if level == NONE:
        return body
    if level not in KEPT:
        raise ValueError(f"remat {level!r} is no level: use {', '.join((NONE, *KEPT))}")
    policy = jax.checkpoint_policies.save_only_these_names(*KEPT[level])
    return jax.checkpoint(body, policy=policy if KEPT[level] else None)


def spell(remat: Remat) -> str:
    """`products in 5 layers, full in 3`."""
    counts = [f"{level} in {len(list(part))}" for level, part in groupby(remat)]
    return ", ".join([f"{counts[0]} layers", *counts[1:]])


def spans(remat: Remat, layers: int) -> list[tuple[str, int, int]]:
    """(level, first layer, layers) of each run of layers with one level.

    Raises ValueError when the levels are not those of that many layers.
    """
    levels = remat or (NONE,) * layers
    if len(levels) != layers:
        raise ValueError(f"remat has {len(levels)} levels for {layers} layers: give one a layer")
    found, first = [], 0
    for level, part in groupby(levels):
        count = len(list(part))
        found.append((level, first, count))
        first += count
    return found
