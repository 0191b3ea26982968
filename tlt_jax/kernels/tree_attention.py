"""Attention of the nodes of token trees to a KV cache and to their ancestors, for verification and drafting.

On NVIDIA GPUs it is one kernel, Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): the slots of a row are split; each split
computes a softmax and the logarithm of its sum, and these merge the splits. How many splits a row has follows from its length.
The last split also handles the tree's nodes, under the ancestor mask.

The programs of a tile of queries count their arrivals in memory. All but the last to arrive store their partial result and
count that too; the last waits for them, which have only to store, and merges in order of the splits what they stored and its
own result, rounded as if stored. So the bits do not depend on who is last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax.distributed.mesh import partition
from tlt_jax.kernels.fused import ATTENTION, Fused, constant, jit, tl
from tlt_jax.kernels.numerics import capped, contract, finite, masked, power, sound
from tlt_jax.shapes import shaped

DTYPES = (jnp.bfloat16, jnp.float32)  # that the kernel takes
MOST_SPLITS = 32  # of a row
# Least slots of a split for every query of a head. A split stores and reads R (E + 1 or 2) numbers, the level in float32, of
# R queries, and its slots are 2 E numbers each: so all but the first of a row are at most 5 % of the cache's bytes.
SLOTS_PER_QUERY = 21
MERGED = 32  # numbers of partial results that a thread loads at once
LOWEST = constant(-1.0e38)  # below every score; finite, so that differences are not NaN
STORED = constant(1 << 16)  # what a stored partial result adds to the counter; an arrival adds 1


@dataclass(frozen=True)
class TreeTiles:
    """Queries and slots of a tile; slots of a row for every split after the first; warps; tiles of slots held at once."""

    queries: int
    slots: int
    split: int
    warps: int
    stages: int

    def tiles(self, queries: int) -> int:
        """Tiles of this many queries."""
        return -(-queries // self.queries)

    def splits(self, slots: int) -> int:
        """The most splits of a row of this many slots."""
        return min(MOST_SPLITS, 1 + slots // self.split)


def rule(queries: int, width: int, itemsize: int) -> TreeTiles:
    """Sizes from what the compiler says of an H200's code: no spills, and 8 warps or more fit a multiprocessor.

    They do not depend on the batch, so a row's result does not depend on the other rows. bfloat16: 64 x 64 with 4 warps issues
    fewer instructions a slot than with 8 warps, which compute the weights twice, and two such programs fit where one of 64 x
    128 does. A product has 16 rows also where fewer queries are: they cost no bytes.
    """
    if itemsize == 2:
        tile = min(64, max(16, power(queries)))
        slots, warps = (64, 4) if width <= 128 else (32, 4 if tile == 16 else 8)
    else:  # full float32 products use no tensor cores, and hold their tiles in registers
        tile, slots, warps = 16, 32, 4 if width <= 64 else 8
    return TreeTiles(tile, slots, max(SLOTS_PER_QUERY * queries, 2 * slots), warps, 3)


@jax.named_scope("attention")
@shaped
def attend(
    q: Float[Array, "B K G N E"],
    k: Float[Array, "B K E M"],
    v: Float[Array, "B K M E"],
    ancestors: Bool[Array, "B N M"],
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K _ _"],
    lengths: Int[Array, " B"],
    slots_last: bool,
    fused: Fused | None = None,
    arrivals: Int32[Array, "B K tiles"] | None = None,
    first: Int[Array, "B N"] | None = None,
    wraps: bool = False,
    cap: float = 0.0,
) -> tuple[Float[Array, "B K G N E"], Int32[Array, "B K tiles"] | None]:
    """Attention of N tree nodes to the first `lengths` slots, which are committed, and to their ancestors among M nodes.

    `first`: the first position that each node sees, where not all. With `wraps` position p lies in slot p % S, and the
    slots hold the last S of `lengths` positions. `cap`: of the scores, see numerics.capped; the kernel has none.

    `ancestors`: a node sees itself. `values` are [B, K, E, S] with `slots_last`, [B, K, S, E] otherwise. Where the kernel is
    in `fused`, in bfloat16 and float32, its counters are the second result: `arrivals` of the next call with the same shapes,
    which else fills its own. None elsewhere. Raises ValueError when the slots do not divide into the kernel's tiles.

    `values` are finite in all slots. Keys, and values of nodes, need not be: they make the queries that see them NaN, and no
    other.
    """
    runs = fused is not None and ATTENTION in fused.on and not slots_last and q.dtype in DTYPES
    if not runs or cap:
        given = q, k, v, ancestors, keys, values, lengths, slots_last
        return attend_in_xla(*given, first, wraps, cap), None
    B, K, G, N, E = q.shape
    sizes = rule(G * N, E, q.dtype.itemsize)
    if arrivals is None:
        arrivals = jnp.zeros((B, K, sizes.tiles(G * N)), jnp.int32)
    heads, rows = partition(("batch", "kv_heads"), "rollout"), partition(("batch",), "rollout")
    # Every device holds its own heads; XLA would gather the cache for a kernel that it cannot partition.
    given = (
        q,
        k,
        v,
        ancestors,
        keys,
        values,
        lengths,
        arrivals,
        *(() if first is None else (first,)),
    )
    specs = heads, heads, heads, rows, heads, heads, rows, heads, rows
    return jax.shard_map(
        partial(attend_in_kernel, fused=fused, sizes=sizes, wraps=wraps),
        mesh=fused.mesh,
        in_specs=specs[: len(given)],
        out_specs=(heads, heads),
        check_vma=False,
    )(*given)


def attend_in_xla(
    q: Array, k: Array, v: Array, ancestors: Array, keys: Array, values: Array, lengths: Array, slots_last: bool,
    first: Array | None = None, wraps: bool = False, cap: float = 0.0,
) -> Array:  # fmt: skip
    """`attend` on any device: scores of all slots, softmax, and the product with the values."""
    B, K, G, N, E = q.shape
    S, M = keys.shape[3], v.shape[2]
    scale = 1 / math.sqrt(E)
    places = jnp.arange(S)
    if wraps:
        last = lengths[:, None] - 1
        places = last - (last - places) % S  # of the positions in the slots; below 0: none
    committed = (places < lengths[:, None])[:, None, None, None]
    if first is not None:
        places = jnp.broadcast_to(places, (B, S))[:, None]
        committed &= (places >= jnp.maximum(first, 0)[:, :, None])[:, None, None]
    flat = q.reshape(B, K, G * N, E)
    old = contract("bkqe,bkes->bkqs", flat, keys).reshape(B, K, G, N, S)
    # Without the barrier XLA fuses both products into one, and copies all keys to concatenate the nodes' keys to them.
    apart = jax.lax.optimization_barrier(flat)
    new = contract("bkqe,bkem->bkqm", apart, k).reshape(B, K, G, N, M)
    new = jnp.where(sound(v)[:, :, None, None], capped(scale * new, cap), jnp.nan)
    old, new = masked(capped(scale * old, cap), committed), masked(new, ancestors[:, None, None])
    top = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)

    def mix(weights: Array, values: Array, subscripts: str) -> Array:
        weights = weights.reshape(B, K, G * N, -1).astype(values.dtype)
        return contract(f"bkqs,{subscripts}->bkqe", weights, values).reshape(q.shape)

    mixed = mix(old, values, "bkes" if slots_last else "bkse")
    # Nodes last, as the projections of nodes make them: XLA takes them without a transpose.
    mixed += mix(new, finite(jnp.swapaxes(v, 2, 3)), "bkes")
    return (mixed / total).astype(q.dtype)


def attend_in_kernel(
    q: Array, k: Array, v: Array, ancestors: Array, keys: Array, values: Array, lengths: Array, arrivals: Array,
    first: Array | None = None, *, fused: Fused, sizes: TreeTiles, wraps: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """`attend` and its counters, on one device with unsharded arrays.

    Products are computed in the dtype of the arrays (float32 is not rounded to TF32) and accumulate in float32; partial
    results have the dtype of the arrays, and their levels float32. `arrivals`: zeros, `sizes.tiles(G N)` for every head.
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
    lengths = lengths.astype(jnp.int32)
    mixed, arrivals, _, _ = fused.call(
        q, k, v, seen, keys, values, lengths, lengths if first is None else first.astype(jnp.int32), arrivals,
        kernel=attend_tile, name="tree_attention",
        out_type=(
            jax.ShapeDtypeStruct((B, N, K, G, E), q.dtype),
            jax.ShapeDtypeStruct(arrivals.shape, jnp.int32),
            jax.ShapeDtypeStruct((B, K, splits, R, E), q.dtype),
            jax.ShapeDtypeStruct((B, K, splits, R), jnp.float32),
        ),
        input_output_aliases={8: 1},
        grid=(tiles * splits * B * K,), num_warps=sizes.warps, num_stages=sizes.stages,
        K=K, R=R, N=N, M=M, E=E, S=S, SPLITS=splits, TILES=tiles, SPLIT=sizes.split, SLOTS=sizes.slots,
        ROWS=sizes.queries, NODES=nodes, WIDTH=width,
        CHUNK=min(power(splits), max(1, MERGED // held)), SCALE=math.log2(math.e) / math.sqrt(E),
        HAS_FIRST=first is not None, WRAPS=wraps,
    )  # fmt: skip
    return jnp.moveaxis(mixed, 1, 3), arrivals


@jit
def attend_tile(
    q, k, v, ancestors, keys, values, lengths, firsts, arrivals, mixed, parts, levels,
    K: tl.constexpr, R: tl.constexpr, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    NODES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, SCALE: tl.constexpr, HAS_FIRST: tl.constexpr,
    WRAPS: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of one head's queries to one split of the slots; the last split of a tile merges them.

    Tiles of one split are neighbours in the grid, then splits of one head: they share the L2 cache.
    """
    program = tl.program_id(0)
    tile, split = program % TILES, program // TILES % SPLITS
    head = (program // (TILES * SPLITS)).to(tl.int64)
    sequence = head // K
    count = tl.load(lengths + sequence)  # of committed positions
    length = tl.minimum(count, S) if WRAPS else count  # of slots that hold one
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
    if HAS_FIRST:
        seen_from = tl.load(firsts + sequence * N + row % N)
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
        visible = committed[None, :]
        if HAS_FIRST:
            place = count - 1 - (count - 1 - slot) % S if WRAPS else slot
            visible = visible & (place[None, :] >= seen_from[:, None])
        scores = tl.where(visible, scores, LOWEST)
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


@jit
def absorb(scores, tile_v, top, total, result, SCALE: tl.constexpr):
    """Adds one more tile to the largest score, the sum of weights and the weighted values; SCALE times a score is to base 2."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores * SCALE - (higher * SCALE)[:, None])
    kept = tl.exp2((top - higher) * SCALE)
    total = total * kept + tl.sum(weights, axis=1)
    result = result * kept[:, None]
    result = tl.dot(weights.to(tile_v.dtype), tile_v, result, input_precision="ieee")
    return higher, total, result


@jit
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
