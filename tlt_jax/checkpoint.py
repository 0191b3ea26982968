"""Asynchronous, atomic checkpoints of a run, the latest and the best; only this file uses orbax."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from tlt_jax import atomic
from tlt_jax.errors import CheckpointError, DamagedCheckpoint

FORMAT = 1
FOLDER = "checkpoints"
META = "meta"
DELETED, DAMAGED = (
    "deleted",
    "damaged",
)  # folders beside the steps: what is being deleted, and what was set aside


class Restored(NamedTuple):
    """A checkpoint: its step, the requested items, and the metadata saved by the caller."""

    step: int
    items: dict[str, Any]
    meta: dict[str, Any]


class Store:
    """The checkpoints of one run folder.

    Items are pytrees of arrays that can be restored separately. Keeps the latest `keep`
    checkpoints, and the best one by `best_metric` (highest; of equal ones the latest); others are
    deleted once the next one is whole, at its next save or when the store is closed. Saving returns
    once the arrays are copied to the host; an interrupted save or deletion leaves nothing that
    `restore` finds. `identity`: what every checkpoint of the run has in common, by name; one with
    another value is not restored. Raises CheckpointError when there is no folder and `create` is False.
    """

    def __init__(
        self,
        run: str | Path,
        keep: int = 2,
        best_metric: str = "",
        create: bool = True,
        identity: Mapping[str, str] | None = None,
    ):
        self.identity = dict(identity or {})
        self.folder = Path(run).absolute() / FOLDER
        self.keep, self.best_metric, self.is_owner = keep, best_metric, create
        self._amended: dict[
            int, dict[str, Any]
        ] = {}  # of steps: what was added after they were saved
        if not create and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} does not exist: give the folder of a run that has saved"
            )

        # Deleted folders are renamed first, so that none is ever half there.
        options = ocp.CheckpointManagerOptions(
            todelete_subdir=DELETED, cleanup_tmp_directories=create, create=create
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._empty_deleted()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving; the arrays may be donated as soon as this returns.

        An existing checkpoint of the step keeps its arrays; one without metrics gets these, and this
        `meta`. Raises CheckpointError when writing fails.
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
        }

        arguments = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(**arguments, **{META: ocp.args.JsonSave(described)}),
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot save {self.folder / str(step)}: {one_line(error)}: free the disk"
            ) from error

    def wait(self) -> None:
        """Waits until every save is on disk. Raises CheckpointError when writing fails."""
        try:
            self._manager.wait_until_finished()
        except OSError as error:
            raise CheckpointError(
                f"cannot save below {self.folder}: {one_line(error)}: free the disk"
            ) from error

    def close(self) -> None:
        """Waits for the saves, deletes what is not kept, and stops the threads."""
        self.wait()
        self._prune()
        self._manager.close()

    def steps(self) -> list[int]:
        """The saved steps, oldest first."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The latest saved step; None when there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The saved step with the highest best_metric; None when no step has it.

        Waits for the saves.
        """
        self.wait()
        ranked = [(self._score(step), step) for step in self.steps()]
        return max(
            ((value, step) for value, step in ranked if value is not None), default=(None, None)
        )[1]

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """True when `metrics` has a higher best_metric than every saved step.

        Such a step is worth a checkpoint outside the schedule.
        """
        if not self._is_ranked(metrics):
            return False
        best = self.best()
        return (
            best is None
            or metrics[self.best_metric] > self.index(best)["metrics"][self.best_metric]
        )

    def index(self, step: int) -> dict[str, Any]:
        """The index of a checkpoint: format, step, identity, items, metrics, meta.

        items: name -> leaf -> dtype, shape, checksum. Raises CheckpointError when it is not
        readable.
        """
        folder = self.folder / str(step)
        path = folder / META / "metadata"
        try:
            described = json.loads(path.read_text())
        except FileNotFoundError as error:
            reason = f"was not written by tlt_jax ({META} is missing)"
            raise DamagedCheckpoint(f"{folder} {reason}: {self._remedy(step)}") from error
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(
                f"{folder} is corrupt ({META}: {one_line(error)}): {self._remedy(step)}"
            ) from error

        if not isinstance(described, dict) or "format" not in described or "items" not in described:
            raise DamagedCheckpoint(
                f"{folder} was not written by tlt_jax ({META} has no format): {self._remedy(step)}"
            )
        if described["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has format {described['format']}, this version reads up to {FORMAT}: update tlt_jax"
            )
        if described.get("step", step) != step:
            raise CheckpointError(
                f"{folder} holds step {described['step']}: give the folder its old name, or delete it"
            )
        return described | self._amended.get(step, {})

    def restore(self, step: int | None, targets: Mapping[str, Any]) -> Restored:
        """The items of a step (None: the latest), with the shardings of the abstract pytrees.

        The mesh may differ from the one at saving. Raises CheckpointError when the checkpoint does
        not exist, is damaged, is of another run, or has other shapes or dtypes.
        """
        step = self.latest() if step is None else step
        folder = self.folder / str(step)
        if step is None or step not in self.steps():
            raise CheckpointError(f"{folder.parent} has no checkpoint{f' {step}' if step is not None else ''}; "
                                  f"it has {self.steps() or 'none'}")  # fmt: skip

        described = self.index(step)
        saved = described.get("identity", {})
        if other := [name for name in saved if saved[name] != self.identity.get(name, saved[name])]:
            first = f"{other[0]} is {saved[other[0]]} there and {self.identity[other[0]]} here"
            more = f", and {', '.join(other[1:])}" if other[1:] else ""
            raise CheckpointError(
                f"{folder} is of another run: {first}{more}: go on with what it was saved with, or use another run folder"
            )
        for name, target in targets.items():
            compare(folder, name, described["items"].get(name), target)

        try:
            arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
            with all_reads_end():
                restored = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        except Exception as error:  # of whatever kind, of the libraries below
            raise DamagedCheckpoint(
                f"{folder} is corrupt ({one_line(error.__cause__ or error)}): {self._remedy(step)}"
            ) from error

        items = {name: restored[name] for name in targets}
        for name, tree in items.items():
            for leaf, entry in leaf_index(tree).items():
                if entry["checksum"] != described["items"][name][leaf]["checksum"]:
                    raise DamagedCheckpoint(
                        f"{folder} is corrupt ({name}{leaf} changed on disk): {self._remedy(step)}"
                    )

        return Restored(step, items, described["meta"])

    def _is_ranked(self, metrics: Mapping[str, float] | None) -> bool:
        return bool(self.best_metric) and self.best_metric in (metrics or {})

    def set_aside(self, step: int) -> None:
        """Moves a checkpoint to a folder where nothing looks for it; all processes take part."""
        if jax.process_index() == 0:
            place = self.folder / DAMAGED / str(step)
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(place)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} is set aside")
        self._manager.reload()

    def _amend(self, step: int, metrics: Mapping[str, float], meta: Mapping[str, Any]) -> None:
        """Adds metrics to a checkpoint, and replaces its meta."""
        added = {
            "metrics": {name: float(value) for name, value in metrics.items()},
            "meta": dict(meta),
        }
        if jax.process_index() == 0:
            path = self.folder / str(step) / META / "metadata"
            atomic.write_text(path, json.dumps(self.index(step) | added))
        self._amended[step] = added

    def _prune(self) -> None:
        """Deletes what is neither among the latest nor the best; no save is in progress."""
        steps = self.steps()
        kept = {*steps[-self.keep :], self.best() if self.best_metric else None}
        if self.is_owner:
            for step in steps:
                if step not in kept:
                    self._manager.delete(step)
            self._empty_deleted()

    def _empty_deleted(self) -> None:
        if self.is_owner and jax.process_index() == 0:
            shutil.rmtree(self.folder / DELETED, ignore_errors=True)

    def _score(self, step: int) -> float | None:
        """The best_metric of a step; None when it has none, or cannot be read."""
        try:
            return self.index(step)["metrics"].get(self.best_metric)
        except CheckpointError:
            return None

    def _remedy(self, step: int) -> str:
        others = [other for other in self.steps() if other != step]
        return f"set checkpoint.resume last_good to go on from {f'step {max(others)}' if others else 'the start'}"


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose tasks end before it closes."""

    def close(self) -> None:
        while tasks := asyncio.all_tasks(self):  # a task may start others
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def all_reads_end() -> Iterator[None]:
    """Context in which orbax waits for all reads, though one has failed.

    It closes its event loop at the first failure; the reads that end later would find it closed, and
    TensorStore print a traceback for each.
    """
    factory, asyncio.new_event_loop = asyncio.new_event_loop, PatientLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = factory


def leaf_index(tree) -> dict[str, dict[str, Any]]:
    """Path of each leaf -> dtype, shape and checksum."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    places = defaultdict(dict)  # one program per set of devices: JAX cannot mix them
    for path, leaf in leaves:
        devices = frozenset(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else None
        places[devices][jax.tree_util.keystr(path)] = leaf

    sums = jax.device_get([checksums(place) for place in places.values()])
    sums = {name: int(one) for place in sums for name, one in place.items()}

    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    return {
        name: {**signature(leaf), "checksum": sums[name]}
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def signature(leaf) -> dict[str, Any]:
    """Dtype and shape as JSON, as in the index of a checkpoint."""
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


@jax.jit
def checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """uint32 checksum of each array, the same on every mesh.

    The sum, modulo 2^32, of its words (1, 2 or 4 bytes) times 2 * position + 1, an odd number.
    """
    return {name: checksum(array) for name, array in arrays.items()}


def checksum(array: jax.Array) -> jax.Array:
    """See checksums.

    Computed where the shards are, so that only one word per array is transferred to the host.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(
        array, {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    )

    weight = jnp.ones((), jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        weight = weight + 2 * np.uint32(stride % 2**32) * jax.lax.broadcasted_iota(
            jnp.uint32, words.shape, axis
        )
        stride *= words.shape[axis]

    return jnp.sum(words.astype(jnp.uint32) * weight, dtype=jnp.uint32)


def compare(folder: Path, name: str, saved: Mapping[str, Any] | None, target) -> None:
    """Raises CheckpointError when an item is missing, or a leaf differs in shape or dtype."""
    if saved is None:
        raise CheckpointError(f"{folder} has no item {name!r}: it was saved without it")

    leaves, _ = jax.tree_util.tree_flatten_with_path(target)
    wanted = {jax.tree_util.keystr(path): signature(leaf) for path, leaf in leaves}
    for leaf in [*wanted, *saved]:
        ours, theirs = wanted.get(leaf), saved.get(leaf)
        if ours is None or theirs is None or any(ours[key] != theirs[key] for key in ours):
            raise CheckpointError(
                f"{folder} holds another model: {name}{leaf} is {spell(theirs)} there and {spell(ours)} here: "
                "use the configuration that it was saved with"
            )


def spell(entry: Mapping[str, Any] | None) -> str:
    """A leaf as text: float32[8,4], or missing."""
    return f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]" if entry else "missing"


def one_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
