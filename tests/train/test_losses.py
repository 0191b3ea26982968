"""GRPO's arithmetic against numbers worked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.data.packing import PackedRows
from tlt_jax.train import losses
from tlt_jax.train.advantages import (
    ADVANTAGES,
    answer_advantages,
    answer_weights,
    group_advantages,
    zero_variance,
)

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0], [0.3, 0.3, 0.3, 0.3]])


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        (
            "grpo",
            [0.8660239, -0.8660239, -0.8660239, 0.8660239],
            [1.4999985, -0.4999995, -0.4999995, -0.4999995],
        ),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3], [2.0, -2 / 3, -2 / 3, -2 / 3]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]),
        ("maxrl", [1.0, -1.0, -1.0, 1.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_advantages_are_those_worked_by_hand(kind, first, second):
    found = group_advantages(REWARDS, kind)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found[:2], [first, second], rtol=1e-6)
    np.testing.assert_array_equal(found[2], 0.0)


@pytest.mark.parametrize("kind", list(ADVANTAGES))
def test_advantages_sum_to_zero_in_each_group_and_ignore_a_shift(kind):
    rewards = np.random.default_rng(0).normal(size=(5, 7))
    found = group_advantages(rewards, kind)
    np.testing.assert_allclose(found.sum(axis=1), 0.0, atol=1e-12)
    if kind != "maxrl":  # relative to the mean
        np.testing.assert_allclose(group_advantages(rewards + 3.0, kind), found, atol=1e-12)


def test_reinforce_pp_whitens_the_rewards_of_all_tokens():
    """As verl's masked_whiten over a batch of answers, each token with the reward of its answer."""
    random = np.random.default_rng(0)
    rewards, lengths = random.normal(size=(3, 4)), random.integers(1, 9, (3, 4))
    found = answer_advantages(rewards, lengths, "reinforce_pp")
    tokens = np.repeat(rewards.reshape(-1), lengths.reshape(-1))
    expected = (rewards - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not answer_advantages(np.full((2, 1), 0.1), np.array([[3], [4]]), "reinforce_pp").any()
    broken = np.array([[3, 1], [0, 4]])  # an answer that does not count has no token
    found = answer_advantages(np.array([[1.0, 0.0], [9.0, 0.0]]), broken, "reinforce_pp")
    np.testing.assert_allclose(found[0], (np.array([1.0, 0.0]) - 3 / 8) / (15 / 56) ** 0.5)
    one_each = answer_advantages(np.array([[1.0], [0.0]]), np.array([[2], [2]]), "reinforce_pp")
    np.testing.assert_allclose(one_each, [[0.75**0.5], [-(0.75**0.5)]], rtol=1e-6)


def test_groups_of_equal_rewards_are_counted_and_teach_nothing():
    rewards = np.full((2, 3), 0.1)
    rewards[1, 0] = 0.2
    assert zero_variance(rewards).tolist() == [True, False]
    assert not group_advantages(rewards, "rloo")[0].any()
    rounded = np.array([[0.7 + 0.2 + 0.1, 1.0, 1.0]])  # 0.9999999999999999
    assert rounded.min() < 1.0 and zero_variance(rounded)[0]
    assert not group_advantages(rounded, "grpo").any()
    assert not answer_advantages(rounded, np.ones((1, 3)), "reinforce_pp").any()


def test_rewards_without_a_group_or_not_finite_are_refused():
    with pytest.raises(ValueError, match="at least 2 samples"):
        group_advantages(np.ones((4, 1)), "grpo")
    with pytest.raises(ValueError, match="1 of 4 rewards are not finite"):
        group_advantages(np.array([[1.0, np.nan], [0.0, 1.0]]), "grpo")
    with pytest.raises(ValueError, match="1 of 2 rewards are not finite"):
        answer_advantages(np.array([[1.0], [np.inf]]), np.ones((2, 1)), "reinforce_pp")


@pytest.mark.parametrize(
    ("kind", "weights", "filtered"),
    [
        ("token_mean", [1 / 23] * 3, [1 / 7, 0, 1 / 7]),
        ("sequence_mean", [1 / 6, 1 / 48, 1 / 15], [1 / 4, 0, 1 / 10]),
        ("prompt_mean", [1 / 36, 1 / 36, 1 / 10], [1 / 4, 0, 1 / 10]),
        ("dr_grpo", [1 / 48] * 3, [1 / 48, 0, 1 / 48]),
    ],
)
def test_token_weights_are_those_worked_by_hand(kind, weights, filtered):
    """Of all answers, the first two of one prompt, and without the second one."""
    lengths, kept, prompts = np.array([2, 16, 5]), np.array([True, False, True]), [7, 7, 9]
    np.testing.assert_allclose(answer_weights(lengths, kind, 16, None, prompts), weights)
    np.testing.assert_allclose(answer_weights(lengths, kind, 16, kept, prompts), filtered)
    assert not answer_weights(lengths, kind, 16, np.zeros(3, bool), prompts).any()


def rows_of(new, old, advantages, rollout=None, segments=None) -> PackedRows:
    """Rows of one answer, or of these segments, with these probabilities."""
    new, old = (jnp.log(jnp.asarray(part)) for part in (new, old))
    ones = jnp.ones(new.shape, int)
    return PackedRows(
        ones, ones, ones if segments is None else segments, weights=jnp.ones(new.shape),
        advantages=jnp.asarray(advantages), update_logprobs=new, old_logprobs=old,
        rollout_logprobs=None if rollout is None else jnp.log(jnp.asarray(rollout)),
    )  # fmt: skip


def value_and_slope(loss, rows):
    """The loss of each token, and the gradient of their sum in the log-probs."""
    found = loss(rows)
    gradient = jax.grad(lambda new: loss(rows._replace(update_logprobs=new)).loss.sum())
    return found, gradient(rows.update_logprobs)


@pytest.mark.parametrize("limits", [(0.0, 0.0), (0.0, 0.2), (0.2, 0.0), (0.0, 0.0, 3.0)])
@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "dppo", "sapo"])
def test_at_ratio_1_the_gradient_is_that_of_reinforce_whatever_the_limits(name, limits):
    """A limit of 0 puts the bound on the ratio: there a token is not clipped, as in torch (clamp 1, halves of minimum)."""
    one, advantages = np.full((1, 4), 0.1), np.array([[1.0, -1.0, 2.5, -0.3]])
    given = rows_of(one, one, advantages)
    limits = limits if name in ("ppo", "gspo") else limits[:2]
    limits = (1.0, 1.05) if name == "sapo" else limits
    found, gradient = value_and_slope(lambda new: losses.BUILT_IN[name](new, *limits), given)
    np.testing.assert_allclose(gradient, -given.advantages, rtol=1e-6 if name == "sapo" else 0)
    if name not in ("cispo", "sapo"):
        np.testing.assert_array_equal(found.loss, -given.advantages)
    assert name == "sapo" or not (found.clipped_low | found.clipped_high).any()


def test_extreme_ratios_leave_loss_and_gradient_finite():
    zeros, ones = jnp.zeros((1, 4)), jnp.ones((1, 4))
    advantages = jnp.array([[1.0, -1.0, 1.0, -1.0]])
    rows = rows_of(ones, ones, advantages, ones, jnp.arange(1, 5)[None])
    logprobs = jnp.array([[500.0, 500.0, -500.0, -500.0]])
    for loss in losses.BUILT_IN.values():
        total, gradient = jax.value_and_grad(
            lambda logprobs, loss=loss: jnp.sum(
                loss(rows._replace(update_logprobs=logprobs), 0.2, 0.2).loss
                + losses.kl_k3(logprobs, zeros)
            )
        )(logprobs)
        assert jnp.isfinite(total) and jnp.isfinite(gradient).all()
    for level in ("token", "sequence"):
        found = losses.importance(rows._replace(old_logprobs=logprobs), level, 2.0, 3.0)
        assert jnp.isfinite(found.ratio).all() and not found.weight.any(), "all are masked"


def test_k3_is_that_worked_by_hand_and_its_mean_is_the_divergence():
    found = losses.kl_k3(jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.25])))
    np.testing.assert_allclose(found, [np.log(2) - 0.5, 0.0], atol=1e-6)
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    k3 = losses.kl_k3(jnp.log(jnp.asarray(policy)), jnp.log(jnp.asarray(reference)))
    np.testing.assert_allclose(
        np.sum(policy * k3), np.sum(policy * np.log(policy / reference)), rtol=1e-5
    )
