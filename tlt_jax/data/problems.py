"""Problems of the data, collected to be told at once; knows no file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tlt_jax.errors import DataError

SHOWN_PER_KIND, SHOWN, SHOWN_LINES = 3, 20, 3


class Problems:
    """Collects problems of the data; `stop_if_any` raises them as one error.

    The same problem in several lines of a file is one problem.
    """

    def __init__(self):
        # (place, kind) -> text of a problem -> its lines
        self.groups: dict[tuple[str, str], dict[str, list[int | None]]] = defaultdict(dict)

    def add(self, place: str, line: int | None, what: str, fix: str, detail: str = "") -> None:
        """Records one problem; problems of one place and kind are listed together."""
        text = f"{what}{f' ({detail})' if detail else ''}: {fix}"
        self.groups[place, what].setdefault(text, []).append(line)

    def stop_if_any(self) -> None:
        """Raises DataError with at most 20 of the problems and their total, if any."""
        if not self.groups:
            return

        total = sum(len(texts) for texts in self.groups.values())
        shown: list[str] = []
        for (place, what), texts in self.groups.items():
            found = [_spell(place, text, lines) for text, lines in texts.items()]
            room = min(
                SHOWN_PER_KIND if len(self.groups) > 1 else SHOWN, SHOWN - len(shown), len(found)
            )
            shown += found[:room]
            if 0 < room < len(found):
                shown[-1] += f" [and {len(found) - room} more: {what}]"

        head = f"the data has {total} problem{'s' if total > 1 else ''}"
        raise DataError(
            "\n  ".join([head + (f", {len(shown)} shown" if len(shown) < total else ""), *shown])
        )


def _spell(place: str, text: str, lines: Sequence[int | None]) -> str:
    """A problem with its first line, and the next ones of the others."""
    where = place if lines[0] is None else f"{place}:{lines[0]}"
    if len(lines) == 1:
        return f"{where}: {text}"
    named = ", ".join(map(str, lines[1 : SHOWN_LINES + 1]))
    rest = len(lines) - 1 - SHOWN_LINES
    return f"{where}: {text} [also in {named}{f' and {rest:,} more' if rest > 0 else ''}]"
