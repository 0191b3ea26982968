"""Laws of the loss of block drafters: what it computes, where its anchors are, and what its gradient reaches."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_drafter_update as updates
from test_drafter_update import (
    DFLASH,
    DFLASH2,
    DFLASH2_REDUCED,
    DSPARK,
    DSPARK_BARE,
    DSPARK_REDUCED,
    DSPARK_TAUGHT,
    recipe_of,
    slope_of,
)

from tlt_jax.data.packing import PackedRows
from tlt_jax.drafter import losses, recipe as drafter_recipe, update
from tlt_jax.drafter.recipe import DrafterRecipe
from tlt_jax.models import architecture, block_drafter, drafter as drafters

IDS = updates.IDS
STEP = 3


def setting(recipe: DrafterRecipe):
    """The drafter, what it shares with the policy, and a batch with features.

    As in windows of sequences, the last token of a segment may be one whose next is to be learned; and there are holes.
    """
    policy, params = updates.policy_of(recipe), updates.params_of(recipe)
    batch = updates.observed(recipe, policy, updates.batch_of(recipe))
    holes = np.random.default_rng(5).random(batch.tokens.shape) < 0.2
    batch = batch._replace(is_answer=(batch.segments > 0) & ~jnp.asarray(holes))
    return policy, params, drafters.shared(policy), batch


# Scores of single positions


def score(target, logits, top, labels, odds, ids):
    return losses.score(target, logits, top, labels, ids, True, odds)


def test_scores_worked_by_hand(x64):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    odds = jnp.log(3.0)  # of a confidence of 0.75
    whole = score(jnp.log(p), jnp.log(q) + 4, jnp.int32(0), jnp.int32(1), odds, None)
    found = whole.terms["token_loss"], whole.terms["variation"], whole.acceptance
    np.testing.assert_allclose(found, (-np.log(0.7), 0.3 + 0.4 + 0.1, 0.6), rtol=1e-12)
    assert (bool(whole.learns), bool(whole.agrees)) == (True, False)
    entropy = -(0.6 * np.log(0.75) + 0.4 * np.log(0.25))
    assert float(whole.terms["confidence_loss"]) == pytest.approx(entropy, rel=1e-12)

    # Tokens 1 and 4 of five are in the draft vocabulary, with 0.3 and 0.2 of the policy's probability.
    ids, q = jnp.array([1, 4], jnp.int32), np.array([0.9, 0.1])
    for true, has_label in ((1, True), (3, False)):
        label = losses.label_of(jnp.int32(true), ids)
        part = score(jnp.log(p[1:]), jnp.log(q), jnp.int32(1), label, None, ids)
        assert (bool(part.learns), bool(part.agrees)) == (has_label, True)
        assert float(part.terms["variation"]) == pytest.approx(0.6 + 0.1 + 0.5, rel=1e-12)
        assert float(part.acceptance) == pytest.approx(0.3 + 0.1, rel=1e-12)
        if has_label:
            assert float(part.terms["token_loss"]) == pytest.approx(-np.log(0.9), rel=1e-12)
    assert losses.label_of(jnp.arange(6), ids).tolist() == [-1, 0, -1, -1, 1, -1]


def test_the_confidence_learns_the_acceptance_and_not_the_other_way_round(x64):
    p = jnp.log(jnp.array([0.5, 0.3, 0.2]))

    def term(logits, odds):
        return score(p, logits, jnp.int32(0), jnp.int32(1), odds, None).terms["confidence_loss"]

    logits, odds = jnp.array([0.3, -0.2, 0.1]), jnp.array(0.4)
    back, ahead = jax.grad(term, argnums=(0, 1))(logits, odds)
    kept = np.minimum(np.exp(p), updates.softmax(np.asarray(logits))).sum()
    np.testing.assert_array_equal(back, 0)
    assert float(ahead) == pytest.approx(1 / (1 + np.exp(-0.4)) - kept, rel=1e-12)


# The whole loss, against a plain loop over blocks


def plain_loss(
    recipe: DrafterRecipe, params, policy, batch: PackedRows, anchors, hidden
) -> dict[str, float]:
    """Loss and metrics from hidden states [R, A, P, Z] of blocks at `anchors`, position by position."""
    config = recipe.drafter
    kept = np.arange(11) if config.has_full_vocab else IDS
    head, states = np.asarray(policy.head)[:11], np.asarray(batch.states)
    tokens, answers, segments = (
        np.asarray(array) for array in (batch.tokens, batch.is_answer, batch.segments)
    )
    sums = {name: [0.0, 0.0] for name in ("token_loss", "variation", "confidence_loss")}
    shares = {j: ([], []) for j in range(config.depth)}
    for row, index in np.argwhere(anchors >= 0):
        for j in range(config.depth):
            place = anchors[row, index] + j
            if place >= tokens.shape[1] or not answers[row, place]:
                break
            if segments[row, place] != segments[row, anchors[row, index]]:
                break
            state = hidden[row, index, j]
            logits, odds = head[kept] @ state, 0.0
            if config.markov_rank:
                before = np.asarray(params.markov_in)[tokens[row, place]]
                after, gate = np.asarray(params.markov_out)[: len(kept)], 1.0
                if config.selector_top_k:
                    gate = np.asarray(params.markov_gate) @ state
                bias = after @ (gate * before)
                logits = logits if config.selector_top_k else logits + bias
            if config.confidence:
                both = np.concatenate([state, before])
                odds = np.asarray(params.confidence) @ both + float(params.confidence_bias)
            p, q = updates.softmax(head @ states[row, place]), updates.softmax(logits)
            full = np.zeros(11)
            full[kept] = q
            if config.selector_top_k:
                best = np.argsort(-logits)[: config.selector_top_k]
                own = updates.softmax(logits[best] + bias[best])
                full[kept[best]] = full[kept[best]].sum() * own
            goal = updates.goal_of(recipe, p, batch, row, place)
            variation, accepted = np.abs(full - goal).sum(), np.minimum(full, p).sum()
            weight = np.exp(-j / losses.GAMMA)
            terms = {"variation": variation}
            if config.confidence:
                sure = 1 / (1 + np.exp(-odds))
                terms["confidence_loss"] = -(
                    accepted * np.log(sure) + (1 - accepted) * np.log(1 - sure)
                )
            has_next = (
                place + 1 < tokens.shape[1] and segments[row, place + 1] == segments[row, place]
            )
            if has_next and tokens[row, place + 1] in kept:
                terms["token_loss"] = -np.log(full[tokens[row, place + 1]])
            for name, term in terms.items():
                sums[name][0] += weight * term
                sums[name][1] += weight
            shares[j][0].append(full.argmax() == p.argmax())
            shares[j][1].append(accepted)
    means = {name: total / weight for name, (total, weight) in sums.items() if weight}
    loss = losses.TOKEN * means["token_loss"] + losses.VARIATION * means["variation"]
    loss += losses.CONFIDENCE * means.get("confidence_loss", 0.0)
    by_depth = {}
    for j, (agrees, accepted) in shares.items():
        by_depth |= {
            f"agreement@{j + 1}": np.mean(agrees),
            f"acceptance@{j + 1}": np.mean(accepted),
        }
    return means | by_depth | {"loss": loss, "tokens": answers.sum()}


@pytest.mark.parametrize(
    "kind",
    [
        DFLASH,
        DFLASH2,
        DFLASH2_REDUCED,
        pytest.param(DSPARK, marks=pytest.mark.matrix),
        DSPARK_REDUCED,
        DSPARK_BARE,
        DSPARK_TAUGHT,
    ],
)  # DSPARK_REDUCED has all that DSPARK has, and a draft vocabulary
def test_loss_and_metrics_are_those_of_a_plain_loop_and_the_gradient_is_its_slope(
    kind, x64, monkeypatch
):
    recipe = recipe_of(kind)
    policy, params, shared, batch = setting(recipe)
    anchors = losses.draw(losses.candidates(batch), STEP, recipe)
    rows = batch.tokens, batch.features, batch.positions, batch.segments, anchors
    hidden = jax.jit(
        lambda params: block_drafter.forward_blocks(params, recipe.drafter, shared, *rows)
    )(params)
    expected = plain_loss(recipe, params, policy, batch, *map(np.asarray, (anchors, hidden)))
    total, metrics = updates.loss_of(recipe, STEP)(params, shared, batch)
    assert dict(metrics | {"loss": total}) == pytest.approx(expected, rel=1e-10)
    # The slope of the acceptance that the confidence learns is not followed, so that term is left out.
    monkeypatch.setattr(losses, "CONFIDENCE", 0.0)
    updates.check_slope(slope_of(recipe, STEP), recipe, params, shared, batch)


def test_the_confidence_trains_all_that_it_reads_and_nothing_else(x64, monkeypatch):
    """As published: its gradient flows into the layers and the Markov embedding, not through its target into the logits."""
    monkeypatch.setattr(losses, "TOKEN", 0.0)
    monkeypatch.setattr(losses, "VARIATION", 0.0)
    recipe = recipe_of(DSPARK)
    _, params, shared, batch = setting(recipe)
    _, gradient = slope_of(recipe, STEP)(params.replace(ids=None), params, shared, batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        assert (np.abs(leaf).max() > 0) == (name != ".markov_out"), name


# Anchors


def test_anchors_are_different_tokens_whose_next_token_is_to_be_learned(x64, monkeypatch):
    """As many as there are, at most one for SPACING tokens of the row."""
    recipe = recipe_of(DSPARK_REDUCED)
    batch = updates.batch_of(recipe)
    segments, answers = np.asarray(batch.segments), np.asarray(batch.is_answer)
    able = np.zeros_like(answers)
    for row, t in np.argwhere(answers):
        able[row, t] = t > 0 and segments[row, t - 1] == segments[row, t]
    assert 0 < able.sum() < answers.sum(), "some answers begin at the first token of their segment"
    np.testing.assert_array_equal(losses.candidates(batch), able)
    for spacing in (1, 2, 8):
        monkeypatch.setattr(losses, "SPACING", spacing)
        found = [np.asarray(losses.draw(jnp.asarray(able), step, recipe)) for step in (4, 4, 5)]
        np.testing.assert_array_equal(found[0], found[1])
        assert spacing == 1 or (found[0] != found[2]).any(), "every step draws anew"
        assert found[0].shape == (4, 16 // spacing)
        for row, anchors in enumerate(found[0]):
            drawn = anchors[anchors >= 0]
            assert able[row, drawn].all() and len(set(drawn)) == len(drawn)
            assert len(drawn) == min(able[row].sum(), 16 // spacing)
    seeds = (replace(recipe, seed=seed) for seed in (0, 1))
    one, other = (losses.draw(jnp.asarray(able), 4, own) for own in seeds)
    assert (one != other).any()


def test_every_candidate_is_drawn_equally_often(monkeypatch):
    """2,000 draws of 4 of 10: a share of 0.4 has a standard deviation of 0.011; one that is off by 0.06 is seen."""
    monkeypatch.setattr(losses, "SPACING", 4)
    recipe = recipe_of(DSPARK_REDUCED)
    mask = jnp.arange(16)[None] % 8 < 5
    steps = jnp.arange(2000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda step: losses.draw(mask, step, recipe)))(steps))
    shares = np.bincount(drawn.reshape(-1), minlength=16) / 2000
    np.testing.assert_allclose(shares[np.asarray(mask[0])], 0.4, atol=0.045)
    assert not shares[~np.asarray(mask[0])].any()


# Costs


def shapes_of(kind: str, model, length: int, *, rows: int = 2, chunk: int = 64, **sizes):
    """The recipe of a drafter of this kind, and the shapes of its policy and of rows with features, in float32."""
    drafter = drafters.for_policy(model, kind, **sizes)
    fixed = {"param_dtype": "float32", "compute_dtype": "float32"}
    recipe = replace(
        recipe_of(DSPARK_REDUCED if drafter.is_block else updates.WHOLE, **fixed), model=model, drafter=drafter,
        logits_chunk=chunk, attention_block=chunk,
    )  # fmt: skip
    features, states = (
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32)
        for width in (drafter.feature_width, model.hidden_size)
    )
    batch = update.abstract_rows(recipe.mesh, rows, length)
    policy = architecture.abstract(model, recipe.mesh, "train", "float32")
    return recipe, policy, batch._replace(features=features, states=states)


@pytest.mark.parametrize(
    "kind, sizes", [("dspark", {"num_layers": 1, "block_size": 4}), ("eagle3", {})]
)
def test_memory_grows_linearly_with_the_row(kind, sizes):
    """Neither the scores of all queries nor the logits of all positions exist at once; and the state is donated."""
    vocab, found = 8192, []
    for length in (1024, 2048):
        model = replace(updates.MODEL, vocab_size=vocab, max_positions=length)
        recipe, policy, batch = shapes_of(kind, model, length, **sizes)
        state = drafter_recipe.abstract_state(recipe)
        compiled = update.program(recipe).lower(state, policy, batch).compile()
        found.append(compiled.memory_analysis())
    short, long = (one.temp_size_in_bytes for one in found)
    positions = 2 * 2 * length  # rows, positions for each token
    assert long < 2.2 * short and long < positions * min(vocab, length * model.num_heads) * 4 / 4
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert found[1].alias_size_in_bytes > 0.99 * state_bytes


def test_the_operations_of_a_loss_are_those_of_its_products():
    """By hand, against XLA's count: the policy's head once a token, that of the draft vocabulary twice a position."""
    R, T, D, V, U, r, heads, kv, width, mlp = 2, 128, 128, 600, 300, 32, 4, 2, 32, 160
    model = replace(
        updates.MODEL, vocab_size=V, hidden_size=D, num_heads=heads, num_kv_heads=kv, head_dim=width, mlp_dim=mlp
    )  # fmt: skip
    sizes = {"num_layers": 1, "block_size": 4, "draft_vocab_size": U, "markov_rank": r}
    recipe, policy, batch = shapes_of("dspark", model, T, rows=R, chunk=10**6, **sizes)
    params = drafters.abstract(recipe.drafter, recipe.mesh, "train", "float32")

    def loss(params, policy, batch):
        return losses.loss(params, drafters.shared(policy), batch, recipe, STEP)[0]

    found = jax.jit(loss).lower(params, policy, batch).compile().cost_analysis()["flops"]
    positions = T // 2 * 4  # a block of 4 for every second token
    # Features of 2 layers, keys and values, the policy's head.
    tokens = T * (2 * D * D + 2 * D * kv * width + D * V)
    layer = 2 * D * heads * width + 2 * D * kv * width + 3 * D * mlp
    attention = 2 * heads * width * (T + 4)
    logits = 2 * D * U + r * U
    expected = 2 * R * (tokens + positions * (layer + attention + logits))
    assert found == pytest.approx(expected, rel=0.06)
