"""The write of nodes into a cache on NVIDIA GPUs, in Triton. Import it only where it is called."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int, Shaped

from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.projection_sizes import power


def write(
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K S E"],
    k: Float[Array, "B K E N"],
    v: Float[Array, "B K N E"],
    starts: Int[Array, "*B"],
    after: Shaped[Array, ...],
    path: Int[Array, "B M"] | None = None,
    *,
    fused: Fused,
) -> tuple[Float[Array, "B K E S"], Float[Array, "B K S E"]]:
    """`cache_rows.write` on one device with unsharded arrays."""
    B, K, E, N = k.shape
    starts = starts.astype(jnp.int32)
    M = N if path is None else path.shape[1]
    return fused.call(
        keys, values, k, v, starts, starts if path is None else path.astype(jnp.int32), after,
        kernel=write_head, name="cache_rows",
        out_type=(
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ),
        input_output_aliases={0: 0, 1: 1}, grid=(B * K,), num_warps=4, num_stages=1,
        K=K, E=E, S=keys.shape[3], N=N, M=M, HAS_PATH=path is not None, ROW_STARTS=starts.ndim,
        WIDTH=power(E), NODES=power(min(M, 16)),
    )  # fmt: skip


@triton.jit
def write_head(
    keys, values, k, v, starts, path, after,
    K: tl.constexpr, E: tl.constexpr, S: tl.constexpr, N: tl.constexpr, M: tl.constexpr, HAS_PATH: tl.constexpr,
    ROW_STARTS: tl.constexpr, WIDTH: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """All nodes of one head, 0 for values that are not finite; starts are clamped as in XLA's dynamic_update_slice."""
    head = tl.program_id(0).to(tl.int64)
    sequence = head // K
    start = tl.minimum(tl.maximum(tl.load(starts + sequence * ROW_STARTS), 0), S - M)
    e = tl.arange(0, WIDTH)
    for first in range(0, M, NODES):
        place = first + tl.arange(0, NODES)
        node = place
        if HAS_PATH:
            node = tl.load(path + sequence * M + place, mask=place < M, other=0)
        within = (e < E)[:, None] & (place < M)[None, :]
        tile = tl.load(k + (head * E + e)[:, None] * N + node[None, :], mask=within, other=0)
        tl.store(keys + (head * E + e)[:, None] * S + (start + place)[None, :], tile, mask=within)
        within = (place < M)[:, None] & (e < E)[None, :]
        tile = tl.load(v + (head * N + node)[:, None] * E + e[None, :], mask=within, other=0)
        tile = tl.where(tl.abs(tile.to(tl.float32)) < float("inf"), tile, 0)
        tl.store(values + (head * S + start + place)[:, None] * E + e[None, :], tile, mask=within)
