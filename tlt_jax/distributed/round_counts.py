"""What a round of a compiled chunk moves, computes and launches, as CSV: `plan` writes it, `simulate` reads it; no JAX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tlt_jax import atomic
from tlt_jax.errors import DataError


class RoundCounts(NamedTuple):
    """Of one device, in a round of `rows` rows of `slots` cache slots: bytes, FLOP, and kernels (0: not counted).

    `strategy`: as spec_decode.strategy.name writes it. `devices`: of a data group, of kind `device` (h200).
    """

    device: str
    devices: int
    rows: int
    slots: int
    strategy: str
    moved: float
    flop: float
    kernels: int


def write(path: Path, counts: Iterable[RoundCounts]) -> None:
    """Writes the counts as CSV."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(RoundCounts._fields)
    table.writerows(
        one._replace(moved=f"{one.moved:.6g}", flop=f"{one.flop:.6g}") for one in counts
    )
    atomic.write_text(path, text.getvalue())


def read(path: Path) -> list[RoundCounts]:
    """The counts of a file. Raises DataError for another file, or for a number that is not finite and above 0."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no counts of rounds can be read there: {error}") from error
    table = csv.DictReader(lines)
    if tuple(table.fieldnames or ()) != RoundCounts._fields:
        raise DataError(
            f"{path}: no counts of rounds: write them with python -m tlt_jax.plan --counts FILE"
        )
    return [parsed(path, number, entry) for number, entry in enumerate(table, 1)]


def parsed(path: Path, number: int, entry: dict[str, str]) -> RoundCounts:
    """A line from its texts. Raises DataError."""
    values: dict = {"device": entry["device"], "strategy": entry["strategy"]}
    for name in RoundCounts._fields:
        if name in values:
            continue
        try:
            values[name] = float(entry[name]) if name in ("moved", "flop") else int(entry[name])
        except (TypeError, ValueError):
            values[name] = math.nan
        if not math.isfinite(values[name]) or values[name] < (name != "kernels"):
            raise DataError(f"{path}, line {number}: {name} {entry[name]!r}: give a number above 0")
    return RoundCounts(**values)
