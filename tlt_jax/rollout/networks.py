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
from tlt_jax.models import block_drafter, drafter as drafters, eagle, kv_cache
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.spec_decode import one_pass
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import Target
from tlt_jax.spec_decode.network import BlockPass, LevelPasses, Network


def network(config: DrafterConfig, target: Target, fused: Fused, dtype: str) -> Network:
    """A drafter's network on one data group; embedding and LM head are the target's."""
    module, group_mesh = block_drafter if config.is_block else eagle, fused.mesh
    everywhere = NamedSharding(group_mesh, PartitionSpec())

    def with_weights(function: Callable) -> Callable:
        """A function of the drafter's weights, its config and what the target shares, as one of all weights."""

        def call(weights: Weights, *rest: Any) -> Any:
            shared = drafters.shared(weights.target)
            return function(weights.drafter, config, shared, *rest, fused=fused)

        return call

    def embedding(weights: Weights, tokens: jax.Array) -> jax.Array:
        return block_drafter.markov_embedding(weights.drafter, tokens, dtype)

    def bias(weights: Weights, tokens: jax.Array) -> jax.Array:
        return block_drafter.markov_bias(weights.drafter, embedding(weights, tokens))

    def confidence(weights: Weights, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden = jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
        odds = block_drafter.confidence(weights.drafter, hidden, embedding(weights, tokens))
        return jax.nn.log_sigmoid(odds)

    if config.is_block:
        passes = BlockPass(
            draft=with_weights(block_drafter.draft_block),
            depth=config.depth,
            bias=bias if config.markov_rank else None,
            confidence=confidence if config.confidence else None,
        )
    else:
        scratch = partial(eagle.scratch, config, dtype=dtype, model_axis=group_mesh.shape["model"])
        passes = LevelPasses(step=with_weights(eagle.draft_level), scratch=scratch)
    return Network(
        extend=with_weights(module.extend),
        fill=with_weights(module.fill),
        passes=passes,
        logits=with_weights(module.logits),
        ids=lambda weights: weights.drafter.ids,
        resize=lambda cache, rows, slots: kv_cache.resize(cache, rows, target.padded_slots(slots)),
        empty=lambda batch, slots: kv_cache.abstract(
            config.layers, batch, target.padded_slots(slots), 0, dtype, group_mesh
        ),
        params=drafters.abstract(config, group_mesh, "rollout", dtype, is_bound=True),
        hidden=jax.ShapeDtypeStruct((1, config.state_width), dtype, sharding=everywhere),
        top=partial(top_k, group_mesh=group_mesh),
        unrolls=not is_cpu(group_mesh),
        survey=partial(survey, group_mesh=group_mesh) if is_gpu(group_mesh) else None,
    )


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
