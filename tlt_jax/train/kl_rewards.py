"""The KL to the start policy in the reward: advantages once the log-probs of a whole rollout are known.

Shapes: R packed rows of T tokens on the mesh, S segments that a row may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tlt_jax.config.schema import REINFORCE_PP, Algorithm
from tlt_jax.data.packing import Packed
from tlt_jax.train import policy_batch
from tlt_jax.train.advantages import VARIANCE_FLOOR, are_equal, check_finite, group_advantages
from tlt_jax.train.answers import segment_sums
from tlt_jax.train.policy_batch import Batch, Rows


class Penalized(NamedTuple):
    """Minibatches with the advantages of rewards from which the KL was subtracted, and these in numbers.

    `advantages` float[answers]: of an answer the mean over its tokens. `kl`: mean over the answers that count of the mean
    over their tokens of log-prob - reference.
    """

    batches: list[Batch]
    advantages: np.ndarray
    kl: float


def penalized(
    algorithm: Algorithm,
    mesh: Mesh,
    batches: Sequence[Batch],
    packed: Sequence[Packed],
    rewards: np.ndarray,
    counts: np.ndarray,
) -> Penalized:
    """Advantages of rewards less `kl_coef` times the KL to the reference, as verl's use_kl_in_reward.

    The KL of a token is estimated as log-prob - reference (k1), both before the first optimizer step. Group advantages are
    those of reward - kl_coef * sum of the answer's KL. With reinforce_pp a token's return is the reward less kl_coef times
    the KL of it and of the later tokens of its answer; all returns are whitened together (`whitened`). Where the rewards
    that are compared, of a group or with reinforce_pp of the step, are all equal, advantages are 0: the KL alone, scaled to
    unit size, would be a gradient that does not depend on kl_coef. A KL that is not finite gives advantages that are not.

    `batches`: the minibatches of a rollout in order, with old and reference log-probs, and rewards in the place of
    advantages; `rewards` float[prompts, samples]; `counts` bool[answers]: answers that are not finite do not, and have no
    KL. A collective of all processes, which all get the same result. Raises ValueError for rewards that are not finite.
    """
    check_finite(rewards)
    run, lengths = programs(mesh), np.concatenate([one.answer_lengths for one in packed]) * counts
    divisors = np.maximum(lengths, 1)
    kl = by_answer(run.kl, batches, packed)
    mean_kl = float(np.sum(kl / divisors) / max(counts.sum(), 1))
    if algorithm.advantage == REINFORCE_PP:
        if are_equal(rewards.reshape(-1), lengths):
            batches = [[run.scaled(rows, 0.0, 0.0) for rows in batch] for batch in batches]
        else:
            batches = whitened(run, algorithm.kl_coef, batches, int(lengths.sum()))
        return Penalized(batches, by_answer(run.advantages, batches, packed) / divisors, mean_kl)

    penalty = algorithm.kl_coef * kl.reshape(rewards.shape)
    advantages = group_advantages(rewards, algorithm.advantage, penalty).reshape(-1)
    parts = np.split(advantages, np.cumsum([len(one.answer_lengths) for one in packed])[:-1])
    batches = [
        policy_batch.with_advantages(*given, mesh)
        for given in zip(batches, packed, parts, strict=True)
    ]
    return Penalized(batches, advantages, mean_kl)


def whitened(run: Programs, kl_coef: float, batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """The minibatches with advantages (return - mean) / sqrt(variance + 1e-8) over all `tokens` answer tokens.

    As verl's reinforce_plus_plus with gamma 1; the variance is the unbiased one, of n - 1.
    """
    batches = [[run.returns(rows, kl_coef) for rows in batch] for batch in batches]

    def moment(center: float, power: int) -> float:
        # Each is awaited: dozens in flight deadlock on fake devices (policy_update.block_on_cpu).
        steps = [rows for batch in batches for rows in batch]
        return sum(float(jax.device_get(run.moment(rows, center, power))) for rows in steps)

    mean = moment(0.0, 1) / tokens
    scale = float(1 / np.sqrt(moment(mean, 2) / max(tokens - 1, 1) + VARIANCE_FLOOR))
    return [[run.scaled(rows, mean, scale) for rows in batch] for batch in batches]


def by_answer(
    program: jax.stages.Wrapped, batches: Sequence[Batch], packed: Sequence[Packed]
) -> np.ndarray:
    """float64[answers]: what a program of `Programs` gives by row and segment, in the order of the answers."""
    found = []
    for batch, places in zip(batches, packed, strict=True):
        sums = np.stack([jax.device_get(program(rows)) for rows in batch]).astype(np.float64)
        step, row, first = places.spans.T
        found.append(sums[step, row, places.segments[step, row, first] - 1])
    return np.concatenate(found)


class Programs(NamedTuple):
    """The jitted functions of this module; sums are on every device."""

    kl: jax.stages.Wrapped
    advantages: jax.stages.Wrapped
    returns: jax.stages.Wrapped
    moment: jax.stages.Wrapped
    scaled: jax.stages.Wrapped


@cache
def programs(mesh: Mesh) -> Programs:
    """The programs for rows on a mesh."""
    everywhere, rows = NamedSharding(mesh, PartitionSpec()), policy_batch.rows_sharding(mesh)
    return Programs(
        jax.jit(answer_kl, out_shardings=everywhere),
        jax.jit(answer_advantages, out_shardings=everywhere),
        jax.jit(returns, out_shardings=rows),
        jax.jit(moment, static_argnames="power", out_shardings=everywhere),
        jax.jit(scaled, out_shardings=rows),
    )


def token_kl(rows: Rows) -> Float[Array, "R T"]:
    """log-prob - reference of each target, 0 elsewhere."""
    return jnp.where(rows.is_answer, rows.old - rows.reference, 0)


def answer_kl(rows: Rows) -> Float[Array, "R S"]:
    """The sum over each answer of log-prob - reference."""
    return segment_sums(token_kl(rows), rows.segments, rows.is_answer)


def answer_advantages(rows: Rows) -> Float[Array, "R S"]:
    """The sum over each answer of its tokens' advantages."""
    return segment_sums(rows.advantages, rows.segments, rows.is_answer)


def returns(rows: Rows, kl_coef: float) -> Rows:
    """The rows with each token's return in the place of advantages, which held the reward of its answer."""
    mask = rows.is_answer

    def joined(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        (total, ends), (more, breaks) = later, earlier
        return more + jnp.where(breaks, 0, total), ends | breaks

    # Between two answers lies a token that is none: there a sum begins anew.
    kl, _ = jax.lax.associative_scan(joined, (token_kl(rows), ~mask), reverse=True, axis=1)
    return rows.replace(advantages=jnp.where(mask, rows.advantages - kl_coef * kl, 0))


def moment(rows: Rows, center: float, power: int) -> Float[Array, ""]:
    """Sum over targets of (advantage - center) ** power."""
    return jnp.sum(jnp.where(rows.is_answer, (rows.advantages - center) ** power, 0))


def scaled(rows: Rows, mean: float, scale: float) -> Rows:
    """The rows with advantages (advantage - mean) * scale."""
    whitened = (rows.advantages - mean) * scale
    return rows.replace(advantages=jnp.where(rows.is_answer, whitened, 0))
