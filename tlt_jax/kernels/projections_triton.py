"""Norms and projections of few tokens on NVIDIA GPUs, in Triton. Import it only where it is called.

A program takes a tile of a matrix's rows and all tokens, and reads its rows once. The root mean square of a token is summed in
the same pass: the norm's weight is applied before the product, and one over the root mean square after it. A sum has the same
order for every token, whatever the other tokens are and whichever program comes last.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int32

from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.projection_sizes import ARRIVALS, Sizes, power


def heads(
    inputs: Sequence[Float[Array, "T In"]],
    norms: Sequence[Float[Array, " In"]],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...]] | None,
    head_norms: Sequence[Float[Array, " E"]] | None,
    angles: Sequence[Float[Array, "T half"]],
    shape: tuple[int, int, int],
    batch: int,
    eps: float,
    fused: Fused,
    sizes: Sizes,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]]:
    """Rotated queries and keys, and values, of T = B N normed tokens; `shape`: (K, G, E).

    `inputs` are one or two arrays, each normed alone; the rows of the matrices are as wide as both. `matrices`: one [K, G + 2,
    E, In] whose heads are the queries, key and value of a key/value head, or those of queries, keys and values; `biases`
    likewise. `head_norms`: weights of the norms of each query and key.
    """
    (T, width), (K, G, E) = inputs[0].shape, shape
    x, dtype = inputs[0], inputs[0].dtype
    tiles = 1 if head_norms else -(-E // sizes.rows)
    matrices, is_joined = three(matrices)
    biases, has_bias = three(biases or (x,))[0], biases is not None
    B, N = batch, T // batch
    return fused.call(
        x, inputs[-1], norms[0], norms[-1], *matrices, *biases, *(head_norms or (x, x)), *angles,
        kernel=heads_tile, name="norm_qkv_rotary",
        out_type=(
            jax.ShapeDtypeStruct((B, K, G, N, E), dtype),
            jax.ShapeDtypeStruct((B, K, E, N), dtype),
            jax.ShapeDtypeStruct((B, K, N, E), dtype),
        ),
        grid=(K * (G + 2) * tiles,), num_warps=sizes.warps, num_stages=sizes.stages,
        T=T, N=N, IN=width, INPUTS=len(inputs), K=K, G=G, E=E, TILES=tiles, EPS=eps,
        IS_JOINED=is_joined, HAS_BIAS=has_bias, HAS_HEAD_NORM=head_norms is not None,
        TOKENS=max(16, power(T)), PAIRS=power(E // 2) if head_norms else sizes.rows // 2, STEP=sizes.step,
    )  # fmt: skip


def three(arrays: Sequence[Array]) -> tuple[Sequence[Array], bool]:
    """Three arrays, and whether they are one array given three times."""
    return ([*arrays] * 3, True) if len(arrays) == 1 else (arrays, False)


def added(
    x: Float[Array, "T Out"],
    y: Float[Array, "T In"],
    matrix: Float[Array, "Out In"],
    bias: Float[Array, " Out"] | None,
    arrivals: Int32[Array, " A"] | None,
    fused: Fused,
    sizes: Sizes,
) -> Float[Array, "T Out"]:
    """x + matrix @ y + bias. `arrivals`: zeros, as many as there are tiles of rows or more, where sizes have splits."""
    (T, out), tiles = x.shape, -(-x.shape[1] // sizes.rows)
    common = dict(
        name="project_add", grid=(tiles * sizes.splits,), num_warps=sizes.warps,
        num_stages=sizes.stages, T=T, IN=y.shape[1], OUT=out, HAS_BIAS=bias is not None,
        TOKENS=max(16, power(T)), ROWS=sizes.rows, STEP=sizes.step,
    )  # fmt: skip
    given, result = (
        (x, y, matrix, x if bias is None else bias),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
    )
    if sizes.splits == 1:
        return fused.call(*given, kernel=added_tile, out_type=result, **common)
    if arrivals is None or len(arrivals) < tiles:
        raise ValueError(f"{tiles} tiles of rows need as many counters, not {arrivals}")
    part = -(-y.shape[1] // (sizes.splits * sizes.step)) * sizes.step
    parts = jax.ShapeDtypeStruct((sizes.splits, T, out), jnp.float32)
    return fused.call(
        *given, arrivals, kernel=added_split, input_output_aliases={4: 2},
        out_type=(result, parts, jax.ShapeDtypeStruct(arrivals.shape, jnp.int32)),
        SPLITS=sizes.splits, PART=part, **common,
    )[0]  # fmt: skip


def gated(
    x: Float[Array, "T In"],
    norm: Float[Array, " In"],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...]] | None,
    eps: float,
    fused: Fused,
    sizes: Sizes,
) -> tuple[Float[Array, "T F"], Int32[Array, " A"]]:
    """silu(gate) * up of normed tokens, and zeros, the arrivals of `added`.

    `matrices`: [2, F, In], or those of gate and up; `biases` likewise.
    """
    (T, width), F = x.shape, matrices[0].shape[-2]
    is_joined, biases, has_bias = len(matrices) == 1, biases or (x,), biases is not None
    return fused.call(
        x, norm, matrices[0], matrices[-1], biases[0], biases[-1],
        kernel=gated_tile, name="norm_gate_up",
        out_type=(jax.ShapeDtypeStruct((T, F), x.dtype), jax.ShapeDtypeStruct((ARRIVALS,), jnp.int32)),
        grid=(-(-F // (sizes.rows // 2)),), num_warps=sizes.warps, num_stages=sizes.stages,
        T=T, IN=width, F=F, EPS=eps, FIRST_UP=F if is_joined else 0, HAS_BIAS=has_bias,
        TOKENS=max(16, power(T)), PAIRS=sizes.rows // 2, STEP=sizes.step, COUNTERS=ARRIVALS,
    )  # fmt: skip


@triton.jit
def heads_tile(
    x, other, norm, other_norm, wq, wk, wv, bq, bk, bv, q_norm, k_norm, cosines, sines, q, k, v,
    T: tl.constexpr, N: tl.constexpr, IN: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr, IS_JOINED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The pairs (i, i + E/2) of a tile of one head, which are rotated together; with head norms the whole head."""
    program = tl.program_id(0)
    head, pair = program // TILES, program % TILES * PAIRS + tl.arange(0, PAIRS)
    group, part = head // (G + 2), head % (G + 2)
    if IS_JOINED:
        matrix, bias, first = wq, bq, head * E
    else:
        matrix = tl.where(part < G, wq, tl.where(part == G, wk, wv))
        bias = tl.where(part < G, bq, tl.where(part == G, bk, bv))
        first = tl.where(part < G, group * G + part, group) * E
    token, inside = tl.arange(0, TOKENS), pair < E // 2
    row = first + pair
    place, low, high = row * (IN * INPUTS), matrix, matrix + E // 2 * IN * INPUTS
    y1, y2 = normed_products(
        x, norm, low, high, place, inside, token, T, IN, EPS, TOKENS, PAIRS, STEP
    )
    if INPUTS == 2:
        z1, z2 = normed_products(
            other, other_norm, low + IN, high + IN, place, inside, token, T, IN, EPS, TOKENS, PAIRS, STEP
        )  # fmt: skip
        y1, y2 = y1 + z1, y2 + z2
    if HAS_BIAS:
        y1 += tl.load(bias + row, mask=inside, other=0).to(tl.float32)[None, :]
        y2 += tl.load(bias + row + E // 2, mask=inside, other=0).to(tl.float32)[None, :]

    within = (token < T)[:, None] & inside[None, :]
    sequence, node = token // N, token % N
    if part <= G:
        if HAS_HEAD_NORM:
            squares = tl.sum(y1 * y1, axis=1) + tl.sum(y2 * y2, axis=1)
            scale = tl.rsqrt(squares / E + EPS)[:, None]
            weight = tl.where(part < G, q_norm, k_norm) + pair
            y1 = y1 * scale * tl.load(weight, mask=inside, other=0).to(tl.float32)[None, :]
            weight += E // 2
            y2 = y2 * scale * tl.load(weight, mask=inside, other=0).to(tl.float32)[None, :]
        angle = token[:, None] * (E // 2) + pair[None, :]
        cos = tl.load(cosines + angle, mask=within, other=0).to(tl.float32)
        sin = tl.load(sines + angle, mask=within, other=0).to(tl.float32)
        y1, y2 = y1 * cos - y2 * sin, y2 * cos + y1 * sin
        if part < G:
            to = q + (((sequence * K + group) * G + part) * N + node)[:, None] * E + pair[None, :]
            tl.store(to, y1.to(q.dtype.element_ty), mask=within)
            tl.store(to + E // 2, y2.to(q.dtype.element_ty), mask=within)
        else:
            to = k + ((sequence * K + group) * E)[:, None] * N + pair[None, :] * N + node[:, None]
            tl.store(to, y1.to(q.dtype.element_ty), mask=within)
            tl.store(to + E // 2 * N, y2.to(q.dtype.element_ty), mask=within)
    else:
        to = v + ((sequence * K + group) * N + node)[:, None] * E + pair[None, :]
        tl.store(to, y1.to(q.dtype.element_ty), mask=within)
        tl.store(to + E // 2, y2.to(q.dtype.element_ty), mask=within)


@triton.jit
def gated_tile(
    x, norm, gate, up, gate_bias, up_bias, result, arrivals,
    T: tl.constexpr, IN: tl.constexpr, F: tl.constexpr, EPS: tl.constexpr, FIRST_UP: tl.constexpr,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """The same tile of rows of gate and up; the first program sets the counters of the product that follows to zero."""
    if tl.program_id(0) == 0:
        tl.store(arrivals + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    row, token = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, TOKENS)
    inside = row < F if F % PAIRS else row >= 0
    y1, y2 = normed_products(
        x, norm, gate, up + FIRST_UP * IN, row * IN, inside, token, T, IN, EPS, TOKENS, PAIRS, STEP
    )
    if HAS_BIAS:
        y1 += tl.load(gate_bias + row, mask=inside, other=0).to(tl.float32)[None, :]
        y2 += tl.load(up_bias + FIRST_UP + row, mask=inside, other=0).to(tl.float32)[None, :]
    y = y1 * tl.sigmoid(y1) * y2
    within = (token < T)[:, None] & inside[None, :]
    tl.store(result + token[:, None] * F + row[None, :], y.to(result.dtype.element_ty), mask=within)


@triton.jit
def normed_products(
    x, norm, low, high, place, inside, token, T: tl.constexpr, IN: tl.constexpr, EPS: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The products of normed tokens with the rows that begin `place` after `low` and after `high`."""
    y1, y2 = tl.zeros([TOKENS, PAIRS], tl.float32), tl.zeros([TOKENS, PAIRS], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for first in range(0, IN, STEP):
        d = first + tl.arange(0, STEP)
        within = (token < T)[:, None] & (d < IN)[None, :]
        tile = tl.load(x + token[:, None] * IN + d[None, :], mask=within, other=0)
        wide = tile.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        weight = tl.load(norm + d, mask=d < IN, other=0).to(tl.float32)
        scaled = (wide * weight[None, :]).to(tile.dtype)
        within, places = (d < IN)[:, None] & inside[None, :], place[None, :] + d[:, None]
        rows = tl.load(low + places, mask=within, other=0)
        y1 = tl.dot(scaled, rows, y1, input_precision="ieee")
        rows = tl.load(high + places, mask=within, other=0)
        y2 = tl.dot(scaled, rows, y2, input_precision="ieee")
    scale = tl.rsqrt(squares / IN + EPS)[:, None]
    return y1 * scale, y2 * scale


@triton.jit
def added_tile(
    x, y, matrix, bias, result,
    T: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A tile of rows of x + matrix @ y + bias."""
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    inside = row < OUT if OUT % ROWS else row >= 0
    total = products(y, matrix, row, inside, token, 0, IN, T, IN, TOKENS, ROWS, STEP)
    store_added(x, total, bias, result, row, inside, token, T, OUT, HAS_BIAS)


@triton.jit
def added_split(
    x, y, matrix, bias, arrivals, result, parts,
    T: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One part of the reduction of a tile of rows; who comes last adds the parts, in their order, as all have stored them."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row, token = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    inside = row < OUT if OUT % ROWS else row >= 0
    begin = split * PART
    end = tl.minimum(begin + PART, IN)
    total = products(y, matrix, row, inside, token, begin, end, T, IN, TOKENS, ROWS, STEP)
    place, within = token[:, None] * OUT + row[None, :], (token < T)[:, None] & inside[None, :]
    tl.store(parts + split * (T * OUT) + place, total, mask=within)
    tl.debug_barrier()  # every thread has stored before one of them says so
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        total = tl.zeros([TOKENS, ROWS], tl.float32)
        for part in range(SPLITS):
            # Past the L1 cache, which may hold what was there before.
            total += tl.load(
                parts + part * (T * OUT) + place, mask=within, other=0, cache_modifier=".cg"
            )
        store_added(x, total, bias, result, row, inside, token, T, OUT, HAS_BIAS)


@triton.jit
def products(
    y, matrix, row, inside, token, begin, end, T: tl.constexpr, IN: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The products of tokens with rows, over the elements from `begin` to `end`."""
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for first in range(begin, end, STEP):
        d = first + tl.arange(0, STEP)
        within = (token < T)[:, None] & (d < IN)[None, :]
        tile = tl.load(y + token[:, None] * IN + d[None, :], mask=within, other=0)
        within = (d < IN)[:, None] & inside[None, :]
        rows = tl.load(matrix + (row * IN)[None, :] + d[:, None], mask=within, other=0)
        total = tl.dot(tile, rows, total, input_precision="ieee")
    return total


@triton.jit
def store_added(
    x,
    total,
    bias,
    result,
    row,
    inside,
    token,
    T: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Stores x + total + bias."""
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0).to(tl.float32)[None, :]
    place, within = token[:, None] * OUT + row[None, :], (token < T)[:, None] & inside[None, :]
    total += tl.load(x + place, mask=within, other=0).to(tl.float32)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=within)
