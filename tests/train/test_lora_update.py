"""The update of adapters: their gradients, what is not computed, the merged policy, and its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from loop_updates import equations
from objectives import algorithm
from test_policy_update import (
    FULL,
    MODEL,
    assert_same,
    batch_of,
    recipe_of,
)
from test_remat import WIDE, bytes_of, compiled_step, config_of, step_of

from tlt_jax.config import schema
from tlt_jax.config.schema import LORA_TARGETS
from tlt_jax.data import packing
from tlt_jax.data.packing import Example, PackedRows
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.errors import ModelError
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import architecture, lora, low_rank, transformer
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.models.lora import Adapters
from tlt_jax.models.low_rank import Lora
from tlt_jax.optimizer import Adam
from tlt_jax.train import batch as batches, memory, policy_update
from tlt_jax.train.policy_update import Recipe

LORA = Lora(rank=3, alpha=6.0, targets=LORA_TARGETS)
LAYERS = replace(MODEL, num_layers=2)


def adapted(recipe: Recipe, seed: int = 0) -> tuple[Params, Adapters]:
    """A random base, and adapters of which both factors are random; the same on every mesh."""
    random = np.random.default_rng(seed)

    def draw(leaf):
        drawn = (0.4 * random.normal(size=leaf.shape)).astype(leaf.dtype)
        return jax.device_put(drawn, leaf.sharding)

    base, state = policy_update.abstract_base(recipe), policy_update.abstract_state(recipe)
    return jax.tree.map(draw, (base, state.params))


def merged(recipe: Recipe, base: Params, adapters: Adapters) -> Params:
    """NumPy's W + alpha / rank * B A, in float64."""
    found = {}
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        matrix = np.asarray(getattr(base.layers, name), np.float64)
        if (one := getattr(adapters, name)) is not None:
            a, b = np.asarray(one.a, np.float64), np.asarray(one.b, np.float64)
            matrix = matrix + recipe.lora.alpha / recipe.lora.rank * np.einsum("lor,lri->loi", b, a)
        placed = getattr(base.layers, name).sharding
        found[name] = jax.device_put(matrix.astype(recipe.param_dtype), placed)
    return base.replace(layers=base.layers.replace(**found))


def accumulated(recipe: Recipe, params: Params, batch) -> policy_update.Sums:
    programs = policy_update.programs(recipe)
    sums = programs.empty(params, batch[0])
    for rows in batch:
        sums, _ = programs.accumulate(sums, params, rows)
    return sums


def test_a_gradient_is_that_of_all_weights_projected_and_sums_over_steps(x64):
    """dL/dB = scale * G A^T and dL/dA = scale * B^T G, G: the gradient of the merged matrix, by full training's program.

    The sums are those of three accumulation steps, G is that of one with all rows.
    """
    levels = "products", "full"
    full = replace(recipe_of(FULL, 2, 2, remat=levels), model=LAYERS)
    recipe = replace(full, lora=replace(LORA, targets=("q_proj", "v_proj", "o_proj", "down_proj")))
    base, adapters = adapted(recipe)
    whole = merged(recipe, base, adapters)
    (rows,) = batch_of(full, rows=16)
    given = {"old_logprobs": rows.rollout_logprobs, "reference_logprobs": rows.rollout_logprobs}
    expected = accumulated(full, whole, [rows._replace(**given)])
    steps = [
        one._replace(old_logprobs=one.rollout_logprobs, reference_logprobs=one.rollout_logprobs)
        for one in batch_of(recipe)
    ]
    assert len(steps) > 1
    found = accumulated(recipe, lora.applied(base, adapters), steps)
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-10)
    for name in ("q", "v", "o", "down"):
        one, ours = getattr(adapters, name), getattr(found.grads, name)
        G = np.asarray(getattr(expected.grads.layers, name))
        a, b = np.asarray(one.a), np.asarray(one.b)
        for factor, product in (
            (ours.b, np.einsum("loi,lri->lor", G, a)),
            (ours.a, np.einsum("lor,loi->lri", b, G)),
        ):
            assert np.abs(product).max() > 1e-4
            np.testing.assert_allclose(factor, 2 * product, rtol=1e-8, atol=1e-12)
    assert found.grads.k is found.grads.up is None


def test_an_update_moves_adapters_alone_by_the_rule_of_adam(x64):
    recipe = replace(recipe_of(), lora=LORA)
    base, adapters = adapted(recipe)
    before, kept = jax.device_get(adapters), jax.device_get(base)
    programs, batch = policy_update.programs(recipe), batch_of(recipe)
    grads = jax.device_get(accumulated(recipe, lora.applied(base, adapters), batch).grads)
    state = policy_update.create(adapters, recipe)
    assert jax.tree.structure(state) == jax.tree.structure(policy_update.abstract_state(recipe))
    state, metrics = policy_update.update(programs, state, batch, 0, base)
    norm = float(metrics["grad_norm"])
    clipped = grads.q.a / max(1.0, norm)
    step = clipped / (np.abs(clipped) + 1e-8) + recipe.adam.weight_decay * before.q.a
    expected = before.q.a - recipe.adam.learning_rate * step
    np.testing.assert_allclose(state.params.q.a, expected, rtol=1e-9, atol=1e-12)
    assert norm == pytest.approx(np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads))))
    assert_same(jax.device_get(base), kept)
    assert {leaf.shape for leaf in jax.tree.leaves(state.params)} == {
        leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim
    }


def gradient_products(recipe: Recipe) -> set[str]:
    """The matrices of the policy whose gradient an accumulation step computes, by the shapes of its products."""
    matrices = {"q": (256, 256), "k": (128, 256), "gate": (1024, 256), "head": (64, 256)}
    program = jax.make_jaxpr(partial(policy_update.accumulate, recipe=recipe))(*step_of(recipe))
    shapes = {
        tuple(sorted(size for size in one.outvars[0].aval.shape if size > 1))
        for one in equations(program.jaxpr)
        if one.primitive.name == "dot_general"
    }
    return {name for name, shape in matrices.items() if tuple(sorted(shape)) in shapes}


def test_no_gradient_of_the_base_is_computed():
    """Of the products of a backward pass the gradient of what a matrix reads is left."""
    full = recipe_of(param_dtype="float32", compute_dtype="float32", remat=("full",) * 2)
    full = replace(full, model=replace(WIDE, num_layers=2))
    recipe = replace(full, lora=replace(LORA, rank=2))
    assert gradient_products(full) == {"q", "k", "gate", "head"}
    assert gradient_products(recipe) == set()


# The merged policy


def test_the_update_sees_the_policy_that_is_published(x64):
    """Log-probs with adapters are those of the merged weights, and of NumPy's sum."""
    recipe = replace(recipe_of(FULL, 2, 2), model=LAYERS, lora=LORA)
    base, adapters = adapted(recipe)
    programs, batch = policy_update.programs(recipe), batch_of(recipe)
    whole = merged(recipe, base, adapters)
    scores = policy_update.token_logprobs(programs, lora.applied(base, adapters), batch)
    assert_same(scores, policy_update.token_logprobs(programs, whole, batch), rtol=1e-9)
    to_rollout = partial(architecture.to_rollout, config=LAYERS, mesh=recipe.mesh, dtype="float64")
    published = jax.jit(to_rollout)(lora.applied(base, adapters))
    assert_same(published, jax.jit(to_rollout)(whole), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("model_axis", "targets"),
    [(4, LORA_TARGETS), (2, ("q_proj", "v_proj"))],  # of 4, 2 heads of keys and values are repeated
)
def test_factors_that_are_kept_apart_make_the_same_policy(model_axis, targets, x64):
    """Of tree nodes and whole prompts, on every mesh, and for matrices without an adapter beside others in a product."""
    chosen = Lora(3, 6.0, targets)
    recipe = replace(recipe_of(data=2, model=model_axis), model=LAYERS, lora=chosen)
    policy, group = lora.applied(*adapted(recipe)), meshes.data_group(recipe.mesh, 1)
    random = np.random.default_rng(0)
    B, N = 2, 6
    tokens = random.integers(0, LAYERS.vocab_size, (B, N))
    tokens = jnp.asarray(tokens)
    ancestors = jnp.broadcast_to(jnp.tril(jnp.ones((N, N), bool)), (B, N, N))

    def logits(params: Params) -> tuple[jax.Array, jax.Array]:
        cache = model_cases.empty_cache(LAYERS, B, 8, 0, "float64", group)
        positions = jnp.broadcast_to(jnp.arange(N), (B, N))
        nodes, _ = transformer.tree_forward(
            params, LAYERS, tokens, positions, ancestors, cache, jnp.zeros(B, int),
            fused=Fused.of(group),
        )  # fmt: skip
        whole = transformer.prefill(
            params, LAYERS, tokens, jnp.full(B, N), captures_states=True, mesh=group
        )
        return nodes, transformer.logits(params, LAYERS, whole.states)

    found = []
    for apart in (chosen, None):
        program = partial(architecture.to_rollout, config=LAYERS, mesh=recipe.mesh, dtype="float64")
        placed = architecture.shardings(LAYERS, recipe.mesh, "rollout", apart)
        published = jax.jit(partial(program, lora=apart), out_shardings=placed)(policy)
        wanted = architecture.abstract(LAYERS, recipe.mesh, "rollout", "float64", apart)
        assert jax.tree.map(jnp.shape, published) == jax.tree.map(jnp.shape, wanted)
        found.append(jax.jit(logits)(meshes.view(published, group)))
    assert_same(*found, rtol=1e-9, atol=1e-9)


def test_weights_are_merged_before_they_are_rounded():
    """Of a base in bfloat16: a change of less than a rounding of the base is not lost before the sum is made."""
    recipe = replace(recipe_of(param_dtype="float32", compute_dtype="bfloat16"), lora=LORA)
    base, adapters = adapted(recipe)
    found = jax.jit(partial(lora.merge, dtype="bfloat16"))(base, adapters).layers.down
    exact = np.asarray(merged(recipe, base, adapters).layers.down)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    assert found.dtype == jnp.bfloat16
    assert (np.abs(np.asarray(found, np.float32) - exact) <= 0.51 * ulp).all()


TRAINED = replace(
    MODEL, vocab_size=64, hidden_size=64, num_layers=2, mlp_dim=128, head_dim=16, max_positions=64
)
STEPS = (0, 1, 10, 50)


def sampled(recipe: Recipe, params: Params, rows: PackedRows) -> list[jax.Array]:
    """Log-probs of the answers as a rollout has them: of tree nodes, each the child of the last, and of whole prompts."""
    B, T = rows.tokens.shape
    model, dtype = recipe.model, recipe.compute_dtype
    apart = low_rank.kept_apart(recipe.lora, dtype)
    params = architecture.to_rollout(params, model, recipe.mesh, dtype, apart)
    cache = model_cases.empty_cache(model, B, 8, 0, dtype, recipe.mesh)
    ancestors, none = (
        jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T)),
        jnp.zeros(B, int),
    )
    nodes, _ = transformer.tree_forward(
        params, model, rows.tokens, rows.positions, ancestors, cache, none
    )
    prefill = transformer.prefill(params, model, rows.tokens, none + T, captures_states=True)

    def scores(logits: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        return jnp.take_along_axis(logprobs, rows.targets[..., None], axis=-1)[..., 0]

    return [scores(nodes), scores(transformer.logits(params, model, prefill.states))]


def test_the_rollout_samples_the_policy_that_is_trained(x64):
    """In bfloat16, after 1, 10 and 50 steps its log-probs are the update's within the rounding of a forward pass.

    50 steps move most matrices by less than a rounding of their numbers, and yet all of what adapters change of the policy
    is seen by both: of 1,536 tokens, moved by 0.02 on average and rounded by 0.024 in a forward pass, the share that is
    seen is known to 0.03.
    """
    adapters = Lora(8, 16.0, LORA_TARGETS)
    recipe = recipe_of(
        algorithm(), param_dtype="float32", compute_dtype="bfloat16", lora=adapters, temperature=1.0
    )
    recipe = replace(recipe, model=TRAINED, adam=Adam(2e-5, 50))
    random = np.random.default_rng(0)

    def draw(leaf):
        drawn = (0.6 * random.normal(size=leaf.shape)).astype(leaf.dtype)
        return jax.device_put(drawn, leaf.sharding)

    examples = [
        Example(uid, random.integers(0, 64, 8), random.integers(0, 64, 24)) for uid in range(64)
    ]
    packed = packing.pack(examples, 32, 64, 1)
    weights, advantages = np.full(64, 1 / 1536), random.normal(size=64)
    batch = batches.make_batch(packed, recipe, weights, advantages)
    base = jax.tree.map(draw, policy_update.abstract_base(recipe))
    trained = lora.init(adapters, TRAINED, recipe.mesh, jax.random.key(0), "float32")
    exact = replace(recipe, param_dtype="float64", compute_dtype="float64")
    programs = policy_update.programs(recipe)
    rollout = jax.jit(partial(sampled, recipe, rows=batch[0]))
    is_answer = np.asarray(batch[0].is_answer)

    def scores() -> dict[str, np.ndarray]:
        policy = lora.whole(state.params, base)
        wide = jax.tree.map(lambda leaf: leaf.astype("float64"), policy)
        found = [*rollout(policy), programs.score(policy, batch[0])]
        found.append(policy_update.programs(exact).score(wide, batch[0]))
        named = zip(("nodes", "prompts", "update", "exact"), found, strict=True)
        return {name: np.asarray(one, np.float64)[is_answer] for name, one in named}

    state, seen = policy_update.create(trained, recipe), {}
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            seen[step] = scores()
        state, _ = policy_update.update(programs, state, batch, step, base)

    for name in ("nodes", "prompts"):
        differences = {step: np.abs(at[name] - at["update"]).mean() for step, at in seen.items()}
        assert max(differences.values()) <= 1.5 * differences[0], differences
    move = seen[50]["exact"] - seen[0]["exact"]
    for name in ("nodes", "prompts", "update"):
        share = (seen[50][name] - seen[0][name]) @ move / (move @ move)
        assert abs(share - 1) < 0.12, (name, share)


def test_new_adapters_start_as_peft_starts_them():
    """A: uniform, at most 1 / sqrt(its width); B: 0, so that the policy is its base to the bit. The same on every mesh.

    Of 24,576 numbers the standard deviation is known to 0.3 %; 3 % off is found.
    """
    model, key = replace(WIDE, num_layers=2), jax.random.key(3)
    chosen = Lora(24, 16.0, ("q_proj", "down_proj"))
    made = [
        lora.init(chosen, model, make_mesh(*shape), key, "float32") for shape in ((1, 1), (2, 2))
    ]
    assert_same(*made)
    for adapter, width in ((made[0].q, 256), (made[0].down, 1024)):
        a = np.asarray(adapter.a)
        assert a.shape == (2, 24, width) and not np.asarray(adapter.b).any()
        assert 0.99 < np.abs(a).max() * np.sqrt(width) <= 1
        assert a.std() * np.sqrt(3 * width) == pytest.approx(1, abs=0.03)
    recipe = replace(recipe_of(param_dtype="float32", compute_dtype="float32"), lora=LORA)
    base, _ = adapted(recipe)
    start = lora.init(LORA, MODEL, recipe.mesh, key, "float32")
    programs, batch = policy_update.programs(recipe), batch_of(recipe)
    scores = policy_update.token_logprobs(programs, lora.applied(base, start), batch)
    assert_same(scores, policy_update.token_logprobs(programs, base, batch))


def test_the_knobs_name_matrices_as_peft_does():
    assert lora.chosen(schema.Lora(), MODEL) is None
    every = lora.chosen(schema.Lora(rank=8), MODEL)
    assert every == Lora(8, 16.0, LORA_TARGETS) and every.scale == 2.0
    given = schema.Lora(rank=4, alpha=2.0, targets=["v_proj", "q_proj", "v_proj"])
    some = lora.chosen(given, MODEL)
    assert some == Lora(4, 2.0, ("q_proj", "v_proj")) and some.scale == 0.5


def test_experts_have_no_adapters():
    sparse = replace(MODEL, num_experts=4, experts_per_token=2, expert_dim=8)
    assert lora.chosen(schema.Lora(rank=8), sparse).targets == LORA_TARGETS[:4]
    with pytest.raises(ModelError, match="targets up_proj: .*experts.*: use q_proj, .* all-linear"):
        lora.chosen(schema.Lora(rank=8, targets=["q_proj", "up_proj"]), sparse)
    for one in (replace(sparse, shared_dim=8), replace(sparse, dense_layers=(0,))):
        assert lora.chosen(schema.Lora(rank=8), one).targets == LORA_TARGETS


# Memory


def test_the_arrays_of_an_update_of_adapters_are_worked_by_hand():
    """A base of 7 numbers in bfloat16 has 14 bytes; an adapter's number has 4, its moments 8, its gradient 4."""
    config = config_of(
        compute_dtype="bfloat16", lora=schema.Lora(rank=4, targets=["q_proj", "down_proj"])
    )
    config = replace(config, algorithm=replace(config.algorithm, kl_coef=0.1))
    model = ModelConfig("llama", 64, 32, 3, 4, 2, 8, 64, 1024)
    recipe = Recipe.of(config, model, make_mesh(2, 2), 1)
    D, F, L, rank = 32, 64, 3, 4
    matrices = L * (2 * D * D + 2 * D * 16 + 3 * D * F) + 2 * 64 * D  # embedding and head
    norms = 2 * L * D + D  # not sharded
    adapters = L * rank * ((D + D) + (D + F))
    every = matrices + norms + adapters
    share = f"{adapters:,} of {every:,} weights train ({adapters / every:.2%})"
    assert policy_update.share_trained(recipe) == share
    # a of q and b of down lie over `data`, the others over `model`: halves of them on each device.
    found = memory.learning(config, recipe, None)
    counts = 12  # Adam's counters, apart from its moments
    assert found["weights"] == 2 * (matrices // 4 + norms) + 4 * adapters // 2
    assert found["gradients"] == 4 * adapters // 2
    assert 0 <= found["optimizer"] - 8 * adapters // 2 <= counts
    assert "reference" not in found


def test_the_estimate_bounds_what_the_compiled_update_of_adapters_needs():
    """As of all weights: by more than half of the truth nowhere."""
    model, config = replace(WIDE, num_layers=8, vocab_size=512), config_of()
    recipe = replace(Recipe.of(config, model, make_mesh(2, 2), 1), lora=Lora(8, 16.0, LORA_TARGETS))
    kept, rest = memory.estimate(config, recipe)
    recipe = replace(recipe, remat=("products",) * 8)
    found = compiled_step(recipe, 4, 512).memory_analysis()
    needed, estimate = found.temp_size_in_bytes, rest + 8 * kept["products"]
    assert needed < 1.2 * estimate and estimate < 1.6 * needed, (needed, estimate)
    assert found.alias_size_in_bytes > 0.9 * bytes_of(step_of(recipe)[0]) / 4
