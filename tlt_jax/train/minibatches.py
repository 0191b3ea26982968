"""The policy update on one rollout: minibatches, their old and reference log-probs, and the optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tlt_jax import atomic, run_folder
from tlt_jax.checkpoint.index import leaf_index
from tlt_jax.config import Config
from tlt_jax.config.learning import FILTERED, REWARD
from tlt_jax.data import packing
from tlt_jax.data.encoder import Prompt
from tlt_jax.data.packing import Example, Packed
from tlt_jax.errors import CheckpointError
from tlt_jax.models import hf
from tlt_jax.models.architecture import Params
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import LENGTH, Completion, RolloutResult
from tlt_jax.train import kl_rewards, policy_batch, policy_update
from tlt_jax.train.accounts import Stopwatch
from tlt_jax.train.advantages import answer_advantages, answer_weights
from tlt_jax.train.policy_batch import Batch, Rows
from tlt_jax.train.policy_update import PolicyState, UpdatePrograms
from tlt_jax.train.recipe import Recipe
from tlt_jax.train.setup import Setup


class Learned(NamedTuple):
    """Result of the optimizer steps on one rollout: metrics of each step, and the filled share of the rows.

    `rewards` are float[prompts, samples], `advantages` float[prompts * samples].
    """

    updates: list[dict[str, np.ndarray]]
    rewards: np.ndarray
    advantages: np.ndarray
    fill: float


def kl_reference(
    setup: Setup, params: Params, is_new: bool, source: Mapping[str, str] | None = None
) -> Params | None:
    """The frozen initial policy of the KL term; None when algorithm.kl_coef is 0.

    It is saved once in the run folder, and all processes read it from there, so that it shares no buffers with the policy,
    which every update donates. `source`: what it was made from, by name; it is stored with checksums of the weights. Raises
    CheckpointError when a resumed run finds no reference, or another one.
    """
    config, job = setup.config, setup.job
    if not config.algorithm.kl_coef:
        return None

    directory, dtype = run_folder.reference(config), config.model.param_dtype
    source = dict(source or {})
    if is_new:
        hf.save_whole(params, setup.model, directory, setup.mesh, dtype=dtype)
        job.decided(True)  # before it is renamed the others would read an earlier one, or none
    elif not directory.is_dir():
        raise CheckpointError(
            f"{directory} is missing: the KL term needs the start policy, and only a new run has it: use another run folder"
        )
    reference = hf.load(directory, setup.model, setup.mesh, dtype)
    record = {"source": source, "leaves": leaf_index(reference)}
    path = directory / atomic.MADE_FROM
    if is_new and job.is_first:
        atomic.write_text(path, json.dumps(record, indent=1))
    elif not is_new and path.exists():  # older versions wrote no such file
        check_reference(path, record)
    return reference


def check_reference(path: Path, ours: Mapping[str, Any]) -> None:
    """Raises CheckpointError when the record at `path` names other settings, or the weights have changed since."""
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
            f"{path.parent} is corrupt ({other[0]} changed on disk): the run cannot continue without its start policy"
        )


@dataclass(frozen=True)
class PolicyTraining:
    """The update of the policy: its compiled programs, and the reference policy of the KL term (None without one)."""

    config: Config
    recipe: Recipe
    programs: UpdatePrograms
    reference: Params | None
    watch: Stopwatch

    def update(
        self,
        state: PolicyState,
        prompts: Sequence[Prompt],
        rollout: RolloutResult,
        scores: Mapping[int, Score],
        teach: Callable[[Sequence[Rows]], None] | None = None,
    ) -> tuple[PolicyState, Learned]:
        """The policy after one optimizer step for each minibatch of a rollout, and what the steps measured.

        The state is donated. With several minibatches the old log-probs of all are those before the first step. `teach`
        is called with the rows of all accumulation steps before the first optimizer step.
        """
        config, rewards = self.config, rewards_of(rollout, scores)
        given = first_advantages(config, rollout, rewards).reshape(-1)
        batches, packed = zip(
            *(
                make_batch(config, self.recipe, prompts, rollout, given, part)
                for part in split(config, rollout.completions)
            ),
            strict=True,
        )

        with self.watch.phase("old_log_prob"):
            batches, advantages, measured = self.with_logprobs(
                state.params, batches, packed, rewards, given
            )

        if teach:
            teach([rows for batch in batches for rows in batch])

        updates = []
        for batch in batches:
            state, metrics = policy_update.update(self.programs, state, batch)
            updates.append(jax.device_get(metrics) | measured)

        fill = float(np.mean([one.fill for one in packed]))
        return state, Learned(updates, rewards, advantages, fill)

    def with_logprobs(
        self,
        params: Params,
        batches: Sequence[Batch],
        packed: Sequence[Packed],
        rewards: np.ndarray,
        advantages: np.ndarray,
    ) -> tuple[Sequence[Batch], np.ndarray, dict[str, float]]:
        """The batches with the log-probs that the update reads, the advantages of all answers, and metrics.

        With a KL in the reward, the advantages of the batches are those of rewards less the KL.
        """
        algorithm, measured = self.config.algorithm, {}
        is_single, in_reward = len(batches) == 1, algorithm.kl_in == REWARD
        if in_reward or not is_single:
            batches = [scored(self.programs, params, batch, "old") for batch in batches]
        if self.reference is not None:
            batches = [
                scored(self.programs, self.reference, batch, "reference") for batch in batches
            ]
        if in_reward:
            batches, advantages, kl = kl_rewards.penalized(
                algorithm, self.recipe.mesh, batches, packed, rewards
            )
            unread = {"reference": None} | ({"old": None} if is_single else {})
            batches = [[rows.replace(**unread) for rows in batch] for batch in batches]
            measured = {"reward_kl_penalty": kl}
        return batches, advantages, measured


def rewards_of(rollout: RolloutResult, scores: Mapping[int, Score]) -> np.ndarray:
    """float[prompts, samples]: the reward of every answer, of the prompts that have answers."""
    values = [scores[answer.uid].value for answer in rollout.completions]
    answered = {answer.prompt for answer in rollout.completions}
    return np.array(values).reshape(len(answered), -1)


def first_advantages(config: Config, rollout: RolloutResult, rewards: np.ndarray) -> np.ndarray:
    """float64[prompts, samples]: the advantages; with a KL in the reward the rewards, until the KL is known."""
    if config.algorithm.kl_in == REWARD:
        return rewards
    lengths = np.array([len(answer.tokens) for answer in rollout.completions])
    return answer_advantages(rewards, lengths.reshape(rewards.shape), config.algorithm.advantage)


def split(config: Config, answers: Sequence[Completion]) -> list[np.ndarray]:
    """The indices of the answers in each minibatch."""
    return np.array_split(np.arange(len(answers)), config.algorithm.minibatches)


def needed(
    config: Config,
    prompts: Sequence[Prompt],
    groups: Sequence[int],
    answers: Sequence[Completion],
) -> set[int]:
    """Uids of answers that `PolicyTraining.update` packs into rows of these data groups; of others only lengths are needed."""
    rows, found = packing.rows(config), set()
    share = rows // config.mesh.data
    local_rows = {group * share + index for group in groups for index in range(share)}
    for part in split(config, answers):
        examples = [example(prompts, answers[i]) for i in part]
        places = packing.arrange(examples, packing.row_tokens(config), rows, config.mesh.data)
        found |= {examples[place.example].uid for place in places if place.row in local_rows}
    return found


def example(prompts: Sequence[Prompt], answer: Completion) -> Example:
    """An answer with its prompt, as input of packing."""
    return Example(answer.uid, prompts[answer.prompt].tokens, answer.tokens)


def is_filtering(config: Config) -> bool:
    """Whether the loss leaves out answers that were cut at rollout.max_new_tokens (DAPO, arXiv 2503.14476, section 3.4)."""
    return config.algorithm.overlong == FILTERED


def is_kept(config: Config, answers: Sequence[Completion]) -> np.ndarray:
    """bool[answers]: whether the loss counts an answer."""
    return np.array([not is_filtering(config) or one.finish != LENGTH for one in answers])


def make_batch(
    config: Config,
    recipe: Recipe,
    prompts: Sequence[Prompt],
    rollout: RolloutResult,
    advantages: np.ndarray,
    part: np.ndarray,
) -> tuple[Batch, Packed]:
    """The answers `part` as a minibatch of packed rows, and how they are packed."""
    answers = [rollout.completions[i] for i in part]
    examples = [example(prompts, answer) for answer in answers]
    packed = packing.pack(
        examples, packing.row_tokens(config), packing.rows(config), config.mesh.data
    )
    weights = answer_weights(
        packed.answer_lengths,
        config.algorithm.aggregation,
        config.rollout.max_new_tokens,
        is_kept(config, answers),
    )
    recorded = [answer.logprobs for answer in answers]
    return policy_batch.make_batch(
        packed,
        recipe.mesh,
        recipe.longest,
        weights,
        advantages[part],
        recorded,
        marks_answers=is_filtering(config),
    ), packed


def abstract_rows(config: Config, recipe: Recipe) -> Rows:
    """ShapeDtypeStructs with shardings of the rows of an accumulation step, for compilation."""
    is_given = {
        "recorded": True,
        "reference": recipe.objective.kl_coef != 0,
        "old": config.algorithm.minibatches > 1,
        "answers": is_filtering(config),
    }
    given = tuple(name for name, is_one in is_given.items() if is_one)
    sizes = packing.rows(config), packing.row_tokens(config)
    return policy_batch.abstract_rows(recipe.mesh, *sizes, given)


def scores(config: Config) -> bool:
    """Whether an update computes old or reference log-probs."""
    return config.algorithm.minibatches > 1 or config.algorithm.kl_coef != 0


def scored(programs: UpdatePrograms, params: Params, batch: Batch, field: str) -> Batch:
    """The batch with the log-probs under `params` stored in `field`."""
    bare = [rows.replace(old=None, reference=None) for rows in batch]  # one program for both
    logprobs = policy_update.token_logprobs(programs, params, bare)
    return [rows.replace(**{field: part}) for rows, part in zip(batch, logprobs, strict=True)]
