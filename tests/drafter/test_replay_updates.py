"""Batches from a replay buffer give the updates of the sequences alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_drafter_update as updates
from replays import T, feed, replay_of, request_of, texts_of

from tlt_jax.data.packing import PackedRows
from tlt_jax.drafter import losses, update as drafter_update
from tlt_jax.drafter.recipe import DrafterRecipe
from tlt_jax.drafter.replay import Piece
from tlt_jax.models import drafter as drafters

pytestmark = pytest.mark.usefixtures("x64")
# (prompt, answer) tokens: features of 20, 12, 9, 11, 8 and 4 positions are known, which fill a row.
SIZES = ((3, 18), (5, 8), (1, 9), (2, 10), (8, 1), (2, 3))


def alone(recipe: DrafterRecipe, texts, stretches: list[tuple[int, int, int]]) -> PackedRows:
    """Each stretch (uid, first position, stop) in a row of its own, without features."""
    rows = {
        name: np.zeros((len(stretches), T), np.int32)
        for name in ("tokens", "positions", "segments")
    }
    rows["is_answer"] = np.zeros((len(stretches), T), bool)
    for row, (uid, start, stop) in enumerate(stretches):
        prompt, answer = texts[uid]
        places, here = np.arange(start, stop), np.s_[row, : stop - start]
        rows["tokens"][here] = np.concatenate([prompt, answer])[places]
        rows["positions"][here] = places
        rows["segments"][here] = 1
        last = len(prompt) + len(answer) - 1
        rows["is_answer"][here] = (places >= len(prompt) - 1) & (places < last)
    return drafter_update.on_mesh(PackedRows(**rows), recipe.mesh)


def whole(recipe: DrafterRecipe, texts) -> PackedRows:
    """Every text in a row of its own, with the features that the policy computes."""
    stretches = [(uid, 0, len(prompt) + len(answer)) for uid, (prompt, answer) in texts.items()]
    return updates.observed(recipe, updates.policy_of(recipe), alone(recipe, texts, stretches))


@pytest.mark.parametrize("kind, model", [
    (updates.EAGLE, 1), (updates.WHOLE, 2), pytest.param(updates.REDUCED, 1, marks=pytest.mark.matrix),
])  # fmt: skip
def test_packed_sequences_give_the_update_of_each_alone(kind, model):
    recipe = updates.recipe_of(kind, model=model)
    texts, policy, update = (
        texts_of(SIZES),
        updates.policy_of(recipe),
        drafter_update.program(recipe),
    )
    apart = whole(recipe, texts)
    state, expected = update(updates.state_of(recipe), policy, apart)
    tokens = int(expected.pop("tokens")) - 1  # position 0 of a prompt of one token has no loss
    replay = replay_of(mesh=recipe.mesh)
    replay.begin(7, request_of(texts))
    states = None if kind == updates.EAGLE else np.asarray(apart.states)
    feed(replay, texts, np.asarray(apart.features), states)
    batch = replay.sample(0, T)
    assert (np.asarray(batch.segments) > 0).all(), "the row is full"
    assert np.asarray(batch.segments).max() > 2 and np.isfinite(batch.features).all()
    after, found = update(updates.state_of(recipe), policy, batch)
    assert int(found.pop("tokens")) == tokens
    updates.assert_same(found, expected, rtol=1e-9)
    updates.assert_same(after, state, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [pytest.param(updates.EAGLE, marks=pytest.mark.matrix), updates.WHOLE]
)
def test_packed_windows_give_the_gradients_of_each_alone(kind):
    recipe = updates.recipe_of(kind)
    texts, policy = texts_of(((2, 27), (7, 15), (3, 4))), updates.policy_of(recipe)
    params, shared, observed = (
        updates.params_of(recipe),
        drafters.shared(policy),
        whole(recipe, texts),
    )
    features, states = np.asarray(observed.features), np.asarray(observed.states)
    wanted = [(0, 0, 10), (0, 9, 19), (0, 18, 28), (2, 2, 12), (2, 11, 21), (4, 0, 6)]
    apart = alone(recipe, texts, wanted)

    def stretched(source: np.ndarray) -> jax.Array:
        array = np.zeros((len(wanted), T, source.shape[-1]))
        for row, (uid, start, stop) in enumerate(wanted):
            array[row, : stop - start] = source[list(texts).index(uid), start:stop]
        return jnp.asarray(array)

    apart = apart._replace(features=stretched(features), states=stretched(states))
    slope = jax.jit(jax.value_and_grad(lambda *given: losses.loss(*given, recipe, 0)[0]))
    expected = slope(params, shared, apart)
    replay = replay_of(width=10, most=4)
    replay.begin(0, request_of(texts))
    feed(replay, texts, features, states)
    held = sorted(replay.held, key=lambda one: (one.uid, one.start))
    assert [(one.uid, one.start, one.start + one.size) for one in held] == wanted
    batch = replay.assemble([Piece(one, 0, one.size) for one in held], T)
    found = slope(params, shared, batch)
    updates.assert_same(found, expected, rtol=1e-9, atol=1e-12)
