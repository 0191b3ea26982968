"""Mixture of experts: which experts a layer's router gives a token, and what they add to its hidden state."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer

from tlt_jax.models import layers as ops, remat as remats
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.shapes import shaped

MOST_NAMED = 16  # experts that have a metric each


@struct.dataclass
class Routed:
    """The k experts that tokens have in a layer, those of its router's choice, and the router's probabilities of all N."""

    ids: Int[Array, "*A k"]
    own: Int[Array, "*A k"]
    probabilities: Float[Array, "*A N"]


@struct.dataclass
class Routers:
    """Sums over tokens of what the routers of L layers did.

    `load`: tokens that had an expert; `probability`: of each expert; `entropy`: of the probabilities, in nats; `changed`:
    tokens that had other experts than those of the router's choice.
    """

    load: Float[Array, "L N"]
    probability: Float[Array, "L N"]
    entropy: Float[Array, " L"]
    changed: Float[Array, " L"]
    tokens: Float[Array, " L"]


def record_shape(config: ModelConfig) -> tuple[int, np.dtype]:
    """Ids that are recorded of a token, of all layers, and their dtype, whose largest number stands for none."""
    dtype = np.dtype(np.uint8 if config.num_experts < 255 else np.uint16)
    return len(config.expert_layers) * config.experts_per_token, dtype


def record(routed: list[Routed], config: ModelConfig) -> Integer[Array, "*A Lk"] | None:
    """The experts of tokens in the layers that have some, one after the other; None: no layer has."""
    found = [one.ids.astype(record_shape(config)[1]) for one in routed if one is not None]
    return jnp.concatenate(found, axis=-1) if found else None


def by_layer(
    recorded: Integer[Array, "B T W"] | None, config: ModelConfig
) -> Integer[Array, "B T L k"] | None:
    """What `record` gave, by layer."""
    if recorded is None:
        return None
    return recorded.reshape(*recorded.shape[:2], -1, config.experts_per_token)


@shaped
def route(
    router: Float[Array, "N D"],
    config: ModelConfig,
    y: Float[Array, "*A D"],
    replayed: Integer[Array, "*A k"] | None = None,
) -> tuple[Routed, Float[Array, "*A k"]]:
    """The experts of each token, and the weight of each, in at least float32.

    `replayed`: the ids that tokens have instead of the router's choice, as recorded (R3, arXiv 2510.11370); those that are no
    expert are not recorded. The weights are the router's probabilities of the ids whoever chose them, so that a gradient
    reaches the router.
    """
    scores = ops.wide_product(y, router, -1)
    probabilities = jax.nn.softmax(scores, axis=-1)
    N = config.num_experts
    own = ids = jax.lax.top_k(jax.lax.stop_gradient(probabilities), config.experts_per_token)[1]
    if replayed is not None:
        ids = jnp.where(replayed < N, replayed.astype(own.dtype), own)
    ids = remats.named(
        ids, remats.MLP
    )  # a second choice may differ where two experts are nearly equal
    is_chosen = ids[..., None] == jnp.arange(N)
    gates = jnp.where(is_chosen, probabilities[..., None, :], 0).sum(-1)
    if config.normed_gates:
        gates = gates / gates.sum(-1, keepdims=True)
    return Routed(ids, own, probabilities), gates


def measured(routed: Routed, counts: Bool[Array, "*A"]) -> Routers:
    """The sums of one layer (without the axis L) over the tokens that count."""
    p, N = jax.lax.stop_gradient(routed.probabilities), routed.probabilities.shape[-1]
    tokens = tuple(range(counts.ndim))
    weight = counts.astype(p.dtype)
    had = (routed.ids[..., None] == jnp.arange(N)).any(-2)
    same = (routed.own[..., :, None] == routed.ids[..., None, :]).any(-1).all(-1)
    return Routers(
        load=jnp.sum(had * weight[..., None], tokens),
        probability=jnp.sum(routed.probabilities * weight[..., None], tokens),
        entropy=jnp.sum(-jax.scipy.special.xlogy(p, p).sum(-1) * weight),
        changed=jnp.sum(~same * weight),
        tokens=jnp.sum(weight),
    )


def joined(found: list[Routers | None], join: Callable) -> Routers | None:
    """Those of several layers, without those that have no experts."""
    present = [one for one in found if one is not None]
    return jax.tree.map(lambda *leaves: join(leaves), *present) if present else None


def scalars(routers: Routers) -> dict[str, Float[Array, ""]]:
    """Metrics of the routers. Loads are relative to the mean of their layer; each expert's is the mean over the layers."""
    tokens = jnp.maximum(routers.tokens.sum(), 1)
    mean = jnp.maximum(routers.load.mean(-1, keepdims=True), 1e-9)
    relative = routers.load / mean
    found = {
        "experts/changed": routers.changed.sum() / tokens,
        "experts/entropy": routers.entropy.sum() / tokens,
        "experts/load_max": relative.max(),
        "experts/load_min": relative.min(),
        "experts/balance_loss": balance_loss(routers),
    }
    if relative.shape[-1] <= MOST_NAMED:
        found |= {f"experts/load@{expert}": one for expert, one in enumerate(relative.mean(0))}
    return found


def balance_loss(routers: Routers) -> Float[Array, ""]:
    """The load-balancing loss of the Switch Transformer (arXiv 2101.03961, equations 4 to 6), over all layers together.

    N times the sum over experts of the share of tokens that had one, k in all, times the mean probability of it: k where
    the loads are equal. The gradient is that of the probabilities.
    """
    tokens = jnp.maximum(routers.tokens.sum(), 1)
    share = jax.lax.stop_gradient(routers.load).sum(0) / tokens
    return routers.load.shape[-1] * jnp.sum(share * routers.probability.sum(0) / tokens)
