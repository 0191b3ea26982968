"""Tree attention on NVIDIA GPUs, in Triton. Import it only where it is called: Triton is not always installed.

Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): the slots of a row are split; each split computes a softmax and the
logarithm of its sum, and these merge the splits. A split stops at the row's length; a split beyond the length reads
nothing. The first split also handles the tree's nodes, under the ancestor mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int

from tlt_jax.kernels import triton_call

LOWEST = tl.constexpr(-3.0e38)  # below every score; finite, so that differences are not NaN
STAGES = 3  # tiles of slots that are prefetched from memory


@dataclass(frozen=True)
class Blocks:
    """How the work of a head is tiled: queries and slots of a tile, slots of a split, warps of a program."""

    rows: int
    slots: int
    split: int
    warps: int


def blocks(rows: int, width: int, slots: int, dtype: jnp.dtype) -> Blocks:
    """The blocks for this many queries of a key/value head, head dim `width` and cache slots.

    They do not depend on the batch, so a row's result does not depend on the other rows. With head dims of 64 and 128 the
    compiler spills no registers. Every split writes partial results, for each query as large as a bfloat16 slot: so with
    more queries there are fewer splits. Raises ValueError when the slots do not divide into tiles.
    """
    if jnp.dtype(dtype).itemsize == 2:
        tile, columns, warps = min(64, max(16, power(rows))), 64 if width <= 128 else 32, 4
    else:  # full float32 products use no tensor cores, and hold their tiles in registers
        tile, columns, warps = 16, 32, 4 if width <= 64 else 8
    if slots % columns:
        raise ValueError(
            f"{slots} cache slots do not divide into tiles of {columns}: make them a multiple of it"
        )
    splits = min(16, max(1, slots // (256 if rows <= 16 else 512)))
    return Blocks(tile, columns, -(-slots // (splits * columns)) * columns, warps)


def power(number: int) -> int:
    """The smallest power of two >= number."""
    return 1 << (number - 1).bit_length()


def attend(
    q: Float[Array, "B K G N E"],
    k: Float[Array, "B K E M"],
    v: Float[Array, "B K M E"],
    ancestors: Bool[Array, "B N M"],
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K S E"],
    lengths: Int[Array, " B"],
    capability: int,
) -> Float[Array, "B K G N E"]:
    """`tree_attention.attend` on one device with unsharded arrays; `capability`: 90 for compute capability 9.0.

    Products are computed in the dtype of the arrays (float32 is not rounded to TF32) and accumulate in float32.
    """
    B, K, G, N, E = q.shape
    R, M, S = G * N, v.shape[2], keys.shape[3]
    sizes, width = blocks(R, E, S, q.dtype), max(16, power(E))
    splits, tiles = -(-S // sizes.split), -(-R // sizes.rows)
    call = partial(triton_call.call, capability=capability)
    lengths = lengths.astype(jnp.int32)
    mixed, levels = call(
        q, k, v, ancestors.astype(jnp.int8), keys, values, lengths,
        kernel=attend_split, name="tree_attention",
        out_type=(
            jax.ShapeDtypeStruct((B, K, splits, R, E), jnp.float32),
            jax.ShapeDtypeStruct((B, K, splits, R), jnp.float32),
        ),
        grid=(tiles * splits * B * K,), num_warps=sizes.warps, num_stages=STAGES,
        K=K, R=R, N=N, M=M, E=E, S=S, SPLITS=splits, TILES=tiles, SPLIT=sizes.split, SLOTS=sizes.slots,
        ROWS=sizes.rows, NODES=min(sizes.slots, max(16, power(M))), WIDTH=width,
        SCALE=math.log2(math.e) / math.sqrt(E),
    )  # fmt: skip
    merged = call(
        mixed, levels, lengths,
        kernel=merge_splits, name="tree_attention_merge",
        out_type=jax.ShapeDtypeStruct((B, N, K, G, E), q.dtype),
        grid=(B * K * R,), num_warps=4, num_stages=1,
        K=K, R=R, N=N, E=E, SPLITS=splits, SPLIT=sizes.split, PARTS=power(splits), WIDTH=width,
    )  # fmt: skip
    return jnp.moveaxis(merged, 1, 3)


@triton.jit
def attend_split(
    q, k, v, ancestors, keys, values, lengths, mixed, levels,
    K: tl.constexpr, R: tl.constexpr, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    NODES: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of one head's queries to one split of the slots, and its level: log2 of the sum of its weights.

    Tiles of one split are neighbours in the grid, then splits of one head: they share the L2 cache.
    """
    program = tl.program_id(0)
    split = program // TILES % SPLITS
    head = (program // (TILES * SPLITS)).to(tl.int64)
    sequence = head // K
    row = program % TILES * ROWS + tl.arange(0, ROWS)
    place = (head * SPLITS + split) * R + row
    begin, length = split * SPLIT, tl.load(lengths + sequence)
    if (split > 0) & (begin >= length):
        return

    e = tl.arange(0, WIDTH)
    inside = (row < R)[:, None] & (e < E)[None, :]
    queries = tl.load(q + (head * R + row)[:, None] * E + e[None, :], mask=inside, other=0)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)

    if split == 0:
        for first in range(0, M, NODES):
            node = first + tl.arange(0, NODES)
            pair = (row < R)[:, None] & (node < M)[None, :]
            mask = ancestors + (sequence * N + row % N)[:, None] * M + node[None, :]
            seen = tl.load(mask, mask=pair, other=0) != 0
            within = (e < E)[:, None] & (node < M)[None, :]
            tile_k = tl.load(k + (head * E + e)[:, None] * M + node[None, :], within, other=0)
            within = (node < M)[:, None] & (e < E)[None, :]
            tile_v = tl.load(v + (head * M + node)[:, None] * E + e[None, :], within, other=0)
            top, total, result = absorb(queries, tile_k, tile_v, seen, top, total, result, SCALE)

    for first in range(begin, tl.minimum(begin + SPLIT, length), SLOTS):
        slot = first + tl.arange(0, SLOTS)
        committed = slot < length
        # Keys are read in whole tiles within the cache: a mask along the slots would make every load two bytes wide.
        tile_k = tl.load(keys + (head * E + e)[:, None] * S + slot[None, :], (e < E)[:, None], 0)
        within = committed[:, None] & (e < E)[None, :]
        tile_v = tl.load(values + (head * S + slot)[:, None] * E + e[None, :], within, other=0)
        seen = committed[None, :] & (row < R)[:, None]
        top, total, result = absorb(queries, tile_k, tile_v, seen, top, total, result, SCALE)

    any_seen = total > 0
    total = tl.where(any_seen, total, 1)
    tl.store(mixed + place[:, None] * E + e[None, :], result / total[:, None], mask=inside)
    tl.store(levels + place, tl.where(any_seen, top + tl.log2(total), LOWEST), mask=row < R)


@triton.jit
def absorb(queries, tile_k, tile_v, seen, top, total, result, SCALE: tl.constexpr):
    """Adds one more tile to the largest score, the sum of weights and the weighted values; scores are to base 2."""
    scores = tl.dot(queries, tile_k, input_precision="ieee") * SCALE
    scores = tl.where(seen, scores, LOWEST)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0)
    kept = tl.exp2(top - higher)
    total = total * kept + tl.sum(weights, axis=1)
    result = result * kept[:, None]
    result = tl.dot(weights.to(tile_v.dtype), tile_v, result, input_precision="ieee")
    return higher, total, result


@triton.jit
def merge_splits(
    mixed, levels, lengths, merged,
    K: tl.constexpr, R: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merges the results of one query over the splits; writes the features of a node contiguously."""
    program = tl.program_id(0)
    head, row = (program // R).to(tl.int64), program % R
    split, e = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    wrote = (split < SPLITS) & ((split == 0) | (split * SPLIT < tl.load(lengths + head // K)))
    place = (head * SPLITS + split) * R + row
    level = tl.load(levels + place, mask=wrote, other=LOWEST)
    weights = tl.where(wrote, tl.exp2(level - tl.max(level, axis=0)), 0)
    inside = wrote[:, None] & (e < E)[None, :]
    parts = tl.load(mixed + place[:, None] * E + e[None, :], mask=inside, other=0)
    result = tl.sum(weights[:, None] * parts, axis=0) / tl.sum(weights, axis=0)
    node = (head // K * N + row % N) * K + head % K
    target = merged + (node * (R // N) + row // N) * E + e
    tl.store(target, result.to(merged.dtype.element_ty), mask=e < E)
