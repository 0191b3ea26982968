"""What a checkpoint holds, by name: dtype, shape and checksum of each leaf, and a digest of it all; knows no file format."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.errors import CheckpointError

FORMAT = 1


def signed(described: Mapping[str, Any]) -> dict[str, Any]:
    """The index of a checkpoint with the digest of it."""
    return {**described, "digest": digest(described)}


def digest(described: Mapping[str, Any]) -> str:
    """SHA-256 of the index of a checkpoint, as JSON with sorted keys."""
    text = json.dumps(json.loads(json.dumps(described)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def has_all(described: Mapping[str, Any]) -> bool:
    """Whether an index has all parts of one; those before there was a digest are known to be whole by this alone."""
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
