"""The policy and the drafters of a configuration, bound to one data group as Target and Drafter; knows no rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tlt_jax.config.schema import ADAPTIVE, NONE, Speculation
from tlt_jax.distributed.mesh import is_cpu, is_gpu
from tlt_jax.kernels import token_filter
from tlt_jax.models import architecture, eagle, kv_cache, transformer
from tlt_jax.models.architecture import NORMED, Captures, ModelConfig
from tlt_jax.models.eagle import DrafterConfig
from tlt_jax.models.kv_cache import KVCache, Scratch
from tlt_jax.rollout import ngram_memory
from tlt_jax.spec_decode import ngram, one_pass, sampling
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.decoding_params import Sampling
from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import NO_DRAFTER, Drafter, Network, PyTree, Target, stateless
from tlt_jax.spec_decode.merged_drafter import merged_drafter
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, Strategy
from tlt_jax.spec_decode.tree_drafter import Coupling, learned_drafter

COUPLING = Coupling()  # of a learned drafter


def bind_drafters(
    speculation: Speculation,
    config: DrafterConfig | None,
    target: Target,
    group_mesh: Mesh,
    dtype: str,
) -> tuple[Drafter, dict[str, Drafter]]:
    """The drafter on one data group, and those that strategies name: they share its state.

    An adaptive drafter that is not used yet, without its configuration, is n-grams alone.
    """
    drafter = bind_drafter(speculation, config, target, group_mesh, dtype)
    if speculation.drafter != ADAPTIVE:
        return drafter, {}
    if config is None:
        return drafter, {NGRAM: drafter}
    ngrams = ngram_drafter(group_mesh)
    return drafter, {NGRAM: ngrams, LEARNED: drafter, MERGED: merged_drafter(drafter, ngrams)}


def bind_drafter(
    speculation: Speculation,
    config: DrafterConfig | None,
    target: Target,
    group_mesh: Mesh,
    dtype: str,
) -> Drafter:
    """The drafter on one data group: the learned one when there is its configuration."""
    if config is not None:
        return learned_drafter(
            network(config, target, group_mesh, dtype),
            COUPLING,
        )
    return NO_DRAFTER if speculation.drafter == NONE else ngram_drafter(group_mesh)


def ngram_drafter(group_mesh: Mesh) -> Drafter:
    """N-grams as a drafter on one data group."""
    whole = NamedSharding(group_mesh, PartitionSpec())

    def draft(weights, state, context, strategy: Strategy, temperature: float) -> Candidates:
        return ngram.propose(context.history, context.lengths, context.host_context, strategy)

    def host_context(batch: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, ngram_memory.POOL), jnp.int32, sharding=whole)

    return stateless(draft, host_context=host_context)


def network(config: DrafterConfig, target: Target, group_mesh: Mesh, dtype: str) -> Network:
    """A learned drafter's network on one data group; embedding and LM head are the target's."""
    whole = NamedSharding(group_mesh, PartitionSpec())

    def with_windows(function: Callable) -> Callable:
        """A function of the weights, the cache, and tokens and features of windows."""

        def call(
            weights: Weights,
            cache: KVCache,
            tokens: jax.Array,
            features: jax.Array,
            *places: jax.Array,
        ):
            features = jax.lax.with_sharding_constraint(
                features, whole
            )  # split in any other way they travel more
            return function(
                weights.drafter,
                config,
                eagle.shared(weights.target),
                cache,
                tokens,
                features,
                *places,
            )

        return call

    return Network(
        extend=with_windows(partial(eagle.extend, mesh=group_mesh)),
        fill=with_windows(eagle.fill),
        step=lambda weights, *rest: eagle.step(
            weights.drafter, config, eagle.shared(weights.target), *rest, mesh=group_mesh
        ),
        logits=lambda weights, hidden: eagle.logits(
            weights.drafter, config, eagle.shared(weights.target), hidden
        ),
        ids=lambda weights: weights.drafter.ids,
        resize=lambda cache, rows, slots: kv_cache.resize(cache, rows, target.padded_slots(slots)),
        empty=lambda batch, slots: eagle.abstract_cache(
            config, batch, target.padded_slots(slots), dtype, group_mesh
        ),
        scratch=partial(eagle.scratch, config, dtype=dtype, model_axis=group_mesh.shape["model"]),
        params=eagle.abstract(config, group_mesh, "rollout", dtype),
        hidden=jax.ShapeDtypeStruct((1, config.hidden_size), dtype, sharding=whole),
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


SCRATCH_SLOTS = 8  # cache slots past the bucket: a round may commit this many tokens
LANES = 128  # XLA:TPU stores an axis of another length along other axes, and then copies the keys in every chunk


def bind_target(
    config: ModelConfig,
    group_mesh: Mesh,
    dtype: str,
    captures: Captures,
    path: int,
    captures_states: bool = False,
) -> Target:
    """The policy on one data group; a round commits at most `path` tokens."""
    width = len(captures) * config.hidden_size
    captures_states = captures_states and captures != (NORMED,)  # those features are the states

    def padded_slots(slots: int) -> int:
        """Slots of a cache for this many committed tokens: with the tail, and on accelerators whole lanes."""
        slots += max(SCRATCH_SLOTS, path)
        return slots if is_cpu(group_mesh) else -(-slots // LANES) * LANES

    def whole(scratch: Scratch) -> Scratch:
        """Features on every device, as the states they are copies of: XLA would shard those too, in every layer."""
        everywhere = NamedSharding(group_mesh, PartitionSpec())
        captured = scratch.features, scratch.states
        features, states = jax.lax.with_sharding_constraint(captured, everywhere)
        return scratch.replace(features=features, states=states)

    def forward(params: PyTree, *rest: Any) -> tuple[jax.Array, Scratch]:
        logits, scratch = transformer.tree_forward(
            params, config, *rest, captures, captures_states, group_mesh
        )
        return logits, whole(scratch)

    def prefill(params: PyTree, *rest: Any) -> Scratch:
        return whole(
            transformer.prefill(
                params, config, *rest, captures, captures_states=captures_states, mesh=group_mesh
            )
        )

    def empty(batch: int, slots: int) -> KVCache:
        return kv_cache.abstract(
            config, batch, padded_slots(slots), width, dtype, group_mesh, captures_states
        )

    return Target(
        forward=forward,
        keep=partial(kv_cache.commit, mesh=group_mesh),
        features=lambda cache: cache.features,
        prefill=prefill,
        insert=kv_cache.insert,
        resize=lambda cache, rows, slots: kv_cache.resize(cache, rows, padded_slots(slots)),
        empty=empty,
        padded_slots=padded_slots,
        vocab=architecture.padded_vocab(config, group_mesh.shape["model"]),
        params=architecture.abstract(config, group_mesh, "rollout", dtype),
        states=(lambda cache: cache.states) if captures_states else None,
        unrolls=not is_cpu(group_mesh),
        choose=partial(one_pass.choose, is_sharded=group_mesh.shape["model"] > 1)
        if is_gpu(group_mesh)
        else None,
        filter=partial(filtered, group_mesh=group_mesh) if is_gpu(group_mesh) else None,
    )


def filtered(
    scaled: Float[Array, "*A V"], rule: Sampling, group_mesh: Mesh
) -> Float[Array, "*A V"]:
    """`sampling.filter`, by the kernels of token_filter where they run."""
    border = None
    if sampling.is_filtered(rule):
        border = token_filter.border(scaled, rule.top_k, rule.top_p, group_mesh)
    if border is None:
        return sampling.filter(scaled, rule, unrolls=True)
    return jnp.where(sampling.ordered_bits(scaled) >= border, scaled, -jnp.inf)
