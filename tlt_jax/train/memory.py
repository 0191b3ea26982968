"""Device memory of a run: bytes of each kind of large array, the knobs that change them, and what layers keep (model.remat)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.config import Config, schema, validate
from tlt_jax.config.schema import AUTO
from tlt_jax.data import packing
from tlt_jax.distributed.job import Job
from tlt_jax.distributed.mesh import device_kind, is_cpu
from tlt_jax.drafter import recipe as drafter_recipe, update as drafter_update
from tlt_jax.drafter.recipe import DrafterRecipe
from tlt_jax.errors import ConfigError
from tlt_jax.models import (
    architecture,
    decoder_layer,
    drafter as drafters,
    lora,
    moe,
    remat as remats,
    targets,
)
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.models.remat import ATTENTION, FULL, NONE, PRODUCTS, Remat
from tlt_jax.rollout.executables.programs import GroupShapes, StateShape
from tlt_jax.rollout.request import bucket_width
from tlt_jax.train import policy_update
from tlt_jax.train.policy_update import Recipe

GIB = 2**30
TPU_GIB = {
    "TPU v4": 32,
    "TPU v5 lite": 16,
    "TPU v5e": 16,
    "TPU v5": 95,
    "TPU v5p": 95,
    "TPU v6 lite": 32,
    "TPU v6e": 32,
}
RESIDENT = ("weights", "optimizer", "reference", "drafter", "drafter optimizer")
ROLLOUT = (
    "rollout copy", "cache", "features", "states", "drafter copy", "drafter cache", "drafter in training",
)  # fmt: skip
UPDATE = ("gradients", "logits chunk", "drafter features", "routing", "supports")
KNOBS = {
    "weights": "mesh.data or mesh.model (more devices)",
    "optimizer": "mesh.data (the moments are sharded over it), or model.lora.rank (adapters have few)",
    "reference": "mesh.data (more devices), or algorithm.kl_coef 0, which needs no reference policy",
    "rollout copy": "mesh.model (the copy is sharded over it), or model.compute_dtype bfloat16",
    "cache": "rollout.slots, or rollout.max_new_tokens, or mesh.model",
    "features": "rollout.slots, or rollout.max_new_tokens, or speculation.drafter (one that reads fewer hidden states)",
    "states": "rollout.slots, or rollout.max_new_tokens, or mesh.model",
    "drafter": "mesh.data (more devices)",
    "drafter copy": "mesh.model (the copy is sharded over it)",
    "drafter cache": "rollout.slots, or rollout.max_new_tokens, or mesh.model",
    "drafter in training": "mesh.model (every data group trains a copy, sharded over it)",
    "drafter optimizer": "mesh.data (the moments are sharded over it)",
    "drafter features": "train.rows or train.row_tokens, or drafter_training.share 0 (then only idle groups train the drafter)",
    "routing": "rollout.max_new_tokens, or algorithm.router_replay never",
    "supports": "rollout.top_k, or algorithm.support_replay false",
    "gradients": "mesh.data (their sums are sharded over it), or model.lora.rank (adapters have few)",
    "logits chunk": "mesh.model (the vocabulary is sharded over it)",
    "temporaries": "train.rows or model.remat full in the update; rollout.slots "
    "or the nodes of speculation.strategies in the rollout",
}

# Shares of a device's memory that stay free: for fragments and what the estimate misses; for fragments alone.
SPARE, FRAGMENTS = 0.08, 0.03

log = logging.getLogger(__name__)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )


def budget(
    config: Config,
    recipe: Recipe,
    shapes: GroupShapes,
    capacity: int,
    drafter: DrafterConfig | None,
) -> dict[str, int]:
    """Bytes on one device of each kind of large array, without the temporaries of programs.

    `shapes`: of a data group that decodes at most `capacity` sequences at once.
    """
    mesh, dtype = recipe.mesh, config.model.compute_dtype
    kinds = {
        **learning(config, recipe, drafter),
        "rollout copy": device_bytes(shapes.target.params),
        **caches(config, shapes, capacity),
    }
    if drafter:
        kinds["drafter copy"] = device_bytes(
            drafters.abstract(drafter, mesh, "rollout", dtype, is_bound=True)
        )
    if drafter and config.speculation.drafter == schema.ADAPTIVE:
        copies = drafter_update.abstract_copies(drafter_shapes(config, recipe, drafter))
        kinds["drafter in training"] = device_bytes(copies)
    return kinds


def learning(config: Config, recipe: Recipe, drafter: DrafterConfig | None) -> dict[str, int]:
    """The kinds of `budget` that exist during the policy update. "gradients" are the sums over accumulation steps."""
    model, mesh = recipe.model, recipe.mesh
    state, policy = policy_update.abstract_state(recipe), policy_update.abstract_policy(recipe)
    vocab = architecture.padded_vocab(model, mesh.shape["model"]) // mesh.shape["model"]
    tokens = packing.rows(config) // mesh.shape["data"] * packing.row_tokens(config)
    kinds = {
        "weights": device_bytes(policy),  # with adapters also their base
        "optimizer": device_bytes(state.opt_state),
        "gradients": device_bytes(state.params) * 4 // jnp.dtype(config.model.param_dtype).itemsize,
        "logits chunk": targets.chunk_length(tokens, recipe.logits_chunk) * vocab * 4,
    }
    if validate.replays(
        config.algorithm, recipe.compute_dtype, model
    ):  # of all answers at their longest
        sequences = -(-config.rollout.prompts * config.rollout.samples // mesh.shape["data"])
        width, dtype = moe.record_shape(model)
        kinds["routing"] = sequences * packing.longest(config) * width * dtype.itemsize
    if ids := validate.kept(config):
        sequences = -(-config.rollout.prompts * config.rollout.samples // mesh.shape["data"])
        kinds["supports"] = (
            sequences * packing.longest(config) * ids * jnp.dtype(jnp.int32).itemsize
        )
    if config.algorithm.kl_coef and not recipe.lora:  # else the base is the reference
        kinds["reference"] = kinds["weights"]
    if drafter:
        state = drafter_recipe.abstract_state(drafter_shapes(config, recipe, drafter))
        kinds["drafter"] = device_bytes(state.params)
    is_adaptive = config.speculation.drafter == schema.ADAPTIVE
    if drafter and is_adaptive:
        kinds["drafter optimizer"] = device_bytes(state.opt_state)
    if drafter and is_adaptive and config.drafter_training.share:
        widths = (len(drafter.captures) + 1) * model.hidden_size  # features and states
        kinds["drafter features"] = tokens * widths * jnp.dtype(config.model.compute_dtype).itemsize
    return kinds


def drafter_shapes(config: Config, recipe: Recipe, drafter: DrafterConfig) -> DrafterRecipe:
    """A recipe for the shapes of the drafter's state, which depend on no number of its loss or optimizer."""
    return DrafterRecipe(
        recipe.model, drafter, recipe.mesh, recipe.adam, param_dtype=config.model.param_dtype
    )


def fitted(config: Config, recipe: Recipe, drafter: DrafterConfig | None, job: Job) -> Recipe:
    """The recipe of a run on its devices, as `within`; the same in all processes, which all call this."""
    return within(config, recipe, drafter, int(job.told(device_memory(recipe.mesh))))


def within(
    config: Config, recipe: Recipe, drafter: DrafterConfig | None, limit: int, missed: int = 0
) -> Recipe:
    """With model.remat auto, the recipe whose layers keep as much as `limit` bytes of a device allow.

    A function of the configuration and of the whole GiB of the limit, so that a run repeats and resumes with the same
    programs. It rests on shapes (`estimate`), and on `missed` bytes by which these were too low.
    """
    if config.model.remat != AUTO:
        return recipe
    kept, rest = estimate(config, recipe)
    free = (1 - SPARE) * whole(limit) - held(config, recipe, drafter) - missed - rest
    return replace(recipe, remat=levels(kept, recipe.model.num_layers, free))


def corrected(
    config: Config, drafter: DrafterConfig | None, job: Job, recipe: Recipe, needed: int
) -> Recipe:
    """The recipe of `fitted` once its accumulation step is compiled, with `needed` bytes of temporaries.

    Where these do not fit, layers keep less, by what the estimate missed, which is logged. All processes call this alike,
    and follow the numbers of process 0.
    """
    limit, needed = int(job.told(device_memory(recipe.mesh))), int(job.told(needed))
    arrays = held(config, recipe, drafter)
    if arrays + needed <= (1 - FRAGMENTS) * whole(limit):
        return recipe
    kept, rest = estimate(config, recipe)
    missed = needed - rest - sum(kept[level] for level in recipe.remat)
    found = within(config, recipe, drafter, limit, max(missed, 0))
    if found != recipe and job.is_first:
        log.info(
            "model.remat auto: the update needs %.2f GiB of temporaries beside %.2f GiB, and a device has %.2f GiB: it is "
            "compiled again with %s",
            needed / GIB, arrays / GIB, limit / GIB, remats.spell(found.remat),
        )  # fmt: skip
    return found


def held(config: Config, recipe: Recipe, drafter: DrafterConfig | None) -> int:
    """Bytes on one device of the arrays that exist in the update, without the temporaries of its programs."""
    kinds = pick(learning(config, recipe, drafter), *RESIDENT, *UPDATE)
    return sum(size for kind, size in kinds.items() if kind != "logits chunk")  # a temporary


def caches(config: Config, shapes: GroupShapes, batch: int) -> dict[str, int]:
    """Bytes on one device of the caches of policy and drafter, for `batch` sequences of the longest length."""
    state = shapes.state(StateShape(0, batch, cache_slots(config)))
    kinds = {"cache": device_bytes((state.cache.keys, state.cache.values))}
    if state.cache.features.size:
        kinds["features"] = device_bytes(state.cache.features)
    if state.cache.states is not None:
        kinds["states"] = device_bytes(state.cache.states)
    if config.speculation.drafter != schema.NONE:
        bound = (shapes.drafter, *shapes.drafters.values())
        host = max(device_bytes(drafter.host_context(batch)) for drafter in bound)
        kinds["drafter cache"] = device_bytes((state.drafter, state.history)) + host
    return kinds


def cache_slots(config: Config) -> int:
    """Slots of the longest cache that a rollout of training or evaluation uses."""
    prompt = config.data.max_prompt_tokens
    longest = prompt + validate.answer_limit(config)
    if config.environment.path or config.environment.tools:  # whole conversations are prefilled
        return bucket_width(longest)
    return max(longest, bucket_width(prompt))


def device_memory(mesh: Mesh) -> int:
    """Memory of one device in bytes: a table for TPUs, a share of the host's memory for CPUs, else as the device reports."""
    if is_cpu(mesh):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count("cpu")
    if device_kind(mesh) in TPU_GIB:
        return TPU_GIB[device_kind(mesh)] * GIB
    return (mesh.devices.flat[0].memory_stats() or {})["bytes_limit"]


def phases(kinds: dict[str, int]) -> dict[str, dict[str, int]]:
    """The kinds that a device holds at once in the rollout (copies, caches) and in the update (gradients, logits)."""
    return {"rollout": pick(kinds, *RESIDENT, *ROLLOUT), "update": pick(kinds, *RESIDENT, *UPDATE)}


def pick(kinds: dict[str, int], *names: str) -> dict[str, int]:
    """The named kinds that exist in this run."""
    return {name: kinds[name] for name in names if name in kinds}


def preflight(
    config: Config,
    recipe: Recipe,
    shapes: GroupShapes,
    capacity: int,
    drafter: DrafterConfig | None,
) -> None:
    """Raises ConfigError, which names the knob to change, when the large arrays alone do not fit a device."""
    limit = device_memory(recipe.mesh)
    for name, kinds in phases(budget(config, recipe, shapes, capacity, drafter)).items():
        if sum(kinds.values()) > limit:
            raise ConfigError(
                f"the {name} does not fit: {spell(kinds)}, and a device has {limit / GIB:.2f} GiB: {advice(kinds)}"
            )


def spell(kinds: dict[str, int]) -> str:
    """`weights 1.20 GiB + ... = 3.40 GiB a device`."""
    parts = " + ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds.items())
    return f"{parts} = {sum(kinds.values()) / GIB:.2f} GiB a device"


def advice(kinds: dict[str, int]) -> str:
    """Names the knob that shrinks the largest kind."""
    largest = max(kinds, key=lambda kind: kinds[kind])
    return f"the largest are the {largest}: change {KNOBS[largest]}"


def whole(limit: int) -> int:
    """Whole GiB of a device's bytes, so that some bytes less change nothing; of less than one GiB all."""
    return limit // GIB * GIB if limit >= GIB else limit


def estimate(config: Config, recipe: Recipe) -> tuple[dict[str, int], int]:
    """Bytes that a layer keeps by level, as far as a level may be chosen, and bytes of all other temporaries.

    Those are the layers' inputs, and the larger of the temporaries of the head and of one layer; beside the layer's lie the
    head's gradient, and what adapters add to the layer's products.
    """
    model, mesh, parts = recipe.model, recipe.mesh, recipe.mesh.shape["model"]
    rows, length = packing.rows(config) // mesh.shape["data"], packing.row_tokens(config)
    kept, tokens = layer_bytes(recipe, rows, length), rows * length
    itemsize = jnp.dtype(recipe.compute_dtype).itemsize
    inputs = model.num_layers * tokens * (model.hidden_size + model.token_inputs) * itemsize
    layer = kept[NONE]
    if not is_cpu(mesh):
        layer = 2 * kept[PRODUCTS]  # and their gradients: XLA fuses what lies between
        # Reading back what NONE keeps takes longer than computing norms and activations again. On CPUs the times are equal.
        kept = {level: size for level, size in kept.items() if level != NONE}

    def count(weights: Any) -> int:
        """Numbers of a layer, of those with most, on one device."""
        groups = weights if isinstance(weights, tuple) else (weights,)
        sizes = [jax.tree.map(lambda leaf: math.prod(leaf.shape[1:]), one) for one in groups]
        return max(sum(jax.tree.leaves(size)) for size in sizes) // parts

    # The gathered weights in the compute dtype, the gradient in float32 before it is added, and the adapters' results.
    weights, adapters, width = count(architecture.weights(model, 1).layers), 0, 0
    if recipe.lora:
        trained = lora.weights(recipe.lora, model, 1)
        groups = trained.groups or (trained,)
        adapters = count(groups)
        widths = [sum(one.b.shape[1] for one in group.present.values()) for group in groups]
        width = max(widths) // parts
    layer += (weights + adapters) * itemsize + (adapters or weights) * 4 + tokens * width * itemsize

    vocab = architecture.padded_vocab(model, parts)
    if (
        not recipe.lora
    ):  # the head's gradient, made before those of the layers and added to the sums after them
        numbers = vocab * (model.hidden_size + model.num_layers * model.token_inputs)
        layer += numbers * jnp.dtype(recipe.param_dtype).itemsize // mesh.size
    # A copy of the head in the compute dtype, its gradient in float32, and two more arrays of logits of a chunk.
    vocab, gradient = vocab // parts, 0 if recipe.lora else 4
    head = vocab * model.hidden_size * (itemsize + gradient) + 2 * recipe.logits_chunk * vocab * 4
    return kept, inputs + max(layer, head)


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
    parts = recipe.mesh.shape["model"]
    # The layer with most, and keys and values of its own.
    model = max(
        recipe.model.groups,
        key=lambda kind: (kind.has_kv, kind.num_experts, kind.head_dim, kind.mlp_dim),
    )
    heads = max(1, model.num_kv_heads // parts)
    part = replace(
        model,
        num_heads=model.num_heads // parts,
        num_kv_heads=heads,
        mlp_dim=max(kind.mlp_dim for kind in recipe.model.groups) // parts,
        expert_dim=model.expert_dim // parts,
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
        own = jnp.zeros((rows, tokens, part.token_inputs), x.dtype) if part.token_inputs else None
        return decoder_layer.packed_layer(layer, part, x, *given, given=own)[0]

    def size(level: str) -> int:
        kept = remats.keeping(level, body)
        saved = jax.eval_shape(
            lambda x, trained, layer: jax.vjp(lambda *given: kept(*given, layer), x, trained)[1],
            x, trained, layer,
        )  # fmt: skip
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))

    least = size(FULL)  # input and weights
    return {level: size(level) - least for level in (NONE, PRODUCTS, ATTENTION)} | {FULL: 0}
