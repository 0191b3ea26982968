"""Products of experts in Triton, on NVIDIA GPUs: of sorted rows, with their gradients, and of few tokens without a sort.

A sum has the same order for every token, whatever the other tokens are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tlt_jax.kernels.fused import Fused, jit, tl
from tlt_jax.kernels.numerics import power

DTYPES = (jnp.bfloat16, jnp.float32)  # that the kernels take
MOST_PAIRS = 512  # of tokens and their experts in `few`, every program of which reads all ids
GROUP = 16  # pairs of one expert that a program of `few` multiplies at a time
BUSY = (
    528  # programs that keep a large GPU busy: four for each of the 132 multiprocessors of an H200
)


def products(
    rows: Float[Array, "R In"],
    matrix: Float[Array, "N a b"],
    blocks: tuple[Int32[Array, " G"], Int32[Array, " G"], Int32[Array, " G"]],
    block: int,
    dtype: jnp.dtype,
    is_transposed: bool,
    fused: Fused,
) -> Float[Array, "R Out"]:
    """Each row times the matrix of its expert, [Out, In] or transposed; `blocks`: expert, first row and end of each block."""
    N, out, width = matrix.shape
    strides = width, 1
    if is_transposed:
        out, width, strides = width, out, (1, width)
    columns, step, warps = (128, 64, 8) if rows.dtype == jnp.bfloat16 else (64, 32, 4)
    tiles = -(-out // columns)
    return fused.call(
        rows, matrix, *blocks, kernel=product_tile, name="experts",
        out_type=jax.ShapeDtypeStruct((len(rows), out), dtype),
        grid=(len(blocks[0]) * tiles,), num_warps=warps if block > 32 else 4, num_stages=3,
        OUT=out, IN=width, BY_OUT=strides[0], BY_IN=strides[1], TILES=tiles, BLOCK=block, COLUMNS=columns, STEP=step,
    )  # fmt: skip


def slopes(
    slope: Float[Array, "R Out"],
    rows: Float[Array, "R In"],
    begins: Int32[Array, " N"],
    ends: Int32[Array, " N"],
    fused: Fused,
) -> Float[Array, "N Out In"]:
    """The gradient of the matrices; expert e has the rows from begins[e] to ends[e]."""
    (_, out), width, N = slope.shape, rows.shape[1], len(begins)
    side, step, warps = (128, 64, 8) if rows.dtype == jnp.bfloat16 else (64, 32, 4)
    tiles = -(-out // side), -(-width // side)
    return fused.call(
        slope, rows, begins, ends, kernel=slope_tile, name="experts_slope",
        out_type=jax.ShapeDtypeStruct((N, out, width), rows.dtype),
        grid=(N * tiles[0] * tiles[1],), num_warps=warps, num_stages=3,
        OUT=out, IN=width, TILES_OUT=tiles[0], TILES_IN=tiles[1], SIDE=side, STEP=step,
    )  # fmt: skip


def few(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T k"],
    gates: Float[Array, "T k"],
    joined: Float[Array, "N 2 F D"],
    down: Float[Array, "N D F"],
    fused: Fused,
) -> Float[Array, "T k D"]:
    """gates * down @ (silu(gate @ x) * up @ x) of each token and expert, in float32. Touched matrices are read once."""
    (T, D), (N, _, F, _), k = x.shape, joined.shape, ids.shape[1]
    P = T * k
    experts = min(N, P)  # that may be touched
    columns = 16 if experts * -(-F // 32) < BUSY else 32
    common = dict(
        num_warps=4, num_stages=4, P=P, D=D, F=F, BY_PAIR=P < N, PAIRS=max(16, power(P)),
        COLUMNS=columns, STEP=256 // x.dtype.itemsize, SLOTS=GROUP,
    )  # fmt: skip
    tiles = -(-F // columns)
    h = fused.call(
        x, ids, gates.astype(jnp.float32), joined, kernel=few_gated, name="experts_gate_up",
        out_type=jax.ShapeDtypeStruct((P, F), x.dtype), grid=(experts * tiles,), TILES=tiles, CHOICES=k, **common,
    )  # fmt: skip
    tiles = -(-D // columns)
    return fused.call(
        h, ids, down, kernel=few_down, name="experts_down",
        out_type=jax.ShapeDtypeStruct((T, k, D), jnp.float32), grid=(experts * tiles,), TILES=tiles, **common,
    )  # fmt: skip


@jit
def product_tile(
    rows, matrix, experts, firsts, ends, result,
    OUT: tl.constexpr, IN: tl.constexpr, BY_OUT: tl.constexpr, BY_IN: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The rows of a block, which have one expert, and a tile of its outputs."""
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    first, end = tl.load(firsts + block), tl.load(ends + block)
    if first < end:
        row, column = first + tl.arange(0, BLOCK), tile * COLUMNS + tl.arange(0, COLUMNS)
        has, inside, row = row < end, column < OUT, row.to(tl.int64)[:, None]
        start = matrix + tl.load(experts + block).to(tl.int64) * (OUT * IN)
        total = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for begin in range(0, IN, STEP):
            d = begin + tl.arange(0, STEP)
            within = has[:, None] & (d < IN)[None, :]
            left = tl.load(rows + row * IN + d[None, :], mask=within, other=0)
            within = (d < IN)[:, None] & inside[None, :]
            place = column[None, :] * BY_OUT + d[:, None] * BY_IN
            right = tl.load(start + place, mask=within, other=0)
            total = tl.dot(left, right, total, input_precision="ieee")
        place, within = row * OUT + column[None, :], has[:, None] & inside[None, :]
        tl.store(result + place, total.to(result.dtype.element_ty), mask=within)


@jit
def slope_tile(
    slope, rows, begins, ends, result,
    OUT: tl.constexpr, IN: tl.constexpr, TILES_OUT: tl.constexpr, TILES_IN: tl.constexpr, SIDE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of an expert's matrix, from all its rows; 0 without any."""
    tile, expert = (
        tl.program_id(0) % (TILES_OUT * TILES_IN),
        tl.program_id(0) // (TILES_OUT * TILES_IN),
    )
    o = tile // TILES_IN * SIDE + tl.arange(0, SIDE)[:, None]
    d = tile % TILES_IN * SIDE + tl.arange(0, SIDE)[None, :]
    end, total = tl.load(ends + expert), tl.zeros([SIDE, SIDE], tl.float32)
    for first in range(tl.load(begins + expert), end, STEP):
        row = first + tl.arange(0, STEP)
        has, row = row < end, row.to(tl.int64)
        left = tl.load(slope + row[None, :] * OUT + o, mask=has[None, :] & (o < OUT), other=0)
        right = tl.load(rows + row[:, None] * IN + d, mask=has[:, None] & (d < IN), other=0)
        total = tl.dot(left, right, total, input_precision="ieee")
    place = expert.to(tl.int64) * (OUT * IN) + o * IN + d
    tl.store(result + place, total.to(result.dtype.element_ty), mask=(o < OUT) & (d < IN))


@jit
def few_gated(
    x, ids, gates, matrix, h,
    P: tl.constexpr, CHOICES: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BY_PAIR: tl.constexpr, TILES: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """gates * silu(gate) * up of the pairs of one expert, a tile of its width."""
    expert, mine, count = of_program(ids, P, BY_PAIR, TILES, PAIRS)
    f = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside, start = f < F, matrix + expert.to(tl.int64) * (2 * F * D)
    for begin in range(0, count, SLOTS):
        pair, has = slots(mine, count, begin, SLOTS)
        gate, up = tl.zeros([SLOTS, COLUMNS], tl.float32), tl.zeros([SLOTS, COLUMNS], tl.float32)
        for first in range(0, D, STEP):
            d = first + tl.arange(0, STEP)
            place = (pair // CHOICES * D)[:, None] + d[None, :]
            tile = tl.load(x + place, mask=has[:, None] & (d < D)[None, :], other=0)
            place, within = (f * D)[None, :] + d[:, None], (d < D)[:, None] & inside[None, :]
            gate_rows = tl.load(start + place, mask=within, other=0)
            up_rows = tl.load(start + F * D + place, mask=within, other=0)
            gate = tl.dot(tile, gate_rows, gate, input_precision="ieee")
            up = tl.dot(tile, up_rows, up, input_precision="ieee")
        weight = tl.load(gates + pair, mask=has, other=0)
        y = gate * tl.sigmoid(gate) * up * weight[:, None]
        place, within = (pair * F)[:, None] + f[None, :], has[:, None] & inside[None, :]
        tl.store(h + place, y.to(h.dtype.element_ty), mask=within)


@jit
def few_down(
    h, ids, matrix, result,
    P: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BY_PAIR: tl.constexpr, TILES: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The last products of the pairs of one expert, a tile of D."""
    expert, mine, count = of_program(ids, P, BY_PAIR, TILES, PAIRS)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside, start = column < D, matrix + expert.to(tl.int64) * (D * F)
    for begin in range(0, count, SLOTS):
        pair, has = slots(mine, count, begin, SLOTS)
        total = tl.zeros([SLOTS, COLUMNS], tl.float32)
        for first in range(0, F, STEP):
            f = first + tl.arange(0, STEP)
            within = has[:, None] & (f < F)[None, :]
            tile = tl.load(h + (pair * F)[:, None] + f[None, :], mask=within, other=0)
            place, within = (column * F)[None, :] + f[:, None], (f < F)[:, None] & inside[None, :]
            total = tl.dot(
                tile, tl.load(start + place, mask=within, other=0), total, input_precision="ieee"
            )
        place, within = (pair * D)[:, None] + column[None, :], has[:, None] & inside[None, :]
        tl.store(result + place, total, mask=within)


@jit
def of_program(
    ids, P: tl.constexpr, BY_PAIR: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr
):
    """The expert of the program, which pairs it has and how many; 0 where another program has the expert."""
    slot, pair = tl.program_id(0) // TILES, tl.arange(0, PAIRS)
    chosen = tl.load(ids + pair, mask=pair < P, other=-1)
    if BY_PAIR:
        expert = tl.load(ids + slot)
    else:
        expert = slot
    mine = (chosen == expert).to(tl.int32)
    count = tl.sum(mine, axis=0)
    if BY_PAIR:
        count = tl.where(tl.sum(tl.where(pair < slot, mine, 0), axis=0) == 0, count, 0)
    return expert, mine, count


@jit
def slots(mine, count, begin, SLOTS: tl.constexpr):
    """The pairs of an expert from its pair number `begin` on, and which of the slots have one."""
    slot, number = begin + tl.arange(0, SLOTS), tl.cumsum(mine, axis=0)
    return tl.sum((number[None, :] <= slot[:, None]).to(tl.int32), axis=1), slot < count
