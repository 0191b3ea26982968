"""Device memory of a run: bytes of each kind of large array, and the knobs that change them."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.config import Config, schema, validate
from tlt_jax.config.schema import AUTO
from tlt_jax.data import packing
from tlt_jax.distributed.job import Job
from tlt_jax.distributed.mesh import device_kind, is_cpu
from tlt_jax.drafter import merge, recipe as drafter_recipe
from tlt_jax.drafter.recipe import Recipe as DrafterRecipe
from tlt_jax.errors import ConfigError
from tlt_jax.models import architecture, drafter as drafters, remat as remats, targets
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.rollout.buckets import bucket_width
from tlt_jax.rollout.executables.programs import GroupShapes, StateShape
from tlt_jax.train import policy_update, remat
from tlt_jax.train.recipe import Recipe

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
    "rollout copy", "cache", "features", "states", "drafter copy", "drafter cache", "drafter in training", "replay",
)  # fmt: skip
UPDATE = ("gradients", "logits chunk", "drafter features")
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
    "replay": "idle_training.replay_mib, or idle_training.replay_place host",
    "drafter optimizer": "mesh.data (the moments are sharded over it)",
    "drafter features": "train.rows or train.row_tokens, or drafter_training.share 0 (then only idle groups train the drafter)",
    "gradients": "mesh.data (their sums are sharded over it), or model.lora.rank (adapters have few)",
    "logits chunk": "mesh.model (the vocabulary is sharded over it)",
    "temporaries": "train.rows or model.remat full in the update; rollout.slots "
    "or the nodes of speculation.strategies in the rollout",
}

log = logging.getLogger(__name__)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device."""

    def of(leaf: jax.ShapeDtypeStruct) -> int:
        size = leaf.dtype.itemsize
        for length in leaf.sharding.shard_shape(leaf.shape):
            size *= length
        return size

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


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
        copies = merge.abstract_copies(drafter_shapes(config, recipe, drafter))
        kinds["drafter in training"] = device_bytes(copies)
        if config.idle_training.replay_place == "device":
            kinds["replay"] = config.idle_training.replay_mib * 2**20 // mesh.shape["model"]
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
    """A recipe for the shapes of the drafter's state, which depend on no number of its objective or optimizer."""
    return DrafterRecipe(
        recipe.model, drafter, recipe.mesh, recipe.adam, None, param_dtype=config.model.param_dtype
    )


def fitted(config: Config, recipe: Recipe, drafter: DrafterConfig | None, job: Job) -> Recipe:
    """The recipe of a run on its devices, as `within`; the same in all processes, which all call this."""
    return within(config, recipe, drafter, int(job.told(device_memory(recipe.mesh))))


def within(config: Config, recipe: Recipe, drafter: DrafterConfig | None, limit: int) -> Recipe:
    """The recipe; with model.remat auto its layers keep what `limit` bytes of a device allow (`remat.chosen`)."""
    if config.model.remat != AUTO:
        return recipe
    return replace(recipe, remat=remat.chosen(config, recipe, held(config, recipe, drafter), limit))


def corrected(
    config: Config, drafter: DrafterConfig | None, job: Job, recipe: Recipe, needed: int
) -> Recipe:
    """The recipe of `fitted` once its accumulation step is compiled, with `needed` bytes of temporaries.

    Where these do not fit, layers keep less (`remat.corrected`), which is logged. All processes call this alike, and follow
    the numbers of process 0.
    """
    limit, needed = int(job.told(device_memory(recipe.mesh))), int(job.told(needed))
    arrays = held(config, recipe, drafter)
    levels = remat.corrected(config, recipe, arrays, limit, needed)
    if levels != recipe.remat and job.is_first:
        log.info(
            "model.remat auto: the update needs %.2f GiB of temporaries beside %.2f GiB, and a device has %.2f GiB: it is "
            "compiled again with %s",
            needed / GIB, arrays / GIB, limit / GIB, remats.spell(levels),
        )  # fmt: skip
    return replace(recipe, remat=levels)


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
    longest = max(prompt + validate.answer_limit(config), bucket_width(prompt))
    return next((size for size in config.rollout.cache_buckets if size >= longest), longest)


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
