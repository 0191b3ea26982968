"""Asynchronous, atomic checkpoints of a run: the latest ones and the best."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import orbax.checkpoint as ocp

from tlt_jax import atomic
from tlt_jax.checkpoint import index
from tlt_jax.checkpoint.index import (
    FORMAT,
    META,
    check_identity,
    compare,
    is_damage,
    leaf_index,
    one_line,
    read_index,
    signed,
)
from tlt_jax.config.task import is_at_least
from tlt_jax.distributed.job import Job
from tlt_jax.errors import CheckpointError, DamagedCheckpoint, is_disk_full


def is_not_disk_full(record: logging.LogRecord) -> bool:
    """Whether a log record is not about a full disk, which the save raises anyway."""
    return not (record.exc_info and is_disk_full(record.exc_info[1]))


@cache
def hush() -> None:
    """Filters the libraries' messages about a full disk, one for each array, from now on."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_not_disk_full)
    shown = sys.unraisablehook

    def show(unraisable: Any) -> None:
        # TensorStore reports its writes to an event loop, which is closed after the first failure.
        if str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    sys.unraisablehook = show


FOLDER = "checkpoints"
# Folders next to the steps: checkpoints that are being deleted, and damaged ones.
DELETED, DAMAGED = "deleted", "damaged"
EVALUATION = "evaluation"  # key of an index
ABANDON_S = 10.0  # seconds that a failed process waits for its saves
POLL_S = 0.02  # seconds between two polls of a save


class Restored(NamedTuple):
    """A checkpoint: its step, the requested items, and the metadata saved by the caller."""

    step: int
    items: dict[str, Any]
    meta: dict[str, Any]


class Store:
    """The checkpoints of one run folder.

    Items are pytrees of arrays that can be restored separately. Keeps the latest `keep` checkpoints
    and the best one by `best_metric` (highest; the latest of equal ones). Deletes others at the next
    save, or when the store is closed, after the newer one is complete. Saving returns once the
    arrays are copied to the host; `restore` never finds an interrupted save or deletion.
    `evaluation`: a number that grows when evaluations change, so that their metrics cannot be
    compared: the best is one with the highest number, which older versions did not save (0).
    `identity`: values that all checkpoints of the run share, by name; a checkpoint with another value
    is not restored. Every process of the `job` makes a store and calls its methods in the same
    order: all are collectives, except those that only read an index. Raises CheckpointError when the
    folder is missing and `create` is False, or when processes see different checkpoints.
    """

    def __init__(
        self,
        run: str | Path,
        keep: int = 2,
        best_metric: str = "",
        create: bool = True,
        identity: Mapping[str, str] | None = None,
        job: Job | None = None,
        evaluation: int = 0,
    ):
        self.identity, self.job, self.evaluation = dict(identity or {}), job or Job(), evaluation
        self.folder = Path(run).absolute() / FOLDER
        self.keep, self.best_metric, self.is_owner = keep, best_metric, create
        self._bytes = 0  # of the arrays in the running save
        # By step: metrics and meta added after the save.
        self._amended: dict[int, dict[str, Any]] = {}
        if not create and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} does not exist: give the folder of a run that has saved"
            )

        hush()
        # Folders are renamed before they are deleted, so that no incomplete one remains.
        options = ocp.CheckpointManagerOptions(
            todelete_subdir=DELETED, cleanup_tmp_directories=create, create=create
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._empty_deleted()
        self._see_the_same()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving; the arrays may be donated as soon as this returns.

        An existing checkpoint of the step keeps its arrays; if it has no metrics, these and `meta` are
        added. Raises CheckpointError when writing fails, OSError with the bytes `needed` on a full disk.
        """
        self.wait()
        if step in self._manager.all_steps():
            if metrics and not self.index(step)["metrics"]:
                self._amend(step, metrics, meta or {})
            return
        self._prune()

        described = {
            "format": FORMAT,
            "step": step,
            "identity": self.identity,
            "items": {name: leaf_index(tree) for name, tree in items.items()},
            "metrics": {name: float(value) for name, value in (metrics or {}).items()},
            "meta": dict(meta or {}),
            EVALUATION: self.evaluation,
        }

        self._bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(dict(items)))
        arguments = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **arguments, **{META: ocp.args.JsonSave(signed(described))}
                ),
            )
        except Exception as error:
            self._fail(error)

    def wait(self) -> None:
        """Waits until all saves are on disk. Raises as `save`."""
        while self._manager.is_saving_in_progress():
            self.job.alive()
            time.sleep(POLL_S)
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Waits for the saves, deletes the checkpoints not to keep, and stops the threads."""
        self.wait()
        self._prune()
        self._manager.close()

    def abandon(self) -> None:
        """Waits for the saves of this process, which has failed, without any collective.

        Deleting or saving would wait for the other processes, which are elsewhere.
        """

        def settle() -> None:
            with contextlib.suppress(Exception):  # the first error is reported
                self._manager.wait_until_finished()

        saving = threading.Thread(target=settle, name="abandoned saves", daemon=True)
        saving.start()
        saving.join(ABANDON_S if self.job.count > 1 else None)

    def steps(self) -> list[int]:
        """The saved steps, oldest first."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The latest saved step; None when there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The saved step with the highest best_metric, of those with the latest kind of evaluation; None when none has it.

        Waits for the saves.
        """
        self.wait()
        ranked = {step: score for step in self.steps() if (score := self._score(step))}
        kind, highest = max(ranked.values(), default=(0, 0.0))
        return max(
            (
                s
                for s, (one, value) in ranked.items()
                if one == kind and is_at_least(value, highest)
            ),
            default=None,
        )

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """True when best_metric in `metrics` exceeds that of every comparable step, which justifies an extra checkpoint."""
        if not self._is_ranked(metrics):
            return False
        best = self.best()
        if best is None:
            return True
        kind, highest = self._score(best)
        is_higher = not is_at_least(highest, metrics[self.best_metric])
        return kind < self.evaluation or (kind == self.evaluation and is_higher)

    def index(self, step: int) -> dict[str, Any]:
        """The index of a checkpoint: format, step, identity, items, metrics, meta.

        items: name -> leaf -> dtype, shape, checksum. Raises as `read_index`.
        """
        described = read_index(self.folder / str(step), lambda: self._remedy(step))
        return described | self._amended.get(step, {})

    def restore(self, step: int | None, targets: Mapping[str, Any]) -> Restored:
        """The items of a step (None: the latest), with the shardings of the abstract pytrees.

        The mesh may differ from that of the save. An error in one process is raised in all. Raises
        CheckpointError when the checkpoint does not exist, is of another run, has other shapes or
        dtypes, or cannot be read; DamagedCheckpoint when it is damaged.
        """
        step = self.latest() if step is None else step
        try:
            items, wrong = self._read(step, targets), ("", "")
        except CheckpointError as error:
            items, wrong = {}, (type(error).__name__, str(error))
        said = self.job.meeting().heard(json.dumps(wrong) if wrong[0] else "")
        for kind, message in map(json.loads, said.values()):
            raise (DamagedCheckpoint if kind == DamagedCheckpoint.__name__ else CheckpointError)(
                message
            )

        folder, described = self.folder / str(step), self.index(step)
        for name, tree in items.items():
            for leaf, entry in leaf_index(tree).items():
                if entry["checksum"] != described["items"][name][leaf]["checksum"]:
                    raise DamagedCheckpoint(
                        f"{folder} is corrupt ({name}{leaf} changed on disk): {self._remedy(step)}"
                    )

        return Restored(step, items, described["meta"])

    def _read(self, step: int | None, targets: Mapping[str, Any]) -> dict[str, Any]:
        """The items that this process reads; no collective. Raises as `restore`."""
        folder = self.folder / str(step)
        if step is None or step not in self.steps():
            raise CheckpointError(f"{folder.parent} has no checkpoint{f' {step}' if step is not None else ''}; "
                                  f"it has {self.steps() or 'none'}")  # fmt: skip

        described = self.index(step)
        check_identity(folder, described.get("identity", {}), self.identity)
        for name, target in targets.items():
            compare(folder, name, described["items"].get(name), target)

        try:
            return index.read(folder, targets)
        except Exception as error:  # of any kind, of the libraries below; classified here
            cause = error.__cause__ or error
            if is_damage(cause):
                raise DamagedCheckpoint(
                    f"{folder} is corrupt ({one_line(cause)}): {self._remedy(step)}"
                ) from error
            if isinstance(cause, (OSError, ValueError)):
                raise CheckpointError(
                    f"{folder} cannot be read ({one_line(cause)}): it may be intact; repair the file system, and start again"
                ) from error
            raise

    def _fail(self, error: Exception) -> NoReturn:
        """Raises the error of a failed save; on a full disk it deletes the incomplete checkpoint first."""
        if is_disk_full(error):
            if self.job.is_first:
                for left in self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                    shutil.rmtree(left, ignore_errors=True)
            full = OSError(errno.ENOSPC, one_line(error), str(self.folder))
            full.needed = self._bytes
            raise full from error
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot save below {self.folder}: {one_line(error)}") from error
        raise error

    def _is_ranked(self, metrics: Mapping[str, float] | None) -> bool:
        return bool(self.best_metric) and self.best_metric in (metrics or {})

    def set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint to the folder DAMAGED, where `restore` does not search."""
        if self.job.is_first:
            place = self.folder / DAMAGED / str(step)
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(place)
        self.job.decided(True)  # so that the other processes see it
        self._manager.reload()
        self._see_the_same()

    def has_set_aside(self) -> bool:
        """Whether the folder DAMAGED holds checkpoints."""
        return any((self.folder / DAMAGED).glob("[0-9]*"))

    def _see_the_same(self) -> None:
        """Raises CheckpointError in a process whose checkpoints differ from those of process 0."""
        if self.job.count > 1:
            seen = self.job.meeting().heard(json.dumps(self.steps()) if self.job.is_first else "")
            if json.loads(seen[0]) != self.steps():
                raise CheckpointError(
                    f"process {self.job.index} sees the checkpoints {self.steps()} in {self.folder}, process 0 "
                    f"{seen[0]}: all processes need the same file system"
                )

    def _amend(self, step: int, metrics: Mapping[str, float], meta: Mapping[str, Any]) -> None:
        """Adds metrics to a checkpoint, and replaces its meta."""
        added = {
            "metrics": {name: float(value) for name, value in metrics.items()},
            "meta": dict(meta),
            EVALUATION: self.evaluation,
        }
        if self.job.is_first:
            path = self.folder / str(step) / META / "metadata"
            atomic.write_text(path, json.dumps(signed(self.index(step) | added)))
        self._amended[step] = added

    def _prune(self) -> None:
        """Deletes all but the latest and the best checkpoints. No save may be in progress."""
        steps = self.steps()
        kept = {*steps[-self.keep :], self.best() if self.best_metric else None}
        if self.is_owner:
            for step in steps:
                if step not in kept:
                    self._manager.delete(step)
            self._empty_deleted()

    def _empty_deleted(self) -> None:
        if self.is_owner and self.job.is_first:
            shutil.rmtree(self.folder / DELETED, ignore_errors=True)

    def _score(self, step: int) -> tuple[int, float] | None:
        """The kind of evaluation of a step, and its best_metric; None when that is missing or unreadable."""
        try:
            described = self.index(step)
        except CheckpointError:
            return None
        value = described["metrics"].get(self.best_metric)
        return None if value is None else (described.get(EVALUATION, 0), value)

    def _remedy(self, step: int) -> str:
        others = [other for other in self.steps() if other != step]
        if not others:
            return "no other checkpoint exists; a new run needs another run folder"
        return f"the run resumes from step {max(others)}"
