"""The policy network: packed forward for training, prefill and tree forward for rollout; arrays in, arrays out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from tlt_jax.distributed.mesh import is_gpu
from tlt_jax.kernels import cache_rows
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.numerics import capped, contract, masked
from tlt_jax.models import (
    architecture,
    decoder_layer,
    kv_cache,
    layers as ops,
    moe,
    remat as remats,
)
from tlt_jax.models.architecture import NORMED, Captures, Layer, ModelConfig, Params, head
from tlt_jax.models.kv_cache import KVCache, Scratch
from tlt_jax.models.moe import Routers
from tlt_jax.models.params import Tiles, for_columns
from tlt_jax.shapes import shaped


def hidden(*given: Any, **options: Any) -> tuple[Float[Array, "B T D"], Float[Array, "B T F"]]:
    """`routed_hidden` without what the routers did."""
    return routed_hidden(*given, **options)[:2]


@shaped
def routed_hidden(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    compute_dtype: DTypeLike,
    remat: remats.Remat = (),
    block: int = 512,
    longest: int | None = None,
    mesh: Mesh | None = None,
    captures: Captures = (),
    replayed: Integer[Array, "B T L k"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T F"], Routers | None]:
    """Normed last hidden states of packed rows, the captured features, and what the routers did.

    `replayed`: of L layers with experts, see moe.route. A token attends to itself and to the earlier tokens of its segment;
    segment 0 is padding. No segment has more than `longest` tokens. `params`: "train" layout. With a mesh, rows stay sharded
    over `data`, and weights are gathered layer by layer. `remat`: what each layer keeps for the backward pass.
    """

    rows = partial(ops.by_row, mesh=mesh)

    kind, counts = config.kinds[0], segments > 0
    ids = None if replayed is None else jnp.moveaxis(replayed, 2, 0)

    def body(
        carry: tuple[Array, list[Array]], step: tuple[Array, Layer, Array | None]
    ) -> tuple[tuple[Array, list[Array]], Routers | None]:
        (x, kept), (depth, layer, ids) = carry, step
        layer = jax.tree.map(lambda leaf: leaf.astype(compute_dtype), layer)
        given = angles(depth - 1), segments, block, longest, mesh
        x, *_, routed = decoder_layer.packed_layer(
            layer, kind, x, *given, index=depth - 1, replayed=ids
        )
        x, pairs = rows(x), zip(captures, kept, strict=True)
        kept = [jnp.where(depth == capture, x, old) for capture, old in pairs]
        return (x, kept), None if routed is None else moe.measured(routed, counts)

    def at_depth(carry: tuple[Array, list[Array]], depth: Array):
        """`body` on the layer at this depth, read in its place: a slice of some layers would be a copy of their weights."""
        here = jax.tree.map(lambda leaf: leaf[depth - 1], (params.layers, ids))
        return body(carry, (depth, *here))

    angles = decoder_layer.angles_by_layer(
        config, lambda kind, rope: decoder_layer.packed_angles(kind, positions, compute_dtype, rope)
    )
    with jax.named_scope("embed"):
        x = rows(scaled(params.embed[tokens].astype(compute_dtype), config.embed_scale))
    if len(config.groups) > 1:
        given = segments, block, longest, mesh
        return unlike_layers(params, config, tokens, x, angles, given, remat, captures, replayed)
    depths, carry = jnp.arange(1, config.num_layers + 1), (x, [x] * len(captures))
    found = []
    for level, first, count in remats.spans(remat, config.num_layers):
        if count == config.num_layers:
            steps = depths, params.layers, ids
            carry, routers = jax.lax.scan(remats.keeping(level, body), carry, steps)
        else:
            part = depths[first : first + count]
            carry, routers = jax.lax.scan(remats.keeping(level, at_depth), carry, part)
        found.append(routers)
    x, kept = carry
    x = final(x, params.final_norm.astype(compute_dtype), config, -1)
    return x, gathered(captures, kept, x, axis=-1), moe.joined(found, jnp.concatenate)


def unlike_layers(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    x: Float[Array, "B T D"],
    angles: Callable[[int], decoder_layer.Angles],
    options: tuple[Int[Array, "B T"], int, int | None, Mesh | None],
    remat: remats.Remat,
    captures: Captures,
    replayed: Integer[Array, "B T L k"] | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T F"], Routers | None]:
    """`routed_hidden` from the first hidden states on, where layers have different shapes: one by one, without a scan."""
    rows, dtype = partial(ops.by_row, mesh=options[-1]), x.dtype
    given, counts = token_inputs(params, config, tokens, x), options[0] > 0

    def run(
        index: int, x: Array, layer: Layer, rotation: tuple, kv: tuple | None, own: Array | None, ids: Array | None
    ):  # fmt: skip
        layer = jax.tree.map(lambda leaf: leaf.astype(dtype), layer)
        kind = config.kinds[index]
        x, *kv, routed = decoder_layer.packed_layer(
            layer, kind, x, rotation, *options, index=index, kv=kv, given=own, replayed=ids
        )
        return rows(x), tuple(kv), None if routed is None else moe.measured(routed, counts)

    kept, states, found, sparse = {}, [x], [], config.expert_layers
    for level, first, count in remats.spans(remat, config.num_layers):
        for index in range(first, first + count):
            layer = architecture.layer_at(params.layers, config, index)
            own = None if given is None else given[:, :, index]
            kv, has_ids = (
                kept.get(config.kv_layers[index]),
                replayed is not None and index in sparse,
            )
            ids = replayed[:, :, sparse.index(index)] if has_ids else None
            x, kept[index], routers = remats.keeping(level, partial(run, index))(
                x, layer, angles(index), kv, own, ids
            )
            states.append(x)
            found.append(routers)
    x = final(x, params.final_norm.astype(dtype), config, -1)
    features = gathered(captures, [states[capture] for capture in captures], x, axis=-1)
    return x, features, moe.joined(found, jnp.stack)


@jax.named_scope("token")
def token_inputs(
    params: Params, config: ModelConfig, tokens: Int[Array, "*A"], x: Float[Array, "*A D"]
) -> Float[Array, "*A L P"] | None:
    """What every layer gets of each token beside the hidden state; None: nothing. x: the first hidden states.

    The mean of an embedding of all layers and a projection of x, times the square root of 2 (as Gemma 4 has it).
    """
    if not config.token_inputs:
        return None
    P, split = config.token_inputs, (*tokens.shape, config.num_layers, config.token_inputs)
    embedded = math.sqrt(P) * params.inputs_embed[tokens].astype(x.dtype)
    made = ops.project(x, params.inputs_project.astype(x.dtype), None, -1)
    made = (made / math.sqrt(config.hidden_size)).reshape(split)
    made = decoder_layer.norm(made, params.inputs_norm.astype(x.dtype), config)
    return (made + embedded.reshape(split)) / math.sqrt(2)


def scaled(x: Float[Array, "*A"], scale: float) -> Float[Array, "*A"]:
    """x times a factor that only some families have."""
    return x if scale == 1 else scale * x


def final(
    x: Float[Array, "*A D"], weight: Float[Array, " D"], config: ModelConfig, axis: int
) -> Float[Array, "*A D"]:
    """The normed last hidden states. The scale of the logits is in them, so that whoever has them needs only the head."""
    return scaled(decoder_layer.norm(x, weight, config, axis), config.logit_scale)


def gathered(
    captures: Captures,
    kept: Sequence[Float[Array, "*A D"]],
    normed: Float[Array, "*A D"],
    axis: int,
) -> Float[Array, "*A F"]:
    """The captured hidden states, concatenated on `axis`; of width 0 without captures."""
    if not captures:
        return jax.lax.slice_in_dim(normed, 0, 0, axis=axis % normed.ndim)
    chosen = [normed if capture == NORMED else x for capture, x in zip(captures, kept, strict=True)]
    return jnp.concatenate(chosen, axis=axis)


@jax.named_scope("head")
@shaped
def logits(
    params: Params, config: ModelConfig, x: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """Logits over the padded vocabulary, in at least float32; those of padding are the lowest number."""
    scores = contract("...d,vd->...v", x, head(params).astype(x.dtype))
    scores = capped(scores, config.logit_cap)
    return masked(scores, jnp.arange(scores.shape[-1]) < config.vocab_size)


@jax.named_scope("prefill")
@shaped
def prefill(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "Q P"],
    lengths: Int[Array, " Q"],
    captures: Captures = (),
    block: int = 512,
    captures_states: bool = False,
    mesh: Mesh | None = None,
    rings: tuple[int, ...] = (),
) -> Scratch:
    """Keys, values, features and states of whole prompts; those past a prompt's length are undefined.

    `rings`: of the cache that they are for; layers with fewer slots than a prompt has tokens have its last ones.

    Values are finite, and keys NaN where they were not; past a prompt's length both are finite. `params`: "rollout" layout.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    with jax.named_scope("embed"):
        x = scaled(params.embed[tokens], config.embed_scale)
    angles = decoder_layer.angles_by_layer(
        config, lambda kind, rope: decoder_layer.packed_angles(kind, positions, x.dtype, rope)
    )
    inputs, kept, states, routed = token_inputs(params, config, tokens, x), {}, [x], []
    for index, (layer, kind) in enumerate(zip(params.layers, config.kinds, strict=True)):
        given = angles(index), segments, block
        x, *kv, router = decoder_layer.packed_layer(
            layer, kind, x, *given, mesh=mesh, for_cache=True, index=index,
            kv=kept.get(config.kv_layers[index]), given=None if inputs is None else inputs[:, :, index],
        )  # fmt: skip
        kept[index] = tuple(kv)
        states.append(x)
        routed.append(router)

    keys, values = [], []
    for place, index in enumerate(config.cached_layers):
        ring, (k, v) = rings[place] if rings else 0, kept[index]
        keys.append(kv_cache.in_ring(jnp.moveaxis(k, 1, 3), lengths, ring, 3))
        values.append(kv_cache.in_ring(jnp.moveaxis(v, 1, 2), lengths, ring, 2))
    normed = final(x, params.final_norm, config, -1)  # XLA removes it unless captured
    features = gathered(captures, [states[capture] for capture in captures], normed, axis=-1)
    normed = normed if captures_states else None
    return Scratch(tuple(keys), tuple(values), features, normed, None, moe.record(routed, config))


def seen_in_windows(
    config: ModelConfig, positions: Int[Array, "B N"], ancestors: Bool[Array, "B N N"]
) -> Callable[[int], tuple[Bool[Array, "B N N"], Int[Array, "B N"] | None]]:
    """The nodes that each node sees in a layer, by its index, and the first position that it sees; None: all."""
    apart = positions[:, :, None] - positions[:, None, :]
    by_window = {
        window: (ancestors & (apart < window), positions - (window - 1)) if window else (ancestors, None)
        for window in config.windows or (0,)
    }  # fmt: skip
    return lambda index: by_window[config.windows[index] if config.windows else 0]


@shaped
def tree_forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B N"],
    positions: Int[Array, "B N"],
    ancestors: Bool[Array, "B N N"],
    cache: KVCache,
    lengths: Int[Array, " B"],
    captures: Captures = (),
    captures_states: bool = False,
    fused: Fused | None = None,
) -> tuple[Float[Array, "B N V"], Scratch]:
    """Logits of tree nodes, and the Scratch from which `commit` takes a path.

    A node attends to the committed slots, its ancestors and itself. `params`: "rollout" layout.
    """
    B, N = tokens.shape
    with jax.named_scope("embed"):
        x = scaled(params.embed[tokens.reshape(-1)].T, config.embed_scale)
    angles = decoder_layer.angles_by_layer(
        config, lambda kind, rope: decoder_layer.node_angles(kind, positions, x.dtype, rope)
    )
    seen = seen_in_windows(config, positions, ancestors)
    inputs = token_inputs(params, config, tokens.reshape(-1), x.T)
    found, states, normed, routed = {}, [x], None, []
    arrivals: dict[ModelConfig, Array | None] = {}  # of layers of one shape
    norms = [*(layer.attention_norm for layer in params.layers[1:]), params.final_norm]
    for index, (layer, norm, kind) in enumerate(
        zip(params.layers, norms, config.kinds, strict=True)
    ):
        source = config.kv_layers[index]
        place = config.cached_layers.index(source)
        past = cache.keys[place], cache.values[place], lengths, cache.slots_last
        (own, first), rotation = seen(index), angles(index)
        (x, normed), k, v, arrivals[kind], router = decoder_layer.tree_layer(
            layer, kind, (x, normed), norm, rotation, own, past, fused, arrivals.get(kind), first,
            cache.wraps(place), found.get(source), None if inputs is None else inputs[:, index].T,
        )  # fmt: skip
        found[index] = k, v
        states.append(x)
        routed.append(router)
    kept = [found[index] for index in config.cached_layers]

    if normed is None:
        x = final(x, params.final_norm, config, 0)
    else:
        x = scaled(normed, config.logit_scale)
    with jax.named_scope("head"):
        # On GPUs XLA fuses more into reductions of the last axis.
        if fused is not None and is_gpu(fused.mesh):
            scores = capped(contract("dt,vd->tv", x, head(params)), config.logit_cap)
            if config.vocab_size < scores.shape[1]:
                scores = masked(scores, jnp.arange(scores.shape[1]) < config.vocab_size)
        elif isinstance(matrix := for_columns(head(params), B * N), Tiles):
            scores = capped(ops.project(x.T, matrix, None, -1), config.logit_cap)
            if config.vocab_size < scores.shape[1]:
                scores = masked(scores, jnp.arange(scores.shape[1]) < config.vocab_size)
        else:
            scores = capped(contract("vd,dt->vt", matrix, x), config.logit_cap)
            scores = masked(scores, jnp.arange(scores.shape[0])[:, None] < config.vocab_size).T
    features = gathered(captures, [states[capture] for capture in captures], x, axis=0).T.reshape(
        B, N, -1
    )

    # Make the scratch depend on the end of the pass: XLA would copy a cache that may be written before it is read.
    after = x.T if cache_rows.runs(fused, cache.slots_last) else None
    if after is None:
        sound = (x[0] == x[0]).reshape(B, 1, 1, N)
        still = jnp.swapaxes(sound, 2, 3)
        kept = [(jnp.where(sound, k, 0), jnp.where(still, v, 0)) for k, v in kept]
    keys, values = zip(*kept, strict=True)
    states = x.T.reshape(B, N, -1) if captures_states else None
    experts = moe.record(routed, config)
    experts = None if experts is None else experts.reshape(B, N, -1)
    scratch = Scratch(keys, values, features, states, after, experts)
    return scores.reshape(B, N, -1), scratch
