"""What a rollout teaches the policy: its minibatches, their old and reference log-probs, and the optimizer steps on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax import atomic, run_folder
from tlt_jax.checkpoint.index import leaf_index
from tlt_jax.config import Config
from tlt_jax.data import packing
from tlt_jax.data.dataset import Prompt
from tlt_jax.data.packing import Example
from tlt_jax.distributed.job import Job
from tlt_jax.errors import CheckpointError
from tlt_jax.models import hf
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import Completion, RolloutResult
from tlt_jax.train import policy_batch, policy_update
from tlt_jax.train.accounts import Stopwatch
from tlt_jax.train.advantages import answer_weights, group_advantages
from tlt_jax.train.policy_batch import Batch, Rows
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
    config: Config,
    params: Params,
    model: ModelConfig,
    mesh: Mesh,
    is_new: bool,
    source: Mapping[str, str] | None = None,
    job: Job | None = None,
) -> Params | None:
    """The frozen initial policy of the KL term; None when algorithm.kl_coef is 0.

    Saved once in the run folder, and read from there by all processes, so that it never shares buffers
    with the policy, which every update donates. `source`: what it is made from, by name; kept with the
    checksums of what was saved. Raises CheckpointError when a run that goes on finds none, or another one.
    """
    if not config.algorithm.kl_coef:
        return None

    directory, dtype = run_folder.reference(config), config.model.param_dtype
    job, source = job or Job(), dict(source or {})
    if is_new:
        hf.save_whole(params, model, directory, mesh, dtype=dtype)
        job.decided(True)  # before it is renamed the others would read an earlier one, or none
    elif not directory.is_dir():
        raise CheckpointError(
            f"{directory} is missing: the KL term needs the start policy, and only a new run has it: use another run folder"
        )
    reference = hf.load(directory, model, mesh, dtype)
    kept = {"source": source, "leaves": leaf_index(reference)}
    path = directory / atomic.MADE_FROM
    if is_new and job.is_first:
        atomic.write_text(path, json.dumps(kept, indent=1))
    elif not is_new and path.exists():  # versions without it kept none
        check_reference(path, kept)
    return reference


def check_reference(path: Path, ours: Mapping[str, Any]) -> None:
    """Raises CheckpointError when the file says that the reference beside it was made from something else, or has changed."""
    try:
        theirs = json.loads(path.read_text())
        source, leaves = theirs["source"], theirs["leaves"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): use another run folder") from error
    for name, value in ours["source"].items():
        if source.get(name, value) != value:
            raise CheckpointError(
                f"{path.parent} was made with {name} {source[name]}, this run has {value}: use another run folder"
            )
    if other := [name for name, leaf in ours["leaves"].items() if leaves.get(name) != leaf]:
        raise CheckpointError(
            f"{path.parent} is corrupt ({other[0]} changed on disk): the run cannot go on without its start policy"
        )


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
    teach: Callable[[Sequence[Rows]], None] | None = None,
) -> tuple[PolicyState, Learned]:
    """The policy after the optimizer steps on one rollout, and what they measured.

    One step per minibatch. Of several minibatches all use the log-probs before the first step as
    the old ones. `teach` is called with the rows of all accumulation steps before the first step.
    """
    rewards = np.array([scores[answer.uid].value for answer in rollout.completions]).reshape(
        len(prompts), -1
    )
    advantages = group_advantages(rewards, config.algorithm.advantage).reshape(-1)

    batches, fills = zip(
        *(
            make_batch(config, recipe, prompts, rollout, advantages, part)
            for part in split(config, rollout.completions)
        ),
        strict=True,
    )

    with watch.phase("old_log_prob"):
        if len(batches) > 1:
            batches = [scored(programs, state.params, batch, "old") for batch in batches]
        if reference is not None:
            batches = [scored(programs, reference, batch, "reference") for batch in batches]

    if teach:
        teach([rows for batch in batches for rows in batch])

    updates = []
    for batch in batches:
        state, metrics = policy_update.update(programs, state, batch)
        updates.append(jax.device_get(metrics))

    return state, Learned(updates, rewards, advantages, float(np.mean(fills)))


def split(config: Config, answers: Sequence[Completion]) -> list[np.ndarray]:
    """The indices of the answers in each minibatch."""
    return np.array_split(np.arange(len(answers)), config.algorithm.minibatches)


def needed(
    config: Config,
    prompts: Sequence[Prompt],
    groups: Sequence[int],
    answers: Sequence[Completion],
) -> set[int]:
    """The uids of the answers that `update_policy` packs into rows of these data groups; of all others it needs the lengths."""
    rows, found = packing.rows(config), set()
    share = rows // config.mesh.data
    own = {group * share + index for group in groups for index in range(share)}
    for part in split(config, answers):
        examples = [example(prompts, answers[i]) for i in part]
        places = packing.arrange(examples, packing.row_tokens(config), rows, config.mesh.data)
        found |= {examples[place.example].uid for place in places if place.row in own}
    return found


def example(prompts: Sequence[Prompt], answer: Completion) -> Example:
    """An answer with its prompt, to be packed."""
    return Example(answer.uid, prompts[answer.prompt].tokens, answer.tokens)


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
    examples = [example(prompts, answer) for answer in answers]
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
