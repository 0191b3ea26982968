"""metrics.jsonl and warm_start.jsonl of a run folder, a line for each step; knows no meaning of a metric."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax import atomic
from tlt_jax.config import Config
from tlt_jax.config.schema import METRICS, WARM_START

WARM = "sft/"  # metrics of the supervised warm start, which counts steps of its own

log = logging.getLogger(__name__)


class ScalarsFile:
    """A file with a line for each step: {"step": 3, "reward/mean": 0.25, ...}; null stands for a number that is not finite.

    Scalars of the newest step are added to its line. They are on disk when a method returns. Lines of `first_step` and
    later, which an interrupted run wrote, are removed; of a line that was cut off the whole numbers are kept.
    """

    def __init__(self, path: Path, first_step: float):
        self._path = path
        lines = [one for one in read(path) if one["step"] < first_step]
        self._last: dict[str, Any] = lines[-1] if lines else {}
        texts = [encoded(one) for one in lines]
        self._end = sum(map(len, texts))
        self._start = self._end - len(texts[-1]) if texts else 0  # of the last line
        if path.exists():
            atomic.write_text(path, b"".join(texts).decode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds scalars of a step, not earlier than the newest one."""
        is_newest = self._last.get("step") == step
        self._last = {**(self._last if is_newest else {"step": step}), **finite(values)}
        self._start = self._start if is_newest else self._end
        text = encoded(self._last)
        try:
            self._path.touch()
            with self._path.open("r+b") as file:
                file.seek(self._start)
                file.write(text)
                file.truncate()
        except OSError as error:
            error.needed = len(text)  # bytes, for the error message of the caller
            raise
        self._end = self._start + len(text)


class MetricsFiles:
    """Writes every scalar of a run to <run>/metrics.jsonl, and those of the warm start to <run>/warm_start.jsonl.

    A run that starts anew (first_step 0) removes both.
    """

    def __init__(self, config: Config, first_step: int):
        folder = Path(config.run)
        if not first_step:
            for name in (METRICS, WARM_START):
                (folder / name).unlink(missing_ok=True)
        self._steps = ScalarsFile(folder / METRICS, first_step)
        self._warm_start = ScalarsFile(folder / WARM_START, math.inf)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars of a step: of the run, or of the warm start."""
        for file, is_warm in ((self._steps, False), (self._warm_start, True)):
            own = {name: one for name, one in values.items() if name.startswith(WARM) == is_warm}
            if own:
                file.write(step, own)

    def histogram(self, step: int, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Writes nothing: completions and chunks hold the values."""

    def text(self, step: int, name: str, markdown: str) -> None:
        """Writes nothing."""

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Writes nothing."""

    def close(self, is_failed: bool) -> None:
        """Does nothing: no file is open."""


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """The values, None for those that are not finite, which JSON cannot hold."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def encoded(line: Mapping[str, Any]) -> bytes:
    """The line of a step."""
    return f"{json.dumps(line)}\n".encode()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, in order of steps; none without the file. Unreadable ones are left out, which is logged."""
    texts = [line.decode(errors="replace") for line in atomic.lines(path)] if path.exists() else []
    lines = [line for line in map(parsed, texts[:-1]) if line]
    if len(lines) < len(texts[:-1]):
        log.warning("%s has %d lines that cannot be read", path, len(texts[:-1]) - len(lines))
    return lines + [line for line in map(parsed, texts[-1:]) if line]


def parsed(text: str) -> dict[str, Any] | None:
    """The numbers of a line, those before the break when it was cut off; None when there are none."""
    while text:
        try:
            line = json.loads(text)
        except ValueError:
            whole = text.rpartition(", ")[0]
            text = f"{whole}}}" if whole else ""
            continue
        return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
    return None
