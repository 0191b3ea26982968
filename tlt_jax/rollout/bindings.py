"""What the configuration drafts with: a learned drafter or n-grams, as spec_decode takes them; knows no rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.config import parse
from tlt_jax.config.schema import NGRAM, NONE, Config, Speculation
from tlt_jax.errors import ConfigError
from tlt_jax.models import eagle, hf_drafter, kv_cache
from tlt_jax.models.eagle import DrafterConfig, DrafterParams
from tlt_jax.models.kv_cache import KVCache
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.spec_decode import ngram
from tlt_jax.spec_decode.decode import Weights
from tlt_jax.spec_decode.interface import NO_DRAFTER, Drafter, Network, Target, stateless
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree_drafter import Coupling, learned
from tlt_jax.tuner import goodput
from tlt_jax.tuner.arms import affordable, bucketed, strategies_for


def load(config: Config, model: ModelConfig, mesh: Mesh) -> tuple[DrafterConfig, DrafterParams] | tuple[None, None]:
    """The learned drafter of speculation.drafter in the "train" layout; None when it names no directory.

    Raises ModelError, naming what does not fit, for the directory of another policy's drafter.
    """
    path = directory(config)
    if path is None:
        return None, None
    return hf_drafter.load(path, model, mesh, config.model.param_dtype, positions(config, model))


def describe(config: Config, model: ModelConfig) -> DrafterConfig | None:
    """The learned drafter of speculation.drafter, without its weights; None when it names no directory.

    Its config.json is enough. While the directory is not there, it is the drafter that train.drafter would write.
    Raises ModelError as `load` does.
    """
    path = directory(config)
    if path is None:
        return None
    if not path.exists():
        if not config.warmup.start:
            return fresh(config, model)
        path = Path(parse.expand(config.warmup.start, "warmup.start"))
    return hf_drafter.read_config(path, model, positions(config, model))


def fresh(config: Config, model: ModelConfig) -> DrafterConfig:
    """A new drafter, as `warmup` wants it. Raises ConfigError when its knobs clash."""
    check_warmup(config)
    size = min(config.warmup.vocab or model.vocab_size, model.vocab_size)
    return eagle.for_policy(model, config.warmup.kind, draft_vocab_size=size)


def check_warmup(config: Config) -> None:
    """Raises ConfigError when the knobs of the warm-up clash."""
    warmup = config.warmup
    if warmup.vocab and (warmup.start or warmup.kind == "eagle"):
        reason = "the drafter of warmup.start has its own" if warmup.start else "an eagle drafter proposes every token"
        raise ConfigError(f"warmup.vocab {warmup.vocab}: {reason}: set it to 0")


def directory(config: Config) -> Path | None:
    """The directory that speculation.drafter names."""
    name = config.speculation.drafter
    return None if name in (NONE, NGRAM) else Path(parse.expand(name, "speculation.drafter"))


def positions(config: Config, model: ModelConfig) -> int:
    """The length of the longest sequence that a drafter has to draft for."""
    return min(config.data.max_prompt_tokens + config.rollout.max_new_tokens, model.max_positions)


def make(
    settings: Speculation, config: DrafterConfig | None, target: Target, group: Mesh, dtype: str
) -> Drafter:
    """The drafter on one data group."""
    if config is not None:
        return learned(network(config, target, group, dtype), Coupling(settings.coupling, settings.sharpness))
    if settings.drafter == NONE:
        return NO_DRAFTER
    whole = NamedSharding(group, PartitionSpec())
    search = ngram.Settings(settings.min_match, settings.max_match)

    def draft(weights, state, context, strategy: Strategy, temperature: float):
        return ngram.propose(context.history, context.lengths, context.guide, strategy, search)

    def guide(batch: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, settings.pool), jnp.int32, sharding=whole)

    return stateless(draft, guide=guide)


def network(config: DrafterConfig, target: Target, group: Mesh, dtype: str) -> Network:
    """A learned drafter's network on one data group; embedding and LM head are the target's."""
    whole = NamedSharding(group, PartitionSpec())

    def with_windows(function: Callable) -> Callable:
        """A function of the weights, the cache, and tokens and features of windows."""

        def call(weights: Weights, cache: KVCache, tokens: jax.Array, features: jax.Array, *places: jax.Array):
            features = jax.lax.with_sharding_constraint(features, whole)  # split in any other way they travel more
            return function(weights.drafter, config, eagle.shared(weights.target), cache, tokens, features, *places)

        return call

    return Network(
        extend=with_windows(eagle.extend),
        fill=with_windows(eagle.fill),
        step=lambda weights, *rest: eagle.step(weights.drafter, config, eagle.shared(weights.target), *rest),
        logits=lambda weights, hidden: eagle.logits(weights.drafter, config, eagle.shared(weights.target), hidden),
        ids=lambda weights: weights.drafter.ids,
        resize=lambda cache, rows, slots: kv_cache.resize(cache, rows, target.room(slots)),
        empty=lambda batch, slots: eagle.abstract_cache(config, batch, target.room(slots), dtype, group),
        scratch=partial(eagle.scratch, config, dtype=dtype, model_axis=group.shape["model"]),
        params=eagle.abstract(config, group, "rollout", dtype),
        hidden=jax.ShapeDtypeStruct((1, config.hidden_size), dtype, sharding=whole),
        top=partial(top_k, group=group),
    )


def top_k(values: jax.Array, k: int, group: Mesh) -> tuple[jax.Array, jax.Array]:
    """lax.top_k along an axis that may lie over `model`: every device looks through its own part first.

    Of lax.top_k alone XLA makes a sort, and deals rows of logits, and all that is computed from the result, to the devices.
    """
    parts, width = group.shape["model"], values.shape[-1] // group.shape["model"]
    if parts == 1 or values.shape[-1] % parts or width < k:
        return jax.lax.top_k(values, k)
    best, places = jax.lax.top_k(values.reshape(*values.shape[:-1], parts, width), k)
    places += width * jnp.arange(parts)[:, None]
    whole = NamedSharding(group, PartitionSpec())
    best, places = (
        jax.lax.with_sharding_constraint(array.reshape(*values.shape[:-1], parts * k), whole) for array in (best, places)
    )
    best, chosen = jax.lax.top_k(best, k)
    return best, jnp.take_along_axis(places, chosen, axis=-1)


def reach(settings: Speculation, arms: Sequence[Strategy], batches: Sequence[int]) -> dict[Strategy, int]:
    """The largest of these batch buckets that the tuner may use each strategy for; without those it never uses."""

    def usable(batch: int, fewest: int) -> Sequence[Strategy]:
        """What the tuner may choose for a batch with at least this many live rows."""
        if settings.tuner == "fixed":
            return arms[:1]
        if settings.tuner == "goodput":
            return affordable(arms, batch, goodput.MOST_NODES)
        bucket = strategies_for(bucketed(arms), batch)
        if settings.tuner == "threshold":
            return bucket[:1] if fewest <= settings.threshold else ()
        return bucket

    fewest = (1, *(size + 1 for size in batches))
    found = {arm: batch for batch, least in zip(batches, fewest, strict=False) for arm in usable(batch, least)}
    return {arm: found[arm] for arm in arms if arm in found}
