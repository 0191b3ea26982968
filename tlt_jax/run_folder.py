"""The folder of a run: where its parts are, and its resolved configuration; knows no step and no model."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tlt_jax import atomic
from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import LOG, TENSORBOARD
from tlt_jax.errors import ConfigError

RESOLVED, REFERENCE, EXPORT, ANSWERS = "config.yaml", "reference", "hf", "answers"
# Folders that a run writes.
PARTS = (
    "checkpoints",
    TENSORBOARD,
    "completions",
    "speculation",
    "timeline",
    REFERENCE,
    EXPORT,
    ANSWERS,
)
DRAFTER = "drafter"  # the folder of what is trained for drafting


def enter(config: Config) -> None:
    """Writes the resolved configuration; ConfigError, with the knobs that differ, when the folder is another run's.

    A run that stopped before its first step lost nothing: its configuration may be corrected in place.
    """
    path = Path(config.run) / RESOLVED
    if path.exists() and has_begun(config):
        different = configuration.differences(config, read(config.run))
        if different:
            raise ConfigError(
                f"{config.run} holds a run with other values of {', '.join(different)}: use those of {path}, or "
                "another run folder"
            )
    atomic.remove_left(path.parent, *(one for one in path.parent.glob("*") if one.is_dir()))
    for name in PARTS:
        part = Path(config.run) / name
        if part.exists() and not (part.is_dir() and os.access(part, os.W_OK)):
            kind = "cannot be written" if part.is_dir() else "is no folder"
            raise ConfigError(f"{part} {kind}: move it away, or use another run folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, configuration.to_yaml(config))
    except OSError as error:
        raise ConfigError(
            f"run {config.run!r} cannot be written ({error.strerror}): set another run folder"
        ) from error


def identity(config: Config, data: str) -> dict[str, str]:
    """What all checkpoints of a run have in common; `data` is the digest of its rows."""
    knobs = {name: str(value) for name, value in configuration.identity(config).items()}
    return knobs | {"the digest of its rows": data}


def read(run: str | Path, arguments: Sequence[str] = ()) -> Config:
    """The configuration of the run in a folder, with the changes of a command line; ConfigError."""
    return configuration.read_resolved(Path(run) / RESOLVED, arguments)


def has_begun(config: Config) -> bool:
    """True when the folder holds a checkpoint or the answers of a step."""
    kept = ("checkpoints/[0-9]*", "completions/*.jsonl", f"{ANSWERS}/*.jsonl")
    return any(True for pattern in kept for _ in Path(config.run).glob(pattern))


def export(config: Config) -> Path:
    """Where the final policy goes."""
    return Path(config.run) / EXPORT


def drafter_export(config: Config) -> Path:
    """Where the drafter that the run trained goes, and where `train.drafter` writes its own."""
    return Path(config.run) / DRAFTER / EXPORT


def is_exported(config: Config) -> bool:
    """True when the final policy is there, or is not wanted."""
    return not config.checkpoint.export or export(config).is_dir()


def stopped(config: Config, checkpoint: Path | None) -> str:
    """What a run says that SIGTERM has stopped: where it is saved (None: it had nothing to save), and how to go on."""
    if checkpoint is None:
        return f"{config.run} was stopped before its first step: the same command begins again"
    return f"{config.run} was stopped, and is saved in {checkpoint}: the same command goes on from there"


def record_failure(config: Config, text: str) -> None:
    """Adds why the run failed to its log, where there is one."""
    path = Path(config.run) / LOG
    if path.exists():
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")


def summary(config: Config) -> str:
    """Where the results of a finished run are, and what to do with them."""
    run, model = Path(config.run), export(config)
    lines = [f"{config.run} is done:"]
    if TENSORBOARD in config.log.trackers:
        lines.append(f"  metrics      tensorboard --logdir {run / TENSORBOARD}")
    lines.append(f"  answers      {run / 'completions'}")
    if model.is_dir():
        lines.append(f"  model        {model}")
    if drafter_export(config).is_dir():
        lines.append(f"  drafter      {drafter_export(config)}")
    if model.is_dir():
        lines.append(f"  try it       python -m tlt_jax.generate --model {model} --prompt TEXT")
    return "\n".join(lines)


def reference(config: Config) -> Path:
    """Where the frozen start policy of the KL term is kept."""
    return Path(config.run) / REFERENCE
