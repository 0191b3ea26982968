"""The networks of learned drafters, bound to one data group; knows no rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.distributed.mesh import is_cpu, is_gpu
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import block_drafter, drafter_network, eagle, kv_cache
from tlt_jax.models.block_config import BlockConfig
from tlt_jax.models.drafter_network import DrafterConfig
from tlt_jax.models.eagle_config import EagleConfig
from tlt_jax.spec_decode import one_pass
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import Target
from tlt_jax.spec_decode.network import BlockPass, LevelPasses, Network


def network(config: DrafterConfig, target: Target, fused: Fused, dtype: str) -> Network:
    """A drafter's network on one data group; embedding and LM head are the target's."""
    is_block, group_mesh = isinstance(config, BlockConfig), fused.mesh
    module, parts = (block_drafter, block_parts) if is_block else (eagle, eagle_parts)
    width, whole = 0 if is_block else config.hidden_size, NamedSharding(group_mesh, PartitionSpec())
    return Network(
        **parts(config, fused, dtype),
        ids=lambda weights: weights.drafter.ids,
        resize=lambda cache, rows, slots: kv_cache.resize(cache, rows, target.padded_slots(slots)),
        empty=lambda batch, slots: module.abstract_cache(
            config, batch, target.padded_slots(slots), dtype, group_mesh
        ),
        params=drafter_network.abstract_bound(config, group_mesh, dtype),
        hidden=jax.ShapeDtypeStruct((1, width), dtype, sharding=whole),
        top=partial(top_k, group_mesh=group_mesh),
        unrolls=not is_cpu(group_mesh),
        survey=partial(survey, group_mesh=group_mesh) if is_gpu(group_mesh) else None,
    )


def with_weights(function: Callable, config: DrafterConfig) -> Callable:
    """A function of the drafter's weights, its config and what the target shares, as one of all weights."""

    def call(weights: Weights, *rest: Any) -> Any:
        return function(weights.drafter, config, drafter_network.shared(weights.target), *rest)

    return call


def with_rows(function: Callable, config: DrafterConfig, group_mesh: Mesh) -> Callable:
    """`with_weights` of a head on hidden states, which a CPU has as rows.

    As columns, which XLA:CPU prefers, 2 to 8 hidden states take it 14 times as long.
    """
    bound = with_weights(function, config)
    if not is_cpu(group_mesh):
        return bound
    return lambda weights, hidden: bound(weights, jax.lax.optimization_barrier(hidden))


def gathered(features: jax.Array, group_mesh: Mesh) -> jax.Array:
    """The features on every device: split in any other way they travel more."""
    return jax.lax.with_sharding_constraint(features, NamedSharding(group_mesh, PartitionSpec()))


def eagle_parts(config: EagleConfig, fused: Fused, dtype: str) -> dict[str, Any]:
    """What an EAGLE drafter does in its own way."""
    group_mesh = fused.mesh

    def with_windows(function: Callable) -> Callable:
        """A function of the weights, the cache, and tokens and features of windows."""
        bound = with_weights(function, config)
        return lambda weights, cache, tokens, features, *places: bound(
            weights, cache, tokens, gathered(features, group_mesh), *places
        )

    return {
        "extend": with_windows(partial(eagle.extend, fused=fused)),
        "fill": with_windows(eagle.fill),
        "passes": LevelPasses(
            step=with_weights(partial(eagle.step, fused=fused), config),
            scratch=partial(
                eagle.scratch, config, dtype=dtype, model_axis=group_mesh.shape["model"]
            ),
        ),
        "logits": with_rows(eagle.logits, config, group_mesh),
    }


def block_parts(config: BlockConfig, fused: Fused, dtype: str) -> dict[str, Any]:
    """What a block drafter does in its own way."""
    group_mesh = fused.mesh

    def extend(weights, cache, tokens, features, starts, last):
        known = gathered(features, group_mesh)
        cache = block_drafter.extend(weights.drafter, config, cache, known, starts, fused)
        return cache, features[:, 0, :0]

    def fill(weights, cache, tokens, features, rows, starts):
        known = gathered(features, group_mesh)
        return block_drafter.fill(weights.drafter, config, cache, known, rows, starts)

    def bias(weights, tokens):
        embedding = block_drafter.markov_embedding(weights.drafter, tokens, dtype)
        return block_drafter.markov_bias(weights.drafter, config, embedding)

    def confidence(weights, hidden, tokens):
        embedding = block_drafter.markov_embedding(weights.drafter, tokens, dtype)
        hidden = jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
        odds = block_drafter.confidence(weights.drafter, hidden, embedding)
        return jax.nn.log_sigmoid(odds)

    return {
        "extend": extend,
        "fill": fill,
        "passes": BlockPass(
            draft=with_weights(partial(block_drafter.draft, fused=fused), config),
            depth=config.depth,
            bias=bias if config.markov_rank else None,
            confidence=confidence if config.confidence else None,
        ),
        "logits": with_rows(block_drafter.logits, config, group_mesh),
    }


def top_k(values: jax.Array, k: int, group_mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """lax.top_k along an axis that may lie over `model`: every device looks through its own part first.

    Of lax.top_k alone XLA makes a sort, and deals rows of logits, and all that is computed from the result, to the devices.
    """
    parts, width = group_mesh.shape["model"], values.shape[-1] // group_mesh.shape["model"]
    if parts == 1 or values.shape[-1] % parts or width < k:
        return jax.lax.top_k(values, k)
    best, places = jax.lax.top_k(values.reshape(*values.shape[:-1], parts, width), k)
    places += width * jnp.arange(parts)[:, None]
    whole = NamedSharding(group_mesh, PartitionSpec())
    best, places = (
        jax.lax.with_sharding_constraint(array.reshape(*values.shape[:-1], parts * k), whole)
        for array in (best, places)
    )
    best, chosen = jax.lax.top_k(best, k)
    return best, jnp.take_along_axis(places, chosen, axis=-1)


def survey(values: jax.Array, k: int, group_mesh: Mesh) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`top_k` and the logsumexp: in one pass while k is small."""
    if k > one_pass.MOST:
        return *top_k(values, k, group_mesh), jax.nn.logsumexp(values, axis=-1)

    def whole(found: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Gathered in one array of floats, in which indices are exact up to 2**24."""
        joined = jnp.stack([array.astype(values.dtype) for array in found], axis=-2)
        joined = jax.lax.with_sharding_constraint(
            joined, NamedSharding(group_mesh, PartitionSpec())
        )
        return [joined[..., n, :].astype(array.dtype) for n, array in enumerate(found)]

    return one_pass.top_k(values, k, whole if group_mesh.shape["model"] > 1 else list)
