"""Sums of the parts of a product, with what follows them in a layer, in Triton. Import it only where it is called.

The parts of a sum are added in their order, and a token's results do not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.projection_sizes import power


def heads(
    parts: Float[Array, "S T Out"],
    change: Float[Array, "T Out"] | None,
    bias: Float[Array, " Out"] | None,
    head_norms: Sequence[Float[Array, " E"]] | None,
    angles: Sequence[Float[Array, "T half"]],
    shape: tuple[int, int, int],
    is_joined: bool,
    batch: int,
    eps: float,
    dtype: DTypeLike,
    fused: Fused,
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E N"], Float[Array, "B K N E"]]:
    """Rotated queries and keys, and values, of this dtype, from the product of T = B N tokens; `shape`: (K, G, E).

    `change`: is added to the sum of the parts, before the bias.
    A row of the product has the queries, key and value of each key/value head if `is_joined`, else queries, keys, values.
    """
    (splits, T, _), (K, G, E) = parts.shape, shape
    B, N, cos = batch, T // batch, angles[0]
    return fused.call(
        parts, parts if change is None else change, cos if bias is None else bias,
        *(head_norms or (cos, cos)), *angles,
        kernel=heads_group, name="bias_rotary",
        out_type=(
            jax.ShapeDtypeStruct((B, K, G, N, E), dtype),
            jax.ShapeDtypeStruct((B, K, E, N), dtype),
            jax.ShapeDtypeStruct((B, K, N, E), dtype),
        ),
        grid=(T * K,), num_warps=4, num_stages=1,
        T=T, N=N, K=K, G=G, E=E, EPS=eps, SPLITS=splits, IS_JOINED=is_joined, HAS_CHANGE=change is not None,
        HAS_BIAS=bias is not None,
        HAS_HEAD_NORM=head_norms is not None, HEADS=power(G + 2), PAIRS=power(E // 2),
    )  # fmt: skip


def added(
    parts: Float[Array, "S T Out"],
    change: Float[Array, "T Out"] | None,
    x: Float[Array, "T Out"],
    bias: Float[Array, " Out"] | None,
    norm: Float[Array, " Out"],
    eps: float,
    fused: Fused,
) -> tuple[Float[Array, "T Out"], Float[Array, "T Out"]]:
    """x + the sum of the parts + change + bias, and that at unit root mean square times `norm`."""
    splits, T, out = parts.shape
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return fused.call(
        parts, parts if change is None else change, x, norm if bias is None else bias, norm,
        kernel=added_row, name="add_norm", out_type=(result, result),
        grid=(T,), num_warps=8 if out <= 4096 else 16, num_stages=1,
        T=T, OUT=out, EPS=eps, SPLITS=splits, HAS_CHANGE=change is not None, HAS_BIAS=bias is not None, WIDTH=power(out),
    )  # fmt: skip


@triton.jit
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


@triton.jit
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
