"""The packed rows that an update learns from, by minibatch: of a rollout, or of worked solutions."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.config import Config, validate
from tlt_jax.config.schema import FILTERED, REWARD, Algorithm
from tlt_jax.data import packing
from tlt_jax.data.packing import Example, PackedRows, Spans
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.distributed.mesh import put
from tlt_jax.models import moe
from tlt_jax.models.architecture import Params
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import LENGTH, NONFINITE, Completion, RolloutResult
from tlt_jax.shapes import most_segments
from tlt_jax.train import policy_update
from tlt_jax.train.advantages import answer_advantages, answer_weights, penalized_advantages
from tlt_jax.train.policy_update import Recipe, UpdatePrograms, rows_sharding

Minibatch = list[PackedRows]  # on the mesh, by accumulation step


class Batch(NamedTuple):
    """What the update learns of one rollout: minibatches of packed rows, and where their answers lie.

    `rewards` float[prompts, samples], `advantages` float[answers]; `fill`: share of tokens that are not padding; `metrics`:
    of what came into the rewards.
    """

    minibatches: list[Minibatch]
    spans: list[Spans]
    rewards: np.ndarray
    advantages: np.ndarray
    fill: float
    metrics: dict[str, float]

    @property
    def rows(self) -> list[PackedRows]:
        """The rows of all accumulation steps."""
        return [rows for minibatch in self.minibatches for rows in minibatch]


def pack(
    config: Config,
    recipe: Recipe,
    prompts: Sequence[Prompt],
    rollout: RolloutResult,
    scores: Mapping[int, Score],
) -> Batch:
    """The answers of a rollout as packed rows. With a KL in the reward their advantages are the rewards, see add_logprobs."""
    answers, algorithm = rollout.completions, config.algorithm
    values = [scores[answer.uid].value for answer in answers]
    rewards = np.array(values).reshape(len({answer.prompt for answer in answers}), -1)
    advantages = rewards
    if algorithm.kl_in != REWARD:
        lengths = np.array([answer.own.sum() for answer in answers]) * is_finite(answers)
        lengths = lengths.reshape(rewards.shape)
        advantages = answer_advantages(rewards, lengths, algorithm.advantage)
    advantages, minibatches, spans, fills = advantages.reshape(-1), [], [], []
    for part in split(config, answers):
        chosen = [answers[i] for i in part]
        packed = pack_rows(config, [example(prompts, answer) for answer in chosen])
        rows, places = packed
        weights = answer_weights(
            places.counts, algorithm.aggregation, config.rollout.max_new_tokens, is_kept(config, chosen),
            [one.prompt for one in chosen],
        )  # fmt: skip
        logprobs = [answer.logprobs for answer in chosen]
        minibatches.append(
            make_batch(packed, recipe, weights, advantages[part], logprobs, is_finite(chosen))
        )
        spans.append(places)
        fills.append(np.mean(rows.segments > 0))
    return Batch(minibatches, spans, rewards, advantages, float(np.mean(fills)), {})


def add_logprobs(
    config: Config,
    programs: UpdatePrograms,
    params: Params,
    start: Params | None,
    batch: Batch,
    counts: np.ndarray,
) -> Batch:
    """The batch with the log-probs that the update reads: of the old policy `params`, and of the reference `start`.

    With several minibatches the old log-probs of all are those before the first optimizer step. With a KL in the reward,
    the advantages are those of rewards less the KL of the answers that count, bool[answers]. Raises ValueError without the
    start policy that a KL needs.
    """
    algorithm, minibatches = config.algorithm, batch.minibatches
    is_single, in_reward = len(minibatches) == 1, algorithm.kl_in == REWARD
    if algorithm.kl_coef and start is None:
        raise ValueError(
            f"algorithm.kl_coef {algorithm.kl_coef} needs the start policy: give it as start"
        )
    if in_reward or not is_single:
        minibatches = [scored(programs, params, one, "old_logprobs") for one in minibatches]
    if algorithm.kl_coef:
        minibatches = [scored(programs, start, one, "reference_logprobs") for one in minibatches]
    if not in_reward:
        return batch._replace(minibatches=minibatches)
    minibatches, advantages, kl = penalized(
        algorithm, minibatches, batch.spans, batch.rewards, counts
    )
    if is_single:  # the update has the same log-probs
        minibatches = [[rows._replace(old_logprobs=None) for rows in one] for one in minibatches]
    return batch._replace(
        minibatches=minibatches, advantages=advantages, metrics={"reward_kl_penalty": kl}
    )


def penalized(
    algorithm: Algorithm,
    minibatches: Sequence[Minibatch],
    spans: Sequence[Spans],
    rewards: np.ndarray,
    counts: np.ndarray,
) -> tuple[list[Minibatch], np.ndarray, float]:
    """Minibatches with old and reference log-probs, with the advantages of rewards less the KL (penalized_advantages).

    Also the advantages float[answers], means over the tokens of each, and the mean over the answers that count of their mean
    KL. A collective of all processes, which all get the same result.
    """
    kl, steps = [], iter(counts)
    mesh = minibatches[0][0].tokens.sharding.mesh
    for minibatch, places in zip(minibatches, spans, strict=True):
        found = [token_kl(mesh)(one.old_logprobs, one.reference_logprobs) for one in minibatch]
        found = np.stack(jax.device_get(found)).astype(np.float64)
        for (step, row, first), length in zip(places.places, places.lengths, strict=True):
            values = found[step, row, first : first + length]
            kl.append(values if next(steps) else np.zeros(length))
    given = penalized_advantages(rewards, kl, counts, algorithm.advantage, algorithm.kl_coef)
    placed, left = [], iter(given)
    for minibatch, places in zip(minibatches, spans, strict=True):
        parts = put(list(places.place([next(left) for _ in places.lengths])), rows_sharding(mesh))
        placed.append(
            [rows._replace(advantages=part) for rows, part in zip(minibatch, parts, strict=True)]
        )
    means = [one.mean() for one, counted in zip(kl, counts, strict=True) if counted]
    mean_kl = float(np.sum(means) / max(len(means), 1))
    return placed, np.array([one.mean() for one in given]), mean_kl


@cache
def replicated(mesh: Mesh) -> jax.stages.Wrapped:
    """The jitted copy of an array to every device."""
    return jax.jit(lambda one: one, out_shardings=NamedSharding(mesh, PartitionSpec()))


@cache
def token_kl(mesh: Mesh) -> jax.stages.Wrapped:
    """The jitted difference of log-probs and those of the reference, on every device."""
    return jax.jit(operator.sub, out_shardings=NamedSharding(mesh, PartitionSpec()))


def scored(programs: UpdatePrograms, params: Params, minibatch: Minibatch, field: str) -> Minibatch:
    """The minibatch with the log-probs under `params` stored in `field`."""
    logprobs = policy_update.token_logprobs(programs, params, [bare(rows) for rows in minibatch])
    return [rows._replace(**{field: part}) for rows, part in zip(minibatch, logprobs, strict=True)]


def bare(rows: PackedRows) -> PackedRows:
    """The rows without what is computed before an update, so that one program serves all of it."""
    return rows._replace(
        old_logprobs=None, reference_logprobs=None, teacher_logprobs=None, teacher_ids=None
    )


def solutions(
    config: Config, recipe: Recipe, texts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Minibatch:
    """Prompts with worked solutions as packed rows; every solution token has the same weight."""
    examples = [Example(uid, prompt, solution) for uid, (prompt, solution) in enumerate(texts)]
    packed = pack_rows(config, examples)
    weights = answer_weights(packed[1].lengths, "token_mean", config.rollout.max_new_tokens)
    return make_batch(packed, recipe, weights, np.ones(len(examples)))


def pack_rows(config: Config, examples: Sequence[Example]) -> tuple[PackedRows, Spans]:
    """packing.pack into rows of this run."""
    sizes = packing.row_tokens(config), packing.rows(config)
    return packing.pack(examples, *sizes, config.mesh.data)


def make_batch(
    packed: tuple[PackedRows, Spans],
    recipe: Recipe,
    weights: Sequence[float] | Sequence[np.ndarray],
    advantages: Sequence[float] | Sequence[np.ndarray],
    rollout_logprobs: Sequence[np.ndarray] | None = None,
    is_finite: np.ndarray | None = None,
    **logprobs: Sequence[np.ndarray],
) -> Minibatch:
    """The packed rows on the mesh, by accumulation step.

    weights[n] and advantages[n] are per example, or per answer token of each; is_finite[n] is per example, and all
    `logprobs`, by field, are per answer token. Of examples that are not finite nothing is learned. Raises ValueError for an
    example longer than the recipe's `longest`, and for a row with more examples than attention supports.
    """
    (rows, spans), longest = packed, recipe.longest
    most = most_segments(rows.tokens.shape[-1])
    if longest is not None and rows.positions.max() >= longest:
        raise ValueError(
            f"an example has {rows.positions.max() + 1} tokens, the recipe's longest {longest}"
        )
    if rows.segments.max() > most:
        raise ValueError(
            f"a row has {rows.segments.max()} examples, attention takes {most}: pack them by packing.pack"
        )
    own = rows.is_answer  # what others wrote in an answer has no loss
    rows = rows._replace(weights=spans.spread(weights) * own, advantages=spans.spread(advantages))
    if rollout_logprobs is not None:
        logprobs["rollout_logprobs"] = rollout_logprobs
    rows = rows._replace(**{field: spans.place(values) for field, values in logprobs.items()})
    if is_finite is not None:
        rows = rows._replace(is_answer=own & (spans.spread(is_finite) > 0))
    steps = [
        jax.tree.map(lambda leaf, step=step: leaf[step], rows) for step in range(len(rows.tokens))
    ]
    return put(steps, rows_sharding(recipe.mesh))


def abstract_rows(
    mesh: Mesh,
    rows: int,
    row_tokens: int,
    given: Sequence[str] = (),
    record: tuple[int, np.dtype] | None = None,
    top_k: int = 0,
    kept: int = 0,
) -> PackedRows:
    """ShapeDtypeStructs with shardings of the rows of an accumulation step, for compilation.

    `given`: names of the log-probs that are not None. `record`: moe.record_shape of experts that are replayed. `top_k`: of
    the teacher; `kept`: ids of a support.
    """

    def array(dtype: jax.typing.DTypeLike, *width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, row_tokens, *width), dtype, sharding=rows_sharding(mesh))

    integers, wide = [array(jnp.int32) for _ in range(4)], jnp.asarray(0.0).dtype
    floats = {name: array(wide) for name in ("weights", "advantages", *given)}
    experts = array(record[1], record[0]) if record else None
    ids = array(jnp.int32, top_k) if top_k else None
    if top_k:
        floats["teacher_logprobs"] = array(wide, top_k)
    return PackedRows(
        *integers,
        array(jnp.bool_),
        **floats,
        experts=experts,
        teacher_ids=ids,
        support=array(jnp.int32, kept) if kept else None,
    )


def abstract_rows_of(config: Config, recipe: Recipe) -> PackedRows:
    """`abstract_rows` of a run."""
    is_given = {
        "rollout_logprobs": True,
        "reference_logprobs": config.algorithm.kl_coef != 0,
        "old_logprobs": config.algorithm.minibatches > 1,
        "teacher_logprobs": bool(config.algorithm.teacher.path),
    }
    given = [name for name, is_one in is_given.items() if is_one]
    is_replayed = validate.replays(config.algorithm, recipe.compute_dtype, recipe.model)
    record = moe.record_shape(recipe.model) if is_replayed else None
    sizes = packing.rows(config), packing.row_tokens(config)
    kept = validate.kept(config)
    return abstract_rows(recipe.mesh, *sizes, given, record, config.algorithm.teacher.top_k, kept)


def scored_policies(config: Config, policy: Params, base: Params | None) -> list[Params]:
    """The policies of different forms whose log-probs an update computes: the old one, and the reference.

    `base`: of the policy's adapters, which is the reference; None without adapters, when both have one form.
    """
    algorithm = config.algorithm
    found = [policy] if algorithm.minibatches > 1 or algorithm.kl_in == REWARD else []
    if algorithm.kl_coef and (base is not None or not found):
        found.append(policy if base is None else base)
    return found


def split(config: Config, answers: Sequence[Completion]) -> list[np.ndarray]:
    """The indices of the answers in each minibatch."""
    return np.array_split(np.arange(len(answers)), config.algorithm.minibatches)


def needed(
    config: Config,
    prompts: Sequence[Prompt],
    groups: Sequence[int],
    answers: Sequence[Completion],
) -> set[int]:
    """Uids of answers that `pack` puts into rows of these data groups; of others only lengths are needed."""
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
    prompt, tokens, record = prompts[answer.prompt].tokens, answer.tokens, answer.record
    support = answer.support
    if answer.finish == NONFINITE:
        prompt, tokens = np.zeros_like(prompt), np.zeros_like(tokens)
        record = None if record is None else np.full_like(record, np.iinfo(record.dtype).max)
        support = None if support is None else np.full_like(support, -1)
    own = answer.own if answer.replies else None
    return Example(answer.uid, prompt, tokens, record, own, support)


def is_finite(answers: Sequence[Completion]) -> np.ndarray:
    """bool[answers]: whether the policy's logits were finite to the end: policy and drafter learn from no other answer."""
    return np.array([one.finish != NONFINITE for one in answers])


def is_kept(config: Config, answers: Sequence[Completion]) -> np.ndarray:
    """bool[answers]: whether the loss counts an answer.

    With algorithm.overlong filtered it leaves out those that were cut at rollout.max_new_tokens (DAPO, arXiv 2503.14476,
    section 3.4).
    """
    left_out = {NONFINITE, LENGTH} if config.algorithm.overlong == FILTERED else {NONFINITE}
    return np.array([one.finish not in left_out for one in answers])
