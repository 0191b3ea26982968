"""Products of a layer with few tree nodes, each with its norm, bias and what follows as one kernel, on one NVIDIA GPU.

Every function returns None where XLA's operations run instead: for many nodes or large matrices (`rule`), with tensor
parallelism, in other dtypes and where the kernel is off. Features lie on the first axis, as in decoding.

A program takes a tile of a matrix's rows and all tokens, and reads its rows once. The root mean square of a token is summed in
the same pass: the norm's weight is applied before the product, and one over the root mean square after it. A sum has the same
order for every token, whatever the other tokens are and whichever program comes last; its bits depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tlt_jax.kernels.fused import ADDED, GATED, HEADS, MOST_MATRIX, Fused, jit, tl
from tlt_jax.kernels.numerics import power
from tlt_jax.shapes import shaped

DTYPES = (jnp.bfloat16, jnp.float32)  # that the kernels take
# More tokens run in XLA. Full float32 products use no tensor cores.
MOST_TOKENS = {2: 64, 4: 16}  # by the bytes of a number
# Every program reads all tokens, from the L2 cache: 320 KiB are 8 us at 40 bytes a nanosecond, which is assumed.
MOST_READ = 320 << 10
SPLIT_FROM = 128 << 10  # a product that reads more in a program is split, where it can be
MOST_SPLITS = 8
ARRIVALS = 1024  # counters that a product of gates sets to zero for the next one: as many tiles may be split
BUSY = 128  # programs that keep a large GPU busy: an H200 has 132 multiprocessors


@dataclass(frozen=True)
class ProjectionTiles:
    """The work of a program: rows of the matrix, elements of the reduction at a time; warps; tiles held at once.

    `splits`: programs that share the reduction of a tile of rows.
    """

    rows: int
    step: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True)
class Product:
    """A product of `tokens` rows with a matrix [out, width], by the kernel of this name.

    `head`: rows of the matrix that one program must have, all of a head that is normed; 0: any number. `can_split`: it has
    counters.
    """

    kernel: str
    out: int
    width: int
    tokens: int
    itemsize: int
    head: int = 0
    can_split: bool = False

    def read(self, rows: int) -> int:
        """Bytes that a program reads which has this many rows of the matrix."""
        return (self.tokens + rows) * self.width * self.itemsize


def rule(one: Product) -> ProjectionTiles | None:
    """Sizes with which two programs or more fit a multiprocessor of an H200; None: XLA's product.

    A tile has as many rows as there are tokens, so that rows are most of what is read, unless too few programs are left.
    """
    if one.tokens > MOST_TOKENS[one.itemsize]:
        return None
    tile = rows = max(16, power(one.tokens))
    while rows > 16 and one.out < BUSY * rows:
        rows //= 2
    if one.kernel == ADDED and tile == 16 and one.out < BUSY * rows:
        rows = 8  # two products of eight pairs are the least of the other kernels
    rows, splits = max(rows, power(one.head)), 1
    if one.can_split and one.out <= ARRIVALS * tile and one.read(rows) > SPLIT_FROM:
        rows = tile
        while splits < MOST_SPLITS and one.out * splits < BUSY * rows:
            splits *= 2
    if one.out * one.width * one.itemsize > MOST_MATRIX or one.read(rows) > MOST_READ * splits:
        return None
    step = (256 if tile + rows <= 64 else 128) * 2 // one.itemsize
    return ProjectionTiles(rows, step, 4, 4 if tile + rows <= 64 else 3, splits)


def chosen(
    kernel: str, x: Array, out: int, width: int, fused: Fused | None, head: int = 0, can_split: bool = False
) -> ProjectionTiles | None:  # fmt: skip
    """Sizes of the kernel for a product with x; None: XLA's."""
    if fused is None or kernel not in fused.on or fused.mesh.size > 1 or x.dtype not in DTYPES:
        return None
    return rule(Product(kernel, out, width, x.shape[1], x.dtype.itemsize, head, can_split))


@shaped
def heads(
    inputs: Sequence[Float[Array, "D BN"]],
    norms: Sequence[Float[Array, " D"]],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...] | None],
    head_norms: tuple[Float[Array, " E"] | None, Float[Array, " E"] | None],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    shape: tuple[int, int, int],
    batch: int,
    eps: float,
    fused: Fused | None,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]] | None:
    """Rotated queries and keys, and values, of normed inputs, as tree_attention.attend takes them; `shape`: (K, G, E).

    `inputs` are one array or two, each normed alone; the matrices read both. `matrices`: one of shape [K, G + 2, E, In], with
    the queries, key and value of each key/value head, or those of queries, keys and values.
    """
    (width, T), (K, G, E), dtype = inputs[0].shape, shape, inputs[0].dtype
    is_joined, has_bias, has_norm = (
        len(matrices) == 1,
        biases[0] is not None,
        head_norms[0] is not None,
    )
    out, reads = K * (G + 2) * E, matrices[0].shape[-1]
    sizes = chosen(HEADS, inputs[0], out, reads, fused, E if has_norm else 0)
    if sizes is None:
        return None
    x, B, N, tiles = inputs[0].T, batch, T // batch, 1 if has_norm else -(-E // sizes.rows)
    given = (*matrices, *(biases if has_bias else [x] * len(matrices)))
    given = [one for one in given for _ in range(3)] if is_joined else given
    return fused.call(
        x, inputs[-1].T, norms[0], norms[-1], *given, *(head_norms if has_norm else (x, x)), *(angle.T for angle in angles),
        kernel=heads_tile, name="norm_qkv_rotary",
        out_type=(
            jax.ShapeDtypeStruct((B, K, G, N, E), dtype),
            jax.ShapeDtypeStruct((B, K, E, N), dtype),
            jax.ShapeDtypeStruct((B, K, N, E), dtype),
        ),
        grid=(K * (G + 2) * tiles,), num_warps=sizes.warps, num_stages=sizes.stages,
        T=T, N=N, IN=width, INPUTS=len(inputs), K=K, G=G, E=E, TILES=tiles, EPS=eps,
        IS_JOINED=is_joined, HAS_BIAS=has_bias, HAS_HEAD_NORM=has_norm,
        TOKENS=max(16, power(T)), PAIRS=power(E // 2) if has_norm else sizes.rows // 2, STEP=sizes.step,
    )  # fmt: skip


@shaped
def added(
    x: Float[Array, "Out BN"],
    y: Float[Array, "In BN"],
    matrix: Float[Array, "Out In"],
    bias: Float[Array, " Out"] | None,
    arrivals: Int32[Array, " A"] | None,
    fused: Fused | None,
) -> Float[Array, "Out BN"] | None:
    """x + matrix @ y + bias. `arrivals`: those of `gated`, with which programs can share the reduction."""
    sizes = chosen(ADDED, y, *matrix.shape, fused, can_split=arrivals is not None)
    if sizes is None:
        return None
    (out, T), width, tiles, x = x.shape, len(y), -(-len(x) // sizes.rows), x.T
    common = dict(
        name="project_add", grid=(tiles * sizes.splits,), num_warps=sizes.warps, num_stages=sizes.stages,
        T=T, IN=width, OUT=out, HAS_BIAS=bias is not None, TOKENS=max(16, power(T)), ROWS=sizes.rows, STEP=sizes.step,
    )  # fmt: skip
    given = x, y.T, matrix, x if bias is None else bias
    result = jax.ShapeDtypeStruct((T, out), x.dtype)
    if sizes.splits == 1:
        return fused.call(*given, kernel=added_tile, out_type=result, **common).T
    part = -(-width // (sizes.splits * sizes.step)) * sizes.step
    parts = jax.ShapeDtypeStruct((sizes.splits, T, out), jnp.float32)
    return fused.call(
        *given, arrivals, kernel=added_split, input_output_aliases={4: 2},
        out_type=(result, parts, jax.ShapeDtypeStruct(arrivals.shape, jnp.int32)),
        SPLITS=sizes.splits, PART=part, **common,
    )[0].T  # fmt: skip


@shaped
def gated(
    x: Float[Array, "D BN"],
    norm: Float[Array, " D"],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...] | None],
    eps: float,
    fused: Fused | None,
) -> tuple[Float[Array, "F BN"], Int32[Array, " A"]] | None:
    """silu(gate) * up of normed x, and zeros, the arrivals for one call of `added`.

    `matrices`: one of shape [2, F, D], or those of gate and up; `biases` likewise.
    """
    (width, T), F, has_bias = x.shape, matrices[0].shape[-2], biases[0] is not None
    sizes = chosen(GATED, x, 2 * F, width, fused)
    if sizes is None:
        return None
    x = x.T
    bias = biases if has_bias else (x,)
    y, arrivals = fused.call(
        x, norm, matrices[0], matrices[-1], bias[0], bias[-1], kernel=gated_tile, name="norm_gate_up",
        out_type=(jax.ShapeDtypeStruct((T, F), x.dtype), jax.ShapeDtypeStruct((ARRIVALS,), jnp.int32)),
        grid=(-(-F // (sizes.rows // 2)),), num_warps=sizes.warps, num_stages=sizes.stages,
        T=T, IN=width, F=F, EPS=eps, FIRST_UP=F if len(matrices) == 1 else 0, HAS_BIAS=has_bias,
        TOKENS=max(16, power(T)), PAIRS=sizes.rows // 2, STEP=sizes.step, COUNTERS=ARRIVALS,
    )  # fmt: skip
    return y.T, arrivals


@jit
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


@jit
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


@jit
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


@jit
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


@jit
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


@jit
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


@jit
def store_added(
    x, total, bias, result, row, inside, token, T: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Stores x + total + bias."""
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0).to(tl.float32)[None, :]
    place, within = token[:, None] * OUT + row[None, :], (token < T)[:, None] & inside[None, :]
    total += tl.load(x + place, mask=within, other=0).to(tl.float32)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=within)
