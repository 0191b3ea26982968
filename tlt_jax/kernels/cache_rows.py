"""Writes keys and values of tree nodes into a cache, both by one kernel on NVIDIA GPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from tlt_jax.distributed.mesh import partition
from tlt_jax.kernels.fused import CACHE_ROWS, Fused, jit, tl
from tlt_jax.kernels.numerics import power
from tlt_jax.shapes import shaped


def runs(fused: Fused | None, slots_last: bool) -> bool:
    """Whether `write` runs, for values of this layout."""
    return fused is not None and CACHE_ROWS in fused.on and not slots_last


@shaped
def write(
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K S E"],
    k: Float[Array, "B K E N"],
    v: Float[Array, "B K N E"],
    path: Int[Array, "B M"] | None,
    starts: Int[Array, "*B"],
    after: Shaped[Array, ...],
    fused: Fused,
    wraps: bool = False,
) -> tuple[Float[Array, "B K E S"], Float[Array, "B K S E"]]:
    """Keys and values with the nodes path[b] (None: all) of row b at slots starts[b], starts[b] + 1, ..., in place.

    `starts`: one number stands for all rows; with `wraps` the slots are a ring. Values that are NaN or infinite are written
    as 0.
    For GPUs on which the kernel runs. XLA would copy a cache that may be written before it is read; `after`, which the
    kernel does not read, is a result of all that read it.
    """
    heads, rows = partition(("batch", "kv_heads"), "rollout"), partition(("batch",), "rollout")
    given = (keys, values, k, v, starts, after, *(() if path is None else (path,)))
    whole = partition((), "rollout")
    specs = (heads, heads, heads, heads, rows if starts.ndim else whole, whole, rows)
    return jax.shard_map(
        partial(write_in_kernel, fused=fused, wraps=wraps),
        mesh=fused.mesh,
        in_specs=specs[: len(given)],
        out_specs=(heads, heads),
        check_vma=False,
    )(*given)


def write_in_kernel(
    keys: Array, values: Array, k: Array, v: Array, starts: Array, after: Array, path: Array | None = None, *, fused: Fused,
    wraps: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """`write` on one device with unsharded arrays."""
    B, K, E, N = k.shape
    starts = starts.astype(jnp.int32)
    M = N if path is None else path.shape[1]
    return fused.call(
        keys, values, k, v, starts, starts if path is None else path.astype(jnp.int32), after,
        kernel=write_head, name="cache_rows",
        out_type=(jax.ShapeDtypeStruct(keys.shape, keys.dtype), jax.ShapeDtypeStruct(values.shape, values.dtype)),
        input_output_aliases={0: 0, 1: 1}, grid=(B * K,), num_warps=4, num_stages=1,
        K=K, E=E, S=keys.shape[3], N=N, M=M, HAS_PATH=path is not None, ROW_STARTS=starts.ndim, WRAPS=wraps,
        WIDTH=power(E), NODES=power(min(M, 16)),
    )  # fmt: skip


@jit
def write_head(
    keys, values, k, v, starts, path, after,
    K: tl.constexpr, E: tl.constexpr, S: tl.constexpr, N: tl.constexpr, M: tl.constexpr, HAS_PATH: tl.constexpr,
    ROW_STARTS: tl.constexpr, WRAPS: tl.constexpr, WIDTH: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """All nodes of one head, 0 for values that are not finite; starts are clamped as in XLA's dynamic_update_slice."""
    head = tl.program_id(0).to(tl.int64)
    sequence = head // K
    start = tl.load(starts + sequence * ROW_STARTS)
    if not WRAPS:
        start = tl.minimum(tl.maximum(start, 0), S - M)
    e = tl.arange(0, WIDTH)
    for first in range(0, M, NODES):
        place = first + tl.arange(0, NODES)
        slot = start + place
        if WRAPS:
            slot = slot % S
        node = place
        if HAS_PATH:
            node = tl.load(path + sequence * M + place, mask=place < M, other=0)
        within = (e < E)[:, None] & (place < M)[None, :]
        tile = tl.load(k + (head * E + e)[:, None] * N + node[None, :], mask=within, other=0)
        tl.store(keys + (head * E + e)[:, None] * S + slot[None, :], tile, mask=within)
        within = (place < M)[:, None] & (e < E)[None, :]
        tile = tl.load(v + (head * N + node)[:, None] * E + e[None, :], mask=within, other=0)
        tile = tl.where(tl.abs(tile.to(tl.float32)) < float("inf"), tile, 0)
        tl.store(values + (head * S + slot)[:, None] * E + e[None, :], tile, mask=within)
