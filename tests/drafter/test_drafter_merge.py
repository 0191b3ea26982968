"""Copies of the drafter and their merge: means weighted by tokens, of weights and moments, on any mesh."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_drafter_update import EAGLE, REDUCED, recipe_of, state_of

from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import update as drafter_update

MESHES = [(1, 1), (2, 1), (2, 2), (4, 1)]


def groups_of(recipe):
    return [meshes.data_group(recipe.mesh, index) for index in range(recipe.mesh.shape["data"])]


def copies_of(recipe, state):
    return list(together(recipe).spread(state).values())


def together(recipe):
    return drafter_update.Copies(recipe, dict(enumerate(groups_of(recipe))))


def merged(copies, tokens, recipe):
    return together(recipe).merged(dict(enumerate(copies)), tokens)


def changed(copy, group: int):
    """The copy after simulated training: every float and every counter changed."""

    def other(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf * (group + 2) + 0.25 * group

    step = copy.step + 3 * (group + 1)
    return jax.tree.map(other, copy).replace(step=step)


@pytest.mark.parametrize("data,model", MESHES)
def test_groups_get_whole_copies_and_the_merge_is_their_mean_weighted_by_tokens(x64, data, model):
    """Of weights and moments."""
    recipe = recipe_of(REDUCED, data=data, model=model)
    state = state_of(recipe)
    ids = np.asarray(state.params.ids)
    before, copies = jax.device_get(state), copies_of(recipe, state)
    for copy, group in zip(
        copies, groups_of(recipe), strict=True
    ):  # a whole one on its own devices
        for leaf, whole in zip(jax.tree.leaves(copy), jax.tree.leaves(before), strict=True):
            assert set(leaf.sharding.device_set) == set(group.devices.flat)
            np.testing.assert_array_equal(np.asarray(leaf), whole[None])
    copies = [changed(copy, i) for i, copy in enumerate(copies)]
    tokens = [100 * (i + 1) for i in range(data)]
    hosts = [jax.device_get(copy) for copy in copies]
    found = merged(copies, tokens, recipe)

    weights = np.array(tokens) / sum(tokens)
    for got, like, *leaves in zip(*map(jax.tree.leaves, (found, state, *hosts)), strict=True):
        assert got.sharding.is_equivalent_to(like.sharding, got.ndim) and got.dtype == like.dtype
        if jnp.issubdtype(got.dtype, jnp.floating):
            mean = sum(weight * leaf[0] for weight, leaf in zip(weights, leaves, strict=True))
            np.testing.assert_allclose(np.asarray(got), mean, rtol=1e-12)
    np.testing.assert_array_equal(np.asarray(found.params.ids), ids)
    assert int(found.step) == 3 * data
    for leaf, was in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), was, "the state from before survives")
    moments = [leaf for leaf in jax.tree.leaves(found.opt_state) if leaf.ndim]
    assert moments and (data == 1 or any(np.abs(np.asarray(leaf)).max() > 0 for leaf in moments))


def test_a_group_that_trained_nothing_counts_for_nothing_whatever_its_numbers(x64):
    recipe = recipe_of(EAGLE, data=2)
    first, second = copies_of(recipe, state_of(recipe))
    trained = changed(first, 0)
    expected = jax.device_get(trained)
    broken = jax.tree.map(
        lambda leaf: leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, second
    )
    found = merged([trained, broken], [7, 0], recipe)
    for got, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(got), leaf[0], rtol=1e-15)


def test_bfloat16_weights_are_averaged_in_float32(x64):
    recipe = replace(recipe_of(EAGLE, data=4), param_dtype="bfloat16")
    state = state_of(recipe)
    copies = copies_of(recipe, state)
    found = merged(copies, [1, 1, 1, 1], recipe)
    for got, was in zip(jax.tree.leaves(found.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(was))
