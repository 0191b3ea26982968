"""Chooses what each layer keeps for the backward pass, by the memory of a device (model.remat auto). Compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.data import packing
from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.models import architecture, decoder_layer, remat as remats
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

    Those are the layers' inputs, and the larger of the temporaries of the head and of one layer; beside the layer's lies the
    head's gradient.
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
    layer = jax.tree.map(
        lambda weight: jax.ShapeDtypeStruct(weight.shape, recipe.compute_dtype),
        architecture.layer_weights(part, heads, None),
    )
    x = jax.ShapeDtypeStruct((rows, tokens, model.hidden_size), recipe.compute_dtype)

    def body(x: jax.Array, layer: architecture.Layer) -> jax.Array:
        ids = jnp.zeros((rows, tokens), jnp.int32)
        angles = decoder_layer.packed_angles(part, ids, x.dtype)
        given = angles, ids, recipe.attention_block, recipe.longest, mesh
        return decoder_layer.packed_layer(layer, part, x, *given)[0]

    def size(level: str) -> int:
        saved = jax.eval_shape(
            lambda *given: jax.vjp(remats.keeping(level, body), *given)[1], x, layer
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))

    least = size(FULL)  # input and weights
    return {level: size(level) - least for level in (NONE, PRODUCTS, ATTENTION)} | {FULL: 0}


def weight_bytes(recipe: Recipe) -> int:
    """Bytes of a layer's gathered weights in the compute dtype, and of its gradient in float32 before it is added."""
    stacked = architecture.weights(recipe.model, 1).layers
    count = sum(int(jnp.prod(jnp.array(weight.shape[1:]))) for weight in jax.tree.leaves(stacked))
    return count // recipe.mesh.shape["model"] * (jnp.dtype(recipe.compute_dtype).itemsize + 4)


def head_gradient_bytes(recipe: Recipe) -> int:
    """Bytes of the head's gradient, which is made before those of the layers, and added to the sums after them."""
    vocab = architecture.padded_vocab(recipe.model, recipe.mesh.shape["model"])
    whole = vocab * recipe.model.hidden_size * jnp.dtype(recipe.param_dtype).itemsize
    return whole // recipe.mesh.size


def head_bytes(recipe: Recipe) -> int:
    """Bytes of a copy of the head in the compute dtype, its gradient in float32, and two more arrays of logits of a chunk."""
    parts = recipe.mesh.shape["model"]
    vocab = architecture.padded_vocab(recipe.model, parts) // parts
    copy = vocab * recipe.model.hidden_size * (jnp.dtype(recipe.compute_dtype).itemsize + 4)
    return copy + 2 * recipe.logits_chunk * vocab * 4
