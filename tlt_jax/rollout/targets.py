"""The policy of one data group as spec_decode's Target: binds models to it; knows no rollout."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.models import kv_cache, transformer
from tlt_jax.models.architecture import Captures
from tlt_jax.models.kv_cache import Scratch
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.spec_decode.interface import PyTree, Target

TAIL = 8  # cache slots past the bucket: a round may commit this many tokens
LANES = 128  # XLA:TPU stores an axis of another length along other axes, and then copies the keys in every chunk


def make(config: ModelConfig, group: Mesh, dtype: str, captures: Captures, path: int) -> Target:
    """The policy on one data group; a round commits at most `path` tokens."""
    width = len(captures) * config.hidden_size

    def room(slots: int) -> int:
        """Slots of a cache for this many committed tokens: with the tail, and on accelerators whole lanes."""
        slots += max(TAIL, path)
        return slots if group.devices.flat[0].platform == "cpu" else -(-slots // LANES) * LANES

    def whole(scratch: Scratch) -> Scratch:
        """Features on every device, as the states they are copies of: XLA would shard those too, in every layer."""
        everywhere = NamedSharding(group, PartitionSpec())
        return scratch.replace(features=jax.lax.with_sharding_constraint(scratch.features, everywhere))

    def forward(params: PyTree, *rest: Any) -> tuple[jax.Array, Scratch]:
        logits, scratch = transformer.tree_forward(params, config, *rest, captures)
        return logits, whole(scratch)

    return Target(
        forward=forward,
        keep=kv_cache.commit,
        features=lambda cache: cache.features,
        prefill=lambda params, tokens, lengths: whole(transformer.prefill(params, config, tokens, lengths, captures)),
        insert=kv_cache.insert,
        resize=lambda cache, rows, slots: kv_cache.resize(cache, rows, room(slots)),
        empty=lambda batch, slots: kv_cache.abstract(config, batch, room(slots), width, dtype, group),
        room=room,
        vocab=transformer.padded_vocab(config, group.shape["model"]),
        params=transformer.abstract(config, group, "rollout", dtype),
    )
