"""Per-token losses of the policy update, on devices; knows no model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tlt_jax.config import extension
from tlt_jax.config.learning import PPO
from tlt_jax.errors import ConfigError
from tlt_jax.shapes import shaped

LOG_RATIO_LIMIT = 20.0  # log-ratios are clipped to +-20, so that no ratio or gradient overflows


class PolicyLoss(NamedTuple):
    """Per token: loss, probability ratio, and whether the clip was active below or above."""

    loss: Float[Array, "*T"]
    ratio: Float[Array, "*T"]
    clipped_low: Bool[Array, "*T"]
    clipped_high: Bool[Array, "*T"]


def exp_ratio(log_ratio: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """exp of log-ratios, clipped to plus and minus LOG_RATIO_LIMIT."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@shaped
def policy_loss(
    logprobs: Float[Array, "*T"],
    old_logprobs: Float[Array, "*T"],
    advantages: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7, with separate limits as in DAPO, arXiv
    2503.14476.
    """
    ratio = exp_ratio(logprobs - old_logprobs)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    return PolicyLoss(
        loss,
        ratio,
        clipped_low=(advantages < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
    )


@shaped
def custom_loss(
    name: str,
    logprobs: Float[Array, "*T"],
    old_logprobs: Float[Array, "*T"],
    advantages: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
) -> Float[Array, "*T"]:
    """Loss per token from the user's function `name` (module:function)."""
    function = extension.load("algorithm.loss", name)
    return function(logprobs, old_logprobs, advantages, clip_low, clip_high)


def check(name: str) -> None:
    """Raises ConfigError unless algorithm.loss names a per-token loss that JAX can trace."""
    if name == PPO:
        return
    function = extension.load("algorithm.loss", name)
    tokens = jax.ShapeDtypeStruct((2, 3), "float32")
    try:
        found = jax.eval_shape(lambda *arrays: function(*arrays, 0.2, 0.2), tokens, tokens, tokens)
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"algorithm.loss {name!r} does not take logprobs, old_logprobs, advantages, clip_low, clip_high, or JAX cannot "
            f"trace it: {reason}"
        ) from error
    if getattr(found, "shape", None) != tokens.shape:
        what = f"shape {found.shape}" if hasattr(found, "shape") else f"a {type(found).__name__}"
        raise ConfigError(
            f"algorithm.loss {name!r} gave {what} for tokens of shape {tokens.shape}: return an array with the loss of each"
        )


@shaped
def kl_k3(logprobs: Float[Array, "*T"], reference: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """Schulman's k3 estimate of KL(policy, reference) per token (arXiv 2402.03300, eq. 4).

    r - 1 - log r with r = reference / policy.
    """
    log_ratio = jnp.clip(reference - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(log_ratio) - 1 - log_ratio


@shaped
def importance_weight(
    old_logprobs: Float[Array, "*T"], recorded: Float[Array, "*T"], cap: float
) -> Float[Array, "*T"]:
    """Truncated importance weight of the trainer's policy over the sampler's, at most `cap`.

    It carries no gradient.
    """
    return jax.lax.stop_gradient(jnp.minimum(exp_ratio(old_logprobs - recorded), cap))
