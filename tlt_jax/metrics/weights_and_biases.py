"""The Weights & Biases run of a run folder, by the optional package wandb; knows no names of metrics."""

from __future__ import annotations

import dataclasses
import html
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax import atomic
from tlt_jax.config import Config
from tlt_jax.config.schema import WANDB
from tlt_jax.errors import ConfigError

ID = "id.txt"
# The step as a metric: W&B's counter must increase, and a resumed run repeats steps.
STEP = "step"
LONGEST_NAME = 128
# Timeouts in seconds of starting a W&B run, and of its last uploads.
BEGIN_S, FINISH_S = 30, 20

log = logging.getLogger(__name__)


def check_trackers(config: Config) -> None:
    """Raises ConfigError when log.trackers names wandb and it is not installed, or cannot start the run."""
    if WANDB not in config.log.trackers:
        return
    if find_spec("wandb") is None:
        raise ConfigError(
            f"log.trackers names {WANDB}, which is not installed: pip install -e '.[wandb]'"
        )
    wandb = imported(Path(config.run))
    try:
        wandb.Settings(project=project())
    except wandb.Error as error:
        raise ConfigError(f"WANDB_PROJECT: {one_line(error)}: use another name") from error
    is_online = os.environ.get("WANDB_MODE", "online") == "online"
    if is_online and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            f"log.trackers names {WANDB}, and no API key is set: run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline"
        )


def project() -> str:
    """The project of the run: W&B's own variable, or this package's name."""
    return os.environ.get("WANDB_PROJECT", "tlt_jax")


def imported(run: Path) -> Any:
    """The package wandb, silent and with its log in the run folder."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CACHE_DIR", str((run / WANDB / "cache").absolute()))
    import wandb  # optional, and takes a second to import

    return wandb


class WeightsAndBiases:
    """Writes to a run of Weights & Biases; its files are in <run>/wandb.

    A resumed run (`first_step` above 0) resumes its W&B run, where repeated steps appear twice. No
    failure of W&B stops a step: without its server everything is written to the run folder, and
    after any other failure nothing more is written. Both are logged once.
    """

    def __init__(self, config: Config, first_step: int):
        self._folder = Path(config.run) / WANDB
        self._run = self._wandb = None
        self._try(lambda: self._begin(config, first_step > 0))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars of a step."""
        self._write(step, lambda: dict(values))

    def histogram(self, step: int, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Writes a histogram of the values."""
        self._write(
            step,
            lambda: {name: self._wandb.Histogram(np_histogram=np.histogram(values, bins=30))},
        )

    def text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text, shown verbatim."""
        page = f"<pre>{html.escape(markdown)}</pre>"
        self._write(
            step, lambda: {name: self._wandb.Html(page, inject=False, data_is_not_path=True)}
        )

    def close(self, is_failed: bool) -> None:
        """Ends the W&B run after the last upload, or after FINISH_S seconds."""
        if self._run is not None:
            self._try(lambda: self._run.finish(exit_code=int(is_failed)))
            self._run = None

    def _begin(self, config: Config, is_resumed: bool) -> None:
        """Begins a run, or resumes that of the id in the folder; an offline one when the server cannot be reached."""
        self._wandb, path = imported(Path(config.run)), self._folder / ID
        if is_resumed and path.exists():
            name = path.read_text().strip()
        else:
            name = secrets.token_hex(8)
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, f"{name}\n")
        shown = (
            os.environ.get("WANDB_NAME") or "/".join(Path(config.run).parts[-2:])[-LONGEST_NAME:]
        )
        arguments = {
            "dir": config.run, "id": name, "resume": "allow", "project": project(), "name": shown,
            "config": dataclasses.asdict(config), "allow_val_change": True, "reinit": "create_new",
        }  # fmt: skip
        settings = self._wandb.Settings(
            console="off", init_timeout=BEGIN_S, finish_timeout=FINISH_S, finish_timeout_raises=True
        )
        try:
            self._run = self._wandb.init(**arguments, settings=settings)
        except self._wandb.Error as error:
            said = "Weights & Biases cannot be reached (%s): `wandb sync` takes %s afterwards"
            log.warning(said, one_line(error), self._folder)
            self._wandb.teardown()  # it would keep trying, and hold the id
            self._run = self._wandb.init(**arguments, settings=settings, mode="offline")
        self._run.define_metric("*", step_metric=STEP)
        if not self._run.offline:
            log.info("Weights & Biases: %s", self._run.url)

    def _write(self, step: int, row: Callable[[], dict[str, Any]]) -> None:
        if self._run is not None:
            self._try(lambda: self._run.log({STEP: step, **row()}))

    def _try(self, work: Callable[[], Any]) -> None:
        """Does the work; after an error of any kind nothing more is done, as a tracker must not stop a run."""
        try:
            work()
        except Exception as error:
            self._run = None
            said = "Weights & Biases failed (%s): nothing more of this run is sent; earlier data is in %s"
            log.warning(said, one_line(error), self._folder)


def one_line(error: Exception) -> str:
    """The first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
