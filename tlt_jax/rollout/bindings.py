"""The policy and the drafters of a configuration, bound to one data group as Target and Drafter."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tlt_jax.config.schema import ADAPTIVE, NONE, Speculation
from tlt_jax.distributed.mesh import is_cpu, is_gpu
from tlt_jax.kernels import token_filter
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import architecture, kv_cache, moe, transformer
from tlt_jax.models.architecture import NORMED, Captures, ModelConfig
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.models.kv_cache import KVCache, Scratch
from tlt_jax.models.low_rank import Lora
from tlt_jax.rollout import ngram_memory
from tlt_jax.spec_decode import ngram, one_pass, sampling
from tlt_jax.spec_decode.interface import (
    NO_DRAFTER,
    Candidates,
    Drafter,
    PyTree,
    Sampling,
    Target,
    TokenRecord,
    stateless,
)
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, Strategy
from tlt_jax.spec_decode.tree_drafter import learned_drafter, merged_drafter


def bind_drafters(
    speculation: Speculation,
    config: DrafterConfig | None,
    target: Target,
    fused: Fused,
    dtype: str,
) -> tuple[Drafter, dict[str, Drafter]]:
    """The drafter on one data group, and those that strategies name: they share its state.

    An adaptive drafter that is not used yet, without its configuration, is n-grams alone.
    """
    ngrams = NO_DRAFTER if speculation.drafter == NONE else ngram_drafter(fused.mesh)
    named = {NGRAM: ngrams} if speculation.drafter == ADAPTIVE else {}
    if config is None:
        return ngrams, named
    learned = learned_drafter(config, target, fused, dtype)
    if named:
        named |= {LEARNED: learned, MERGED: merged_drafter(learned, ngrams)}
    return learned, named


def ngram_drafter(group_mesh: Mesh) -> Drafter:
    """N-grams as a drafter on one data group."""
    whole = NamedSharding(group_mesh, PartitionSpec())

    def draft(weights, state, context, strategy: Strategy, temperature: float) -> Candidates:
        return ngram.propose(context.history, context.lengths, context.host_context, strategy)

    def host_context(batch: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, ngram_memory.POOL), jnp.int32, sharding=whole)

    return stateless(draft, host_context=host_context)


SCRATCH_SLOTS = 8  # cache slots past the bucket: a round may commit this many tokens
LANES = 128  # XLA:TPU stores an axis of another length along other axes, and then copies the keys in every chunk


def bind_target(
    config: ModelConfig,
    fused: Fused,
    dtype: str,
    captures: Captures,
    path: int,
    captures_states: bool = False,
    lora: Lora | None = None,
    records: bool = False,
) -> Target:
    """The policy on one data group; a round commits at most `path` tokens. `lora`: adapters that are not merged.

    `records`: the experts of every token are reported.
    """
    group_mesh, width = fused.mesh, len(captures) * config.hidden_size
    captures_states = captures_states and captures != (NORMED,)  # those features are the states

    def padded_slots(slots: int) -> int:
        """Slots of a cache for this many committed tokens: with the tail, and on accelerators whole lanes."""
        slots += max(SCRATCH_SLOTS, path)
        return slots if is_cpu(group_mesh) else -(-slots // LANES) * LANES

    windows = [config.windows[layer] for layer in config.cached_layers] if config.windows else ()
    rings = tuple(padded_slots(window) if window else 0 for window in windows)

    def whole(scratch: Scratch) -> Scratch:
        """Features on every device, as the states they are copies of: XLA would shard those too, in every layer."""
        everywhere = NamedSharding(group_mesh, PartitionSpec())
        captured = scratch.features, scratch.states
        features, states = jax.lax.with_sharding_constraint(captured, everywhere)
        return scratch.replace(features=features, states=states)

    def forward(params: PyTree, *rest: Any) -> tuple[jax.Array, Scratch]:
        logits, scratch = transformer.tree_forward(
            params, config, *rest, captures, captures_states, fused
        )
        return logits, whole(scratch)

    def prefill(params: PyTree, *rest: Any) -> Scratch:
        return whole(
            transformer.prefill(
                params,
                config,
                *rest,
                captures,
                captures_states=captures_states,
                mesh=group_mesh,
                rings=rings,
            )  # fmt: skip
        )

    def empty(batch: int, slots: int) -> KVCache:
        return kv_cache.abstract(
            config, batch, padded_slots(slots), width, dtype, group_mesh, captures_states, rings
        )

    return Target(
        forward=forward,
        keep=partial(kv_cache.commit, fused=fused),
        features=lambda cache: cache.features,
        prefill=prefill,
        insert=kv_cache.insert,
        resize=lambda cache, rows, slots: kv_cache.resize(cache, rows, padded_slots(slots)),
        empty=empty,
        padded_slots=padded_slots,
        vocab=architecture.padded_vocab(config, group_mesh.shape["model"]),
        params=architecture.abstract(config, group_mesh, "rollout", dtype, lora),
        states=(lambda cache: cache.states) if captures_states else None,
        unrolls=not is_cpu(group_mesh),
        choose=partial(one_pass.choose, is_sharded=group_mesh.shape["model"] > 1)
        if is_gpu(group_mesh)
        else None,
        filter=partial(filtered, fused=fused) if is_gpu(group_mesh) else None,
        append=None if any(rings) else kv_cache.write,
        record=TokenRecord(*moe.record_shape(config), lambda scratch: scratch.experts)
        if records
        else None,
    )


def filtered(scaled: Float[Array, "*A V"], rule: Sampling, fused: Fused) -> Float[Array, "*A V"]:
    """`sampling.filter`, by the kernels of token_filter where they run."""
    border = None
    if sampling.is_filtered(rule):
        border = token_filter.border(scaled, rule.top_k, rule.top_p, fused)
    if border is None:
        return sampling.filter(scaled, rule, unrolls=True)
    return jnp.where(sampling.ordered_bits(scaled) >= border, scaled, -jnp.inf)
