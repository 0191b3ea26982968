"""Losses, importance weights and advantages of whole answers, against formulas of verl and TRL in NumPy, answer by answer."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objectives import algorithm
from test_policy_update import MODEL, ROW, assert_same, recipe_of

from tlt_jax.config.schema import Algorithm
from tlt_jax.data import packing
from tlt_jax.data.packing import Example, PackedRows
from tlt_jax.models import architecture
from tlt_jax.train import batch as batches, losses, policy_update
from tlt_jax.train.advantages import ADVANTAGES, answer_weights, penalized_advantages
from tlt_jax.train.policy_update import Recipe

COUNT, LONGEST, TEMPERATURE = 14, 8, 0.7
AGGREGATIONS = ("token_mean", "sequence_mean", "dr_grpo")
PLAIN = algorithm(clip_low=0.25, clip_high=0.3, entropy_coef=0.05, kl_coef=0.2)
CASES = [
    replace(PLAIN, **{"loss": loss, "importance": importance, "importance_cap": 1.1} | more)
    for loss, importance, more in [
        ("ppo", "none", {"clip_dual": 1.6}),
        ("ppo", "token", {}),
        ("ppo", "token", {"importance_mask": 1.3}),
        ("ppo", "token", {"importance_veto": 1.3}),
        ("ppo", "sequence", {"importance_mask": 1.4}),
        ("gspo", "none", {"clip_dual": 1.6}),
        ("gspo", "token", {"importance_mask": 1.2, "importance_veto": 1.3}),
        ("gspo", "sequence", {}),
        ("cispo", "none", {}),
        ("cispo", "token", {}),
        ("cispo", "sequence", {"importance_mask": 1.4}),
        ("dppo", "none", {"clip_low": 0.03, "clip_high": 0.04}),
        (
            "dppo",
            "token",
            {
                "clip_low": 0.03,
                "clip_high": 0.04,
                "importance_mask": 1.2,
                "importance_mask_low": 0.75,
            },
        ),
        ("sapo", "none", {"sapo_positive": 2.0, "sapo_negative": 3.0}),
        ("sapo", "token", {"importance_mask": 1.06, "importance_mask_level": "geometric"}),
        ("ppo", "geometric", {"importance_mask": 1.06, "importance_mask_low": 0.97}),
    ]
]


NAMES = "rollout_logprobs", "old_logprobs", "reference_logprobs"


class Answer(NamedTuple):
    """An example with what is known of its tokens before the update."""

    example: Example
    advantage: float
    old_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    reference_logprobs: np.ndarray


@pytest.fixture(scope="module")
def known() -> list[Answer]:
    """Answers of 1 to 7 tokens; old log-probs are near those of the shallow policy, by answer above or below them."""
    random, found = np.random.default_rng(0), []
    embed = weights_of((MODEL.vocab_size, MODEL.hidden_size))
    for uid in range(COUNT):
        prompt, answer = (random.integers(0, 11, random.integers(1, n)) for n in (5, LONGEST))
        logits = embed[[prompt[-1], *answer[:-1]]] @ embed.T / TEMPERATURE
        chosen = logits[np.arange(len(answer)), answer]
        logp = chosen - np.log(np.exp(logits).sum(axis=1))
        old, reference = logp + random.normal(0, 0.3, (2, len(answer))) + (-1) ** (uid // 2) * 0.7
        recorded = old + random.normal(0, 0.15, len(answer))
        advantage = (-1) ** uid * random.uniform(0.5, 1.5)
        found.append(Answer(Example(uid, prompt, answer), advantage, old, recorded, reference))
    return found


def weights_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(0, 0.4, shape)


def packed_of(known: list[Answer], rows: int, groups: int = 1):
    return packing.pack([one.example for one in known], ROW, rows, groups)


def batch_of(
    recipe: Recipe, known: list[Answer], rows: int, aggregation="token_mean"
) -> list[PackedRows]:
    """The answers as packed rows, with all their log-probs."""
    packed = packed_of(known, rows, recipe.mesh.shape["data"])
    weights = answer_weights(packed[1].lengths, aggregation, LONGEST)
    advantages = np.array([one.advantage for one in known])
    given = [[getattr(one, name) for one in known] for name in NAMES]
    batch = batches.make_batch(packed, recipe, weights, advantages, given[0])
    place = policy_update.rows_sharding(recipe.mesh)
    old, reference = (jax.device_put(packed[1].place(part), None) for part in given[1:])
    return [
        rows._replace(
            old_logprobs=jax.device_put(old[step], place),
            reference_logprobs=jax.device_put(reference[step], place),
        )
        for step, rows in enumerate(batch)
    ]


def params_of(recipe: Recipe) -> architecture.Params:
    target = architecture.abstract(recipe.model, recipe.mesh, "train", "float64")
    drawn = jax.tree.map(lambda leaf: weights_of(leaf.shape), target)
    return jax.device_put(drawn, jax.tree.map(lambda leaf: leaf.sharding, target))


def plain_scores(params: architecture.Params, rows: PackedRows) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of all places under the shallow policy, from all logits at once."""
    logits = params.embed[rows.tokens] @ params.embed[: MODEL.vocab_size].T
    logp = jax.nn.log_softmax(logits / TEMPERATURE)
    chosen = jnp.take_along_axis(logp, rows.targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


# The formulas, of one answer, as its authors, TRL and verl write them


def ratio_of(objective: Algorithm, logp: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Of each token; with gspo of the answer: the length-normalized likelihood ratio (2507.18071, eq. 7)."""
    log_ratio = logp - old
    return np.exp(np.full_like(logp, log_ratio.mean()) if objective.loss == "gspo" else log_ratio)


def importance_of(objective: Algorithm, one: Answer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights of the tokens, their ratios, and which are masked (verl's rollout_is; its token_k1, seq_sum_k1, seq_mean_k1,
    seq_max_k2; token_k1 with two bounds is IcePop's, 2510.18855)."""
    ratio = np.exp(one.old_logprobs - one.rollout_logprobs)
    if objective.importance == "none":
        return np.ones_like(ratio), ratio, np.zeros(ratio.shape, bool)
    most, veto = (
        limit or np.inf for limit in (objective.importance_mask, objective.importance_veto)
    )
    is_vetoed = np.max(0.5 * np.log(ratio) ** 2) > 0.5 * np.log(veto) ** 2
    ratios = {
        "token": ratio, "sequence": np.full_like(ratio, np.prod(ratio)),
        "geometric": np.full_like(ratio, np.prod(ratio) ** (1 / len(ratio))),
    }  # fmt: skip
    level = objective.importance_mask_level
    masked = ratios[objective.importance if level == "auto" else level]
    ratio = ratios[objective.importance]
    is_masked = (masked > most) | (masked < (objective.importance_mask_low or 1 / most)) | is_vetoed
    return np.minimum(ratio, objective.importance_cap) * ~is_masked, ratio, is_masked


def loss_of(objective: Algorithm, one: Answer, logp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Policy-gradient loss of each token, and its derivative in the token's own log-prob."""
    advantage, ratio = one.advantage, ratio_of(objective, logp, one.old_logprobs)
    weight = importance_of(objective, one)[0]
    limits = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "dppo":  # 2602.04879, as prime-rl's: probabilities against the sampler's
        moved = np.exp(logp) - np.exp(one.rollout_logprobs)
        is_kept = moved <= objective.clip_high if advantage > 0 else moved >= -objective.clip_low
        loss = -ratio * advantage * is_kept * weight
        return loss, loss
    if objective.loss == "sapo":  # 2511.20347, as TRL's
        t = objective.sapo_positive if advantage > 0 else objective.sapo_negative
        gate = 1 / (1 + np.exp(-t * (ratio - 1)))
        loss, slope = -4 / t * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage
        return loss * weight, slope * weight
    if objective.loss == "cispo":
        slope = -np.clip(ratio, *limits) * advantage * weight
        return slope * logp, slope
    loss = -advantage * ratio
    loss = np.maximum(loss, -advantage * np.clip(ratio, *limits))  # verl's pg_losses1 and 2
    is_free = loss == -advantage * ratio
    if objective.clip_dual and advantage < 0:
        is_free &= loss < -advantage * objective.clip_dual
        loss = np.minimum(loss, -advantage * objective.clip_dual)  # pg_losses3
    return loss * weight, np.where(is_free, -advantage * ratio, 0) * weight


def reference(objective: Algorithm, known, spans, logp, entropy, weights):
    """Loss of the rows, its derivative in each log-prob, and the policy-gradient loss, from log-probs [R, T]."""
    total, pg_loss, slopes = 0.0, 0.0, np.zeros(logp.shape)
    for one, (_, row, first), weight in zip(known, spans, weights, strict=True):
        at = row, slice(first, first + len(one.old_logprobs))
        loss, slope = loss_of(objective, one, logp[at])
        ratio = np.exp(one.reference_logprobs - logp[at])
        kl = ratio - 1 - (one.reference_logprobs - logp[at])
        pg_loss += weight * loss.sum()
        rest = objective.kl_coef * kl - objective.entropy_coef * entropy[at]
        total += weight * (loss + rest).sum()
        slopes[at] = weight * (slope + objective.kl_coef * (1 - ratio))
    return total, slopes, pg_loss


def named(objective: Algorithm) -> str:
    words = [objective.loss, objective.importance]
    return " ".join(
        words
        + ["dual"] * bool(objective.clip_dual)
        + ["mask"] * bool(objective.importance_mask)
        + ["low"] * bool(objective.importance_mask_low)
        + ["veto"] * bool(objective.importance_veto)
    )


@pytest.mark.parametrize("objective", CASES, ids=named)
def test_value_gradient_and_metrics_are_those_of_the_published_formulas(
    objective, known, shallow, x64
):
    """With each aggregation; the gradient in the weights is that of the formulas' derivatives in the log-probs."""
    recipe = recipe_of(objective)
    params, packed = params_of(recipe), packed_of(known, 8)
    found = jax.jit(jax.value_and_grad(partial(policy_update.loss, recipe=recipe), has_aux=True))

    def linear(params, rows, slopes):
        logp, entropy = plain_scores(params, rows)
        return jnp.sum(slopes * logp) - objective.entropy_coef * jnp.sum(rows.weights * entropy)

    expected = jax.jit(jax.grad(linear))
    for aggregation in AGGREGATIONS:
        (rows,) = batch_of(recipe, known, 8, aggregation)
        logp, entropy = map(np.asarray, plain_scores(params, rows))
        weights = answer_weights(packed[1].lengths, aggregation, LONGEST)
        total, slopes, pg_loss = reference(
            objective, known, packed[1].places, logp, entropy, weights
        )
        (value, (sums, maxima)), gradient = found(params, rows)
        assert float(value) == pytest.approx(total, rel=1e-10)
        theirs = expected(params, rows, slopes)
        for one, other in zip(*map(jax.tree.leaves, (gradient, theirs)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-12)
        assert np.abs(gradient.embed).max() > 1e-3
    metrics = losses.means(sums) | maxima
    assert float(metrics["pg_loss"]) == pytest.approx(pg_loss, rel=1e-10)
    spans = zip(packed[1].places, packed[1].lengths, strict=True)
    spans = [(row, slice(first, first + length)) for (_, row, first), length in spans]
    check_metrics(objective, known, [logp[at] for at in spans], metrics)
    assert float(metrics["entropy"]) == pytest.approx(
        np.mean(np.concatenate([entropy[at] for at in spans]))
    )


def check_metrics(objective, known, logps, metrics) -> None:
    """The metrics, recomputed answer by answer."""
    log_ratios = [logp - one.old_logprobs for logp, one in zip(logps, known, strict=True)]
    tokens = np.concatenate(log_ratios)
    ratios = [
        ratio_of(objective, logp, one.old_logprobs) for logp, one in zip(logps, known, strict=True)
    ]
    signs = np.concatenate([np.full(len(one.old_logprobs), one.advantage) for one in known])
    signs = (signs < 0, signs > 0) if objective.loss != "cispo" else (True, True)
    used, middle = np.concatenate(ratios), 1
    if objective.loss == "dppo":
        sampled = np.concatenate([one.rollout_logprobs for one in known])
        used, middle = np.exp(np.concatenate(logps)) - np.exp(sampled), 0
    low = (used < middle - objective.clip_low) & signs[0]
    high = (used > middle + objective.clip_high) & signs[1]
    assert low.any() and high.any()
    expected = {
        "ratio_mean": np.exp(tokens).mean(), "ratio_max": np.exp(tokens).max(), "ppo_kl": -tokens.mean(),
    }  # fmt: skip
    if objective.loss != "sapo":
        expected |= {
            "pg_clipfrac": (low | high).mean(), "pg_clipfrac_low": low.mean(), "pg_clipfrac_high": high.mean(),
        }  # fmt: skip
    if objective.clip_dual:
        expected["pg_clipfrac_lower"] = (signs[0] & (used > objective.clip_dual)).mean()
        assert expected["pg_clipfrac_lower"] > 0
    difference = np.concatenate([np.abs(one.old_logprobs - one.rollout_logprobs) for one in known])
    to_reference = np.concatenate(
        [one.reference_logprobs - a for a, one in zip(logps, known, strict=True)]
    )
    expected |= {
        "rollout_logprob_diff_mean": difference.mean(), "rollout_logprob_diff_max": difference.max(),
        "kl": (np.exp(to_reference) - 1 - to_reference).mean(),
    }  # fmt: skip
    sequences = np.exp([one.mean() for one in log_ratios])
    if losses.needs_answers(objective):
        expected |= {"sequence_ratio_mean": sequences.mean(), "sequence_ratio_max": sequences.max()}
    if objective.importance != "none":
        _, weights, masked = zip(*(importance_of(objective, one) for one in known), strict=True)
        each, whole = np.concatenate(weights), np.array([one.mean() for one in weights])
        corrected = {
            "rollout_is_mean": each.mean(), "rollout_is_max": each.max(),
            "rollout_is_ratio_fraction_high": (each > objective.importance_cap).mean(),
            "kl": np.concatenate([one.rollout_logprobs - one.old_logprobs for one in known]).mean(),
        }  # fmt: skip
        if losses.needs_answers(objective):
            corrected |= {"rollout_is_seq_mean": whole.mean(), "rollout_is_seq_max": whole.max()}
        if objective.importance_mask or objective.importance_veto:
            some = [one.any() for one in masked]
            assert 0 < sum(some) < len(some)
            is_partial = any(one.any() and not one.all() for one in masked)
            of_tokens = objective.importance_mask_level in ("auto", "token")
            of_tokens &= objective.importance == "token" and objective.importance_mask > 0
            assert is_partial == of_tokens
            corrected["rollout_rs_masked_fraction"] = np.concatenate(masked).mean()
            if losses.needs_answers(objective):
                corrected["rollout_rs_seq_masked_fraction"] = np.mean(some)
        expected |= {f"rollout_corr/{name}": value for name, value in corrected.items()}
    expected["tokens"] = len(tokens)
    if losses.needs_answers(objective):
        expected["answers"] = len(known)
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-9), name
    assert set(metrics) == set(expected) | {"pg_loss", "entropy"}


def test_a_loss_of_ones_own_with_a_mean_over_answers_has_its_whole_gradient(
    known, x64, monkeypatch
):
    """GSPO's first form, differentiated through the mean of the log-ratios, as TRL writes it."""

    def gspo(rows, clip_low, clip_high):
        assert rows.update_logprobs.ndim == 2 and rows.rollout_logprobs is not None
        log_ratio = rows.update_logprobs - rows.old_logprobs
        ratio = jnp.exp(losses.answer_mean(log_ratio, rows.segments, rows.mask))
        clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
        return -jnp.minimum(ratio * rows.advantages, clipped * rows.advantages)

    module = ModuleType("own_sequences")
    module.gspo = gspo
    monkeypatch.setitem(sys.modules, "own_sequences", module)
    results = []
    for loss in ("gspo", "own_sequences:gspo"):
        recipe = recipe_of(replace(PLAIN, loss=loss, importance="sequence"))
        (rows,) = batch_of(recipe, known, 8)
        found = jax.jit(
            jax.value_and_grad(partial(policy_update.loss, recipe=recipe), has_aux=True)
        )
        (value, (sums, _)), gradient = found(params_of(recipe), rows)
        results.append((value, gradient, sums))
    assert_same(*(one[:2] for one in results), rtol=1e-9, atol=1e-13)
    theirs, ours = (one[2] for one in results)
    assert theirs.keys() - ours.keys() == {"pg_clipfrac", "pg_clipfrac_low", "pg_clipfrac_high"}
    for name, value in ours.items():
        assert float(value) == pytest.approx(float(theirs[name]), rel=1e-9), name


def test_packing_accumulation_and_sharding_do_not_change_an_update_of_whole_answers(
    known, shallow, x64
):
    objective = replace(
        PLAIN, loss="gspo", importance="sequence", importance_cap=1.1, importance_mask=1.4
    )
    results = []
    for mesh, rows in (((1, 1), 8), ((1, 1), 1), ((2, 2), 2)):
        recipe = recipe_of(objective, *mesh)
        batch = batch_of(recipe, known, rows)
        assert (len(batch) > 1) == (rows < 8)
        state = policy_update.create(params_of(recipe), recipe)
        results.append(policy_update.update(policy_update.programs(recipe), state, batch, 0))
    for other in results[1:]:
        assert_same(results[0], other, rtol=1e-9, atol=1e-12)


# Sums over answers


def test_sums_over_answers_are_those_of_a_loop_and_stay_in_their_answer(x64):
    random = np.random.default_rng(0)
    segments = np.sort(random.integers(0, 9, (3, 40)), axis=1)
    mask, values = random.random((3, 40)) < 0.6, random.normal(size=(3, 40))
    mask &= segments > 0
    values[0, segments[0] == 3] = np.nan
    given = jnp.asarray(segments), jnp.asarray(mask)
    found = np.asarray(losses.answer_sum(jnp.asarray(values), *given))
    means = np.asarray(losses.answer_mean(jnp.asarray(values), *given))
    for row, token in np.ndindex(found.shape):
        answer = (segments[row] == segments[row, token]) & mask[row]
        total, count = values[row][answer].sum(), max(answer.sum(), 1)
        expected = (total, total / count) if mask[row, token] else (0, 0)
        np.testing.assert_allclose((found[row, token], means[row, token]), expected, rtol=1e-12)
    for row in range(3):
        for segment in range(1, 9):
            assert len(set(found[row][(segments[row] == segment) & mask[row]].astype(str))) <= 1
    weights = jnp.asarray(random.normal(size=(3, 40)))
    sums = lambda values: jnp.sum(weights * losses.answer_sum(values, *given))  # noqa: E731
    gradient = jax.grad(sums)(jnp.zeros((3, 40)))
    np.testing.assert_allclose(gradient, losses.answer_sum(weights, *given), atol=1e-12)


# A KL in the reward


@pytest.mark.parametrize(
    ("advantage", "out"),
    [("grpo", (1, 9)), ("rloo", ()), ("reinforce_pp", ()), ("reinforce_pp", (1, 9))],
)
def test_a_kl_in_the_reward_is_that_of_verl(advantage, out, known, x64):
    """In two minibatches of several accumulation steps on two data groups; against loops over answers and tokens.

    The log-probs of answers that do not count may be anything; of groups their rewards count, as those of other answers.
    """
    rewards, counts = np.random.default_rng(3).normal(size=(2, COUNT // 2)), np.ones(COUNT, bool)
    counts[list(out)] = False
    moved = [
        one if counted else one._replace(old_logprobs=one.old_logprobs + np.nan)
        for one, counted in zip(known, counts, strict=True)
    ]
    spans, minibatches = [], []
    for part in (slice(COUNT // 2), slice(COUNT // 2, COUNT)):
        spans.append(packed_of(moved[part], 2, 2)[1])
        batch = batch_of(recipe_of(PLAIN, 2, 1), moved[part], 2)
        assert spans[-1].shape[0] == len(batch) > 1
        kept = spans[-1].spread(counts[part]) > 0
        minibatches.append(
            [rows._replace(is_answer=rows.is_answer & kept[i]) for i, rows in enumerate(batch)]
        )
    knobs = algorithm(advantage=advantage, kl_in="reward", kl_coef=0.3)
    found, advantages, mean_kl = batches.penalized(knobs, minibatches, spans, rewards, counts)

    kl = [
        counted * (one.old_logprobs - one.reference_logprobs)
        for one, counted in zip(known, counts, strict=True)
    ]
    assert mean_kl == pytest.approx(sum(one.mean() for one in kl) / counts.sum(), rel=1e-10)
    less = rewards - 0.3 * np.array([one.sum() for one in kl]).reshape(rewards.shape)
    if advantage == "reinforce_pp":
        returns = [
            r - 0.3 * np.cumsum(one[::-1])[::-1] for r, one in zip(rewards.flat, kl, strict=True)
        ]
        tokens = np.concatenate([returns[i] for i in np.flatnonzero(counts)])
        whitened = [(one - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for one in returns]
        expected = [counted * one for one, counted in zip(whitened, counts, strict=True)]
    elif advantage == "grpo":
        spread = less.std(axis=1, ddof=1, keepdims=True) + 1e-6
        whole = (less - less.mean(axis=1, keepdims=True)) / spread
        expected = [np.full(len(one), a) for one, a in zip(kl, whole.flat, strict=True)]
    else:
        others = [[np.delete(group, i).mean() for i in range(len(group))] for group in less]
        expected = [np.full(len(one), a) for one, a in zip(kl, (less - others).flat, strict=True)]
    np.testing.assert_allclose(advantages, [one.mean() for one in expected], atol=1e-10)
    for batch, one, first in zip(found, spans, (0, COUNT // 2), strict=True):
        placed = one.place(expected[first : first + COUNT // 2])
        np.testing.assert_allclose([rows.advantages for rows in batch], placed, atol=1e-10)


def advantages_of(known: list[Answer], rewards: np.ndarray, kind: str) -> np.ndarray:
    """Of each answer the mean of its tokens', of rewards less a small share of the KL; all count."""
    kl = [one.old_logprobs - one.reference_logprobs for one in known]
    found = penalized_advantages(rewards, kl, np.ones(COUNT, bool), kind, 0.001)
    return np.array([one.mean() for one in found])


@pytest.mark.parametrize("kind", [*ADVANTAGES, "reinforce_pp"])
def test_rewards_without_a_difference_get_nothing_from_the_kl(kind, known):
    """Those of a group, or with reinforce_pp of the step: else a KL would give advantages of unit size, whatever kl_coef is."""
    rewards = np.ones((2, COUNT // 2))
    assert not advantages_of(known, rewards, kind).any()
    if kind == "reinforce_pp":
        assert not advantages_of(known, np.full((COUNT, 1), 0.7), kind).any()
    rewards[1, ::2] = 0
    found = advantages_of(known, rewards, kind)
    assert found[COUNT // 2 :].all() and found[: COUNT // 2].all() == (kind == "reinforce_pp")


@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_log_probs_that_are_not_finite_make_advantages_that_are_not(value, kind, known):
    """So their update is skipped, and no error blames the rewards; rewards that are not finite themselves are refused."""
    rewards = np.random.default_rng(3).normal(size=(2, COUNT // 2))
    moved = [known[0]._replace(old_logprobs=known[0].old_logprobs + value), *known[1:]]
    is_finite = np.isfinite(advantages_of(moved, rewards, kind))
    assert not is_finite[0] and is_finite[COUNT // 2 :].all() == (kind == "grpo")
    with pytest.raises(ValueError, match="1 of 14 rewards are not finite"):
        advantages_of(known, np.where(rewards == rewards[0, 0], value, rewards), kind)
