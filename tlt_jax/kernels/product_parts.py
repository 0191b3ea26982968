"""Large products of few tokens in parts that XLA makes, and one Triton kernel that adds them and does what follows.

XLA splits the reduction of such a product so that enough programs run, and adds the parts in a kernel that the next norm does
not join. Here the split is ours, and the sum is part of the kernel that follows. Parts are added in their order, and a token's
results do not depend on the other tokens. Every function returns None where XLA's operations run instead: for many tokens,
small matrices, with tensor parallelism, in other dtypes and where the kernel is off. Features lie on the first axis, as in
decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tlt_jax.kernels.fused import MOST_MATRIX, PART_ADDED, PART_HEADS, Fused, jit, tl
from tlt_jax.kernels.numerics import power
from tlt_jax.shapes import shaped

# Small matrices XLA splits into more and narrower parts than `splits`, and would split ours again.
LEAST_MATRIX = MOST_MATRIX
MOST_TOKENS = 256  # XLA splits the products of a 7B policy up to there, into as many parts or more
# Programs that keep a large GPU busy: three for each of the 132 multiprocessors of an H200.
BUSY = 396
TILE = 64  # rows of the matrix, and tokens, of a program of XLA's product, which is assumed
MOST_SPLITS = 8
LEAST_WIDTH, LARGE_WIDTH = 512, 8192  # of the reduction of a part; XLA splits a wider one again
MOST_WIDTH = 16384  # of a row that a program holds in registers


@shaped
def heads(
    x: Float[Array, "In BN"],
    matrices: Sequence[Float[Array, ...]],
    biases: Sequence[Float[Array, ...] | None],
    head_norms: tuple[Float[Array, " E"] | None, Float[Array, " E"] | None],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    shape: tuple[int, int, int],
    batch: int,
    eps: float,
    fused: Fused | None,
    change: Float[Array, "K J E BN"] | None = None,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]] | None:
    """Rotated queries and keys, and values, as tree_attention.attend takes them, of what the product reads; `shape`: (K, G, E).

    `matrices`: one of shape [K, G + 2, E, In], or those of queries, keys and values; `biases` likewise.
    `change`: in float32, is added to the product with one matrix.
    """
    if not runs(PART_HEADS, x, sum(one.size for one in matrices), fused):
        return None
    # XLA reads each in its place.
    matrix = jnp.concatenate([one.reshape(-1, len(x)) for one in matrices])
    parts, cos, (K, G, E), T = product(x, matrix), angles[0].T, shape, x.shape[1]
    B, N, dtype = batch, T // batch, x.dtype
    bias = cos if biases[0] is None else jnp.concatenate([one.reshape(-1) for one in biases])
    norms = (cos, cos) if head_norms[0] is None else head_norms
    return fused.call(
        parts, parts if change is None else change.reshape(-1, T).T, bias, *norms, cos, angles[1].T,
        kernel=heads_group, name="bias_rotary",
        out_type=(
            jax.ShapeDtypeStruct((B, K, G, N, E), dtype),
            jax.ShapeDtypeStruct((B, K, E, N), dtype),
            jax.ShapeDtypeStruct((B, K, N, E), dtype),
        ),
        grid=(T * K,), num_warps=4, num_stages=1,
        T=T, N=N, K=K, G=G, E=E, EPS=eps, SPLITS=len(parts), IS_JOINED=len(matrices) == 1, HAS_CHANGE=change is not None,
        HAS_BIAS=biases[0] is not None, HAS_HEAD_NORM=head_norms[0] is not None, HEADS=power(G + 2), PAIRS=power(E // 2),
    )  # fmt: skip


@shaped
def added(
    x: Float[Array, "Out BN"],
    y: Float[Array, "In BN"],
    matrix: Float[Array, "Out In"],
    bias: Float[Array, " Out"] | None,
    norm: Float[Array, " Out"],
    eps: float,
    fused: Fused | None,
    change: Float[Array, "Out BN"] | None = None,
) -> tuple[Float[Array, "Out BN"], Float[Array, "Out BN"]] | None:
    """x + matrix @ y + change + bias, and that normed by `norm`; the change is in float32."""
    if not runs(PART_ADDED, y, matrix.size, fused) or len(x) > MOST_WIDTH:
        return None
    parts, (out, T) = product(y, matrix), x.shape
    result = jax.ShapeDtypeStruct((T, out), x.dtype)
    total, normed = fused.call(
        parts, parts if change is None else change.T, x.T, norm if bias is None else bias, norm,
        kernel=added_row, name="add_norm", out_type=(result, result),
        grid=(T,), num_warps=8 if out <= 4096 else 16, num_stages=1, T=T, OUT=out, EPS=eps, SPLITS=len(parts),
        HAS_CHANGE=change is not None, HAS_BIAS=bias is not None, WIDTH=power(out),
    )  # fmt: skip
    return total.T, normed.T


def runs(name: str, x: Float[Array, "In BN"], numbers: int, fused: Fused | None) -> bool:
    """Whether the kernel runs, for a product of x with this many numbers."""
    if fused is None or name not in fused.on or fused.mesh.size > 1:
        return False
    is_large = numbers * x.dtype.itemsize > LEAST_MATRIX
    return is_large and x.dtype in (jnp.bfloat16, jnp.float32) and x.shape[1] <= MOST_TOKENS


def product(y: Float[Array, "In T"], matrix: Float[Array, "Out In"]) -> Float[Array, "S T Out"]:
    """Parts in float32 whose sum over the first axis is matrix @ y."""
    (out, width), tokens = matrix.shape, y.shape[1]
    count = splits(out, width, tokens)
    y, matrix = y.T.reshape(tokens, count, -1), matrix.reshape(out, count, -1)
    dimensions = ((2,), (2,)), ((1,), (1,))
    return jax.lax.dot_general(y, matrix, dimensions, preferred_element_type=jnp.float32)


def splits(out: int, width: int, tokens: int) -> int:
    """Parts of the reduction of a product with a matrix [out, width], so that BUSY programs run."""
    programs, count = out / TILE * -(-tokens // TILE), 1
    while count < MOST_SPLITS and (programs * count < BUSY or width > count * LARGE_WIDTH):
        if width % (2 * count) or width < 2 * count * LEAST_WIDTH:
            break
        count *= 2
    return count


@jit
def heads_group(
    parts, change, bias, q_norm, k_norm, cosines, sines, q, k, v,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EPS: tl.constexpr,
    SPLITS: tl.constexpr, IS_JOINED: tl.constexpr, HAS_CHANGE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The queries, key and value of one token and key/value head, as the pairs (i, i + E/2) that are rotated together."""
    token, group = tl.program_id(0) // K, tl.program_id(0) % K
    j, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    inside = pair < E // 2
    within = (j < G + 2) & inside
    if IS_JOINED:
        head = group * (G + 2) + j
    else:
        head = tl.where(j < G, group * G + j, j * K + group)
    place = head * E + pair
    y1, y2 = tl.zeros([HEADS, PAIRS], tl.float32), tl.zeros([HEADS, PAIRS], tl.float32)
    for split in tl.static_range(SPLITS):
        row = parts + (split * T + token) * (K * (G + 2) * E) + place
        y1 += tl.load(row, mask=within, other=0)
        y2 += tl.load(row + E // 2, mask=within, other=0)
    if HAS_CHANGE:
        row = change + token * (K * (G + 2) * E) + place
        y1 += tl.load(row, mask=within, other=0)
        y2 += tl.load(row + E // 2, mask=within, other=0)
    if HAS_BIAS:
        y1 += tl.load(bias + place, mask=within, other=0).to(tl.float32)
        y2 += tl.load(bias + place + E // 2, mask=within, other=0).to(tl.float32)
    z1, z2 = y1, y2
    if HAS_HEAD_NORM:
        squares = tl.sum(y1 * y1, axis=1) + tl.sum(y2 * y2, axis=1)
        scale = tl.rsqrt(squares / E + EPS)[:, None]
        for_q, for_k = (j < G) & inside, (j == G) & inside
        w1 = tl.load(q_norm + pair + 0 * j, mask=for_q, other=0).to(tl.float32)
        w2 = tl.load(q_norm + E // 2 + pair + 0 * j, mask=for_q, other=0).to(tl.float32)
        w1 += tl.load(k_norm + pair + 0 * j, mask=for_k, other=0).to(tl.float32)
        w2 += tl.load(k_norm + E // 2 + pair + 0 * j, mask=for_k, other=0).to(tl.float32)
        z1, z2 = y1 * scale * w1, y2 * scale * w2
    cos = tl.load(cosines + token * (E // 2) + pair, mask=inside, other=0).to(tl.float32)
    sin = tl.load(sines + token * (E // 2) + pair, mask=inside, other=0).to(tl.float32)
    z1, z2 = z1 * cos - z2 * sin, z2 * cos + z1 * sin

    sequence, node = token // N, token % N
    to = q + (((sequence * K + group) * G + j) * N + node) * E + pair
    tl.store(to, z1.to(q.dtype.element_ty), mask=(j < G) & inside)
    tl.store(to + E // 2, z2.to(q.dtype.element_ty), mask=(j < G) & inside)
    to = k + ((sequence * K + group) * E + pair + 0 * j) * N + node
    tl.store(to, z1.to(q.dtype.element_ty), mask=(j == G) & inside)
    tl.store(to + E // 2 * N, z2.to(q.dtype.element_ty), mask=(j == G) & inside)
    to = v + ((sequence * K + group) * N + node) * E + pair + 0 * j
    tl.store(to, y1.to(q.dtype.element_ty), mask=(j == G + 1) & inside)
    tl.store(to + E // 2, y2.to(q.dtype.element_ty), mask=(j == G + 1) & inside)


@jit
def added_row(
    parts, change, x, bias, norm, result, normed,
    T: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr, SPLITS: tl.constexpr, HAS_CHANGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All of a token. The norm is that of the result as it is stored, as in XLA's form."""
    token, d = tl.program_id(0), tl.arange(0, WIDTH)
    inside = d < OUT
    total = tl.zeros([WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * T + token) * OUT + d, mask=inside, other=0)
    if HAS_CHANGE:
        total += tl.load(change + token * OUT + d, mask=inside, other=0)
    if HAS_BIAS:
        total += tl.load(bias + d, mask=inside, other=0).to(tl.float32)
    total += tl.load(x + token * OUT + d, mask=inside, other=0).to(tl.float32)
    stored = total.to(result.dtype.element_ty)
    tl.store(result + token * OUT + d, stored, mask=inside)
    wide = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / OUT + EPS)
    weight = tl.load(norm + d, mask=inside, other=0).to(tl.float32)
    tl.store(normed + token * OUT + d, (wide * scale * weight).to(stored.dtype), mask=inside)
