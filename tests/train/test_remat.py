"""What layers keep for the backward pass: gradients, memory of the compiled programs, and the choice by memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_updates import equations
from objectives import algorithm
from pairwise import marked

from tlt_jax.config import Config
from tlt_jax.config.schema import Data, Mesh, Model, Rollout, Train
from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.distributed.job import Job
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.distributed.topology import describe
from tlt_jax.models import architecture, remat as remats
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.remat import ATTENTION, FULL, NONE, PRODUCTS
from tlt_jax.optimizer import Adam
from tlt_jax.train import batch as batches, memory, policy_update
from tlt_jax.train.policy_update import Recipe

LAYERS, ROWS, TOKENS = 3, 4, 24
SIZES = ModelConfig("qwen2", 37, 16, LAYERS, 4, 2, 4, 32, 64, tied=True, init_std=0.4)
MODELS = {
    "tied": SIZES,
    "biases": replace(SIZES, family="llama", tied=False, qkv_bias=True, o_bias=True, mlp_bias=True),
    "QK-norm": replace(SIZES, family="qwen3", tied=False, qk_norm=True),
}
LEVELS = {
    "none": (NONE,) * LAYERS,
    "products": (PRODUCTS,) * LAYERS,
    "attention": (ATTENTION,) * LAYERS,
    "full": (FULL,) * LAYERS,
    "both": (PRODUCTS, ATTENTION, ATTENTION),
}


def recipe_of(model: ModelConfig, remat: remats.Remat, mesh=(1, 1), dtype="float64") -> Recipe:
    objective = algorithm(entropy_coef=0.1)
    given = make_mesh(*mesh), Adam(1e-2, 10), objective
    dtypes = {"param_dtype": dtype, "compute_dtype": dtype}
    return Recipe(model, *given, **dtypes, remat=remat, logits_chunk=8, attention_block=8)


def rows_of(recipe: Recipe) -> PackedRows:
    """PackedRows with two examples and padding."""
    random = np.random.default_rng(0)
    shape = ROWS, TOKENS
    segments = np.repeat([[1] * 10 + [2] * 9 + [0] * 5], ROWS, axis=0)
    rows = PackedRows(
        tokens=random.integers(0, 37, shape, np.int32),
        positions=np.concatenate([np.arange(10), np.arange(9), np.zeros(5)]) + np.zeros(shape),
        segments=segments,
        targets=random.integers(0, 37, shape, np.int32),
        weights=(segments > 0) * random.random(shape),
        advantages=random.normal(size=shape),
        rollout_logprobs=-random.random(shape),
    )
    integers = ("positions", "segments")
    rows = rows._replace(**{name: np.int32(getattr(rows, name)) for name in integers})
    return jax.device_put(rows, batches.rows_sharding(recipe.mesh))


def start_of(recipe: Recipe):
    """Random weights, and sums with other numbers in them."""
    params = architecture.init(recipe.model, recipe.mesh, jax.random.key(1), recipe.param_dtype)
    sums = policy_update.programs(recipe).empty(params, rows_of(recipe))
    return params, sums.replace(grads=jax.tree.map(lambda leaf: leaf + 0.25, sums.grads))


# "both" has the layers of "products" and of "attention"; the gate runs each model, each mesh and the other levels once.
GATE = {
    ("QK-norm", (1, 1), "none"), ("QK-norm", (1, 1), "both"), ("tied", (2, 2), "full"), ("biases", (2, 2), "both"),
}  # fmt: skip
CASES = [("QK-norm", (1, 1), level) for level in LEVELS]
CASES += [(model, (2, 2), level) for model in ("tied", "biases") for level in ("full", "both")]


@pytest.mark.parametrize(("model", "mesh", "level"), marked([(one, one in GATE) for one in CASES]))
def test_the_sums_grow_by_the_gradient_of_the_loss(model, mesh, level, x64):
    recipe = recipe_of(MODELS[model], LEVELS[level], mesh)
    rows, (params, sums) = rows_of(recipe), start_of(recipe)
    plain = recipe_of(MODELS[model], ())
    loss = jax.jit(jax.value_and_grad(partial(policy_update.loss, recipe=plain), has_aux=True))
    (value, _), gradient = loss(jax.device_get(params), jax.device_get(rows))
    before = jax.device_get(sums.grads)
    sums, found = policy_update.programs(recipe).accumulate(sums, params, rows)
    assert float(found) == pytest.approx(float(value), rel=1e-12)
    for leaf, old, slope in zip(*map(jax.tree.leaves, (sums.grads, before, gradient)), strict=True):
        np.testing.assert_allclose(leaf, old + slope, rtol=1e-10, atol=1e-12)


def test_a_gradient_that_is_not_finite_is_added_too(x64):
    recipe = recipe_of(SIZES, LEVELS["full"])
    rows, (params, sums) = rows_of(recipe), start_of(recipe)
    rows = rows._replace(advantages=rows.advantages.at[0, 0].set(jnp.nan))
    sums, _ = policy_update.programs(recipe).accumulate(sums, params, rows)
    assert np.isnan(sums.grads.layers.q).all()
    state = policy_update.create(params, recipe)
    kept = jax.device_get(state.params)
    state, metrics = policy_update.programs(recipe).apply(state, sums, 0)
    assert int(metrics["nonfinite"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), kept)


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


WIDE = ModelConfig("qwen2", 64, 256, 16, 4, 2, 64, 1024, 64)  # its layers are most of its weights


@pytest.mark.parametrize(
    ("mesh", "level"),
    [
        ((1, 1), "products"),
        pytest.param((2, 2), "full", marks=pytest.mark.matrix),
        ((2, 2), "both"),
    ],
)
def test_no_second_tree_of_gradients_exists(mesh, level):
    """The temporaries are less than half of the layers' gradients, which are in the donated sums."""
    remat = {"both": (PRODUCTS,) * 6 + (FULL,) * 10}.get(level, (level,) * 16)
    recipe = recipe_of(WIDE, remat, mesh, "float32")
    rows = batches.abstract_rows(recipe.mesh, 4, 16, ("rollout_logprobs",))
    state, sums = policy_update.abstract_state(recipe), policy_update.abstract_sums(recipe, rows)
    lowered = policy_update.programs(recipe).accumulate.lower(sums, state.params, rows)
    found = lowered.compile().memory_analysis()
    devices = mesh[0] * mesh[1]
    assert found.temp_size_in_bytes < bytes_of(state.params.layers) / devices / 2
    assert found.alias_size_in_bytes > 0.95 * bytes_of(sums) / devices


def products(recipe: Recipe) -> int:
    """Matrix products of an accumulation step, each of a scan over layers counted once."""
    rows = batches.abstract_rows(recipe.mesh, ROWS, TOKENS, ("rollout_logprobs",))
    state, sums = policy_update.abstract_state(recipe), policy_update.abstract_sums(recipe, rows)
    step = partial(policy_update.accumulate, recipe=recipe)
    program = jax.make_jaxpr(step)(sums, state.params, rows)
    return sum(one.primitive.name == "dot_general" for one in equations(program.jaxpr))


def test_a_level_computes_again_what_it_does_not_keep(x64):
    """Of a layer: q, k, v, the two products of attention, o, gate and up. The MLP's last product is never needed again.

    Attention in blocks computes its scores again in any case, and under ATTENTION and PRODUCTS nothing else of it.
    """
    count = {
        level: products(recipe_of(replace(SIZES, num_layers=2), (level,) * 2))
        for level in (NONE, PRODUCTS, ATTENTION, FULL)
    }
    again = {level: number - count[NONE] for level, number in count.items()}
    assert again == {NONE: 0, PRODUCTS: 0, ATTENTION: 3, FULL: 8}


# The choice


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (3000, (NONE,) * 3),
        (2999, (PRODUCTS,) * 3),
        (300, (PRODUCTS,) * 3),
        (299, (PRODUCTS,) * 2 + (ATTENTION,)),
        (60, (ATTENTION,) * 3),
        (45, (ATTENTION,) * 2 + (FULL,)),
        (19, (FULL,) * 3),
        (-5, (FULL,) * 3),
    ],
)
def test_layers_keep_the_most_that_is_free(free, expected):
    kept = {NONE: 1000, PRODUCTS: 100, ATTENTION: 20, FULL: 0}
    assert memory.levels(kept, 3, free) == expected
    least = dict(list(kept.items())[1:])  # of an accelerator
    assert memory.levels(least, 3, free) == tuple(PRODUCTS if x == NONE else x for x in expected)


def config_of(**model) -> Config:
    return Config(
        model=Model(**model),
        mesh=Mesh(data=2, model=2),
        train=Train(steps=1, rows=4, row_tokens=512),
        data=Data(max_prompt_tokens=256),
        rollout=Rollout(max_new_tokens=256),
    )


def test_kept_bytes_are_worked_by_hand():
    """Of 2 of 4 rows of 512 tokens, with the heads and the MLP halved over `model`, in float32."""
    model = replace(SIZES, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=96)
    recipe = replace(Recipe.of(config_of(), model, make_mesh(2, 2), 1), logits_chunk=64)
    found = memory.layer_bytes(recipe, 2, 512)
    tokens, heads, width = 2 * 512, 4, 8
    attention = heads * width + 2 * 2 * width  # queries; keys and values
    attention += heads * (width + 2)  # weighted values, maxima and sums of the weights
    assert found[ATTENTION] == pytest.approx(4 * tokens * attention, rel=0.01)
    assert found[PRODUCTS] - found[ATTENTION] == 4 * tokens * (16 + 2 * 48)
    assert found[NONE] > found[PRODUCTS]
    assert found[FULL] == 0


def test_auto_chooses_by_the_memory_of_a_device_and_a_bound_word_does_not(monkeypatch):
    config, model, mesh = config_of(), replace(SIZES, num_layers=6), make_mesh(2, 2)
    recipe = Recipe.of(config, model, mesh, 1)
    within = partial(memory.within, config, recipe, None)
    kept = memory.layer_bytes(recipe, 2, 512)
    monkeypatch.setattr(memory, "layer_bytes", lambda *_: kept)
    found = [within(limit).remat for limit in range(100_000, 60_000_000, 100_000)]
    order = (FULL, ATTENTION, PRODUCTS, NONE)
    ranks = [[order.index(level) for level in one] for one in found]
    assert ranks == sorted(ranks) and {len(one) for one in found} == {6}
    assert {one[0] for one in found} == set(order) and (PRODUCTS,) + (ATTENTION,) * 5 in found
    gib = memory.GIB
    assert within(3 * gib) == within(4 * gib - 1), "a device that reports a few bytes less"
    monkeypatch.setattr(memory, "is_cpu", lambda mesh: False)
    assert within(2 * gib).remat == (PRODUCTS,) * 6
    for word in (NONE, FULL):
        config = config_of(remat=word)
        recipe = Recipe.of(config, model, mesh, 1)
        assert memory.within(config, recipe, None, 1) == recipe and recipe.remat == (word,) * 6


def test_the_estimate_bounds_what_the_compiled_update_needs():
    """By more than half of the truth nowhere, for each choice; on the devices of this machine."""
    model = replace(WIDE, num_layers=8, vocab_size=512)
    config = config_of()
    recipe = Recipe.of(config, model, make_mesh(2, 2), 1)
    rows = batches.abstract_rows(recipe.mesh, 4, 512, ("rollout_logprobs",))
    kept, rest = memory.estimate(config, recipe)
    for remat_of in ((FULL,) * 8, (ATTENTION,) * 8, (PRODUCTS,) * 8, (PRODUCTS,) * 4 + (FULL,) * 4):
        one = replace(recipe, remat=remat_of)
        sums, params = policy_update.abstract_sums(one, rows), policy_update.abstract_state(one)
        lowered = policy_update.programs(one).accumulate.lower(sums, params.params, rows)
        needed = lowered.compile().memory_analysis().temp_size_in_bytes
        estimate = rest + sum(kept[level] for level in remat_of)
        assert needed < 1.1 * estimate and estimate < 1.6 * needed, (remat_of, needed, estimate)


@pytest.mark.gpu
def test_the_estimate_is_near_what_a_gpu_needs():
    """Compiled for an H200. While a layer's gradient is made, the head's, 13 % of all, waits."""
    model = ModelConfig("qwen2", 49152, 768, 4, 12, 2, 64, 3072, 2048, qkv_bias=True)
    mesh = make_mesh(1, 1, describe("h200:1").devices)
    train = Train(steps=1, rows=4, row_tokens=2048)
    config = replace(config_of(compute_dtype="bfloat16"), train=train)
    recipe = replace(Recipe.of(config, model, mesh, 1), remat=(PRODUCTS,) * 4, logits_chunk=256)
    rows = batches.abstract_rows(mesh, 4, 2048, ("rollout_logprobs",))
    sums, state = policy_update.abstract_sums(recipe, rows), policy_update.abstract_state(recipe)
    lowered = policy_update.programs(recipe).accumulate.lower(sums, state.params, rows)
    needed = lowered.compile().memory_analysis().temp_size_in_bytes
    kept, rest = memory.estimate(config, recipe)
    assert 0.95 * needed < rest + 4 * kept[PRODUCTS] < 1.1 * needed


@pytest.fixture
def compiled():
    """Names of the programs that JAX compiled so far."""
    found = []

    def listen(event, seconds, **more):
        if event.endswith("backend_compile_duration"):
            found.append(more.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_layers_keep_less_where_the_compiled_program_does_not_fit(monkeypatch, compiled, caplog):
    """With an estimate that knows three quarters of what a level keeps; with a right one it compiles once."""
    caplog.set_level("INFO")
    config, mesh = config_of(), make_mesh(2, 2)
    model = replace(SIZES, num_layers=6, hidden_size=32, mlp_dim=64)
    recipe, job = Recipe.of(config, model, mesh, 1), Job()
    kept = memory.layer_bytes(recipe, 2, 512)
    params = architecture.init(model, mesh, jax.random.key(1), "float32")
    rows = batches.abstract_rows(mesh, 4, 512, ("rollout_logprobs",))
    rows = jax.tree.map(
        lambda one: jax.device_put(np.ones(one.shape, one.dtype), one.sharding), rows
    )

    def run(share: float) -> tuple[float, list[remats.Remat], int]:
        """On a device that NONE fits by the estimate: the loss, the levels at first and in the end, the compilations."""
        known = {level: int(share * size) for level, size in kept.items()}
        monkeypatch.setattr(memory, "layer_bytes", lambda *_: known)
        sizes, rest = memory.estimate(config, recipe)
        needed = memory.held(config, recipe, None) + rest + 6 * sizes[NONE]
        limit = int(needed / (1 - memory.SPARE)) + 100
        monkeypatch.setattr(memory, "device_memory", lambda mesh: limit)
        fitted, before = memory.fitted(config, recipe, None, job), len(compiled)
        correct = partial(memory.corrected, config, None, job)
        programs = policy_update.corrected_programs(config, fitted, correct)
        sums, value = programs.accumulate(programs.empty(params, rows), params, rows)
        assert programs.accumulate(sums, params, rows)[1] == value
        levels = [fitted.remat, programs.accumulate.recipe.remat]
        return float(value), levels, sum("accumulate" in one for one in compiled[before:])

    loss, levels, compilations = run(0.75)
    assert levels == [(NONE,) * 6, (PRODUCTS,) * 6] and compilations == 2
    assert "compiled again with products in 6 layers" in caplog.text
    jax.clear_caches()
    other, levels, compilations = run(1.2)
    assert levels == [(NONE,) * 6] * 2 and compilations == 1
    assert other == pytest.approx(loss, rel=1e-5)


def test_all_processes_take_the_levels_of_process_0(monkeypatch):
    """Process 1 has less memory, and says that its program needs more."""
    config, mesh, board = config_of(), make_mesh(2, 2), LocalBoard()
    recipe = replace(Recipe.of(config, SIZES, mesh, 1), remat=(PRODUCTS,) * LAYERS)
    found = []
    for index, limit, needed in ((0, 10_000_000, 9_000_000), (1, 1_000_000, 90_000_000)):
        monkeypatch.setattr(memory, "device_memory", lambda mesh, limit=limit: limit)
        job = Job(index, 2, board)
        found.append(memory.corrected(config, None, job, recipe, needed))
    assert found == [recipe] * 2
    less = memory.corrected(config, None, Job(), recipe, 9_000_000)
    assert less.remat == (FULL,) * LAYERS


def test_levels_that_do_not_exist_raise():
    rows = rows_of(recipe_of(SIZES, ()))
    for levels, said in ((("auto",) * LAYERS, "'auto' is no level"), ((FULL,), "1 levels for 3")):
        recipe = recipe_of(SIZES, levels, dtype="float32")
        state = policy_update.abstract_state(recipe)
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(partial(policy_update.loss, recipe=recipe), state.params, rows)
