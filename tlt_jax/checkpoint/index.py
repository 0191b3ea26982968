"""The index of a checkpoint (dtype, shape and checksum of each leaf, and a digest), and reading its arrays in one process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tlt_jax.errors import CheckpointError, DamagedCheckpoint

# Codes of the reading library for missing, truncated or changed files. Its other codes (UNAVAILABLE, PERMISSION_DENIED,
# RESOURCE_EXHAUSTED, ...) do not mean that files are damaged.
DATA_LOSS = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
CODE = re.compile(r"([A-Z][A-Z_]{4,}): ")


def read(folder: Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """The items in a folder, with the shardings of these abstract pytrees. No collective. Raises the libraries' errors.

    A field that is None is not looked for: it may be newer than the checkpoint.
    """
    handler = ocp.PyTreeCheckpointHandler()

    def one(name: str, target: Any) -> Any:
        wanted = present(ocp.tree.serialize_tree(target, keep_empty_nodes=True))
        places = ocp.checkpoint_utils.construct_restore_args(wanted)
        asked = ocp.args.PyTreeRestore(item=wanted, restore_args=places, partial_restore=True)
        found = ocp.tree.deserialize_tree(handler.restore(folder / name, args=asked), target)
        for path, leaf in jax.tree.leaves_with_path(found):
            if isinstance(
                leaf, jax.ShapeDtypeStruct
            ):  # what files with wrong names lack is left as it was
                raise ValueError(
                    f"NOT_FOUND: {name}{jax.tree_util.keystr(path)} is not in the files"
                )
        return found

    try:
        with all_reads_end():
            return {name: one(name, target) for name, target in targets.items()}
    finally:
        handler.close()


def present(tree: Any) -> Any:
    """Nested dicts and lists without the keys of dicts whose value is None."""
    if isinstance(tree, dict):
        return {key: present(value) for key, value in tree.items() if value is not None}
    return [present(value) for value in tree] if isinstance(tree, list) else tree


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for its tasks before it closes."""

    def close(self) -> None:
        while tasks := asyncio.all_tasks(self):  # a task may start others
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def all_reads_end() -> Iterator[None]:
    """Context in which orbax waits for all reads, also after one has failed.

    Orbax closes its event loop at the first failure; TensorStore would print a traceback for each
    later read.
    """
    factory, asyncio.new_event_loop = asyncio.new_event_loop, PatientLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = factory


def is_damage(error: BaseException) -> bool:
    """Whether a read error means missing or changed files, by a checksum, an index or a code of data loss.

    False for errors that an intact checkpoint can have: too little memory, an unresponsive file system, another
    process's failure.
    """
    if isinstance(error, ValueError):  # or JSON that cannot be parsed
        code = CODE.match(str(error))
        return code is None or code[1] in DATA_LOSS
    of_an_index = FileNotFoundError, LookupError, AttributeError, TypeError, AssertionError
    return isinstance(error, of_an_index)


def one_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


FORMAT = 1
META = "meta"  # the item of a checkpoint that holds its index


def signed(described: Mapping[str, Any]) -> dict[str, Any]:
    """The index of a checkpoint with its digest."""
    return {**described, "digest": digest(described)}


def digest(described: Mapping[str, Any]) -> str:
    """SHA-256 of the index of a checkpoint, as JSON with sorted keys."""
    text = json.dumps(json.loads(json.dumps(described)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_index(folder: Path, remedy: Callable[[], str]) -> dict[str, Any]:
    """The index of the checkpoint in a folder, whose name is its step.

    `remedy`: what to do about a damaged one. Raises CheckpointError when the index is of a newer format or of another
    step, DamagedCheckpoint when it is missing or corrupt.
    """
    path = folder / META / "metadata"
    try:
        described = json.loads(path.read_text())
    except FileNotFoundError as error:
        reason = f"was not written by tlt_jax ({META} is missing)"
        raise DamagedCheckpoint(f"{folder} {reason}: {remedy()}") from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{folder} is corrupt ({META}: {one_line(error)}): {remedy()}"
        ) from error

    if not isinstance(described, dict) or "format" not in described or "items" not in described:
        raise DamagedCheckpoint(
            f"{folder} was not written by tlt_jax ({META} has no format): {remedy()}"
        )
    if described.pop("digest", None) not in (None, digest(described)):
        raise DamagedCheckpoint(f"{folder} is corrupt ({path} changed on disk): {remedy()}")
    if not has_all(described):
        raise DamagedCheckpoint(f"{folder} is corrupt ({path}): {remedy()}")
    if described["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} has format {described['format']}, this version reads up to {FORMAT}: update tlt_jax"
        )
    step = int(folder.name)
    if described.get("step", step) != step:
        raise CheckpointError(
            f"{folder} holds step {described['step']}: rename the folder back, or delete it"
        )
    return described


def check_identity(folder: Path, saved: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raises CheckpointError when a checkpoint is of a run with other values."""
    if other := [name for name in saved if saved[name] != ours.get(name, saved[name])]:
        first = f"{other[0]} is {saved[other[0]]} there and {ours[other[0]]} here"
        more = f", and {', '.join(other[1:])}" if other[1:] else ""
        raise CheckpointError(
            f"{folder} is of another run: {first}{more}: use the values that it was saved with, or another run folder"
        )


def has_all(described: Mapping[str, Any]) -> bool:
    """Whether an index has all its parts; this is the only check of an older index without a digest."""
    parts = [described.get(name) for name in ("items", "metrics", "meta")]
    if not all(isinstance(part, dict) for part in parts) or not isinstance(
        described["format"], int
    ):
        return False
    leaves = [leaf for item in parts[0].values() for leaf in dict(item).values()]
    return all(
        isinstance(leaf, dict) and {"dtype", "shape", "checksum"} <= leaf.keys() for leaf in leaves
    )


def leaf_index(tree) -> dict[str, dict[str, Any]]:
    """Path of each leaf -> dtype, shape and checksum."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    places = defaultdict(dict)  # one program per set of devices, which JAX cannot mix
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
    """Dtype and shape of a leaf, as in the index."""
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


@jax.jit
def checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """uint32 checksum of each array, the same on every mesh.

    The sum, modulo 2^32, of its words (1, 2 or 4 bytes) times 2 * position + 1, an odd number.
    """
    return {name: checksum(array) for name, array in arrays.items()}


def checksum(array: jax.Array) -> jax.Array:
    """See checksums. Computed on the shards, so that one word per array is transferred to the host."""
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
    """A leaf as text, such as float32[8,4], or "missing"."""
    return f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]" if entry else "missing"
