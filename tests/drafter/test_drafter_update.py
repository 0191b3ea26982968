"""Laws of the drafter's update: what it computes, that sharding and chunks do not change it, and what it does not touch."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.config import Config
from tlt_jax.config.schema import DrafterTraining, Optim
from tlt_jax.data import packing
from tlt_jax.data.packing import Example, PackedRows
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.drafter import (
    losses,
    recipe as drafter_recipe,
    step_training,
    update as drafter_update,
)
from tlt_jax.drafter.recipe import DrafterRecipe, DrafterState, recipe_of as configured
from tlt_jax.models import architecture, drafter as drafters, eagle, params as trees
from tlt_jax.optimizer import Adam

MODEL = architecture.ModelConfig(
    family="qwen2", vocab_size=11, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24,
    max_positions=32, qkv_bias=True, tied=False, init_std=0.4,
)  # fmt: skip
IDS = np.array([0, 2, 3, 5, 7, 10], np.int32)
ADAM = Adam(learning_rate=1e-2, total_steps=10, weight_decay=0.1)
UNROLL = 2
EAGLE, WHOLE, REDUCED = "eagle", "eagle3", "eagle3 reduced"
DFLASH, DSPARK, DSPARK_REDUCED, DSPARK_BARE = "dflash", "dspark", "dspark reduced", "dspark bare"
DFLASH2, DFLASH2_REDUCED = "dflash2", "dflash2 reduced"
# With a teacher of the policy whose LIKELY likeliest tokens are known.
REDUCED_TAUGHT, DSPARK_TAUGHT, LIKELY, TEACHER_SHARE = (
    "eagle3 reduced taught", "dspark reduced taught", 4, 0.3,
)  # fmt: skip
SOME, ONE = {"draft_vocab_size": len(IDS)}, {"block_size": 3, "num_layers": 1, "markov_rank": 8}
SIZES = {
    EAGLE: {}, WHOLE: {}, REDUCED: SOME, DFLASH: {"block_size": 4}, DSPARK: ONE, DSPARK_REDUCED: ONE | SOME,
    DSPARK_BARE: ONE | {"markov_rank": 0, "confidence": False}, DFLASH2: ONE | {"selector_top_k": 4, "conv_group_size": 4},
    DFLASH2_REDUCED: ONE | SOME | {"selector_top_k": 3, "block_size": 4}, REDUCED_TAUGHT: SOME, DSPARK_TAUGHT: ONE | SOME,
}  # fmt: skip
OF_EACH_KIND = pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.matrix) for kind in (EAGLE, DFLASH)),
        REDUCED,
        DFLASH2_REDUCED,
        DSPARK_REDUCED,
    ],
)


def recipe_of(kind=EAGLE, data=1, model=1, **changes) -> DrafterRecipe:
    drafter = drafters.for_policy(MODEL, kind.split()[0], **SIZES[kind])
    fixed = {
        "unroll": 0 if drafter.is_block else UNROLL, "param_dtype": "float64", "compute_dtype": "float64",
        "logits_chunk": 16, "attention_block": 16, "teacher_share": TEACHER_SHARE * kind.endswith("taught"),
    }  # fmt: skip
    return DrafterRecipe(MODEL, drafter, make_mesh(data, model), ADAM, **(fixed | changes))


def drawn(target, seed: int):
    """Random numbers for every float of abstract params, the same on every mesh."""
    random = np.random.default_rng(seed)
    numbers = jax.tree.map(
        lambda leaf: (0.4 * random.normal(size=leaf.shape)).astype(leaf.dtype), target
    )
    return jax.device_put(numbers, jax.tree.map(lambda leaf: leaf.sharding, target))


def policy_of(recipe: DrafterRecipe) -> architecture.Params:
    return drawn(architecture.abstract(MODEL, recipe.mesh, "train", recipe.param_dtype), seed=0)


def params_of(recipe: DrafterRecipe, seed: int = 1) -> drafters.DrafterParams:
    target = drafters.abstract(recipe.drafter, recipe.mesh, "train", recipe.param_dtype)
    ids = None if target.ids is None else jax.device_put(IDS, target.ids.sharding)
    return drawn(target.replace(ids=None), seed).replace(ids=ids)


def state_of(recipe: DrafterRecipe) -> DrafterState:
    return drafter_recipe.create(params_of(recipe), recipe)


def batch_of(recipe: DrafterRecipe) -> PackedRows:
    """Four packed rows with prompts of every length from 1 on."""
    random = np.random.default_rng(0)
    examples = [
        Example(
            uid, random.integers(0, 11, 1 + uid % 4), random.integers(0, 11, random.integers(1, 9))
        )
        for uid in range(7)
    ]
    packed, _ = packing.pack(examples, 16, 4)
    assert len(packed.tokens) == 1
    rows = jax.tree.map(lambda leaf: leaf[0], packed._replace(targets=None))
    if not recipe.teacher_share:
        return drafter_update.on_mesh(rows, recipe.mesh)
    p = softmax(random.normal(0, 2, (*rows.tokens.shape, 11)))
    ids = np.argsort(-p, axis=-1)[..., :LIKELY].astype(np.int32)
    taught = ids, np.log(np.take_along_axis(p, ids, -1))
    placed = meshes.put(taught, meshes.sharding(recipe.mesh, ("batch", None, None), "train"))
    rows = drafter_update.on_mesh(rows, recipe.mesh)
    return rows._replace(teacher_ids=placed[0], teacher_logprobs=placed[1])


def goal_of(recipe: DrafterRecipe, p: np.ndarray, batch: PackedRows, *place: int) -> np.ndarray:
    """What the drafter learns at a position where the policy has the probabilities p[11]."""
    if not recipe.teacher_share:
        return p
    ids = np.asarray(batch.teacher_ids)[place]
    theirs = p.copy()
    theirs[ids] = np.exp(np.asarray(batch.teacher_logprobs)[place])
    others = np.setdiff1d(np.arange(11), ids)
    theirs[others] *= (1 - theirs[ids].sum()) / p[others].sum()
    assert theirs.sum() == pytest.approx(1)
    return (1 - recipe.teacher_share) * p + recipe.teacher_share * theirs


def observed(recipe: DrafterRecipe, policy: architecture.Params, batch: PackedRows) -> PackedRows:
    return jax.jit(lambda policy, batch: drafter_update.observe(policy, batch, recipe))(
        policy, batch
    )


def loss_of(recipe: DrafterRecipe, step: int = 0):
    """Jitted (params, shared, batch) -> loss and metrics."""
    return jax.jit(lambda *given: losses.loss(*given, recipe, step))


def slope_of(recipe: DrafterRecipe, step: int = 0):
    """Jitted (params without ids, params, shared, batch) -> loss and metrics, and their gradient."""

    def total(trained, params, shared, batch):
        return losses.loss(trained.replace(ids=params.ids), shared, batch, recipe, step)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def check_slope(slope, recipe: DrafterRecipe, params: drafters.DrafterParams, *rest) -> tuple:
    """Loss and metrics; the gradient is the slope of the loss, in a random direction."""
    trained = params.replace(ids=None)
    found, gradient = slope(trained, params, *rest)
    direction = params_of(recipe, seed=5).replace(ids=None)
    shifted = [
        slope(jax.tree.map(lambda p, d, s=s: p + s * 1e-6 * d, trained, direction), params, *rest)[0][0]
        for s in (1, -1)
    ]  # fmt: skip
    products = jax.tree.map(lambda one, other: np.sum(one * other), gradient, direction)
    expected = float(shifted[0] - shifted[1]) / 2e-6
    assert sum(jax.tree.leaves(products)) == pytest.approx(expected, rel=1e-5)
    return found


def assert_same(one, other, **tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if tolerance:
            np.testing.assert_allclose(a, b, **tolerance)
        else:
            np.testing.assert_array_equal(a, b)


# Scores of single tokens


def score(target, logits, top, ids=None):
    return losses.score(target, logits, top, losses.label_of(top, ids), ids)


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def test_scores_worked_by_hand(x64):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    entropy = -(0.5 * np.log(0.2) + 0.3 * np.log(0.7) + 0.2 * np.log(0.1))
    whole = score(jnp.log(p), jnp.log(q) + 4, jnp.int32(0))
    assert_same(
        (whole.terms["token_loss"], whole.acceptance), (entropy, 0.2 + 0.3 + 0.1), rtol=1e-12
    )
    assert (bool(whole.agrees), bool(whole.learns)) == (False, True)

    # Tokens 1 and 4 of five are in the draft vocabulary, with 0.3 and 0.2 of the policy's probability.
    ids, q = jnp.array([1, 4], jnp.int32), np.array([0.9, 0.1])
    for top, agrees, learns in (
        (1, True, True),
        (4, False, True),
        (3, False, False),
        (0, False, False),
    ):
        part = score(jnp.log(p[1:]), jnp.log(q), jnp.int32(top), ids)
        # To the policy renormalized over the two.
        entropy = -(0.6 * np.log(0.9) + 0.4 * np.log(0.1))
        assert_same((part.terms["token_loss"], part.acceptance), (entropy, 0.3 + 0.1), rtol=1e-12)
        assert (bool(part.agrees), bool(part.learns)) == (agrees, learns)


# The whole loss, against a plain loop over slots


def plain_loss(
    recipe: DrafterRecipe, policy: architecture.Params, batch: PackedRows, hidden, logits
) -> dict[str, float]:
    """Loss and metrics from the drafter's hidden states [J, R, T, Z] and logits [J, R, T, U], slot by slot."""
    eagle1, kept = (
        recipe.drafter.kind == "eagle",
        IDS if recipe.drafter.draft_vocab_size < 11 else np.arange(11),
    )
    head, states = np.asarray(policy.head)[:11], np.asarray(batch.states)
    answers, segments = np.asarray(batch.is_answer), np.asarray(batch.segments)
    q, hidden, metrics, total = (
        softmax(np.asarray(logits)[..., : len(kept)]),
        np.asarray(hidden),
        {},
        0.0,
    )
    for j in range(recipe.unroll):
        features, tokens, agrees, acceptance = [], [], [], []
        for row in range(segments.shape[0]):
            for slot in range(segments.shape[1] - 1 - j):
                place = slot + 1 + j
                if not answers[row, place] or segments[row, place] != segments[row, slot]:
                    continue
                p, drafted = softmax(head @ states[row, place]), q[j, row, slot]
                gap = np.abs(hidden[j, row, slot] - states[row, place])
                features.append(np.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
                agrees.append(kept[drafted.argmax()] == p.argmax())
                acceptance.append(np.minimum(p[kept], drafted).sum())
                if p.argmax() in kept:
                    goal = goal_of(recipe, p, batch, row, place)[kept]
                    tokens.append(-(goal / goal.sum() * np.log(drafted)).sum())
        part = 0.1 * np.mean(tokens) + np.mean(features) if eagle1 else np.mean(tokens)
        total += losses.DECAY**j * part
        metrics |= {
            f"agreement@{j + 1}": np.mean(agrees),
            f"acceptance@{j + 1}": np.mean(acceptance),
        }
        if j == 0:
            metrics |= {"token_loss": np.mean(tokens)} | (
                {"feature_loss": np.mean(features)} if eagle1 else {}
            )
    return metrics | {"loss": total, "tokens": answers.sum()}


@pytest.mark.parametrize(
    "kind", [EAGLE, pytest.param(WHOLE, marks=pytest.mark.matrix), REDUCED, REDUCED_TAUGHT]
)
def test_loss_and_metrics_are_those_of_a_plain_loop_and_the_gradient_is_its_slope(kind, x64):
    recipe = recipe_of(kind)
    policy, params = policy_of(recipe), params_of(recipe)
    batch, shared = observed(recipe, policy, batch_of(recipe)), drafters.shared(policy)
    rows = (batch.tokens, batch.features, batch.positions, batch.segments)
    hidden = jax.jit(lambda params: eagle.unroll(params, recipe.drafter, shared, *rows, UNROLL))(
        params
    )
    expected = plain_loss(
        recipe, policy, batch, hidden, eagle.logits(params, recipe.drafter, shared, hidden)
    )
    slope = slope_of(recipe)
    total, metrics = check_slope(slope, recipe, params, shared, batch)
    assert dict(metrics | {"loss": total}) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", [pytest.param(EAGLE, marks=pytest.mark.matrix), WHOLE])
def test_segments_and_not_positions_determine_what_a_draft_step_can_predict(kind, x64):
    """Attention depends on differences of positions only: where a segment starts changes nothing."""
    recipe = recipe_of(kind)
    policy, params = policy_of(recipe), params_of(recipe)
    batch, shared = observed(recipe, policy, batch_of(recipe)), drafters.shared(policy)
    moved = batch._replace(positions=jnp.where(batch.segments > 0, batch.positions + 5, 0))
    loss = loss_of(recipe)
    assert_same(loss(params, shared, batch), loss(params, shared, moved), rtol=1e-10)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_teacher_that_is_the_policy_or_has_all_tokens_known(x64, share):
    """Mixed with itself a policy is what it was; with all tokens and the whole share the teacher's distribution is learned."""
    p, t = jax.nn.log_softmax(np.random.default_rng(3).normal(0, 2, (2, 5, 7)), axis=-1)
    for theirs, known in ((p, 3), (t, 7)):
        teacher = losses.Likeliest(*jax.lax.top_k(theirs, known)[::-1])
        normalizer, _, scale = losses.sums(p + 2.0, teacher)
        assert_same(normalizer, jnp.full(5, 2.0), rtol=1e-12)
        expected = np.log((1 - share) * np.exp(p) + share * np.exp(theirs))
        assert_same(losses.mixed(p, teacher, scale, None, share), expected, rtol=1e-9)


# Sharding and chunks


@pytest.mark.parametrize("kind", [REDUCED_TAUGHT, DSPARK_TAUGHT])
def test_sharded_and_chunked_losses_with_a_teacher_are_the_plain_one(kind, x64):
    found = []
    for recipe in (recipe_of(kind), recipe_of(kind, 2, 2, logits_chunk=1)):
        policy, params = policy_of(recipe), params_of(recipe)
        batch, shared = observed(recipe, policy, batch_of(recipe)), drafters.shared(policy)
        given = params.replace(ids=None), params, shared, batch
        found.append(slope_of(recipe)(*given))
    assert_same(*found, rtol=1e-9, atol=1e-12)


@OF_EACH_KIND
def test_sharded_and_chunked_updates_are_the_plain_one_and_compile_once(kind, x64):
    results = []
    for recipe in (recipe_of(kind), recipe_of(kind, 4, 2, logits_chunk=1, attention_block=3)):
        update, state, policy = drafter_update.program(recipe), state_of(recipe), policy_of(recipe)
        placed, compiled = jax.tree.map(lambda leaf: leaf.sharding, state), update._cache_size()
        for _ in range(2):
            state, metrics = update(state, policy, batch_of(recipe))
        assert update._cache_size() <= compiled + 1
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == placed
        results.append((state, metrics))
    assert_same(*results, rtol=1e-9, atol=1e-12)


def test_state_is_the_one_announced_for_checkpoints(x64):
    recipe = recipe_of(REDUCED, 2, 2, param_dtype="bfloat16", compute_dtype="bfloat16")
    state, expected = state_of(recipe), drafter_recipe.abstract_state(recipe)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, announced in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (
            announced.shape,
            announced.dtype,
            announced.sharding,
        )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {
        jnp.dtype("float32")
    }


# The step


@pytest.mark.parametrize("kind", [REDUCED, DSPARK_REDUCED])
def test_stored_features_give_the_same_update_as_computed_ones(x64, monkeypatch, kind):
    """With the policy of a rollout, also where a CPU has its matrices in tiles."""
    recipe = recipe_of(kind)
    policy, batch, update = policy_of(recipe), batch_of(recipe), drafter_update.program(recipe)
    expected = update(state_of(recipe), policy, batch)
    stored = observed(recipe, policy, batch)
    for tile, fewest in ((4, 1), (64, 2**18)):
        monkeypatch.setattr(trees, "TILE", tile), monkeypatch.setattr(trees, "FEWEST", fewest)
        rollout = jax.jit(
            lambda policy: architecture.to_rollout(policy, MODEL, recipe.mesh, "float64")
        )(policy)
        assert isinstance(rollout.head, trees.Tiles) == (tile == 4)
        assert_same(update(state_of(recipe), rollout, stored), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [REDUCED, DFLASH2_REDUCED, DSPARK_REDUCED])
def test_only_trained_leaves_move_and_losses_fall(kind, x64, monkeypatch):
    monkeypatch.setattr(losses, "SPACING", 1)  # a block drafter has the same anchors in every step
    recipe = recipe_of(kind, seed=int(kind != REDUCED))  # programs are kept by recipe
    policy, state, before = policy_of(recipe), state_of(recipe), params_of(recipe)
    kept, found = jax.device_get(policy), []
    for _ in range(6):
        state, metrics = drafter_update.program(recipe)(state, policy, batch_of(recipe))
        found.append(float(metrics["loss"]))
    assert found == sorted(found, reverse=True)
    assert_same(policy, kept)
    np.testing.assert_array_equal(state.params.ids, IDS)
    for leaf, old in zip(
        *(jax.tree.leaves(one.replace(ids=None)) for one in (state.params, before)), strict=True
    ):
        assert (np.asarray(leaf) != np.asarray(old)).any()
    assert (
        len(jax.tree.leaves(state.opt_state))
        == 2 * len(jax.tree.leaves(before.replace(ids=None))) + 2
    )


def test_update_that_is_not_finite_changes_nothing_and_is_counted(x64):
    recipe = recipe_of(REDUCED)
    update, policy, batch, before = (
        drafter_update.program(recipe),
        policy_of(recipe),
        batch_of(recipe),
        state_of(recipe),
    )
    broken, state = policy.replace(head=policy.head.at[0, 0].set(jnp.nan)), state_of(recipe)
    for skips in (1, 2):
        state, metrics = update(state, broken, batch)
        assert (int(state.step), int(state.skips), int(metrics["nonfinite"])) == (
            skips,
            skips,
            skips,
        )
        assert_same((state.params, state.opt_state), (before.params, before.opt_state))
    state, _ = update(state, policy, batch)
    expected, _ = update(state_of(recipe), policy, batch)
    assert_same((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert (int(state.step), int(state.skips), int(state.skipped)) == (3, 0, 2)


@pytest.mark.parametrize("kind", [REDUCED, DSPARK_REDUCED])
def test_rows_without_answers_have_no_loss_and_no_gradient(kind, x64):
    recipe = recipe_of(kind)
    batch = batch_of(recipe)
    batch = batch._replace(is_answer=jnp.zeros_like(batch.is_answer))
    _, metrics = drafter_update.program(recipe)(state_of(recipe), policy_of(recipe), batch)
    assert (float(metrics["loss"]), float(metrics["grad_norm"]), int(metrics["nonfinite"])) == (
        0,
        0,
        0,
    )


def test_recipe_holds_the_numbers_of_the_configuration():
    knobs = DrafterTraining(learning_rate=2e-4, steps=40, unroll=3)
    config = Config(drafter_training=knobs, optim=Optim(beta2=0.9, grad_clip=0.5))
    recipe = configured(config, MODEL, drafters.for_policy(MODEL, "eagle"), make_mesh(1, 1))
    assert recipe.adam == Adam(2e-4, 40, "cosine", 2, 0.1, 0.9, 0.9, 0.0, 0.5)
    assert recipe.unroll == 3
    config = replace(config, drafter_training=replace(knobs, unroll=0))
    assert (
        configured(config, MODEL, drafters.for_policy(MODEL, "eagle3"), make_mesh(1, 1)).unroll == 5
    )
    assert hash(recipe) == hash(replace(recipe))


def test_on_a_cpu_a_batch_is_learned_before_the_next_one_is_dispatched(monkeypatch):
    """Collectives of two batches may wait for each other's threads on fake devices."""
    done, recipe = [], recipe_of(data=2)

    def learned(state, policy, batch):
        done.append(f"learn {batch.tokens[0]}")
        return state, {"loss": float(batch.tokens[0]), "tokens": 1.0, "nonfinite": 0.0}

    monkeypatch.setattr(
        step_training.update, "observation", lambda recipe: lambda policy, batch: batch
    )
    monkeypatch.setattr(step_training.update, "program", lambda recipe: learned)
    monkeypatch.setattr(
        jax, "block_until_ready", lambda found: done.append(f"wait {found['loss']:g}")
    )
    batches = [PackedRows(np.array([number]), None, None, None) for number in range(3)]
    step_training.learn(recipe, None, None, batches, 0)
    assert done == [f"{what} {number}" for number in range(3) for what in ("learn", "wait")]
