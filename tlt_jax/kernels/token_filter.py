"""Where top-k and top-p cut rows of a vocabulary, by three kernels on one NVIDIA GPU.

Three kernels read the logits once each, a tile of a row in a program: (1) maximum, minimum and sum of exponentials; (2) a
histogram, counts and weights in BINS bins of equal width between the maximum and a bound that the border is not below; (3) the
logits of the bin with the border, among which the last program of a row to arrive searches. So all multiprocessors read 32 rows
of 152,064 logits, 19.5 MB, three times from the L2 cache. With one program a row one kernel would do, but at 64 bytes a cycle
of its multiprocessor each pass over 608 KB would take 5 us or more, and a search takes several. Bins of equal bits would take
four passes of 8 bits, and most logits share few exponents, whose atomic additions would wait for each other.

Weights are integers, exp(logit - maximum) in units of 2**-S, and sums of floats have a fixed order: no bit depends on the order
of the programs or on other rows. A border differs from that of rounded float sums only where the probabilities of the kept
tokens sum to top_p within that rounding.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from tlt_jax.kernels.fused import FILTER, Fused, constant, jit, tl
from tlt_jax.kernels.numerics import power
from tlt_jax.shapes import shaped

TILE, BINS, WARPS = 4096, 512, 8  # logits of a program, bins of a row, warps of a program
PIECE = 1024  # collected logits that are read at once
MOST_PARTS = 64  # of a tile, each of which has one logit at least that is above the bound of top-k
PADDING = constant(-1e30)  # logits below it are of no token
WIDEST = constant(64.0)  # most distance from the maximum that bins resolve; exp(-64) = 1.6e-28
TOP, LEAST, TOTAL, FLOOR = (constant(n) for n in range(4))  # statistics of a tile


@jax.named_scope("filter")
@shaped
def border(
    scaled: Float[Array, "*A V"], top_k: int, top_p: float, fused: Fused
) -> UInt32[Array, "*A 1"] | None:
    """The ordered bits (`spec_decode.sampling.ordered_bits`) of the least logit that a row keeps; 0: it keeps all.

    Kept are the `top_k` (0: all) largest logits, and of these those with the largest probabilities of at least `top_p`
    together; logits that tie with the last one are kept too. A row with NaN or infinity has any border. None where XLA's
    operations run instead: where the kernels are off, in float64, and where several devices share the vocabulary: each of the
    three kernels reads sums over the whole row that the one before made, so an all-reduce would follow each.
    """
    if FILTER not in fused.on or fused.mesh.size > 1 or scaled.dtype != jnp.float32:
        return None
    shape, V = scaled.shape, scaled.shape[-1]
    scaled = scaled.reshape(-1, V)
    R = len(scaled)
    tiles, has_k, has_p = -(-V // TILE), 0 < top_k < V, top_p < 1
    # Full tiles have `parts` logits each that are not below `floor`: together top_k.
    parts = power(-(-top_k // max(V // TILE, 1))) if has_k else 0
    parts = parts if V >= TILE and parts <= MOST_PARTS else 0
    made = {
        "stats": jax.ShapeDtypeStruct((R, 4, tiles), jnp.float32),
        "counts": jax.ShapeDtypeStruct((R, BINS), jnp.int32),
        "weights": jax.ShapeDtypeStruct((R, BINS, 2), jnp.int32),  # of 64 bits
        "arrivals": jax.ShapeDtypeStruct((R, 2), jnp.int32),
    }
    common = {
        "grid": (R * tiles,), "num_warps": WARPS, "num_stages": 1, "V": V, "TILES": tiles,
        "TILE": TILE, "BINS": BINS,
    }  # fmt: skip
    stats, counts, weights, arrivals = fused.call(
        scaled, kernel=survey_tile, name="filter_survey", out_type=(*made.values(),), PARTS=parts, **common
    )  # fmt: skip
    unit = 62 - V.bit_length()  # all weights together are below 2**62
    common |= {
        "NEAR": power(tiles), "HAS_K": has_k, "HAS_P": has_p, "HAS_FLOOR": parts > 0, "UNIT": float(2**unit),
        "BELOW": math.log((1 - top_p) / V) - 0.01 if has_p else 0.0,
    }  # fmt: skip
    counts, weights = fused.call(
        scaled, stats, counts, weights, kernel=weigh_tile, name="filter_weigh",
        out_type=(made["counts"], made["weights"]), input_output_aliases={2: 0, 3: 1}, **common,
    )  # fmt: skip
    _, found, _ = fused.call(
        scaled, stats, counts, weights, arrivals, kernel=cut_tile, name="filter_cut",
        out_type=(
            made["arrivals"],
            jax.ShapeDtypeStruct((R,), jnp.uint32),
            jax.ShapeDtypeStruct((R, TILE), jnp.float32),
        ),
        input_output_aliases={4: 0}, K=top_k, P=float(top_p), PIECE=PIECE, **common,
    )  # fmt: skip
    return found.reshape(*shape[:-1], 1)


@jit
def survey_tile(
    scaled, stats, counts, weights, arrivals,
    V: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Statistics of a tile; the first one of a row sets its histogram and counters to zero."""
    row, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    x = logits_of(scaled, row, tile, V, TILE)
    top = tl.max(x)
    token = x >= PADDING
    stats += row * (4 * TILES) + tile
    tl.store(stats + TOP * TILES, top)
    tl.store(stats + LEAST * TILES, tl.min(tl.where(token, x, float("inf"))))
    tl.store(stats + TOTAL * TILES, tl.sum(tl.exp(x - tl.where(top >= PADDING, top, 0.0))))
    floor = top
    if PARTS > 1:
        floor = tl.min(tl.max(tl.reshape(x, [TILE // PARTS, PARTS]), axis=0))
    is_full = (tile + 1) * TILE <= V
    tl.store(stats + FLOOR * TILES, tl.where(is_full, floor, float("inf")))
    if tile == 0:
        one = row * BINS + tl.arange(0, BINS)
        tl.store(counts + one, tl.zeros([BINS], tl.int32))
        tl.store(weights.to(tl.pointer_type(tl.int64)) + one, tl.zeros([BINS], tl.int64))
        tl.store(arrivals + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


@jit
def weigh_tile(
    scaled, stats, counts, weights,
    V: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, NEAR: tl.constexpr,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_FLOOR: tl.constexpr, UNIT: tl.constexpr, BELOW: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the histogram of its row. Only logits that may be above the border cost an atomic addition."""
    row, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    x = logits_of(scaled, row, tile, V, TILE)
    top, _, low = bounds_of(stats, row, TILES, NEAR, HAS_K, HAS_P, HAS_FLOOR, BELOW)
    one, inside = row * BINS + bin_of(x, top, low, BINS), x >= low
    if HAS_K:
        tl.atomic_add(counts + one, tl.full([TILE], 1, tl.int32), inside, "relaxed", "gpu")
    if HAS_P:
        to = weights.to(tl.pointer_type(tl.int64)) + one
        tl.atomic_add(to, weight_of(x, top, UNIT), inside, "relaxed", "gpu")


@jit
def cut_tile(
    scaled, stats, counts, weights, arrivals, found, collected,
    V: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, NEAR: tl.constexpr,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_FLOOR: tl.constexpr, UNIT: tl.constexpr, BELOW: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Collects a tile's logits in the bins that may hold the border; who comes last searches them.

    With both filters the weight above the border of top-k lies between those of the bins before it and with it, so the
    border of top-p does between bins `first` and `last`. When a row's bins hold more than TILE logits, the row is read again.
    """
    row, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    x = logits_of(scaled, row, tile, V, TILE)
    top, total, low = bounds_of(stats, row, TILES, NEAR, HAS_K, HAS_P, HAS_FLOOR, BELOW)
    kth, needed, first, last, before, weight = bins_of(
        counts, weights, row, total, BINS, HAS_K, HAS_P, UNIT, K, P
    )
    place = bin_of(x, top, low, BINS)
    chosen = (x >= low) & ((place == kth) | ((place >= first) & (place <= last)))
    count = tl.sum(chosen.to(tl.int32))
    collected += row * TILE
    if count > 0:
        begin = tl.atomic_add(arrivals + row * 2, count, sem="relaxed", scope="gpu")
        to = begin + tl.cumsum(chosen.to(tl.int32)) - 1
        tl.store(collected + to, x, mask=chosen & (to < TILE))
    tl.debug_barrier()  # every thread has stored before one of them says so
    if tl.atomic_add(arrivals + row * 2 + 1, 1, sem="acq_rel", scope="gpu") == TILES - 1:
        number = tl.atomic_add(arrivals + row * 2, 0, sem="relaxed", scope="gpu")
        # Two calls: few logits need small pieces, and each loop over a row large ones.
        if number <= TILE:
            border = cut(
                collected, number, kth, needed, first, last, before, weight, top, low,
                PIECE, BINS, HAS_K, HAS_P, UNIT, P,
            )  # fmt: skip
        else:
            border = cut(
                scaled + row * V, V, kth, needed, first, last, before, weight, top, low,
                TILE, BINS, HAS_K, HAS_P, UNIT, P,
            )  # fmt: skip
        tl.store(found + row, border.to(tl.uint32))


@jit
def cut(
    source, number, kth, needed, first, last, before, weight, top, low,
    PIECE: tl.constexpr, BINS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, UNIT: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """The border, from logits that contain those of bin `kth`, and of bins `first` to `last`."""
    border = tl.zeros([], tl.int64)
    if HAS_K:
        border = search(
            source, number, border, kth, kth, needed, top, low, PIECE, BINS, False, UNIT
        )
    if HAS_P:
        if HAS_K:
            weight += sum_of(source, number, border, kth, kth, top, low, PIECE, BINS, True, UNIT)
        missing = part_of(weight, P) - before
        found = search(
            source, number, border, first, last, missing, top, low, PIECE, BINS, True, UNIT
        )
        border = tl.maximum(border, found)
    return border


@jit
def search(
    source, number, border, first, last, needed, top, low,
    PIECE: tl.constexpr, BINS: tl.constexpr, WEIGHS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The largest ordered bits >= border whose logits and those above them in bins `first` to `last` sum to `needed`; 0: none.

    Bisection between the least and the largest of these logits.
    """
    least, most = tl.full([], 1 << 32, tl.int64), tl.full([], -1, tl.int64)
    for begin in range(0, number, PIECE):
        _, ordered, chosen = piece_of(
            source, begin, number, border, first, last, top, low, PIECE, BINS
        )
        least = tl.minimum(least, tl.min(tl.where(chosen, ordered, 1 << 32)))
        most = tl.maximum(most, tl.max(tl.where(chosen, ordered, -1)))
    while least < most:
        middle = least + (most - least + 1) // 2
        if (
            sum_of(source, number, middle, first, last, top, low, PIECE, BINS, WEIGHS, UNIT)
            >= needed
        ):
            least = middle
        else:
            most = middle - 1
    return tl.where(least > most, 0, least)


@jit
def sum_of(
    source, number, border, first, last, top, low,
    PIECE: tl.constexpr, BINS: tl.constexpr, WEIGHS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The weight, or the number, of the logits >= border in bins `first` to `last`."""
    total = tl.zeros([], tl.int64)
    for begin in range(0, number, PIECE):
        x, _, chosen = piece_of(source, begin, number, border, first, last, top, low, PIECE, BINS)
        if WEIGHS:
            total += tl.sum(tl.where(chosen, weight_of(x, top, UNIT), 0))
        else:
            total += tl.sum(chosen.to(tl.int64))
    return total


@jit
def piece_of(
    source, begin, number, border, first, last, top, low, PIECE: tl.constexpr, BINS: tl.constexpr
):
    """A piece of logits, their ordered bits, and which of them are >= border in bins `first` to `last`."""
    one = begin + tl.arange(0, PIECE)
    x = tl.load(source + one, mask=one < number, other=float("-inf"))
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    ordered = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000).to(tl.int64)
    place = bin_of(x, top, low, BINS)
    return x, ordered, (x >= low) & (place >= first) & (place <= last) & (ordered >= border)


@jit
def logits_of(scaled, row, tile, V: tl.constexpr, TILE: tl.constexpr):
    """A tile of a row, -inf past its end."""
    one = tile * TILE + tl.arange(0, TILE)
    return tl.load(scaled + row * V + one, mask=one < V, other=float("-inf"))


@jit
def bounds_of(
    stats, row, TILES: tl.constexpr, NEAR: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr,
    HAS_FLOOR: tl.constexpr, BELOW: tl.constexpr,
):  # fmt: skip
    """The maximum of a row, its sum of exponentials, and a bound that its border is not below.

    Logits below maximum + log(sum) + log((1 - p) / V) have probabilities of at most 1 - p together.
    """
    near = tl.arange(0, NEAR)
    inside, stats = near < TILES, stats + row * (4 * TILES) + near
    tops = tl.load(stats + TOP * TILES, mask=inside, other=float("-inf"))
    totals = tl.load(stats + TOTAL * TILES, mask=inside, other=0.0)
    top = tl.max(tops)
    total = tl.sum(totals * tl.exp(tops - top))
    low = tl.min(tl.load(stats + LEAST * TILES, mask=inside, other=float("inf")))
    if HAS_FLOOR:
        floors = tl.load(stats + FLOOR * TILES, mask=inside, other=float("inf"))
        low = tl.maximum(low, tl.min(floors))
    if HAS_P and not HAS_K:
        low = tl.maximum(low, top + tl.log(total) + BELOW)
    return top, total, low


@jit
def bins_of(
    counts, weights, row, total, BINS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, UNIT: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Where the borders are: the bin of the k-th logit, and how many of its logits are kept; the first and the last bin
    that the border of top-p may be in, the weight before the first, and the weight of which it keeps a part, without bin
    `kth`. Bins are BINS where there is none.
    """
    bins = tl.arange(0, BINS)
    kth, needed, first, last = tl.full([], BINS, tl.int32), 0, BINS, -1
    before, weight = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if HAS_K:
        counted = tl.cumsum(tl.load(counts + row * BINS + bins))
        kth, before_kth = bin_of_sum(counted, K)
        needed = K - before_kth
    if HAS_P:
        each = tl.load(weights.to(tl.pointer_type(tl.int64)) + row * BINS + bins)
        weighed = tl.cumsum(each)
        if HAS_K:
            weight = tl.max(tl.where(bins < kth, weighed, 0))
            first, before = bin_of_sum(weighed, part_of(weight, P))
            last, _ = bin_of_sum(weighed, part_of(tl.max(tl.where(bins <= kth, weighed, 0)), P))
            last = tl.minimum(last, kth)
        else:
            weight = (total * UNIT).to(tl.int64)
            first, before = bin_of_sum(weighed, part_of(weight, P))
            last = first
    return kth, needed, first, last, before, weight


@jit
def bin_of_sum(cumulative, needed):
    """The first bin with which the bins sum to `needed`, and the sum of those before it."""
    below = cumulative < needed
    return tl.sum(below.to(tl.int32)), tl.max(tl.where(below, cumulative, 0))


@jit
def bin_of(x, top, low, BINS: tl.constexpr):
    """The bin of logits >= low; it does not fall as logits do. The last bin also has all that are farther than WIDEST."""
    width = tl.minimum(top - low, WIDEST)
    place = (top - x) * tl.where(width > 0, (BINS - 1) / width, 0.0)
    return tl.where(place < BINS - 1, place, BINS - 1).to(tl.int32)  # the last also for NaN


@jit
def weight_of(x, top, UNIT: tl.constexpr):
    """exp(x - top) as an integer."""
    return (tl.exp(x - top) * UNIT).to(tl.int64)


@jit
def part_of(weight, P: tl.constexpr):
    """The part P of a weight; products of float32 would round to 24 bits."""
    return (weight.to(tl.float64) * P).to(tl.int64)
