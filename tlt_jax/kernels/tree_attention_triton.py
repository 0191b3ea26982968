"""Tree attention on NVIDIA GPUs, in Triton. Import it only where it is called: Triton is not always installed.

Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): the slots of a row are split; each split computes a softmax and the
logarithm of its sum, and these merge the splits. How many splits a row has follows from its length. The last split also
handles the tree's nodes, under the ancestor mask.

One kernel does it all. The programs of a tile of queries count their arrivals in memory. All but the last to arrive store
their partial result and count that too; the last waits for them, which have only to store, and merges in order of the splits
what they stored and its own result, rounded as if stored. So the bits do not depend on who is last.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax.kernels.attention_sizes import Sizes, power
from tlt_jax.kernels.fused import Fused

LOWEST = tl.constexpr(-1.0e38)  # below every score; finite, so that differences are not NaN
MERGED = 32  # numbers of partial results that a thread loads at once
STORED = tl.constexpr(
    1 << 16
)  # what a stored partial result adds to the counter; an arrival adds 1


def attend(
    q: Float[Array, "B K G N E"],
    k: Float[Array, "B K E M"],
    v: Float[Array, "B K M E"],
    ancestors: Bool[Array, "B N M"],
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K S E"],
    lengths: Int[Array, " B"],
    arrivals: Int32[Array, "B K tiles"],
    fused: Fused,
    sizes: Sizes,
) -> tuple[Float[Array, "B K G N E"], Int32[Array, "B K tiles"]]:
    """`tree_attention.attend` on one device with unsharded arrays.

    Products are computed in the dtype of the arrays (float32 is not rounded to TF32) and accumulate in float32; partial
    results have the dtype of the arrays, and their levels float32. `arrivals`: zeros, `sizes.tiles(G N)` for every head;
    they are zeros again in the result. Raises ValueError when the slots do not divide into tiles.
    """
    B, K, G, N, E = q.shape
    R, M, S = G * N, v.shape[2], keys.shape[3]
    if S % sizes.slots:
        raise ValueError(
            f"{S} cache slots do not divide into tiles of {sizes.slots}: make them a multiple of it"
        )
    splits, tiles, width = sizes.splits(S), sizes.tiles(R), max(16, power(E))
    nodes = 16 if q.dtype == jnp.float32 else min(sizes.slots, max(16, power(M)))  # of a tile
    held = sizes.queries * width // (32 * sizes.warps)  # numbers of a partial result in a thread
    # The only node of a tree sees itself: its mask is neither read nor made.
    seen = ancestors if max(N, M) > 1 else lengths
    mixed, arrivals, _, _ = fused.call(
        q, k, v, seen, keys, values, lengths.astype(jnp.int32), arrivals,
        kernel=attend_tile, name="tree_attention",
        out_type=(
            jax.ShapeDtypeStruct((B, N, K, G, E), q.dtype),
            jax.ShapeDtypeStruct(arrivals.shape, jnp.int32),
            jax.ShapeDtypeStruct((B, K, splits, R, E), q.dtype),
            jax.ShapeDtypeStruct((B, K, splits, R), jnp.float32),
        ),
        input_output_aliases={7: 1},
        grid=(tiles * splits * B * K,), num_warps=sizes.warps, num_stages=sizes.stages,
        K=K, R=R, N=N, M=M, E=E, S=S, SPLITS=splits, TILES=tiles, SPLIT=sizes.split, SLOTS=sizes.slots,
        ROWS=sizes.queries, NODES=nodes, WIDTH=width,
        CHUNK=min(power(splits), max(1, MERGED // held)), SCALE=math.log2(math.e) / math.sqrt(E),
    )  # fmt: skip
    return jnp.moveaxis(mixed, 1, 3), arrivals


@triton.jit
def attend_tile(
    q, k, v, ancestors, keys, values, lengths, arrivals, mixed, parts, levels,
    K: tl.constexpr, R: tl.constexpr, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    NODES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of one head's queries to one split of the slots; the last split of a tile merges them.

    Tiles of one split are neighbours in the grid, then splits of one head: they share the L2 cache.
    """
    program = tl.program_id(0)
    tile, split = program % TILES, program // TILES % SPLITS
    head = (program // (TILES * SPLITS)).to(tl.int64)
    sequence = head // K
    length = tl.load(lengths + sequence)
    most = tl.minimum(SPLITS, 1 + length // SPLIT)
    size = tl.maximum(tl.cdiv(tl.cdiv(length, most), SLOTS), 1) * SLOTS
    splits = tl.maximum(tl.cdiv(length, size), 1)
    if split >= splits:
        return

    # From here on offsets are of this head or sequence, in 32 bits: pointers would take the registers of results.
    q, keys, values = q + head * R * E, keys + head * E * S, values + head * S * E
    k, v, ancestors = k + head * E * M, v + head * M * E, ancestors + sequence * N * M
    parts, levels = parts + head * SPLITS * R * E, levels + head * SPLITS * R
    mixed += (sequence * N * K + head % K) * (R // N) * E
    row, e = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < R)[:, None] & (e < E)[None, :]
    queries = tl.load(q + row[:, None] * E + e[None, :], mask=inside, other=0)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)

    begin = split * size
    for first in range(begin, tl.minimum(begin + size, length), SLOTS):
        slot = first + tl.arange(0, SLOTS)
        committed = slot < length
        # Keys are read in whole tiles within the cache: a mask along the slots would make every load two bytes wide.
        tile_k = tl.load(keys + e[:, None] * S + slot[None, :], (e < E)[:, None], 0)
        within = committed[:, None] & (e < E)[None, :]
        tile_v = tl.load(values + slot[:, None] * E + e[None, :], within, other=0)
        scores = tl.dot(queries, tile_k, input_precision="ieee")
        scores = tl.where(committed[None, :], scores, LOWEST)
        top, total, result = absorb(scores, tile_v, top, total, result, SCALE)

    if split == splits - 1:
        for first in range(0, M, NODES):
            node = first + tl.arange(0, NODES)
            seen = (row < R)[:, None] & (node < M)[None, :]
            if N > 1 or M > 1:
                mask = ancestors + (row % N)[:, None] * M + node[None, :]
                seen = tl.load(mask, mask=seen, other=0) != 0
            within = (e < E)[:, None] & (node < M)[None, :]
            tile_k = tl.load(k + e[:, None] * M + node[None, :], within, other=0)
            within = (node < M)[:, None] & (e < E)[None, :]
            tile_v = tl.load(v + node[:, None] * E + e[None, :], within, other=0)
            scores = tl.dot(queries, tile_k, input_precision="ieee")
            # A value that is not finite makes the queries that see its node NaN, and no other.
            is_finite = tl.abs(tile_v.to(tl.float32)) < float("inf")
            sound = tl.min(is_finite.to(tl.int32), axis=1) > 0
            scores = tl.where(sound[None, :], scores, float("nan"))
            scores, tile_v = tl.where(seen, scores, LOWEST), tl.where(is_finite, tile_v, 0)
            top, total, result = absorb(scores, tile_v, top, total, result, SCALE)

    result = (result / total[:, None]).to(mixed.dtype.element_ty)
    target = mixed + (row % N * K * (R // N) + row // N)[:, None] * E + e[None, :]
    if SPLITS == 1:
        tl.store(target, result, mask=inside)
    elif splits == 1:
        tl.store(target, result, mask=inside)
    else:
        level = top * SCALE + tl.log2(total)
        counter = arrivals + head * TILES + tile
        arrived = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        if arrived % STORED < splits - 1:
            own = split * R + row
            tl.store(parts + own[:, None] * E + e[None, :], result, mask=inside)
            tl.store(levels + own, level, mask=row < R)
            tl.debug_barrier()  # every thread has stored before one of them says so
            tl.atomic_add(counter, STORED, sem="release", scope="gpu")
        else:
            while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") // STORED < splits - 1:
                pass
            tl.store(counter, 0)
            merged = merge(parts, levels, row, e, split, splits, level, result, R, E, CHUNK)
            tl.store(target, merged.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def absorb(scores, tile_v, top, total, result, SCALE: tl.constexpr):
    """Adds one more tile to the largest score, the sum of weights and the weighted values; SCALE times a score is to base 2."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores * SCALE - (higher * SCALE)[:, None])
    kept = tl.exp2((top - higher) * SCALE)
    total = total * kept + tl.sum(weights, axis=1)
    result = result * kept[:, None]
    result = tl.dot(weights.to(tile_v.dtype), tile_v, result, input_precision="ieee")
    return higher, total, result


@triton.jit
def merge(
    parts, levels, row, e, split, splits, level, result,
    R: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The mean of the splits' results by the exponentials of their levels: of this split as given, of others as stored.

    CHUNK splits are loaded at once. Loads bypass the L1 cache, which may hold what other programs have since overwritten.
    """
    top = tl.full(level.shape, LOWEST, tl.float32)
    total, merged = tl.zeros(level.shape, tl.float32), tl.zeros(result.shape, tl.float32)
    for first in range(0, splits, CHUNK):
        one = first + tl.arange(0, CHUNK)
        others = ((one < splits) & (one != split))[:, None] & (row < R)[None, :]
        source = one[:, None] * R + row[None, :]
        stored = tl.load(levels + source, mask=others, other=LOWEST, cache_modifier=".cg")
        stored = tl.where((one == split)[:, None], level[None, :], stored)
        inside = others[:, :, None] & (e < E)[None, None, :]
        source = parts + source[:, :, None] * E + e[None, None, :]
        part = tl.load(source, mask=inside, other=0, cache_modifier=".cg")
        part = tl.where((one == split)[:, None, None], result[None, :, :], part).to(tl.float32)
        higher = tl.maximum(top, tl.max(stored, axis=0))
        weights, kept = tl.exp2(stored - higher[None, :]), tl.exp2(top - higher)
        total = total * kept + tl.sum(weights, axis=0)
        merged = merged * kept[:, None] + tl.sum(weights[:, :, None] * part, axis=0)
        top = higher
    return merged / total[:, None]
