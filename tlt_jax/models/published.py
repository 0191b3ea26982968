"""Published drafters of the bases that people train: where each is, its layout and its licence."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("published_drafters.csv")


class Published(NamedTuple):
    """A row of the table: a drafter on the Hugging Face hub, and its policy `base`, by their hub ids.

    `layout`: the architecture that its config.json names, or what else decides whether it can be read; `licence`: "" where
    only its card says it; `source`: where id and layout are from. No row was loaded from the hub for this table.
    """

    base: str
    drafter: str
    kind: str
    layout: str
    licence: str
    note: str
    source: str

    @property
    def terms(self) -> str:
        """Its licence, as far as it is known here."""
        return f"licence: {self.licence or 'see its card'}"


@cache
def table() -> tuple[Published, ...]:
    """All rows; those of one base in the order of preference."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(Published(**row) for row in csv.DictReader(file))
