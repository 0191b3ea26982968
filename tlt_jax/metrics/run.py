"""The scalars of a run folder, a line for each step, written and read; and a run, read from its folder. Imports no JAX."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlt_jax import atomic
from tlt_jax.config import Config
from tlt_jax.config.schema import COMPLETIONS, EXPORT, METRICS, RESOLVED, WARM_START
from tlt_jax.errors import ConfigError

WARM = "sft/"  # metrics of the supervised warm start, which counts steps of its own

log = logging.getLogger(__name__)


class ScalarsFile:
    """A file with a line for each step: {"step": 3, "reward/mean": 0.25, ...}; null stands for a number that is not finite.

    Scalars of the newest step are added to its line. They are on disk when a method returns. Lines of `first_step` and
    later, which an interrupted run wrote, are removed; of a line that was cut off the whole numbers are kept.
    """

    def __init__(self, path: Path, first_step: float):
        self._path = path
        lines = [one for one in read_scalars(path) if one["step"] < first_step]
        self._last: dict[str, Any] = lines[-1] if lines else {}
        texts = [encoded(one) for one in lines]
        self._end = sum(map(len, texts))
        self._start = self._end - len(texts[-1]) if texts else 0  # of the last line
        if path.exists():
            atomic.write_text(path, b"".join(texts).decode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds scalars of a step, not earlier than the newest one."""
        is_newest = self._last.get("step") == step
        found = {name: one if math.isfinite(one) else None for name, one in values.items()}
        self._last = {**(self._last if is_newest else {"step": step}), **found}
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


def encoded(line: Mapping[str, Any]) -> bytes:
    """The line of a step."""
    return f"{json.dumps(line)}\n".encode()


def read_scalars(path: Path) -> list[dict[str, Any]]:
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


class Series(NamedTuple):
    """A metric over a run: int64 `steps` [n], ascending, and float64 `values` [n], nan for a number that is not finite."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Run:
    """What a run has written in its folder; also of one that still goes on.

    `code`: the exit code of the training that returned it (0 done, 1 diverged, 75 stopped by SIGTERM); None for a run that
    was opened.
    """

    folder: Path
    code: int | None = None

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """Every metric by name, read once; those of the warm start (sft/) have steps of their own."""
        found: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for name in (METRICS, WARM_START):
            for line in read_scalars(self.folder / name):
                step = line.pop("step")
                for metric, value in line.items():
                    found[metric][0].append(step)
                    found[metric][1].append(np.nan if value is None else value)
        return {
            name: Series(np.array(steps, np.int64), np.array(values, np.float64))
            for name, (steps, values) in sorted(found.items())
        }

    @property
    def steps(self) -> int:
        """The last step whose answers are written; 0 without one."""
        return max(self._written(), default=0)

    def completions(self, step: int | None = None) -> list[dict[str, Any]]:
        """The answers of a step (None: the last one), with the fields of docs/run_folder.md.

        Raises ConfigError for a step without answers.
        """
        written = self._written()
        if not written:
            raise ConfigError(f"{self.folder} has no answers yet: no step is done")
        chosen = max(written) if step is None else step
        if chosen not in written:
            raise ConfigError(
                f"step {chosen}: {self.folder} has the answers of steps {min(written)} to {max(written)}"
            )
        return [json.loads(line) for line in atomic.lines(written[chosen])]

    @property
    def hf(self) -> Path:
        """The directory of the final model, which exists once the run is done, unless checkpoint.export is off."""
        return self.folder / EXPORT

    def _written(self) -> dict[int, Path]:
        """The file of answers of each step that has one."""
        files = (self.folder / COMPLETIONS).glob("*.jsonl")
        return {int(path.stem): path for path in files if path.stem.isdigit()}


def open_run(folder: str | Path) -> Run:
    """The run of a folder. Raises ConfigError when no run was started in it."""
    path = Path(folder)
    if not (path / RESOLVED).is_file():
        raise ConfigError(f"{path} is no run folder: it has no {RESOLVED}")
    return Run(path)
