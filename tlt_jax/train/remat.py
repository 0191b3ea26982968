"""Chooses what each layer keeps for the backward pass, by the memory of a device (model.remat auto). Compiles nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.data import packing
from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.models import architecture, decoder_layer, lora, remat as remats
from tlt_jax.models.remat import ATTENTION, FULL, NONE, PRODUCTS, Remat
from tlt_jax.train.recipe import Recipe

GIB = 2**30
# Shares of a device's memory that stay free: for fragments and what the estimate misses; for fragments alone.
SPARE, FRAGMENTS = 0.08, 0.03


def chosen(config: Config, recipe: Recipe, held: int, limit: int) -> Remat:
    """The levels with which layers keep as much as `limit` bytes of a device allow, beside `held` bytes of other arrays.

    A function of the configuration and of the whole GiB of the limit, so that a run repeats and resumes with the same
    programs. It rests on shapes (`estimate`).
    """
    kept, rest = estimate(config, recipe)
    return levels(kept, recipe.model.num_layers, (1 - SPARE) * whole(limit) - held - rest)


def corrected(config: Config, recipe: Recipe, held: int, limit: int, needed: int) -> Remat:
    """The levels once the program with those of the recipe is compiled, and its temporaries are `needed` bytes.

    Those of the recipe if they fit; else what `chosen` gives when the estimate is higher by what it missed.
    """
    if held + needed <= (1 - FRAGMENTS) * whole(limit):
        return recipe.remat
    kept, rest = estimate(config, recipe)
    missed = needed - rest - sum(kept[level] for level in recipe.remat)
    return chosen(config, recipe, held + max(missed, 0), limit)


def whole(limit: int) -> int:
    """Whole GiB of a device's bytes, so that some bytes less change nothing; of less than one GiB all."""
    return limit // GIB * GIB if limit >= GIB else limit


def estimate(config: Config, recipe: Recipe) -> tuple[dict[str, int], int]:
    """Bytes that a layer keeps by level, as far as a level may be chosen, and bytes of all other temporaries.

    Those are the layers' inputs, and the larger of the temporaries of the head and of one layer; beside the layer's lie the
    head's gradient, and what adapters add to the layer's products.
    """
    tokens = packing.rows(config) // recipe.mesh.shape["data"], packing.row_tokens(config)
    kept = layer_bytes(recipe, *tokens)
    itemsize = jnp.dtype(recipe.compute_dtype).itemsize
    inputs = recipe.model.num_layers * tokens[0] * tokens[1] * recipe.model.hidden_size * itemsize
    layer = kept[NONE]
    if not is_cpu(recipe.mesh):
        layer = 2 * kept[PRODUCTS]  # and their gradients: XLA fuses what lies between
        # Reading back what NONE keeps takes longer than computing norms and activations again. On CPUs the times are equal.
        kept = {level: size for level, size in kept.items() if level != NONE}
    layer += weight_bytes(recipe) + head_gradient_bytes(recipe)
    layer += change_bytes(recipe, tokens[0] * tokens[1])
    return kept, inputs + max(layer, head_bytes(recipe))


def levels(kept: Mapping[str, int], layers: int, free: float) -> Remat:
    """The levels with which layers keep the most in `free` bytes; `kept`: bytes of a layer by level, from most to FULL.

    NONE for all layers or for none: it would copy the weights of some layers. Otherwise the first layers have one level, the
    others the next lower one.
    """
    names = list(kept)
    if NONE in kept and layers * kept[NONE] <= free:
        return (NONE,) * layers
    names = [name for name in names if name != NONE]
    for high, low in zip(names, names[1:], strict=False):
        spare = free - layers * kept[low]
        if spare >= 0 and (count := min(layers, int(spare // max(kept[high] - kept[low], 1)))):
            return (high,) * count + (low,) * (layers - count)
    return (FULL,) * layers


@cache
def layer_bytes(recipe: Recipe, rows: int, tokens: int) -> dict[str, int]:
    """Bytes that a layer keeps on one device beside its input and weights, by level, for so many packed rows."""
    model, parts = recipe.model, recipe.mesh.shape["model"]
    heads = max(1, model.num_kv_heads // parts)
    part = replace(
        model,
        num_heads=model.num_heads // parts,
        num_kv_heads=heads,
        mlp_dim=model.mlp_dim // parts,
    )
    # The first device alone, on which attention has the same form. Only shapes are computed.
    mesh = Mesh(
        recipe.mesh.devices[:1, :1], recipe.mesh.axis_names, axis_types=recipe.mesh.axis_types
    )

    def shaped(weights: Any) -> Any:
        return jax.tree.map(
            lambda weight: jax.ShapeDtypeStruct(weight.shape, recipe.compute_dtype), weights
        )

    weights = architecture.layer_weights(part, heads, None)
    layer = shaped(weights)
    trained = shaped(lora.of_layer(recipe.lora, weights)) if recipe.lora else layer
    x = jax.ShapeDtypeStruct((rows, tokens, model.hidden_size), recipe.compute_dtype)

    def body(x: jax.Array, trained: Any, layer: architecture.Layer) -> jax.Array:
        layer = lora.changed(layer, trained) if recipe.lora else trained
        ids = jnp.zeros((rows, tokens), jnp.int32)
        angles = decoder_layer.packed_angles(part, ids, x.dtype)
        given = angles, ids, recipe.attention_block, recipe.longest, mesh
        return decoder_layer.packed_layer(layer, part, x, *given)[0]

    def size(level: str) -> int:
        kept = remats.keeping(level, body)
        saved = jax.eval_shape(
            lambda x, trained, layer: jax.vjp(lambda *given: kept(*given, layer), x, trained)[1],
            x, trained, layer,
        )  # fmt: skip
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))

    least = size(FULL)  # input and weights
    return {level: size(level) - least for level in (NONE, PRODUCTS, ATTENTION)} | {FULL: 0}


def weight_bytes(recipe: Recipe) -> int:
    """Bytes of a layer's gathered weights in the compute dtype, and of its gradient in float32 before it is added."""

    def count(weights: Any) -> int:
        """Numbers of a layer on one device."""
        sizes = (math.prod(weight.shape[1:]) for weight in jax.tree.leaves(weights))
        return sum(sizes) // recipe.mesh.shape["model"]

    layers = count(architecture.weights(recipe.model, 1).layers)
    adapters = count(lora.weights(recipe.lora, recipe.model, 1)) if recipe.lora else 0
    itemsize = jnp.dtype(recipe.compute_dtype).itemsize
    return (layers + adapters) * itemsize + (adapters or layers) * 4


def change_bytes(recipe: Recipe, tokens: int) -> int:
    """Bytes of the adapters' results in one layer, which are added to the products of the base."""
    if not recipe.lora:
        return 0
    adapters = lora.weights(recipe.lora, recipe.model, 1).present.values()
    width = sum(one.b.shape[1] for one in adapters) // recipe.mesh.shape["model"]
    return tokens * width * jnp.dtype(recipe.compute_dtype).itemsize


def head_gradient_bytes(recipe: Recipe) -> int:
    """Bytes of the head's gradient, which is made before those of the layers, and added to the sums after them.

    The head of a base has none.
    """
    if recipe.lora:
        return 0
    vocab = architecture.padded_vocab(recipe.model, recipe.mesh.shape["model"])
    whole = vocab * recipe.model.hidden_size * jnp.dtype(recipe.param_dtype).itemsize
    return whole // recipe.mesh.size


def head_bytes(recipe: Recipe) -> int:
    """Bytes of a copy of the head in the compute dtype, its gradient in float32, and two more arrays of logits of a chunk."""
    parts = recipe.mesh.shape["model"]
    vocab = architecture.padded_vocab(recipe.model, parts) // parts
    gradient = 0 if recipe.lora else 4
    copy = vocab * recipe.model.hidden_size * (jnp.dtype(recipe.compute_dtype).itemsize + gradient)
    return copy + 2 * recipe.logits_chunk * vocab * 4
