"""One layer of the policy, on packed rows and on tree nodes. The drafter's layer is made of its parts.

Features lie on `axis`, as in layers.py; shapes are written for axis -1 in functions that take it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, Integer

from tlt_jax.kernels import experts, packed_attention, product_parts, projections, tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.numerics import finite, sound
from tlt_jax.models import layers as ops, low_rank, moe, remat as remats
from tlt_jax.models.architecture import JoinedLayer, Layer, ModelConfig, Rope
from tlt_jax.models.low_rank import LowRank, is_low_rank
from tlt_jax.models.moe import Routed
from tlt_jax.models.params import Tiles, whole
from tlt_jax.shapes import shaped


def heads(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "*A In"],
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> tuple[Float[Array, "*A H E"], Float[Array, "*A K E"] | None, Float[Array, "*A K E"] | None]:
    """Rotated queries and keys, and values, as heads: [H, E, *A] for axis 0, with angles [E/2, *A].

    A layer without keys and values of its own has None in their place.
    """
    if isinstance(layer, Layer):
        q = queries(layer, config, x, cos, sin, axis)
        return q, *keys_values(layer, config, x, cos, sin, axis)

    with jax.named_scope("attention"):
        y = ops.project(x, layer.qkv, layer.qkv_bias, axis)
        at, G = 0 if axis == 0 else -3, config.num_heads // layer.qkv.shape[0]  # where K lies in y
        parts = jnp.split(y, (G, G + 1)[: layer.qkv.shape[1] - G], axis=at + 1)
        q, *kv = (jax.lax.collapse(part, at, at + 2) for part in parts)
        q = rotated(q, layer.q_norm, config, cos, sin, axis, config.score_scale)
        if not kv:
            return q, None, None
        k, v = rotated(kv[0], layer.k_norm, config, cos, sin, axis), kv[-1]
        return q, k, normed_values(v, config, axis)


def normed_values(v: Float[Array, "*A K E"], config: ModelConfig, axis: int) -> Array:
    """Values as attention takes them."""
    if not config.value_norm:
        return v
    return norm(
        v,
        jnp.full(config.head_dim, 1 - config.norm_offset, v.dtype),
        config,
        1 if axis == 0 else -1,
    )


@jax.named_scope("attention")
def queries(
    layer: Layer,
    config: ModelConfig,
    x: Float[Array, "*A In"],
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> Float[Array, "*A H E"]:
    """Rotated queries, as of `heads`."""
    q = by_head(ops.project(x, layer.q, layer.q_bias, axis), config, axis)
    return rotated(q, layer.q_norm, config, cos, sin, axis, config.score_scale)


@jax.named_scope("attention")
def keys_values(
    layer: Layer,
    config: ModelConfig,
    x: Float[Array, "*A In"],
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
) -> tuple[Float[Array, "*A K E"] | None, Float[Array, "*A K E"] | None]:
    """Rotated keys, and values, as of `heads`."""
    if layer.k is None:
        return None, None
    k = v = by_head(ops.project(x, layer.k, layer.k_bias, axis), config, axis)
    if layer.v is not None:
        v = by_head(ops.project(x, layer.v, layer.v_bias, axis), config, axis)
    v = normed_values(remats.named(v, remats.HEADS), config, axis)
    return rotated(k, layer.k_norm, config, cos, sin, axis), v


def norm(
    x: Float[Array, "*A D"], weight: Float[Array, " D"] | None, config: ModelConfig, axis: int = -1
) -> Float[Array, "*A D"]:
    """x normed as the policy does; as it is without a weight."""
    if weight is None:
        return x
    return ops.rms_norm(x, weight, config.rms_eps, axis, config.norm_offset)


def by_head(x: Float[Array, "*A HE"], config: ModelConfig, axis: int) -> Float[Array, "*A H E"]:
    """A projection split into heads."""
    shape = (
        (-1, config.head_dim, *x.shape[1:]) if axis == 0 else (*x.shape[:-1], -1, config.head_dim)
    )
    return x.reshape(shape)


def rotated(
    x: Float[Array, "*A H E"],
    weight: Float[Array, " _"] | None,
    config: ModelConfig,
    cos: Float[Array, "*A 1 half"],
    sin: Float[Array, "*A 1 half"],
    axis: int,
    scale: float = 1.0,
) -> Float[Array, "*A H E"]:
    """Queries or keys, normed if the policy has that norm, then rotated and scaled."""
    width = 1 if axis == 0 else -1
    x = remats.named(x, remats.HEADS)  # before the norm, whose backward pass needs it
    if weight is not None and config.qk_norm == "width":
        flat = x.reshape(-1, *x.shape[2:]) if axis == 0 else x.reshape(*x.shape[:-2], -1)
        x = norm(flat, weight, config, axis).reshape(x.shape)
    else:
        x = norm(x, weight, config, width)
    if scale != 1:
        x = scale * x
    half = cos.shape[0 if axis == 0 else -1]  # pairs (i, i + half) are rotated
    at = 2 if 2 * half == x.shape[width] else (half, 2 * half)
    first, second, *rest = jnp.split(x, at, axis=width)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate([*turned, *rest], axis=width)


def finish(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "*A D"],
    attended: Float[Array, "*A HE"],
    axis: int,
    given: Float[Array, "*A P"] | None = None,
    replayed: Integer[Array, "*A k"] | None = None,
    mesh: Mesh | None = None,
    fused: Fused | None = None,
) -> tuple[Float[Array, "*A D"], Routed | None]:
    """The layer's output: the projection of attention's result is added, then the MLP, then what is `given` of each token.

    Also what its router did; `replayed`: see moe.route.
    """
    scale = config.residual_scale

    def add(x: Array, y: Array, weight: Array | None) -> Array:
        y = norm(y, weight, config, axis)
        return x + (y if scale == 1 else scale * y)

    with jax.named_scope("attention"):
        y = ops.project(attended, layer.o, layer.o_bias, axis)
        x = remats.named(add(x, y, layer.attended_norm), remats.ATTENDED)

    with jax.named_scope("mlp"):
        y = norm(x, layer.mlp_norm, config, axis)
        y, routed = mlp(layer, config, y, axis, replayed, mesh, fused)
        x = add(x, y, layer.mlp_out_norm)

    if given is not None:
        with jax.named_scope("token"):
            gate = ACTIVATIONS[config.activation](ops.project(x, layer.input_gate, None, axis))
            x = add(x, ops.project(gate * given, layer.input_out, None, axis), layer.input_norm)
    x = x if layer.out_scale is None else x * jax.lax.stop_gradient(layer.out_scale)
    return x, routed


def mlp(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    y: Float[Array, "*A D"],
    axis: int,
    replayed: Integer[Array, "*A k"] | None = None,
    mesh: Mesh | None = None,
    fused: Fused | None = None,
) -> tuple[Float[Array, "*A D"], Routed | None]:
    """What the MLP, or the experts with the one that all tokens have, make of the normed input; and what the router did."""
    shared = None
    if layer.down is not None:
        inner = gated(layer, y, axis, config.activation)
        shared = ops.project(inner, layer.down, layer.down_bias, axis)
    if layer.router is None:
        return shared, None
    if shared is not None:
        shared = jax.nn.sigmoid(ops.project(y, layer.shared_gate, None, axis)) * shared
    y = y.T if axis == 0 else y
    with jax.named_scope("experts"):
        routed, gates = moe.route(layer.router, config, y, replayed)
        is_joined = isinstance(layer, JoinedLayer)
        matrices = (layer.expert_gate_up,) if is_joined else (layer.expert_gate, layer.expert_up)
        where = mesh, fused, "rollout" if is_joined else "train"
        act = ACTIVATIONS[config.activation]
        mixed = experts.mix(y, routed.ids, gates, matrices, layer.expert_down, act, *where)
    mixed = mixed.T if axis == 0 else mixed
    return mixed if shared is None else mixed + shared, routed


def finish_nodes(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "D BN"],
    attended: Float[Array, "HE BN"],
    next_norm: Float[Array, " D"] | None,
    fused: Fused | None,
    given: Float[Array, "P BN"] | None = None,
) -> tuple[Float[Array, "D BN"], Float[Array, "D BN"] | None, Routed | None]:
    """`finish` of tree nodes, by kernels where there are some.

    Between both also that normed by `next_norm` where one kernel makes both.
    """
    eps, mesh = config.rms_eps, None if fused is None else fused.mesh
    if not config.is_usual:
        x, routed = finish(layer, config, x, attended, 0, given, None, mesh, fused)
        return x, None, routed

    def add(
        x: Array, y: Array, weight: Array | LowRank | Tiles, bias: Array | None, arrivals: Array | None, norm: Array | None
    ) -> tuple[Array, Array | None]:  # fmt: skip
        matrix, changed, found = weight, None, None
        if isinstance(weight, Tiles):
            return x + ops.project(y, weight, bias, 0), None
        if is_low_rank(weight):
            matrix, changed = weight.weight, ops.change(y, weight, 0)
        else:
            found = projections.added(x, y, weight, bias, arrivals, fused)
        if found is not None:
            return found, None
        if norm is not None:
            found = product_parts.added(x, y, matrix, bias, norm, eps, fused, changed)
        return (x + ops.project(y, weight, bias, 0), None) if found is None else found

    with jax.named_scope("attention"):
        x, normed = add(x, attended, layer.o, layer.o_bias, None, layer.mlp_norm)

    with jax.named_scope("mlp"):
        joined = isinstance(layer, JoinedLayer)
        matrices = (layer.gate_up,) if joined else (layer.gate, layer.up)
        biases = (layer.gate_up_bias,) if joined else (layer.gate_bias, layer.up_bias)
        found = None
        if all(isinstance(matrix, jax.Array) for matrix in matrices) and layer.router is None:
            found = projections.gated(x, layer.mlp_norm, matrices, biases, eps, fused)
        if found is None:
            normed = ops.rms_norm(x, layer.mlp_norm, eps, 0) if normed is None else normed
            if layer.router is not None:
                y, routed = mlp(layer, config, normed, 0, None, mesh, fused)
                return x + y, None, routed
            found = gated(layer, normed, 0), None
        y, arrivals = found
        return *add(x, y, layer.down, layer.down_bias, arrivals, next_norm), None


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def gated(
    layer: Layer | JoinedLayer, y: Float[Array, "*A D"], axis: int, activation: str = "silu"
) -> Float[Array, "*A F"]:
    """What the MLP's last projection reads, from the normed input.

    For tree nodes (axis 0), joined matrices are one product. For all tokens of prompts that product's result would be one
    more large array, and it saves no time.
    """
    if isinstance(layer, Layer):
        gate = ops.project(y, layer.gate, layer.gate_bias, axis)
        up = ops.project(y, layer.up, layer.up_bias, axis)
        gate, up = remats.named(gate, remats.MLP), remats.named(up, remats.MLP)
    elif axis == 0:
        gate, up = ops.project(y, layer.gate_up, layer.gate_up_bias, axis)
    else:
        matrix = whole(layer.gate_up)
        biases = (None, None) if layer.gate_up_bias is None else layer.gate_up_bias
        gate, up = map(partial(ops.project, y, axis=axis), low_rank.rows(matrix), biases)
    return ACTIVATIONS[activation](gate) * up


@jax.named_scope("layer")
@shaped
def packed_layer(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    angles: tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]],
    segments: Int[Array, "B T"],
    block: int,
    longest: int | None = None,
    mesh: Mesh | None = None,
    for_cache: bool = False,
    index: int | Int[Array, ""] = 0,
    kv: tuple[Float[Array, "B T K E"], Float[Array, "B T K E"]] | None = None,
    given: Float[Array, "B T P"] | None = None,
    replayed: Integer[Array, "B T k"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T K E"], Float[Array, "B T K E"], Routed | None]:
    """The layer's output, the keys and values to which it attends, and what its router did. `index`: of the layer.

    `kv`: those of another layer, for one that has none. `given`: what the layer gets of each token. `replayed`: see moe.route.
    `for_cache`: values are
    finite, and keys NaN where values were not: tokens that see them are NaN, no others. At padding both are finite. Without
    it, a token that is not finite may make its whole row so; such an update is skipped.
    """
    y = norm(x, layer.attention_norm, config)
    q, k, v = heads(layer, config, y, *angles, axis=-1)
    if k is None:
        k, v = kv
    elif for_cache:
        k = jnp.where(sound(v)[..., None], k, jnp.nan)
        k, v = jnp.where((segments > 0)[:, :, None, None], k, 0), finite(v)
    q = q.reshape(*k.shape[:3], -1, config.head_dim)
    options = {"block": block, "longest": longest, "mesh": mesh, "cap": config.score_cap}
    forms = {
        window: partial(packed_attention.attend, **options, window=window or None)
        for window in config.windows or (0,)
    }
    if len(forms) == 1 or isinstance(index, int):
        attended = forms[(config.windows or (0,))[index if len(forms) > 1 else 0]](
            q, k, v, segments
        )
    else:
        which = jnp.array([[*forms].index(window) for window in config.windows])[index]
        attended = jax.lax.switch(which, [*forms.values()], q, k, v, segments)
    attended = attended.reshape(*x.shape[:2], -1)
    x, routed = finish(layer, config, x, attended, -1, given, replayed, mesh)
    return x, k, v, routed


@shaped
def packed_angles(
    config: ModelConfig,
    positions: Int[Array, "B T"],
    dtype: DTypeLike,
    rope: Rope | None = None,
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """Cosine and sine of the rotary embedding, by default the policy's usual one; the same for every head."""
    cos, sin = ops.rope_angles(rope or config.rope, config.head_dim, positions, dtype)
    return cos[:, :, None], sin[:, :, None]


@shaped
def node_angles(
    config: ModelConfig,
    positions: Int[Array, "B N"],
    dtype: DTypeLike,
    rope: Rope | None = None,
) -> tuple[Float[Array, "half BN"], Float[Array, "half BN"]]:
    """Cosine and sine of the rotary embedding of tree nodes; `rope`: as for `packed_angles`."""
    cos, sin = ops.rope_angles(rope or config.rope, config.head_dim, positions.reshape(-1), dtype)
    return cos.T, sin.T


Angles = tuple[Array, Array]  # cosine and sine


def angles_by_layer(
    config: ModelConfig, angles: Callable[[ModelConfig, Rope], Angles]
) -> Callable[[int | Array], Angles]:
    """The cosine and sine of a layer, by its index, from those of a rotary embedding; 1 and 0 in a layer without one.

    Each rotary embedding is computed once.
    """

    def rotation(kind: ModelConfig, rope: Rope | None) -> Angles:
        if rope is not None:
            return angles(kind, rope)
        cos, sin = angles(kind, config.rope)
        return jnp.ones_like(cos), jnp.zeros_like(sin)

    pairs = [(kind.head_dim, rope) for kind, rope in zip(config.kinds, config.ropes, strict=True)]
    found = {
        pair: rotation(config.kinds[pairs.index(pair)], pair[1]) for pair in dict.fromkeys(pairs)
    }
    which, kinds = [[*found].index(pair) for pair in pairs], [*found.values()]
    # Made here, so that a scan over the layers does not make them in each.
    if len(config.groups) == 1:
        cos, sin = map(jnp.stack, zip(*kinds, strict=True)) if len(kinds) > 1 else kinds[0]

    def at(index: int | Array) -> Angles:
        if len(kinds) == 1 or isinstance(index, int):
            return kinds[which[index] if len(kinds) > 1 else 0]
        return cos[jnp.array(which)[index]], sin[jnp.array(which)[index]]

    return at


def node_heads(
    layer: Layer | JoinedLayer,
    config: ModelConfig,
    inputs: tuple[Float[Array, "D BN"], ...],
    norms: tuple[Float[Array, " D"], ...],
    y: Float[Array, "In BN"] | None,
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    batch: int,
    fused: Fused | None,
) -> tuple[
    Float[Array, "B K G N E"], Float[Array, "B K E N"] | None, Float[Array, "B K N E"] | None
]:
    """`heads` of the nodes of B trees as tree_attention.attend takes it, by a kernel where there is one.

    The matrices read the inputs, each normed alone, below each other. `y`: that, where it is made; a layer without these norms
    has it alone, and no inputs.
    """
    eps, E = config.rms_eps, config.head_dim
    joined = isinstance(layer, JoinedLayer)
    matrices = (layer.qkv,) if joined else (layer.q, layer.k, layer.v)
    biases = (layer.qkv_bias,) if joined else (layer.q_bias, layer.k_bias, layer.v_bias)
    changed = is_low_rank(matrices[0])
    K = layer.qkv.shape[0] if joined else layer.k.shape[0] // E
    G = config.num_heads // K
    given = (
        (matrices[0].weight,) if changed else matrices, biases, (layer.q_norm, layer.k_norm), angles, (K, G, E), batch,
        eps, fused,
    )  # fmt: skip
    with jax.named_scope("attention"):
        found, is_usual = None, config.is_usual and config.rope.fraction == 1
        is_plain = is_usual and all(isinstance(matrix, jax.Array) for matrix in matrices)
        if inputs and is_plain:
            found = projections.heads(inputs, norms, *given)
        if found is not None:
            return found
        if y is None:
            pairs = zip(inputs, norms, strict=True)
            y = jnp.concatenate([ops.rms_norm(x, norm, eps, 0) for x, norm in pairs])
        if is_plain or (changed and is_usual):
            change = ops.change(y, layer.qkv, 0) if changed else None
            found = product_parts.heads(y, *given, change)
    if found is not None:
        return found
    q, k, v = heads(layer, config, y, *angles, 0)
    if k is None:
        return ops.queries_by_node(q, K, batch), None, None
    return ops.by_node(q, k, v, batch)


def attention_heads(
    layer: JoinedLayer,
    config: ModelConfig,
    x: tuple[Float[Array, "D BN"], Float[Array, "D BN"] | None],
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    batch: int,
    fused: Fused | None,
) -> tuple[
    Float[Array, "B K G N E"], Float[Array, "B K E N"] | None, Float[Array, "B K N E"] | None
]:
    """`node_heads` of a layer that reads x; x: also normed, where a kernel made that too."""
    x, normed = x
    if not config.is_usual:
        y = norm(x, layer.attention_norm, config, 0)
        return node_heads(layer, config, (), (), y, angles, batch, fused)
    return node_heads(layer, config, (x,), (layer.attention_norm,), normed, angles, batch, fused)


@jax.named_scope("layer")
@shaped
def tree_layer(
    layer: JoinedLayer,
    config: ModelConfig,
    x: tuple[Float[Array, "D BN"], Float[Array, "D BN"] | None],
    next_norm: Float[Array, " D"] | None,
    angles: tuple[Float[Array, "half BN"], Float[Array, "half BN"]],
    ancestors: Bool[Array, "B N N"],
    past: tuple[Float[Array, "B K E S"], Float[Array, "B K _ _"], Int[Array, " B"], bool],
    fused: Fused | None = None,
    arrivals: Int32[Array, "B K tiles"] | None = None,
    first: Int[Array, "B N"] | None = None,
    wraps: bool = False,
    kv: tuple[Float[Array, "B K E N"], Float[Array, "B K N E"]] | None = None,
    given: Float[Array, "P BN"] | None = None,
) -> tuple[
    tuple[Float[Array, "D BN"], Float[Array, "D BN"] | None],
    Float[Array, "B K E N"],
    Float[Array, "B K N E"],
    Int32[Array, "B K tiles"] | None,
    Routed | None,
]:
    """The layer's output, keys and values of tree nodes, `arrivals` of the next layer's attention, what the router did.

    `past`: the cached keys and values, the number of committed slots of each sequence, and whether the values have slots
    on their last axis. `first`, `wraps`: see tree_attention.attend. `kv`: of the nodes in another layer, and `past` of that
    layer, for one that has none; `given`: what the layer gets of each token. x and the output: also normed, for this layer
    and by `next_norm`, where one kernel made both.
    """
    q, k, v = attention_heads(layer, config, x, angles, ancestors.shape[0], fused)
    k, v = kv if k is None else (k, v)
    options = *past, fused, arrivals, first, wraps, config.score_cap
    attended, arrivals = tree_attention.attend(q, k, v, ancestors, *options)
    attended = ops.by_feature(attended)
    *ended, routed = finish_nodes(layer, config, x[0], attended, next_norm, fused, given)
    return tuple(ended), k, v, arrivals, routed
