"""A run, read from its folder: metrics, answers and the path of its model. Writes nothing and imports no JAX."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlt_jax import atomic
from tlt_jax.config.schema import COMPLETIONS, EXPORT, METRICS, RESOLVED, WARM_START
from tlt_jax.errors import ConfigError
from tlt_jax.metrics import scalars_file


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
            for line in scalars_file.read(self.folder / name):
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
