"""What a rollout teaches the policy: its minibatches, their old and reference log-probs, and the optimizer steps on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax import run_folder
from tlt_jax.config import Config
from tlt_jax.data import packing
from tlt_jax.data.dataset import Prompt
from tlt_jax.data.packing import Example
from tlt_jax.models import hf
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.train import policy_batch, policy_update
from tlt_jax.train.accounts import Stopwatch
from tlt_jax.train.advantages import answer_weights, group_advantages
from tlt_jax.train.policy_batch import Batch
from tlt_jax.train.policy_update import PolicyState, UpdatePrograms
from tlt_jax.train.recipe import Recipe


class Learned(NamedTuple):
    """Of the optimizer steps on one rollout: the metrics of each; its rewards and advantages; the filled share of the rows.

    `rewards` are float[prompts, samples], `advantages` float[prompts * samples].
    """

    updates: list[dict[str, np.ndarray]]
    rewards: np.ndarray
    advantages: np.ndarray
    fill: float


def kl_reference(
    config: Config, params: Params, model: ModelConfig, mesh: Mesh, is_new: bool
) -> Params | None:
    """The frozen initial policy of the KL term; None when algorithm.kl_coef is 0.

    Saved once in the run folder, and read from there, so that it never shares buffers with the
    policy, which every update donates.
    """
    if not config.algorithm.kl_coef:
        return None

    directory, dtype = run_folder.reference(config), config.model.param_dtype
    if is_new:
        hf.save_whole(params, model, directory, mesh, dtype=dtype)
    return hf.load(directory, model, mesh, dtype)


def update_policy(
    config: Config,
    recipe: Recipe,
    programs: UpdatePrograms,
    state: PolicyState,
    reference: Params | None,
    prompts: Sequence[Prompt],
    rollout: RolloutResult,
    scores: Mapping[int, Score],
    watch: Stopwatch,
) -> tuple[PolicyState, Learned]:
    """The policy after the optimizer steps on one rollout, and what they measured.

    One step per minibatch. Of several minibatches all use the log-probs before the first step as
    the old ones.
    """
    rewards = np.array([scores[answer.uid].value for answer in rollout.completions]).reshape(
        len(prompts), -1
    )
    advantages = group_advantages(rewards, config.algorithm.advantage).reshape(-1)

    parts = np.array_split(np.arange(len(advantages)), config.algorithm.minibatches)
    batches, fills = zip(
        *(make_batch(config, recipe, prompts, rollout, advantages, part) for part in parts),
        strict=True,
    )

    with watch.phase("old_log_prob"):
        if len(batches) > 1:
            batches = [scored(programs, state.params, batch, "old") for batch in batches]
        if reference is not None:
            batches = [scored(programs, reference, batch, "reference") for batch in batches]

    updates = []
    for batch in batches:
        state, metrics = policy_update.update(programs, state, batch)
        updates.append(jax.device_get(metrics))

    return state, Learned(updates, rewards, advantages, float(np.mean(fills)))


def make_batch(
    config: Config,
    recipe: Recipe,
    prompts: Sequence[Prompt],
    rollout: RolloutResult,
    advantages: np.ndarray,
    part: np.ndarray,
) -> tuple[Batch, float]:
    """The answers `part` as a minibatch of packed rows, and the share that is not padding."""
    answers = [rollout.completions[i] for i in part]
    examples = [
        Example(answer.uid, prompts[answer.prompt].tokens, answer.tokens) for answer in answers
    ]
    packed = packing.pack(
        examples, packing.row_tokens(config), packing.rows(config), config.mesh.data
    )
    weights = answer_weights(
        packed.answer_lengths, config.algorithm.aggregation, config.rollout.max_new_tokens
    )
    recorded = [answer.logprobs for answer in answers]
    return policy_batch.make_batch(
        packed, recipe.mesh, recipe.longest, weights, advantages[part], recorded
    ), packed.fill


def scored(programs: UpdatePrograms, params: Params, batch: Batch, field: str) -> Batch:
    """The batch with the log-probs under `params` as this field."""
    logprobs = policy_update.token_logprobs(programs, params, batch)
    return [rows.replace(**{field: part}) for rows, part in zip(batch, logprobs, strict=True)]
