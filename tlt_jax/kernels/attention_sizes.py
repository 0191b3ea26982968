"""How tree attention on a GPU is tiled: a table of sizes, and a rule for what is not in it; data, no JAX.

Sizes do not depend on the batch, so a row's result does not depend on the other rows; and nothing is measured at the start,
so that bits do not depend on a clock. `benchmarks/accelerator.py --sections tune` measures, and prints lines of TABLE.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SPLITS = 32  # of a row
# Least slots of a split for every query of a head. A split stores and reads R (E + 1 or 2) numbers, the level in float32, of
# R queries, and its slots are 2 E numbers each: so all but the first of a row are at most 5 % of the cache's bytes.
SLOTS_PER_QUERY = 21


@dataclass(frozen=True)
class Sizes:
    """Queries and slots of a tile; slots of a row for every split after the first; warps; tiles of slots held at once."""

    queries: int
    slots: int
    split: int
    warps: int
    stages: int

    def tiles(self, queries: int) -> int:
        """Tiles of this many queries."""
        return -(-queries // self.queries)

    def splits(self, slots: int) -> int:
        """The most splits of a row of this many slots."""
        return min(MOST_SPLITS, 1 + slots // self.split)


# (device kind, queries of a key/value head, head width, slots as `below` rounds them, bytes of a number): sizes
TABLE: dict[tuple[str, int, int, int, int], Sizes] = {}


def sizes(device: str, queries: int, width: int, slots: int, itemsize: int) -> Sizes:
    """The sizes of TABLE if their tiles divide the slots, else those of the rule."""
    measured = TABLE.get((device, queries, width, below(slots), itemsize))
    fits = measured is not None and slots % measured.slots == 0
    return measured if fits else rule(queries, width, itemsize)


def rule(queries: int, width: int, itemsize: int) -> Sizes:
    """Sizes from what the compiler says of an H200's code: no spills, and 8 warps or more fit a multiprocessor.

    bfloat16: 64 x 64 with 4 warps issues fewer instructions a slot than with 8 warps, which compute the weights twice, and two
    such programs fit where one of 64 x 128 does. A product has 16 rows also where fewer queries are: they cost no bytes.
    """
    if itemsize == 2:
        tile = min(64, max(16, power(queries)))
        slots, warps = (64, 4) if width <= 128 else (32, 4 if tile == 16 else 8)
    else:  # full float32 products use no tensor cores, and hold their tiles in registers
        tile, slots, warps = 16, 32, 4 if width <= 64 else 8
    return Sizes(tile, slots, max(SLOTS_PER_QUERY * queries, 2 * slots), warps, 3)


def below(slots: int) -> int:
    """The largest power of two <= slots: a cache has a bucket's slots and some for the path that a round commits."""
    return 1 << (slots.bit_length() - 1)


def power(number: int) -> int:
    """The smallest power of two >= number."""
    return 1 << (number - 1).bit_length()
