"""The arithmetic of a transformer layer: projections, norms, rotary embedding and attention.

Features lie on the last axis (training, prefill: [B, T, D]) or on the first (decoding: [D, nodes], where `weight @ x`
reads every weight once, in order; on a CPU that is 1.1 to 1.5 times faster for 2 to 32 nodes). `axis` says which;
where a function takes it, shapes are written for axis -1: "*A D" is [D, *A] for axis 0.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tlt_jax.models.architecture import Rope
from tlt_jax.shapes import shaped

# Names of what the backward pass of attention does not compute again.
KEPT = "top of scores", "sum of weights", "weighted values"


def widen(dtype: DTypeLike) -> jnp.dtype:
    """At least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def contract(subscripts: str, a: Float[Array, ...], b: Float[Array, ...]) -> Float[Array, ...]:
    """einsum that accumulates and returns in at least float32."""
    wide = widen(a.dtype)
    if a.dtype == wide:
        return jnp.einsum(subscripts, a, b)

    def widened(a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a.astype(wide), b.astype(wide))

    def native(a: Array, b: Array) -> Array:
        return jnp.einsum(subscripts, a, b, preferred_element_type=wide)

    # XLA's CPU back end fails at run time on some products of bfloat16 that return float32.
    return jax.lax.platform_dependent(a, b, cpu=widened, default=native)


@jax.custom_vjp
def linear(x: Float[Array, "*A In"], weight: Float[Array, "Out In"]) -> Float[Array, "*A Out"]:
    """weight @ x for features on the last axis; its gradients are those that JAX would derive.

    XLA turns the first operand of a product over tokens round. For the weight's gradient that is x
    here; a CPU would compute the other operand, y's gradient, in turned order, which is slow.
    """
    return jnp.einsum("...i,oi->...o", x, weight)


def linear_backward(operands: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    """The gradients of linear's operands."""
    x, weight = operands
    tokens = tuple(range(x.ndim - 1))
    dweight = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())))
    return jnp.einsum("...o,oi->...i", dy, weight), dweight.T


linear.defvjp(lambda x, weight: (linear(x, weight), (x, weight)), linear_backward)


def project(
    x: Float[Array, "*A In"],
    weight: Float[Array, "Out In"],
    bias: Float[Array, " Out"] | None,
    axis: int,
) -> Float[Array, "*A Out"]:
    """weight @ x + bias for features on `axis` (0 or -1)."""
    y = linear(x, weight) if axis == -1 else jnp.einsum("oi,i...->o...", weight, x)
    return y if bias is None else y + along(bias, y.ndim, axis)


def along(vector: Float[Array, " D"], ndim: int, axis: int) -> Float[Array, "*ones D"]:
    """The vector shaped to broadcast along one axis of an array with ndim axes."""
    return jnp.expand_dims(vector, [i for i in range(ndim) if i != axis % ndim])


def rms_norm(
    x: Float[Array, "*A D"], weight: Float[Array, " D"], eps: float, axis: int = -1
) -> Float[Array, "*A D"]:
    """x at unit root mean square over `axis`, times weight."""
    wide = x.astype(widen(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axis, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * along(weight, x.ndim, axis)


def rope_frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, " half"]:
    """Angle per position of each of the head_dim / 2 rotating pairs, in float64."""
    frequency = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequency / rope.factor
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


@shaped
def rope_angles(
    rope: Rope, head_dim: int, positions: Int[Array, "*batch"], dtype: DTypeLike
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosine and sine of every rotating pair at these positions, with the attention factor folded in."""
    frequency = jnp.asarray(rope_frequencies(rope, head_dim), widen(dtype))
    angle = positions[..., None].astype(frequency.dtype) * frequency
    cos, sin = rope.attention_factor * jnp.cos(angle), rope.attention_factor * jnp.sin(angle)
    return cos.astype(dtype), sin.astype(dtype)


def rotate(
    x: Float[Array, "*A E"], cos: Float[Array, "*#A half"], sin: Float[Array, "*#A half"], axis: int
) -> Float[Array, "*A E"]:
    """x with the pairs (i, i + E/2) along `axis` rotated by their angle."""
    first, second = jnp.split(x, 2, axis=axis)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=axis)


def masked(scores: Float[Array, "*A"], visible: Bool[Array, ...]) -> Float[Array, "*A"]:
    """Scores where visible, the lowest number elsewhere."""
    return jnp.where(visible, scores, jnp.finfo(scores.dtype).min)


@jax.named_scope("attention")
@shaped
def attend_packed(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    block: int,
    longest: int | None = None,
    own: tuple[Float[Array, "B T J K E"], Float[Array, "B T J K E"]] | None = None,
) -> Float[Array, "B T K G E"]:
    """Causal attention within segments (0 is padding), `block` queries at a time; memory grows linearly with T.

    No segment has more than `longest` tokens (None: T): a block sees no keys further back. `own` are
    J more keys and values of every token, which only it sees.
    """
    T = segments.shape[1]
    block = min(block, T)
    count = -(-T // block)
    window = min(T, (1 - (1 - (longest or T)) // block) * block)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    def split(array: Array) -> Array:
        padded = jnp.pad(
            array, [(0, count * block - T if axis == 1 else 0) for axis in range(array.ndim)]
        )
        return jnp.moveaxis(padded.reshape(-1, count, block, *array.shape[2:]), 1, 0)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*KEPT))
    def one(index: Array, q: Array, segment: Array, own: tuple[Array, Array] | None) -> Array:
        start = jnp.clip((index + 1) * block - window, 0, T - window)
        keys, values, others = (
            jax.lax.dynamic_slice_in_dim(array, start, window, axis)
            for array, axis in ((k, 2), (v, 2), (segments, 1))
        )
        places = index * block + jnp.arange(block)
        earlier = start + jnp.arange(window)[None, :] <= places[:, None]
        same = (segment[:, :, None] == others[:, None, :]) & (segment[:, :, None] > 0)
        return attend_block(q, keys, values, (earlier & same)[:, None, None], own)

    blocks = (jnp.arange(count), *jax.tree.map(split, (q, segments, own)))
    if count == 1:
        return one(*jax.tree.map(lambda array: array[0], blocks))[:, :T]
    out = jnp.moveaxis(jax.lax.map(lambda block: one(*block), blocks), 0, 1)
    return out.reshape(-1, count * block, *q.shape[2:])[:, :T]


def attend_block(
    q: Float[Array, "B T K G E"],
    k: Float[Array, "B K S E"],
    v: Float[Array, "B K S E"],
    visible: Bool[Array, "B 1 1 T S"],
    own: tuple[Float[Array, "B T J K E"], Float[Array, "B T J K E"]] | None,
) -> Float[Array, "B T K G E"]:
    """Attention of T queries to the visible ones of S keys, and to their own.

    The weights' sum divides their product with the values, so that the backward pass needs no sum
    over keys. What is KEPT for it is no larger than q.
    """
    B, T, K, G, E = q.shape
    scale, S = math.sqrt(E), k.shape[2]
    flat = jnp.moveaxis(q, 1, 3).reshape(B, K, G * T, E)
    scores = contract("bkqe,bkse->bkqs", flat, k).reshape(B, K, G, T, S)
    scores = masked(scores / scale, visible)
    if own is not None:
        own_scores = contract("btkge,btjke->bkgtj", q, own[0]) / scale
        scores = jnp.concatenate([scores, own_scores], axis=-1)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - checkpoint_name(top, KEPT[0]))
    total = checkpoint_name(jnp.sum(weights, axis=-1, keepdims=True), KEPT[1])
    weights = weights.astype(v.dtype)
    mixed = contract("bkqs,bkse->bkqe", weights[..., :S].reshape(B, K, G * T, S), v)
    mixed = mixed.reshape(B, K, G, T, E)
    if own is not None:
        mixed += contract("bkgtj,btjke->bkgte", weights[..., S:], own[1])
    mixed = checkpoint_name(mixed.astype(v.dtype), KEPT[2]) / total
    return jnp.moveaxis(mixed, 3, 1).astype(v.dtype)


@shaped
def by_node(
    q: Float[Array, "H E BN"], k: Float[Array, "K E BM"], v: Float[Array, "K E BM"], batch: int
) -> tuple[Float[Array, "B K G N E"], Float[Array, "B K E M"], Float[Array, "B K M E"]]:
    """Heads of the nodes of B trees, features first, as attend_tree takes them."""
    K, E = k.shape[:2]
    q = jnp.moveaxis(q.reshape(K, -1, E, batch, q.shape[-1] // batch), (3, 0, 1, 4, 2), range(5))
    return q, *kv_by_node(k, v, batch)


@shaped
def kv_by_node(
    k: Float[Array, "K E BM"], v: Float[Array, "K E BM"], batch: int
) -> tuple[Float[Array, "B K E M"], Float[Array, "B K M E"]]:
    """Keys and values of the nodes of B trees, features first, as attend_tree takes them."""
    kv = jnp.stack(
        [k, v], axis=1
    )  # XLA would turn a lone transposed product round, and lose what axis 0 gains
    kv = jnp.moveaxis(kv.reshape(*kv.shape[:3], batch, kv.shape[-1] // batch), 3, 0)
    return kv[:, :, 0], jnp.swapaxes(kv[:, :, 1], 2, 3)


@shaped
def by_feature(attended: Float[Array, "B K G N E"]) -> Float[Array, "HE BN"]:
    """What attend_tree returns, features first."""
    B, _, _, N, _ = attended.shape
    return jnp.moveaxis(attended, (1, 2, 4, 0, 3), range(5)).reshape(-1, B * N)


@jax.named_scope("attention")
@shaped
def attend_tree(
    q: Float[Array, "B K G N E"],
    k: Float[Array, "B K E M"],
    v: Float[Array, "B K M E"],
    ancestors: Bool[Array, "B N M"],
    keys: Float[Array, "B K E S"],
    values: Float[Array, "B K _ _"],
    lengths: Int[Array, " B"],
    slots_last: bool,
) -> Float[Array, "B K G N E"]:
    """Attention of N tree nodes to the committed slots (the first `lengths`) and to their ancestors among M nodes.

    `values` are [B, K, E, S] when their slots are last, [B, K, S, E] otherwise.
    """
    B, K, G, N, E = q.shape
    S, M = keys.shape[3], v.shape[2]
    scale = 1 / math.sqrt(E)
    committed = (jnp.arange(S) < lengths[:, None])[:, None, None, None]
    flat = q.reshape(B, K, G * N, E)
    old = contract("bkqe,bkes->bkqs", flat, keys).reshape(B, K, G, N, S)
    new = contract("bkqe,bkem->bkqm", flat, k).reshape(B, K, G, N, M)
    old, new = masked(scale * old, committed), masked(scale * new, ancestors[:, None, None])
    top = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)

    def mix(weights: Array, values: Array, subscripts: str) -> Array:
        weights = weights.reshape(B, K, G * N, -1).astype(values.dtype)
        return contract(f"bkqs,{subscripts}->bkqe", weights, values).reshape(q.shape)

    mixed = mix(old, values, "bkes" if slots_last else "bkse") + mix(new, v, "bkse")
    return (mixed / total).astype(q.dtype)
