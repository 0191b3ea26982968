"""Checks of the section algorithm, and the importance weights that `auto` means. Imports no JAX."""

from __future__ import annotations

from tlt_jax.config.learning import (
    AUTO,
    CISPO,
    GSPO,
    NONE,
    PPO,
    REINFORCE_PP,
    REWARD,
    TOKEN,
    Algorithm,
)
from tlt_jax.errors import ConfigError


def importance(algorithm: Algorithm, compute_dtype: str) -> str:
    """none, token or sequence: algorithm.importance, of which auto depends on model.compute_dtype."""
    if algorithm.importance != AUTO:
        return algorithm.importance
    return TOKEN if compute_dtype == "bfloat16" else NONE


def validate_algorithm(algorithm: Algorithm, samples: int, compute_dtype: str) -> None:
    """Raises ConfigError for knobs that conflict, or that another one leaves without effect.

    `samples`: rollout.samples; `compute_dtype`: model.compute_dtype.
    """
    validate_advantages(algorithm, samples)
    validate_clipping(algorithm)
    validate_importance(algorithm, compute_dtype)


def validate_advantages(algorithm: Algorithm, samples: int) -> None:
    """Raises ConfigError for groups that are too small, and for a KL in the reward that has no weight."""
    if samples < 2 and algorithm.advantage != REINFORCE_PP:
        raise ConfigError(
            f"rollout.samples {samples}: {algorithm.advantage} advantages compare the answers to one prompt, use at least 2, "
            f"or algorithm.advantage {REINFORCE_PP}"
        )
    if algorithm.kl_in == REWARD and not algorithm.kl_coef:
        raise ConfigError(
            "algorithm.kl_in reward with algorithm.kl_coef 0: nothing is subtracted from the reward: set algorithm.kl_coef, "
            "for example 0.001, or algorithm.kl_in loss"
        )


def validate_clipping(algorithm: Algorithm) -> None:
    """Raises ConfigError for a dual clip that clips every token, or that the loss does not have."""
    dual = algorithm.clip_dual
    if not dual:
        return
    if algorithm.loss not in (PPO, GSPO):
        why = "clips the weight of the gradient itself" if algorithm.loss == CISPO else "is yours"
        raise ConfigError(
            f"algorithm.clip_dual {dual:g} with algorithm.loss {algorithm.loss!r}, which {why}: use {PPO} or {GSPO}, or "
            "algorithm.clip_dual 0"
        )
    if dual <= 1:
        raise ConfigError(
            f"algorithm.clip_dual {dual:g} is not above 1: use a larger one, for example 3, or 0 for no dual clip"
        )


def validate_importance(algorithm: Algorithm, compute_dtype: str) -> None:
    """Raises ConfigError for importance limits out of range, or without importance weights."""
    level = importance(algorithm, compute_dtype)
    cap = algorithm.importance_cap
    limits = {"mask": algorithm.importance_mask, "veto": algorithm.importance_veto}
    if cap < 1:
        raise ConfigError(
            f"algorithm.importance_cap {cap:g} is below 1: use at least 1, or algorithm.importance none for no importance "
            "weights"
        )
    for name, limit in limits.items():
        if limit and limit <= 1:
            raise ConfigError(
                f"algorithm.importance_{name} {limit:g} is not above 1, so that nothing would be left: use for example 2, or 0 "
                "for none"
            )
    is_auto = algorithm.importance == AUTO
    why = f" (auto, in model.compute_dtype {compute_dtype})" * is_auto
    given = limits | {"cap": cap if is_auto and cap != Algorithm.importance_cap else 0}
    for name, value in given.items():
        if value and level == NONE:
            raise ConfigError(
                f"algorithm.importance_{name} {value:g} with algorithm.importance none{why} has no effect: set "
                f"algorithm.importance token or sequence, or remove algorithm.importance_{name}"
            )
