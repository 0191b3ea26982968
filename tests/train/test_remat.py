"""What layers keep for the backward pass: gradients, memory of the compiled programs, and the choice by memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from loop_updates import equations
from test_policy_update import MODEL, PLAIN, batch_of, params_of, recipe_of

from tlt_jax.config import Config
from tlt_jax.config.schema import Mesh, Model, Rollout, Train
from tlt_jax.config.task import Data
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.distributed.job import Job
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.distributed.topology import describe
from tlt_jax.models import architecture, remat as remats
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.remat import ATTENTION, FULL, NONE, PRODUCTS
from tlt_jax.train import batch as batches, memory, policy_update
from tlt_jax.train.policy_update import Recipe

LAYERS = 3
SIZES = replace(MODEL, num_layers=LAYERS)
MODELS = {
    "tied": SIZES,
    "biases": replace(SIZES, family="llama", tied=False, o_bias=True, mlp_bias=True),
    "QK-norm": replace(SIZES, family="qwen3", tied=False, qkv_bias=False, qk_norm="head"),
}
BOTH = (PRODUCTS, ATTENTION, ATTENTION)


@pytest.mark.parametrize(
    ("model", "mesh", "levels"),
    [
        ("QK-norm", (1, 1), (NONE,) * LAYERS),
        ("QK-norm", (1, 1), BOTH),
        ("tied", (2, 2), (FULL,) * LAYERS),
        ("biases", (2, 2), BOTH),
    ],
)
def test_the_sums_grow_by_the_gradient_of_the_loss(model, mesh, levels, x64):
    recipe = replace(recipe_of(PLAIN, *mesh, remat=levels), model=MODELS[model])
    (rows,), params, programs = (
        batch_of(recipe, 16),
        params_of(recipe),
        policy_update.programs(recipe),
    )
    sums = programs.empty(params, rows)
    sums = sums.replace(grads=jax.tree.map(lambda leaf: leaf + 0.25, sums.grads))
    plain = replace(recipe, mesh=make_mesh(1, 1), remat=())
    loss = jax.jit(jax.value_and_grad(partial(policy_update.loss, recipe=plain), has_aux=True))
    (value, _), gradient = loss(jax.device_get(params), jax.device_get(rows))
    sums, found = programs.accumulate(sums, params, rows)
    assert float(found) == pytest.approx(float(value), rel=1e-12)
    for leaf, slope in zip(*map(jax.tree.leaves, (sums.grads, gradient)), strict=True):
        np.testing.assert_allclose(leaf, 0.25 + slope, rtol=1e-10, atol=1e-12)


def step_of(recipe: Recipe, rows: int = 4, tokens: int = 128):
    """Abstract arguments of an accumulation step."""
    given = batches.abstract_rows(recipe.mesh, rows, tokens, ("rollout_logprobs",))
    sums = policy_update.abstract_sums(recipe, given)
    return sums, policy_update.abstract_policy(recipe), given


def compiled_step(recipe: Recipe, *sizes: int):
    """The program of an accumulation step, compiled."""
    return policy_update.programs(recipe).accumulate.lower(*step_of(recipe, *sizes)).compile()


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


WIDE = ModelConfig("qwen2", 64, 256, 16, 4, 2, 64, 1024, 64)  # its layers are most of its weights


def test_no_second_tree_of_gradients_exists():
    """The temporaries are less than half of the layers' gradients, which are in the donated sums."""
    levels = (PRODUCTS,) * 6 + (FULL,) * 10
    recipe = recipe_of(PLAIN, 2, 2, param_dtype="float32", compute_dtype="float32", remat=levels)
    recipe = replace(recipe, model=WIDE)
    found = compiled_step(recipe, 4, 16).memory_analysis()
    sums, policy, _ = step_of(recipe, 4, 16)
    assert found.temp_size_in_bytes < bytes_of(policy.layers) / 4 / 2
    assert found.alias_size_in_bytes > 0.95 * bytes_of(sums) / 4


def products(level: str) -> int:
    """Matrix products of an accumulation step, each of a scan over layers counted once."""
    recipe = replace(recipe_of(remat=(level,) * 2), model=replace(SIZES, num_layers=2))
    step = partial(policy_update.accumulate, recipe=recipe)
    program = jax.make_jaxpr(step)(*step_of(recipe, 4, 24))
    return sum(one.primitive.name == "dot_general" for one in equations(program.jaxpr))


def test_a_level_computes_again_what_it_does_not_keep(x64):
    """Of a layer: q, k, v, the two products of attention, o, gate and up. The MLP's last product is never needed again.

    Attention in blocks computes its scores again in any case, and under ATTENTION and PRODUCTS nothing else of it.
    """
    count = {level: products(level) for level in (NONE, PRODUCTS, ATTENTION, FULL)}
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
    model, config = replace(WIDE, num_layers=8, vocab_size=512), config_of()
    recipe = Recipe.of(config, model, make_mesh(2, 2), 1)
    kept, rest = memory.estimate(config, recipe)
    for remat_of in ((ATTENTION,) * 8, (PRODUCTS,) * 4 + (FULL,) * 4):
        found = compiled_step(replace(recipe, remat=remat_of), 4, 512).memory_analysis()
        needed = found.temp_size_in_bytes
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
    needed = compiled_step(recipe, 4, 2048).memory_analysis().temp_size_in_bytes
    kept, rest = memory.estimate(config, recipe)
    assert 0.95 * needed < rest + 4 * kept[PRODUCTS] < 1.1 * needed


def test_layers_keep_less_where_the_compiled_program_does_not_fit(monkeypatch, caplog):
    """With an estimate that knows three quarters of what a level keeps, but not with a right one."""
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

    def run(share: float) -> tuple[float, list[remats.Remat]]:
        """On a device that NONE fits by the estimate: the loss, and the levels at first and in the end."""
        known = {level: int(share * size) for level, size in kept.items()}
        monkeypatch.setattr(memory, "layer_bytes", lambda *_: known)
        sizes, rest = memory.estimate(config, recipe)
        needed = memory.held(config, recipe, None) + rest + 6 * sizes[NONE]
        limit = int(needed / (1 - memory.SPARE)) + 100
        monkeypatch.setattr(memory, "device_memory", lambda mesh: limit)
        fitted = memory.fitted(config, recipe, None, job)
        correct = partial(memory.corrected, config, None, job)
        programs = policy_update.corrected_programs(config, fitted, correct)
        sums, value = programs.accumulate(programs.empty(params, rows), params, rows)
        assert programs.accumulate(sums, params, rows)[1] == value
        return float(value), [fitted.remat, programs.accumulate.recipe.remat]

    loss, levels = run(0.75)
    assert levels == [(NONE,) * 6, (PRODUCTS,) * 6]
    assert "compiled again with products in 6 layers" in caplog.text
    other, levels = run(1.2)
    assert levels == [(NONE,) * 6] * 2 and caplog.text.count("compiled again") == 1
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
    for levels, said in ((("auto",) * LAYERS, "'auto' is no level"), ((FULL,), "1 levels for 3")):
        with pytest.raises(ValueError, match=said):
            step_of(replace(recipe_of(remat=levels), model=SIZES))
