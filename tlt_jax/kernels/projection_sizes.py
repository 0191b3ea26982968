"""Which products of a layer with few tokens are one Triton kernel on a GPU, and how it is tiled; data, no JAX.

A row's result depends on the number of rows, as in any product, and nothing is measured at the start: bits do not depend on a
clock. `benchmarks/accelerator.py --sections tune` measures, and prints lines of TABLE.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

TOKENS = (1, 8, 16, 32, 64)  # of a call, rounded up, as TABLE has them
# More tokens run in XLA. Full float32 products use no tensor cores.
MOST_TOKENS = {2: 64, 4: 16}  # by the bytes of a number
# A kernel saves one or two others, of about 3.8 us each on an H200 (2026-11-26). XLA's products read a large matrix at 0.86 of
# the speed of a copy, and ours are not measured: they take matrices whose reading costs no more than two kernels, 24 MiB (7 us
# at 3.6 TB/s).
MOST_MATRIX = 24 << 20
# Every program reads all tokens, from the L2 cache: 320 KiB are 8 us at 40 bytes a nanosecond, which is assumed.
MOST_READ = 320 << 10
SPLIT_FROM = 128 << 10  # a product that reads more in a program is split, where it can be
MOST_SPLITS = 8
ARRIVALS = 1024  # counters that a product of gates sets to zero for the next one: as many tiles may be split
BUSY = 128  # programs that keep a large GPU busy: an H200 has 132 multiprocessors


@dataclass(frozen=True)
class Sizes:
    """The work of a program: rows of the matrix, elements of the reduction at a time; warps; tiles held at once.

    `splits`: programs that share the reduction of a tile of rows.
    """

    rows: int
    step: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True)
class Product:
    """A product of `tokens` rows with a matrix [out, width]; `kind`: heads | gated | added, as in projections_triton.

    `head`: rows of the matrix that one program must have, all of a head that is normed; 0: any number. `can_split`: it has
    counters.
    """

    kind: str
    out: int
    width: int
    tokens: int
    itemsize: int
    head: int = 0
    can_split: bool = False

    def read(self, rows: int) -> int:
        """Bytes that a program reads which has this many rows of the matrix."""
        return (self.tokens + rows) * self.width * self.itemsize


# (device kind, kind, out, width, tokens, bytes of a number): sizes, or None where XLA's product is faster
TABLE: dict[tuple[str, str, int, int, int, int], Sizes | None] = {}


def sizes(device: str, one: Product) -> Sizes | None:
    """The sizes of TABLE, else those of the rule; None: XLA's product."""
    if one.tokens > MOST_TOKENS[one.itemsize]:
        return None
    place = device, one.kind, one.out, one.width, rounded(one.tokens), one.itemsize
    measured = TABLE.get(place)
    fits = place in TABLE and (measured is None or measured.splits == 1 or one.can_split)
    return measured if fits else rule(one)


def rule(one: Product) -> Sizes | None:
    """Sizes with which two programs or more fit a multiprocessor of an H200; None: XLA's product.

    A tile has as many rows as there are tokens, so that rows are most of what is read, unless too few programs are left.
    """
    tile = rows = max(16, power(one.tokens))
    while rows > 16 and one.out < BUSY * rows:
        rows //= 2
    if one.kind == "added" and tile == 16 and one.out < BUSY * rows:
        rows = 8  # two products of eight pairs are the least of the other kinds
    rows, splits = max(rows, power(one.head)), 1
    if one.can_split and one.out <= ARRIVALS * tile and one.read(rows) > SPLIT_FROM:
        rows = tile
        while splits < MOST_SPLITS and one.out * splits < BUSY * rows:
            splits *= 2
    if one.out * one.width * one.itemsize > MOST_MATRIX or one.read(rows) > MOST_READ * splits:
        return None
    step = (256 if tile + rows <= 64 else 128) * 2 // one.itemsize
    return Sizes(rows, step, 4, 4 if tile + rows <= 64 else 3, splits)


def candidates(one: Product) -> Iterator[Sizes]:
    """Sizes to measure."""
    least = 8 if one.kind == "added" else 16
    all_rows = [power(one.head)] if one.head else [least, 32, 64]
    steps = [step * 2 // one.itemsize for step in (128, 256)]
    splits = (1, 4, 8) if one.can_split else (1,)
    for rows, step, warps, stages, parts in product(all_rows, steps, (4, 8), (3, 4), splits):
        if (max(16, power(one.tokens)) + rows) * step * one.itemsize * stages <= 200 << 10:
            yield Sizes(rows, step, warps, stages, parts)


def rounded(tokens: int) -> int:
    """The number of TOKENS that stands for this many."""
    return next(most for most in TOKENS if most >= tokens)


def power(number: int) -> int:
    """The smallest power of two >= number; 0 of 0."""
    return 1 << (number - 1).bit_length() if number else 0
