"""The policy update on one rollout: minibatches, their old and reference log-probs, and the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from tlt_jax.config import Config
from tlt_jax.config.schema import FILTERED, REWARD
from tlt_jax.data import packing
from tlt_jax.data.packing import Example, Packed
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.models import lora
from tlt_jax.models.architecture import Params
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import LENGTH, NONFINITE, Completion, RolloutResult
from tlt_jax.train import kl_rewards, policy_batch, policy_update
from tlt_jax.train.accounts import Stopwatch
from tlt_jax.train.advantages import answer_advantages, answer_weights
from tlt_jax.train.policy_batch import Batch, Rows
from tlt_jax.train.policy_update import PolicyState, UpdatePrograms
from tlt_jax.train.recipe import Recipe


class Learned(NamedTuple):
    """Result of the optimizer steps on one rollout: metrics of each step, and the filled share of the rows.

    `rewards` are float[prompts, samples], `advantages` float[prompts * samples].
    """

    updates: list[dict[str, np.ndarray]]
    rewards: np.ndarray
    advantages: np.ndarray
    fill: float


@dataclass(frozen=True)
class PolicyTraining:
    """The update of the policy: its compiled programs, and the frozen start policy (None for a run that needs none).

    It is the reference of the KL term, and the base of adapters: with these no second model exists.
    """

    config: Config
    recipe: Recipe
    programs: UpdatePrograms
    start: Params | None
    watch: Stopwatch

    @property
    def base(self) -> Params | None:
        """The base of the adapters that are trained; None when all weights are."""
        return self.start if self.recipe.lora else None

    def weights(self, state: PolicyState) -> Params:
        """The policy's weights, which share buffers with the state."""
        return lora.whole(state.params, self.base)

    def update(
        self,
        state: PolicyState,
        prompts: Sequence[Prompt],
        rollout: RolloutResult,
        scores: Mapping[int, Score],
        step: int,
        teach: Callable[[Sequence[Rows]], None] | None = None,
    ) -> tuple[PolicyState, Learned]:
        """The policy after one optimizer step for each minibatch of a rollout, and what the steps measured.

        The state is donated. With several minibatches the old log-probs of all are those before the first step. `step`:
        number of RL steps before this one, from which the schedule takes the learning rate. `teach` is called with the
        rows of all accumulation steps before the first optimizer step.
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
                self.weights(state), batches, packed, rewards, given, is_finite(rollout.completions)
            )

        if teach:
            teach([rows for batch in batches for rows in batch])

        updates = []
        for batch in batches:
            state, metrics = policy_update.update(self.programs, state, batch, step, self.base)
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
        counts: np.ndarray,
    ) -> tuple[Sequence[Batch], np.ndarray, dict[str, float]]:
        """The batches with the log-probs that the update reads, the advantages of all answers, and metrics.

        With a KL in the reward, the advantages of the batches are those of rewards less the KL of the answers that count.
        Raises ValueError without the start policy that a KL needs.
        """
        algorithm, measured = self.config.algorithm, {}
        is_single, in_reward = len(batches) == 1, algorithm.kl_in == REWARD
        if algorithm.kl_coef and self.start is None:
            raise ValueError(
                f"algorithm.kl_coef {algorithm.kl_coef} needs the start policy: give it as start"
            )
        if in_reward or not is_single:
            batches = [scored(self.programs, params, batch, "old") for batch in batches]
        if algorithm.kl_coef:
            batches = [scored(self.programs, self.start, batch, "reference") for batch in batches]
        if in_reward:
            batches, advantages, kl = kl_rewards.penalized(
                algorithm, self.recipe.mesh, batches, packed, rewards, counts
            )
            if is_single:  # the update has the same log-probs
                batches = [[rows.replace(old=None) for rows in batch] for batch in batches]
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
    counted = (lengths * is_finite(rollout.completions)).reshape(rewards.shape)
    return answer_advantages(rewards, counted, config.algorithm.advantage)


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
    """An answer with its prompt, as input of packing; of an answer that is not finite only the lengths, with tokens of 0.

    So values that are not finite reach no other example of its row, as 0 times them would.
    """
    prompt, tokens = prompts[answer.prompt].tokens, answer.tokens
    if answer.finish == NONFINITE:
        prompt, tokens = np.zeros_like(prompt), np.zeros_like(tokens)
    return Example(answer.uid, prompt, tokens)


def is_filtering(config: Config) -> bool:
    """Whether the loss leaves out answers that were cut at rollout.max_new_tokens (DAPO, arXiv 2503.14476, section 3.4)."""
    return config.algorithm.overlong == FILTERED


def is_finite(answers: Sequence[Completion]) -> np.ndarray:
    """bool[answers]: whether the policy's logits were finite to the end: policy and drafter learn from no other answer."""
    return np.array([one.finish != NONFINITE for one in answers])


def is_kept(config: Config, answers: Sequence[Completion]) -> np.ndarray:
    """bool[answers]: whether the loss counts an answer."""
    left_out = {NONFINITE, LENGTH} if is_filtering(config) else {NONFINITE}
    return np.array([one.finish not in left_out for one in answers])


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
        is_answer=is_finite(answers) if is_filtering(config) else None,
    ), packed


def abstract_rows(config: Config, recipe: Recipe) -> Rows:
    """ShapeDtypeStructs with shardings of the rows of an accumulation step, for compilation."""
    is_given = {
        "recorded": True,
        "reference": config.algorithm.kl_coef != 0,
        "old": config.algorithm.minibatches > 1,
        "answers": is_filtering(config),
    }
    given = tuple(name for name, is_one in is_given.items() if is_one)
    sizes = packing.rows(config), packing.row_tokens(config)
    return policy_batch.abstract_rows(recipe.mesh, *sizes, given)


def scored_policies(config: Config, policy: Params, base: Params | None) -> list[Params]:
    """The policies of different forms whose log-probs an update computes: the old one, and the reference.

    `base`: of the policy's adapters, which is the reference; None without adapters, when both have one form.
    """
    algorithm = config.algorithm
    found = [policy] if algorithm.minibatches > 1 or algorithm.kl_in == REWARD else []
    if algorithm.kl_coef and (base is not None or not found):
        found.append(policy if base is None else base)
    return found


def scored(programs: UpdatePrograms, params: Params, batch: Batch, field: str) -> Batch:
    """The batch with the log-probs under `params` stored in `field`."""
    bare = [rows.replace(old=None, reference=None) for rows in batch]  # one program for both
    logprobs = policy_update.token_logprobs(programs, params, bare)
    return [rows.replace(**{field: part}) for rows, part in zip(batch, logprobs, strict=True)]
