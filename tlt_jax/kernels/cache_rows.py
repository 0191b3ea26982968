"""Writes keys and values of tree nodes into a cache, both by one kernel on NVIDIA GPUs; knows no network."""

from __future__ import annotations

from functools import partial

import jax
from jaxtyping import Array, Float, Int, Shaped

from tlt_jax.distributed.mesh import partition
from tlt_jax.kernels.fused import CACHE_ROWS, Fused
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
) -> tuple[Float[Array, "B K E S"], Float[Array, "B K S E"]]:
    """Keys and values with the nodes path[b] (None: all) of row b at slots starts[b], starts[b] + 1, ..., in place.

    `starts`: one number stands for all rows. Values that are NaN or infinite are written as 0.
    For GPUs on which Triton kernels run. XLA would copy a cache that may be written before it is read; `after`, which the
    kernel does not read, is a result of all that read it.
    """
    from tlt_jax.kernels import cache_rows_triton

    heads, rows = partition(("batch", "kv_heads"), "rollout"), partition(("batch",), "rollout")
    given = (keys, values, k, v, starts, after, *(() if path is None else (path,)))
    whole = partition((), "rollout")
    specs = (heads, heads, heads, heads, rows if starts.ndim else whole, whole, rows)
    return jax.shard_map(
        partial(cache_rows_triton.write, fused=fused),
        mesh=fused.mesh,
        in_specs=specs[: len(given)],
        out_specs=(heads, heads),
        check_vma=False,
    )(*given)
