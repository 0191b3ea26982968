"""The operations of a transformer layer except attention: projections, norms, rotary embedding, heads.

Features lie on the last axis (training, prefill: [B, T, D]) or on the first (decoding: [D, nodes], where `weight @ x`
reads every weight once, in order; on a CPU that is 1.1 to 1.5 times faster for 2 to 32 nodes). `axis` says which; in
functions that take it, shapes are written for axis -1: "*A D" is [D, *A] for axis 0.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tlt_jax.distributed.mesh import sharding
from tlt_jax.kernels.numerics import contract, widen
from tlt_jax.models.low_rank import LowRank, is_low_rank
from tlt_jax.models.params import Tiles, for_columns
from tlt_jax.shapes import shaped

if TYPE_CHECKING:
    from tlt_jax.models.architecture import Rope


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(
    x: Float[Array, "*A In"], weight: Float[Array, "*Out In"], wide: bool = False
) -> Float[Array, "*A *Out"]:
    """weight @ x for features on the last axis; its gradients equal those that JAX derives.

    `wide`: in at least float32, not rounded to the dtype of x. XLA transposes the first operand of a product over tokens.
    Here that is x for the weight's gradient; otherwise a CPU would compute y's gradient in transposed order, which is slow.
    For a weight that is not differentiated, nothing is kept or computed.
    """
    return wide_product(x, weight, -1) if wide else jnp.tensordot(x, weight, (-1, -1))


def linear_forward(
    x: CustomVJPPrimal, weight: CustomVJPPrimal, wide: bool
) -> tuple[Array, tuple[Array | None, Array]]:
    """linear, and what its gradients need."""
    kept = x.value if weight.perturbed else None
    return linear(x.value, weight.value, wide), (kept, weight.value)


def linear_backward(
    wide: bool, operands: tuple[Array | None, Array], dy: Array
) -> tuple[Array, Array | None]:
    """The gradients of linear's operands; None for a weight that is not differentiated."""
    x, weight = operands
    dy = dy.astype(weight.dtype)  # what rounds a wide result makes of it
    dx = jnp.tensordot(dy, weight, weight.ndim - 1)
    if x is None:
        return dx, None
    tokens = tuple(range(x.ndim - 1))
    dweight = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())))
    return dx, jnp.moveaxis(dweight, 0, -1)


linear.defvjp(linear_forward, linear_backward, symbolic_zeros=True)


def wide_product(
    x: Float[Array, "*A In"], weight: Float[Array, "*Out In"], axis: int
) -> Float[Array, "*A *Out"]:
    """weight @ x in at least float32, for features on `axis` (0 or -1)."""
    out = "abc"[: weight.ndim - 1]
    return contract(f"{out}i,i...->{out}..." if axis == 0 else f"{out}i,...i->...{out}", weight, x)


def change(x: Float[Array, "*A In"], weight: LowRank, axis: int) -> Float[Array, "*A *Out"]:
    """scale * b @ a @ x in at least float32, for features on `axis` (0 or -1)."""
    if axis == -1:
        found = linear(linear(x, weight.a), weight.b, True)
    else:
        found = wide_product(jnp.tensordot(weight.a, x, (-1, 0)), weight.b, 0)
    return found if weight.scale == 1 else weight.scale * found


def tiled_product(x: Float[Array, "*A In"], weight: Tiles, axis: int) -> Float[Array, "*A *Out"]:
    """weight @ x for features on `axis` (0 or -1).

    Without barriers XLA would transpose the tiles, and not the few columns and their products. A single column is doubled:
    YNNPACK multiplies two in less time than XLA's loop one.
    """
    *outs, inner = weight.shape
    others = x.shape[1:] if axis == 0 else x.shape[:-1]
    rows = x.reshape(inner, -1).T if axis == 0 else x.reshape(-1, inner)
    rows, count = jax.lax.optimization_barrier(rows), len(rows)

    repeated = {
        len(part): jnp.broadcast_to(rows, (len(part), max(count, 2), inner))
        for part in weight.parts
    }
    repeated = jax.lax.optimization_barrier(repeated)
    found = [jnp.matmul(repeated[len(part)], part) for part in weight.parts]  # [tiles, rows, TILE]
    found = [part[:, :count] for part in jax.lax.optimization_barrier(found)]
    if axis == 0:
        found = [jnp.swapaxes(part, 1, 2).reshape(-1, count) for part in found]
        return jnp.concatenate(found).reshape(*outs, *others)
    found = [jnp.swapaxes(part, 0, 1).reshape(count, -1) for part in found]
    return jnp.concatenate(found, axis=1).reshape(*others, *outs)


def project(
    x: Float[Array, "*A In"],
    weight: Float[Array, "*Out In"] | LowRank | Tiles,
    bias: Float[Array, "*Out"] | None,
    axis: int,
) -> Float[Array, "*A *Out"]:
    """weight @ x + bias for features on `axis` (0 or -1); a weight of more than 2 axes gives as many feature axes.

    Of a LowRank the frozen product and the change are added in at least float32 and rounded once: rounded alone, most of a
    small change would be lost.
    """
    weight = for_columns(weight, math.prod(x.shape) // weight.shape[-1])
    if isinstance(weight, Tiles):
        y = tiled_product(x, weight, axis)
    elif is_low_rank(weight):
        frozen, changed = weight.weight, change(x, weight, axis)
        y = linear(x, frozen, True) if axis == -1 else wide_product(x, frozen, 0)
        y = (y + changed).astype(x.dtype)
    else:
        y = linear(x, weight) if axis == -1 else jnp.tensordot(weight, x, (-1, 0))
    if axis == -1:
        return y if bias is None else y + bias
    return y if bias is None else y + bias.reshape(*bias.shape, *[1] * (x.ndim - 1))


def rms_norm(
    x: Float[Array, "*A D"],
    weight: Float[Array, " D"],
    eps: float,
    axis: int = -1,
    offset: float = 0.0,
) -> Float[Array, "*A D"]:
    """x at unit root mean square over `axis`, times weight, or times weight + offset, which is rounded once, as Gemma's is."""
    wide = x.astype(widen(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axis, keepdims=True) + eps)
    others = [i for i in range(x.ndim) if i != axis % x.ndim]
    if offset:
        gain = jnp.expand_dims(weight.astype(wide.dtype) + offset, others)
        return (wide * scale * gain).astype(x.dtype)
    return (wide * scale).astype(x.dtype) * jnp.expand_dims(weight, others)


def rope_frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, " half"]:
    """Angle per position of each rotated pair, in float64."""
    rotated = int(rope.fraction * head_dim // 2)
    head_dim = head_dim if rope.kind == "proportional" else int(head_dim * rope.fraction)
    frequency = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "proportional":  # of all pairs of a head, which are not next to each other
        return np.where(np.arange(head_dim // 2) < rotated, frequency / rope.factor, 0.0)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "longrope":
        return frequency / np.array(rope.long_factors if rope.is_long else rope.short_factors)
    if rope.kind == "llama3":
        turns = rope.original_max_positions * frequency / (2 * math.pi)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return frequency * ((1 - smooth) / rope.factor + smooth)
    if rope.kind == "yarn":

        def pair_with(turns: float) -> float:
            ratio = rope.original_max_positions / (turns * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

        low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high += 0.001 if low == high else 0
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return frequency * (ramp / rope.factor + (1 - ramp))
    return frequency


def rope_angles(
    rope: Rope, head_dim: int, positions: Int[Array, "*batch"], dtype: DTypeLike
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosine and sine of every rotated pair at these positions, times the attention factor."""
    frequency = jnp.asarray(rope_frequencies(rope, head_dim), widen(dtype))
    angle = positions[..., None].astype(frequency.dtype) * frequency
    cos, sin = rope.attention_factor * jnp.cos(angle), rope.attention_factor * jnp.sin(angle)
    return cos.astype(dtype), sin.astype(dtype)


def by_row(x: Float[Array, "B ..."], mesh: Mesh | None) -> Float[Array, "B ..."]:
    """x with its rows sharded over `data`; as it is without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, ("batch",), "train"))


@shaped
def by_node(
    q: Float[Array, "H E BN"], k: Float[Array, "K E BM"], v: Float[Array, "K E BM"], batch: int
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E M"], Float[Array, "B K M E"]]:
    """Heads of the nodes of B trees, from features first to the layout of tree_attention.attend."""
    return queries_by_node(q, len(k), batch), *kv_by_node(k, v, batch)


@shaped
def queries_by_node(q: Float[Array, "H E BN"], K: int, batch: int) -> Float[Array, "B K G N E"]:
    """Queries of the nodes of B trees, from features first to the layout of tree_attention.attend."""
    q = q.reshape(K, -1, q.shape[1], batch, q.shape[-1] // batch)
    return jnp.moveaxis(q, (3, 0, 1, 4, 2), range(5))


@shaped
def kv_by_node(
    k: Float[Array, "K E BM"], v: Float[Array, "K E BM"], batch: int
) -> tuple[Float[Array, "B K E M"], Float[Array, "B K M E"]]:
    """Keys and values of the nodes of B trees, from features first to the layout of tree_attention.attend."""
    # XLA would transpose a single product back, and lose the speed of axis 0.
    kv = jnp.stack([k, v], axis=1)
    kv = jnp.moveaxis(kv.reshape(*kv.shape[:3], batch, kv.shape[-1] // batch), 3, 0)
    return kv[:, :, 0], jnp.swapaxes(kv[:, :, 1], 2, 3)


@shaped
def by_feature(attended: Float[Array, "B K G N E"]) -> Float[Array, "HE BN"]:
    """The result of tree_attention.attend, features first."""
    B, _, _, N, _ = attended.shape
    return jnp.moveaxis(attended, (1, 2, 4, 0, 3), range(5)).reshape(-1, B * N)
