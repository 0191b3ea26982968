"""Layers over tree nodes by our kernels and by XLA, side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels.fused import ADDED, GATED, HEADS, Fused
from tlt_jax.models import (
    architecture,
    decoder_layer,
    drafter as drafters,
    eagle,
    layers as ops,
    lora,
)
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.low_rank import Lora

SIZES = {"vocab_size": 64, "num_layers": 1, "max_positions": 64, "family": "qwen2"}
POLICIES = {
    "biases": ModelConfig(
        hidden_size=192, num_heads=7, num_kv_heads=1, head_dim=64, mlp_dim=304,
        qkv_bias=True, o_bias=True, mlp_bias=True, **SIZES,
    ),
    "head norms": ModelConfig(
        hidden_size=160, num_heads=2, num_kv_heads=1, head_dim=128, mlp_dim=288, qk_norm="head", **SIZES
    ),
    "split": ModelConfig(
        hidden_size=64, num_heads=3, num_kv_heads=1, head_dim=64, mlp_dim=1600, **SIZES
    ),
}  # fmt: skip
POLICIES["adapters"] = POLICIES["biases"]
ADAPTERS = Lora(4, 8.0, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def noisy(tree, dtype: str):
    """The pytree in this dtype, with noise on all, so that no norm is 1 and no bias 0."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    leaves = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in pairs]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), jax.tree.unflatten(structure, leaves))


def layers(name: str, dtype: str):
    """The policy's configuration and layer, and those of a drafter for it."""
    config, mesh = POLICIES[name], make_mesh(1, 1)
    drafter = drafters.for_policy(config, "eagle3")
    params = noisy(architecture.init(config, mesh, jax.random.key(0), "float32"), dtype)
    adapters = ADAPTERS if name == "adapters" else None
    if adapters:
        drawn = noisy(lora.init(adapters, config, mesh, jax.random.key(2), "float32"), dtype)
        params = lora.applied(params, drawn)
    to_rollout = partial(
        architecture.to_rollout, config=config, mesh=mesh, dtype=dtype, lora=adapters
    )
    rollout = jax.jit(to_rollout)(params)
    drafts = noisy(drafters.init(drafter, mesh, jax.random.key(0), "float32"), dtype)
    return config, rollout.layers[0], drafter, drafts


def both(name: str, dtype: str, batch: int, nodes: int, fused: Fused) -> list[list[np.ndarray]]:
    """Queries, keys, values, output and normed output of the layers of policy and drafter: with the kernels, and without."""
    config, layer, drafter, drafts = layers(name, dtype)
    random, count = np.random.default_rng(0), batch * nodes

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), dtype)

    x, other, attended = (
        normal(width, count)
        for width in (config.hidden_size, config.hidden_size, config.num_heads * config.head_dim)
    )
    turns = 3 * random.normal(size=(config.head_dim // 2, count))
    angles = jnp.asarray(np.cos(turns), dtype), jnp.asarray(np.sin(turns), dtype)

    def results(fused: Fused | None) -> list[np.ndarray]:
        heads = decoder_layer.attention_heads(layer, config, (3 * x, None), angles, batch, fused)
        drafted = eagle.node_heads(drafts, drafter, other, 3 * x, angles, batch, fused)
        ends = []
        for one, of in ((layer, config), (drafts.layers, drafter.layers)):
            norm = one.attention_norm
            total, normed, _ = decoder_layer.finish_nodes(one, of, x, attended, norm, fused)
            ends += [total, ops.rms_norm(total, norm, of.rms_eps, 0) if normed is None else normed]
        return [*heads, *drafted, *ends]

    return [[np.asarray(one) for one in results(form)] for form in (fused, None)]


def interpreted(
    name: str, dtype: str, batch: int, nodes: int, in_parts: bool = False, *, fused: Fused
) -> list[list[np.ndarray]]:
    """`both`; `in_parts`: by the kernels of large matrices."""
    if in_parts:
        fused = replace(fused, on=fused.on - {HEADS, ADDED, GATED})
    return both(name, dtype, batch, nodes, fused)
