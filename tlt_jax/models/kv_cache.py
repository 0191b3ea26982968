"""The KV cache of a rollout, of any network: one array per layer, committed slots first, scratch slots last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from tlt_jax.distributed.mesh import is_tpu, sharding
from tlt_jax.kernels import cache_rows
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.numerics import finite
from tlt_jax.models.architecture import ModelConfig, rollout_kv_heads
from tlt_jax.shapes import shaped

AXES = {"keys": ("batch", "kv_heads", None, None), "values": ("batch", "kv_heads", None, None),
        "features": ("batch", None, "features"), "states": ("batch", None, "features")}  # fmt: skip


@struct.dataclass
class KVCache:
    """Keys and values per layer, never stacked, and drafter features, of the committed tokens of each sequence.

    Layers are those with keys and values of their own (ModelConfig.cached_layers).

    Keys have slots on their last axis, so products with them read the cache in order. Values do so on TPUs only: there,
    heads narrower than 128 lanes would be padded, with a copy of the cache in every chunk. Elsewhere values are [B, K, S,
    E], which a CPU reads 3 times faster. S is the bucket plus the widest path that `commit` writes. `states`: the normed last
    hidden states; None when not captured.

    `rings`: of layers with a window, the most slots that they need: the window and the widest path. Position p lies in slot
    p % slots of such a layer, which has that many slots or S; 0: a layer without a window. (): no layer has one.

    Slots past a sequence's length are undefined, but finite: whatever is written, 0 stands for values, features and states
    that are NaN or infinite. Attention gives them the weight 0, and 0 * NaN is NaN. Keys may be NaN: their scores are masked.
    """

    keys: tuple[Float[Array, "B K E S"], ...]
    values: tuple[Float[Array, "B K _ _"], ...]
    features: Float[Array, "B S F"]
    states: Float[Array, "B S D"] | None = None
    slots_last: bool = struct.field(pytree_node=False, default=False)  # of the values
    rings: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def wraps(self, layer: int) -> bool:
        """Whether a layer has fewer slots than a sequence may have tokens."""
        return bool(self.rings) and self.keys[layer].shape[3] == self.rings[layer]

    def slot_axis(self, name: str) -> int:
        """The axis of the slots in the leaves of this name."""
        return {"keys": 3, "values": 3 if self.slots_last else 2, "features": 1, "states": 1}[name]


@struct.dataclass
class Scratch:
    """Keys, values, features and states of tree nodes before `commit` selects some, or of the N tokens of whole prompts.

    `after`: a result of all that read the cache, where `cache_rows.write` commits keys and values; else None, and keys and
    values depend on such a result. `experts`: of each token, see moe.record.
    """

    keys: tuple[Float[Array, "B K E N"], ...]
    values: tuple[Float[Array, "B K N E"], ...]
    features: Float[Array, "B N F"]
    states: Float[Array, "B N D"] | None = None
    after: Float[Array, "_ _"] | None = None
    experts: Integer[Array, "B N _"] | None = None


def each(function: Callable[..., Array], cache: KVCache, *others: Scratch) -> KVCache:
    """The cache with function(name, layer, its leaf, the leaves of the others as it stores them) for every leaf.

    `layer`: the index of a layer's leaf; -1 for the others.
    """

    def stored(name: str, leaf: Array) -> Array:
        leaf = leaf if name == "keys" else finite(leaf)
        return jnp.swapaxes(leaf, 2, 3) if cache.slots_last and name == "values" else leaf

    def of(name: str) -> Any:
        old, *leaves = (getattr(one, name) for one in (cache, *others))
        if isinstance(old, tuple):
            layers = enumerate(zip(old, *leaves, strict=True))
            return tuple(changed(name, layer, *parts) for layer, parts in layers)
        return None if old is None else changed(name, -1, old, *leaves)

    def changed(name: str, layer: int, old: Array, *new: Array) -> Array:
        return function(name, layer, old, *(stored(name, one) for one in new))

    return cache.replace(**{name: of(name) for name in AXES})


def abstract(
    config: ModelConfig,
    batch: int,
    slots: int,
    features: int,
    dtype: DTypeLike,
    mesh: Mesh,
    captures_states: bool = False,
    rings: tuple[int, ...] = (),
) -> KVCache:
    """Shape, dtype and sharding of a cache on a data group's mesh; `rings`: see KVCache."""
    kinds = [config.kinds[layer] for layer in config.cached_layers]
    heads = [(rollout_kv_heads(kind, mesh.shape["model"]), kind.head_dim) for kind in kinds]

    def describe(name: str, *shape: int) -> jax.ShapeDtypeStruct:
        divides = AXES[name][-1] is None or shape[-1] % mesh.shape["model"] == 0
        axes = AXES[name] if divides else AXES[name][:1]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axes, "rollout"))

    slots_last = is_tpu(mesh)
    sizes = [min(slots, ring or slots) for ring in rings or (0,) * len(kinds)]
    shapes = [(*one, size) for one, size in zip(heads, sizes, strict=True)]
    return KVCache(
        keys=tuple(describe("keys", batch, K, E, size) for K, E, size in shapes),
        values=tuple(
            describe("values", batch, K, *((E, size) if slots_last else (size, E)))
            for K, E, size in shapes
        ),
        features=describe("features", batch, slots, features),
        states=describe("states", batch, slots, config.hidden_size) if captures_states else None,
        slots_last=slots_last,
        rings=rings,
    )


@jax.named_scope("commit")
@shaped
def commit(
    cache: KVCache,
    scratch: Scratch,
    path: Int[Array, "B M"] | None,
    lengths: Int[Array, " B"],
    fused: Fused | None = None,
) -> KVCache:
    """The cache with the nodes path[b] (None: all, in order) written at slots lengths[b], lengths[b] + 1, ...

    Nodes past the accepted ones are written past the new length, where the next commit overwrites them. `fused`: as for the
    pass that made the scratch.
    """

    def write(name: str, layer: int, rows: Array, nodes: Array) -> Array:
        axis = cache.slot_axis(name)
        if path is not None and nodes.shape[axis] > 1:
            index = jnp.expand_dims(path, [i for i in range(1, nodes.ndim) if i != axis])
            nodes = jnp.take_along_axis(nodes, index, axis=axis)

        put = partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)

        def one(row: Array, update: Array, start: Array) -> Array:
            if layer < 0 or not cache.wraps(layer):
                return put(row, update, start)
            for node in range(update.shape[axis - 1]):
                each = jax.lax.slice_in_dim(update, node, node + 1, axis=axis - 1)
                row = put(row, each, (start + node) % row.shape[axis - 1])
            return row

        return jax.vmap(one)(rows, nodes, lengths)

    if scratch.after is None:
        return each(write, cache, scratch)
    nodes = path if scratch.keys[0].shape[3] > 1 else None
    layers = zip(cache.keys, cache.values, scratch.keys, scratch.values, strict=True)
    written = [
        cache_rows.write(*layer, nodes, lengths, scratch.after, fused, cache.wraps(index))
        for index, layer in enumerate(layers)
    ]
    keys, values = zip(*written, strict=True)
    rest = each(write, cache.replace(keys=(), values=()), scratch.replace(keys=(), values=()))
    return rest.replace(keys=keys, values=values)


@shaped
def write(
    cache: KVCache, scratch: Scratch, rows: Int[Array, " R"], starts: Int[Array, " R"]
) -> KVCache:
    """The cache, of layers without windows, with all nodes of R trees; tree r is written to row rows[r] from starts[r] on."""

    def put(name: str, layer: int, array: Array, new: Array) -> Array:
        axis = cache.slot_axis(name)

        def one(r: Array, array: Array) -> Array:
            place = [rows[r], *[jnp.zeros_like(starts[r])] * (array.ndim - 1)]
            place[axis] = starts[r]
            return jax.lax.dynamic_update_slice(array, jax.lax.dynamic_index_in_dim(new, r), place)

        return jax.lax.fori_loop(0, rows.shape[0], one, array)

    return each(put, cache, scratch)


@shaped
def insert(
    cache: KVCache, prefilled: Scratch, rows: Int[Array, " R"], source: Int[Array, " R"]
) -> KVCache:
    """The cache with row source[r] of the prefilled prompts in slots [0, P) of sequence rows[r], or in those of a ring.

    Other slots and sequences are unchanged. The rows are distinct; entries with rows >= B are padding and are dropped.
    """
    P, S = prefilled.features.shape[1], cache.features.shape[1]
    if P > S:
        raise ValueError(f"{P} slots of prefilled prompts do not fit a cache of {S}")

    def fill(name: str, layer: int, array: Array, new: Array) -> Array:
        window = tuple(slice(0, size) for size in new.shape[1:])
        return array.at[rows, *window].set(new[source], mode="drop", unique_indices=True)

    return each(fill, cache, prefilled)


@shaped
def resize(cache: KVCache, rows: Int[Array, " B2"], slots: int) -> KVCache:
    """The cache of the sequences `rows` (-1: those of any row), cut or padded to this many slots."""

    def fit(name: str, layer: int, array: Array) -> Array:
        axis = cache.slot_axis(name)
        array = array[jnp.maximum(rows, 0)]
        ring = cache.rings[layer] if cache.rings and layer >= 0 else 0
        wanted = min(slots, ring or slots)
        if wanted <= array.shape[axis]:
            return jax.lax.slice_in_dim(array, 0, wanted, axis=axis)
        return jnp.pad(
            array, [(0, wanted - size if i == axis else 0) for i, size in enumerate(array.shape)]
        )

    return each(fit, cache)


@shaped
def in_ring(
    prefilled: Float[Array, "Q ..."], lengths: Int[Array, " Q"], ring: int, axis: int
) -> Float[Array, "Q ..."]:
    """Keys or values of whole prompts with the last positions of each in the slots of a ring; as they are where all fit."""
    if not ring or prefilled.shape[axis] <= ring:
        return prefilled
    last = lengths[:, None] - 1
    places = jnp.maximum(last - (last - jnp.arange(ring)) % ring, 0)
    return jnp.take_along_axis(
        prefilled, jnp.expand_dims(places, [i for i in range(1, prefilled.ndim) if i != axis]), axis
    )
