"""GRPO's arithmetic against numbers worked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.train import losses
from tlt_jax.train.advantages import ADVANTAGES, answer_weights, group_advantages, zero_variance

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
    np.testing.assert_allclose(group_advantages(rewards + 3.0, kind), found, atol=1e-12)


def test_groups_of_equal_rewards_are_counted_and_teach_nothing():
    rewards = np.full((2, 3), 0.1)
    rewards[1, 0] = 0.2
    assert zero_variance(rewards).tolist() == [True, False]
    assert not group_advantages(rewards, "rloo")[0].any()


def test_rewards_without_a_group_or_not_finite_are_refused():
    with pytest.raises(ValueError, match="at least 2 samples"):
        group_advantages(np.ones((4, 1)), "grpo")
    with pytest.raises(ValueError, match="1 of 4 rewards are not finite"):
        group_advantages(np.array([[1.0, np.nan], [0.0, 1.0]]), "grpo")


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("token_mean", [1 / 10] * 3),
        ("sequence_mean", [1 / 6, 1 / 9, 1 / 15]),
        ("dr_grpo", [1 / 48] * 3),
    ],
)
def test_token_weights_are_those_worked_by_hand(kind, weights):
    lengths = np.array([2, 3, 5])
    np.testing.assert_allclose(answer_weights(lengths, kind, max_new_tokens=16), weights)
    if kind != "dr_grpo":
        assert np.sum(lengths * weights) == pytest.approx(1.0)


def test_clipped_loss_is_that_worked_by_hand_and_clipped_tokens_have_no_gradient():
    ratios = jnp.array([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0, 2.0])
    old = jnp.full(5, -1.0)

    def loss(logprobs):
        return losses.policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)

    logprobs = old + jnp.log(ratios)
    found = loss(logprobs)
    np.testing.assert_allclose(found.loss, [-1.3, 1.5, -0.5, 0.8, -2.2], rtol=1e-6)
    np.testing.assert_allclose(found.ratio, ratios, rtol=1e-6)
    assert found.clipped_high.tolist() == [True, False, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True, False]
    gradient = jax.grad(lambda logprobs: loss(logprobs).loss.sum())(logprobs)
    np.testing.assert_allclose(gradient, [0.0, 1.5, -0.5, 0.0, -2.2], rtol=1e-6)


def test_extreme_ratios_leave_loss_and_gradient_finite():
    old, advantages = jnp.zeros(4), jnp.array([1.0, -1.0, 1.0, -1.0])
    logprobs = jnp.array([500.0, 500.0, -500.0, -500.0])
    total, gradient = jax.value_and_grad(
        lambda logprobs: jnp.sum(
            losses.policy_loss(logprobs, old, advantages, 0.2, 0.2).loss
            + losses.kl_k3(logprobs, old)
        )
    )(logprobs)
    assert jnp.isfinite(total) and jnp.isfinite(gradient).all()


def test_k3_is_that_worked_by_hand_and_its_mean_is_the_divergence():
    found = losses.kl_k3(jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.25])))
    np.testing.assert_allclose(found, [np.log(2) - 0.5, 0.0], atol=1e-6)
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    k3 = losses.kl_k3(jnp.log(jnp.asarray(policy)), jnp.log(jnp.asarray(reference)))
    np.testing.assert_allclose(
        np.sum(policy * k3), np.sum(policy * np.log(policy / reference)), rtol=1e-5
    )


def test_importance_weights_are_truncated_and_carry_no_gradient():
    old, recorded = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.1, 0.4]))
    np.testing.assert_allclose(losses.importance_weight(old, recorded, 2.0), [2.0, 0.5], rtol=1e-6)
    gradient = jax.grad(lambda old: losses.importance_weight(old, recorded, 2.0).sum())(old)
    np.testing.assert_array_equal(gradient, 0.0)
