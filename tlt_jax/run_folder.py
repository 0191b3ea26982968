"""The run folder: paths of its parts, its lock, and its resolved configuration; knows no model."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt_jax import atomic
from tlt_jax.config import Config, changes, load as configuration
from tlt_jax.config.changes import JUDGING, Change
from tlt_jax.config.schema import COMPLETIONS, EXPORT, LOG, METRICS, RESOLVED, TENSORBOARD
from tlt_jax.distributed.job import Job
from tlt_jax.errors import ConfigError, DiskFull, is_disk_full

LOCK, CHANGES = "lock", "changes.jsonl"
REFERENCE, ANSWERS, START_DRAFTER = "reference", "answers", "start_drafter"
# Folders that a run writes.
PARTS = (
    "checkpoints",
    TENSORBOARD,
    COMPLETIONS,
    "speculation",
    "evaluation",
    "timeline",
    REFERENCE,
    EXPORT,
    ANSWERS,
    START_DRAFTER,
)
DRAFTER = "drafter"  # the folder of the trained drafter

log = logging.getLogger(__name__)


@contextmanager
def entered(config: Config, job: Job | None = None, *parts: str) -> Iterator[None]:
    """Context in which only this job writes in the run folder, which has its resolved configuration, on all processes.

    `parts`: subfolders that this job writes too, locked one by one since another command may use one alone.
    """
    job = job or Job()
    with contextlib.ExitStack() as held:
        if job.is_first:
            held.enter_context(locked(config.run))
            for part in parts:
                held.enter_context(locked(str(Path(config.run) / part)))
            enter(config)
        job.decided(True)  # a barrier: now all see the folder
        try:
            yield
        except DiskFull:
            raise
        except Exception as error:
            if not is_disk_full(error):
                raise
            place = getattr(error, "filename", None) or config.run
            raise full(Path(place), config, getattr(error, "needed", None)) from error


@contextmanager
def locked(run: str) -> Iterator[None]:
    """Context that locks the folder. Raises ConfigError, which names the holder, when another process has locked it.

    The lock belongs to the open file: it ends with the process, however that ends. On a file system without locks
    it warns and continues unlocked.
    """
    path = Path(run) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise unwritable(run, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f"{run} is in use by {file.read().strip() or 'another process'}: wait for it, end it, or use another run folder"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): start no second run in it", run, error.strerror)
        file.truncate(0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n")
        file.flush()
        yield


def enter(config: Config) -> None:
    """Writes the resolved configuration. Raises ConfigError, which names the knobs that differ, for another run's folder.

    The configuration of a run that stopped before its first step may be corrected in place. Changes by
    `override` and of evaluations are recorded in changes.jsonl, with the step from which they hold.
    """
    path = Path(config.run) / RESOLVED
    found, step = [], newest(config)
    if path.exists() and has_begun(config):
        found = changes.allowed(config, read(config.run), config.run, str(path), step)
    atomic.remove_left(path.parent, *(one for one in path.parent.glob("*") if one.is_dir()))
    for name in PARTS:
        part = Path(config.run) / name
        if part.exists() and not (part.is_dir() and os.access(part, os.W_OK)):
            kind = "cannot be written" if part.is_dir() else "is no folder"
            raise ConfigError(f"{part} {kind}: move it away, or use another run folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if found:
            note(config, step, found)
        atomic.write_text(path, configuration.to_yaml(replace(config, override=False)))
    except OSError as error:
        raise unwritable(config.run, error) from error


def unwritable(run: str, error: OSError) -> ConfigError:
    """The error of a folder that cannot be written."""
    return ConfigError(f"run {run!r} cannot be written ({error.strerror}): set another run folder")


def full(place: Path, config: Config, needed: int | None = None) -> DiskFull:
    """The error of a full file system: the folder, the missing bytes, and the checkpoint from which the run resumes."""
    folder = next((one for one in (place, *place.parents) if one.is_dir()), Path())
    free = shutil.disk_usage(folder).free
    missing = f"{free} bytes are free"
    if needed is not None:
        missing = f"{needed} bytes are needed, {max(needed - free, 0)} of them are missing"
        missing += "" if needed > free else " (a quota?)"
    step = newest(config)
    last = f"the last checkpoint, of step {step}, is whole" if step else "nothing was saved yet"
    return DiskFull(
        f"{folder} is full: {missing}; {last}: free the disk, and the same command resumes from there"
    )


def note(config: Config, step: int, found: Sequence[Change]) -> None:
    """Appends a line to changes.jsonl: the step, the time, and {name: [old, new]} of each changed knob."""
    path = Path(config.run) / CHANGES
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    line = {
        "step": step,
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "changes": {name: [old, new] for name, old, new in found},
    }
    atomic.write_text(path, f"{before}{json.dumps(line)}\n")
    for one in found:
        log.warning("from step %d on: %s", step, one)
    if config.checkpoint.best_metric and any(one.name.startswith(JUDGING) for one in found):
        log.warning(
            "evaluations up to step %d are not comparable with later ones: the best by %s is chosen among the later ones",
            step, config.checkpoint.best_metric,
        )  # fmt: skip


def changed(config: Config) -> list[set[str]]:
    """The knobs that were changed in this run so far, by resume."""
    path = Path(config.run) / CHANGES
    lines = atomic.lines(path) if path.exists() else []
    return [set(json.loads(line)["changes"]) for line in lines]


def evaluation(config: Config) -> int:
    """How often knobs were changed without whose values two evaluations of this run cannot be compared."""
    return sum(any(name.startswith(JUDGING) for name in names) for names in changed(config))


def newest(config: Config) -> int:
    """The step of the newest checkpoint, by its name; 0 without one."""
    steps = Path(config.run).glob("checkpoints/[0-9]*")
    return max((int(path.name) for path in steps if path.name.isdigit()), default=0)


def identity(config: Config, data: str) -> dict[str, str]:
    """Settings that all checkpoints of a run share; `data` is the digest of its rows."""
    fixed, overridden = changes.identity(config), set().union(*changed(config))
    knobs = {name: str(value) for name, value in fixed.items() if name not in overridden}
    return knobs | {"the digest of its rows": data}


def start_of(identity: Mapping[str, str]) -> dict[str, str]:
    """The part of a run's identity that determines its start policy."""
    parts = ("model.", "data.", "sft.", "train.seed", "the digest")
    return {name: value for name, value in identity.items() if name.startswith(parts)}


def read(run: str | Path, arguments: Sequence[str] = ()) -> Config:
    """The configuration of the run in a folder, with the changes of a command line. Raises ConfigError."""
    return configuration.read_resolved(Path(run) / RESOLVED, arguments)


def has_begun(config: Config) -> bool:
    """True when the folder holds a checkpoint or the answers of a step."""
    patterns = ("checkpoints/[0-9]*", "completions/*.jsonl", f"{ANSWERS}/*.jsonl")
    return any(True for pattern in patterns for _ in Path(config.run).glob(pattern))


def export(config: Config) -> Path:
    """The directory of the final policy."""
    return Path(config.run) / EXPORT


def drafter_export(config: Config) -> Path:
    """The directory of the drafter, whether trained in the run or by `train.drafter`."""
    return Path(config.run) / DRAFTER / EXPORT


def start_drafter(config: Config) -> Path:
    """The directory of the run's copy of the drafter that it starts from; none for a new one."""
    return Path(config.run) / START_DRAFTER


def of_step(step: int, command: str = "tlt_jax.train") -> dict[str, Any]:
    """The provenance that an export records. A run that was made longer holds the export of an earlier step until it ends."""
    return {"command": command, "step": step}


def is_exported(config: Config, step: int) -> bool:
    """True when the policy after the step, the last thing that a run exports, is written, or checkpoint.export is off."""
    return not config.checkpoint.export or atomic.is_made_from(export(config), of_step(step))


def stopped(config: Config, checkpoint: Path | None) -> str:
    """The message of a run that SIGTERM stopped: its checkpoint (None: nothing to save), and how to continue."""
    if checkpoint is None:
        return f"{config.run} was stopped before its first step: the same command starts again"
    return f"{config.run} was stopped, and is saved in {checkpoint}: the same command resumes from there"


def record_failure(config: Config, text: str) -> None:
    """Appends why the run failed to its log, if it has one."""
    path = Path(config.run) / LOG
    if path.exists():
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")


def summary(config: Config, example: str = "TEXT", remarks: Sequence[str] = ()) -> str:
    """The closing message of a run: the paths of its results, and a command to try the model, on the `example` prompt.

    `remarks`: what went wrong in it; they come first.
    """
    run, model = Path(config.run), export(config)
    python, lines = python_name(), [f"{config.run} is done:"]
    lines += [f"  note         {remark}" for remark in remarks]
    lines.append(f"  metrics      {run / METRICS}")
    if TENSORBOARD in config.log.trackers:
        board = shlex.quote(str(run / TENSORBOARD))
        lines.append(f"  curves       {python} -m tensorboard.main --logdir {board}")
    lines.append(f"  answers      {python} -m tlt_jax.show {shlex.quote(str(run))}")
    if model.is_dir():
        lines.append(f"  model        {model}")
    if drafter_export(config).is_dir():
        lines.append(f"  drafter      {drafter_export(config)}")
    if model.is_dir():
        ask = "--chat" if config.data.chat_template else f"--prompt {shlex.quote(example)}"
        directory = shlex.quote(str(model))
        lines.append(f"  try it       {python} -m tlt_jax.generate --model {directory} {ask}")
    return "\n".join(lines)


def python_name() -> str:
    """How a shell in the working directory starts the Python that runs this: `python` when PATH leads to it."""
    running, found = Path(sys.executable), shutil.which("python")
    if found and Path(found).absolute().parent == running.parent and running.samefile(found):
        return "python"
    is_below = running.is_relative_to(Path.cwd())
    return shlex.quote(str(running.relative_to(Path.cwd()) if is_below else running))


def reference(config: Config) -> Path:
    """The directory of the frozen start policy of the KL term."""
    return Path(config.run) / REFERENCE
