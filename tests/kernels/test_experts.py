"""Mixtures of experts: every form against a loop over tokens and experts in NumPy, in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from kernels import triton_runs
from kernels.expert_mixes import found
from kernels.on_device import on_device
from kernels.triton_runs import FUSED

from tlt_jax.distributed.mesh import make_mesh, partition
from tlt_jax.kernels import experts
from tlt_jax.kernels.experts import FEW, LOOP, MEGABLOX, TILES, Form
from tlt_jax.kernels.fused import COSTS, EXPERTS, FEW_EXPERTS, Fused
from tlt_jax.kernels.numerics import MLP

# Of the largest number. bfloat16 is rounded to 8 bits in each product.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2}
# Tokens, experts, k, D, F, dtype, and whether all tokens have the same experts.
CASES = [
    (1, 8, 2, 16, 24, "float32", False),
    (5, 3, 1, 16, 8, "float64", False),
    (37, 6, 3, 16, 8, "float64", False),
    (37, 6, 3, 16, 8, "bfloat16", False),
    (53, 12, 2, 8, 8, "float64", True),
    (7, 8, 8, 16, 8, "float32", False),
    (200, 5, 4, 16, 24, "float32", False),
]


def given(T, N, k, D, F, dtype, is_same=False) -> tuple:
    """x, ids, gates, gate and up, and down. The last expert has no tokens if there are more than k."""
    random = np.random.default_rng(T)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    among = max(k, N - 1)
    ids = np.stack([np.arange(k) if is_same else random.permutation(among)[:k] for _ in range(T)])
    shapes = [(N, F, D), (N, F, D), (N, D, F)]
    gate, up, down = ((random.normal(size=one) * one[-1] ** -0.5).astype(kind) for one in shapes)
    gates = random.random((T, k)).astype("float64" if dtype == "float64" else "float32")
    return random.normal(size=(T, D)).astype(kind), ids.astype(np.int32), gates, (gate, up), down


def reference(x, ids, gates, matrices, down, slope):
    """The mix and its gradients of x, gates, gate, up and down, token by token."""
    x, gates, gate, up, down = (np.asarray(one, np.float64) for one in (x, gates, *matrices, down))
    y, of_x, of_gates = np.zeros_like(x), np.zeros_like(x), np.zeros_like(gates)
    of_gate, of_up, of_down = (np.zeros_like(one) for one in (gate, up, down))
    for t, own in enumerate(x):
        for j, e in enumerate(ids[t]):
            g, u = gate[e] @ own, up[e] @ own
            s = 1 / (1 + np.exp(-g))
            h = g * s * u
            y[t] += gates[t, j] * (down[e] @ h)
            of_h = down[e].T @ slope[t]
            of_gates[t, j] = h @ of_h
            of_down[e] += gates[t, j] * np.outer(slope[t], h)
            of_g = gates[t, j] * of_h * u * s * (1 + g * (1 - s))
            of_u = gates[t, j] * of_h * g * s
            of_x[t] += gate[e].T @ of_g + up[e].T @ of_u
            of_gate[e] += np.outer(of_g, own)
            of_up[e] += np.outer(of_u, own)
    return y, (of_x, of_gates, (of_gate, of_up), of_down)


def close(ones, others, dtype: str) -> None:
    for one, other in zip(*map(jax.tree.leaves, (ones, others)), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        error = np.abs(one - other).max()
        assert error <= TOLERANCE[dtype] * np.abs(other).max(), error


def slope_of(arrays) -> np.ndarray:
    """Of the same precision as the gates."""
    return np.random.default_rng(1).normal(size=arrays[0].shape).astype(arrays[2].dtype)


@pytest.mark.parametrize("block", [1, 4, 64, None])
@pytest.mark.parametrize("case", CASES)
def test_a_mix_and_its_gradients_are_those_of_a_loop_over_tokens(case, block, x64):
    arrays, mix = given(*case), experts.mix
    if block:
        mix = partial(experts.mix_sorted, form=Form(LOOP, block))
    slope = slope_of(arrays)
    close(found(mix, *arrays, slope), reference(*arrays, slope), case[5])


@pytest.mark.parametrize("case", CASES)
def test_joined_matrices_have_the_same_mix(case, x64):
    *arrays, (gate, up), down = jax.tree.map(jnp.asarray, given(*case))
    mix = jax.jit(partial(experts.mix, activation=jax.nn.silu, layout="rollout"))
    y = mix(*arrays, (jnp.stack([gate, up], axis=1),), down)
    close(y, reference(*arrays, (gate, up), down, arrays[0])[0], case[5])


def test_an_activation_is_applied_to_the_gate_alone():
    x, ids, gates, (gate, up), down = given(9, 4, 2, 8, 8, "float32")
    mix = jax.jit(partial(experts.mix, activation=lambda y: jnp.abs(y)))
    one = mix(x, ids, gates, (gate, up), down)
    close(one, mix(x, ids, gates, (-gate, up), down), "float32")
    close(one, -mix(x, ids, gates, (gate, -up), down), "float32")


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6], (40, 3, 2, 128, 256, "float32")])
def test_products_of_a_tpu_are_those_of_a_loop_over_tokens(case):
    arrays = given(*case)
    mix = partial(experts.mix_sorted, form=Form(MEGABLOX, 16, interpret=True))
    slope = slope_of(arrays)
    close(found(mix, *arrays, slope), reference(*arrays, slope), case[5])


@pytest.mark.parametrize(
    ("data", "model", "gathers_as_tpus"),
    [(2, 2, False), (2, 2, True), (1, 4, False), (4, 1, False)],
)
def test_a_mesh_has_the_same_mix_and_gradients(data, model, gathers_as_tpus, monkeypatch, x64):
    monkeypatch.setattr(experts, "is_tpu", lambda mesh: gathers_as_tpus)
    mesh = make_mesh(data, model)
    arrays = given(24, 6, 3, 16, 8, "float64")
    x, ids, gates, matrices, down = arrays
    x, ids, gates = (one.reshape(4, 6, -1) for one in (x, ids, gates))
    wide = NamedSharding(mesh, partition((None, "mlp", "embed"), "train"))
    places = wide, NamedSharding(mesh, partition((None, "embed", "mlp"), "train"))
    matrices, down = jax.device_put(matrices, places[0]), jax.device_put(down, places[1])
    slope = slope_of(arrays)
    y, slopes = found(
        partial(experts.mix, mesh=mesh), x, ids, gates, matrices, down, slope.reshape(x.shape)
    )
    flat = jax.tree.map(lambda one: one.reshape(24, -1), (y, slopes[:2]))
    close((flat[0], (*flat[1], *slopes[2:])), reference(*arrays, slope), "float64")
    assert slopes[2][0].sharding == wide or 1 in (data, model)


def test_a_data_group_has_the_same_mix():
    *arrays, (gate, up), down = jax.tree.map(jnp.asarray, given(6, 6, 3, 16, 8, "float32"))
    joined = (jnp.stack([gate, up], axis=1),)
    mix = partial(experts.mix, activation=jax.nn.silu, layout="rollout")
    one = jax.jit(partial(mix, mesh=make_mesh(1, 4)))(*arrays, joined, down)
    close(one, reference(*arrays, (gate, up), down, arrays[0])[0], "float32")


@pytest.mark.parametrize("mesh", [None, (2, 2)])
@pytest.mark.parametrize("keeps", [(), (MLP,)])
def test_gradients_of_stacked_layers_are_added_to_those_of_earlier_rows(keeps, mesh, x64):
    """In a scan over recomputed layers, by a backward pass that adds to its references, as in training."""
    mesh = mesh and make_mesh(*mesh)
    x, ids, gates, *_ = given(12, 4, 2, 8, 8, "float64")
    layers = [given(T, 4, 2, 8, 8, "float64")[3:] for T in (1, 2, 3)]
    stacked = jax.tree.map(lambda *ones: jnp.stack(ones), *layers)
    policy = jax.checkpoint_policies.save_only_these_names(*keeps)

    @partial(jax.checkpoint, policy=policy)
    def layer(y, weights):
        return y + experts.mix(
            y, jnp.asarray(ids), jnp.asarray(gates), *weights, jax.nn.silu, mesh
        ), None

    def total(stacked):
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0] ** 2)

    @jax.jit
    def added(stacked):
        references = jax.tree.map(lambda one: jax.new_ref(jnp.ones_like(one)), stacked)
        value, backward = jax.vjp(total, stacked)
        backward.with_refs(references)(jnp.ones_like(value))
        return jax.tree.map(jax.freeze, references)

    y, forwards = np.asarray(x), []
    for weights in layers:
        forwards.append(y)
        y = y + reference(y, ids, gates, *weights, y)[0]
    slope, wanted = 2 * y, []
    for y, weights in zip(forwards[::-1], layers[::-1], strict=True):
        _, (of_x, _, *of_weights) = reference(y, ids, gates, *weights, slope)
        slope = slope + of_x
        wanted.append(tuple(of_weights))
    stack = jax.tree.map(lambda *ones: 1 + np.stack(ones), *wanted[::-1])
    close(added(stacked), stack, "float64")


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_kept_products_are_not_computed_again(mesh):
    """Of the loops of a layer's backward pass those of gate and up are the only ones that are repeated."""
    mesh = mesh and make_mesh(*mesh)
    x, ids, *rest = jax.tree.map(jnp.asarray, given(12, 4, 2, 8, 8, "float32"))

    def loops(*keeps: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*keeps)

        @partial(jax.checkpoint, policy=policy)
        def layer(x, rest):
            return experts.mix(x, ids, *rest, jax.nn.silu, mesh)

        run = jax.jit(jax.grad(lambda *given: jnp.sum(layer(*given) ** 2), (0, 1)))
        return run.lower(x, rest).as_text().count("stablehlo.while")

    assert loops() == loops(MLP) + 2


@pytest.mark.parametrize(
    ("pairs", "dtype", "on", "few", "name"),
    [
        (512, "bfloat16", COSTS, True, FEW),
        (513, "bfloat16", COSTS, True, TILES),
        (8, "bfloat16", COSTS, False, TILES),
        (8, "bfloat16", {EXPERTS}, True, TILES),
        (8, "float64", COSTS, True, LOOP),
        (8, "bfloat16", {FEW_EXPERTS}, False, LOOP),
    ],
)
def test_few_tokens_and_kernels_that_are_off_choose_the_form(pairs, dtype, on, few, name):
    fused = Fused(FUSED.mesh, 90, frozenset(on))
    assert experts.rule(fused.mesh, fused, jnp.dtype(dtype), pairs, 128, few).name == name


# Kernels

TILED = [
    (1, 8, 2, 16, 24, "float32", 16),
    (53, 3, 2, 80, 136, "float32", 32),
    (90, 5, 3, 72, 40, "bfloat16", 16),
    (70, 4, 2, 160, 200, "bfloat16", 64),
]
# The experts of more tokens than a group has slots, by pairs and by experts.
FEWER = [
    (1, 16, 4, 72, 40, "float32"),
    (2, 16, 4, 160, 72, "bfloat16"),
    (9, 5, 3, 136, 24, "float32"),
    (50, 6, 3, 264, 40, "float32"),
    (64, 12, 8, 64, 40, "bfloat16"),
]


def test_kernels_of_sorted_rows_have_the_mix_and_the_gradients():
    arrays = [given(*case[:6]) for case in TILED]
    arrays = [(*one, slope_of(one)) for one in arrays]
    calls = [(one, {"block": case[6]}) for one, case in zip(arrays, TILED, strict=True)]
    results = triton_runs.interpreted("expert_mixes:tiled", calls)
    for case, one, result in zip(TILED, arrays, results, strict=True):
        close(result, reference(*one), case[5])


def joined(arrays: tuple) -> tuple:
    """With gate and up as one."""
    *rest, (gate, up), down = arrays
    return *rest, (np.stack([gate, up], axis=1),), down


@pytest.mark.parametrize("is_reversed", [False, True])
def test_kernels_of_few_tokens_have_the_mix(is_reversed):
    arrays = [given(*case) for case in FEWER]
    calls = [(joined(one), {}) for one in arrays]
    results = triton_runs.interpreted("expert_mixes:mixed", calls, is_reversed)
    for case, one, result in zip(FEWER, arrays, results, strict=True):
        close(result, reference(*one, one[0])[0], case[5])


def test_bits_of_a_token_do_not_depend_on_the_others_of_few():
    """Neither on their values, nor on which experts they have."""
    x, ids, gates, matrices, down = joined(given(20, 6, 2, 72, 40, "float32"))
    others = x[::-1].copy(), ids[::-1].copy(), gates[::-1].copy()
    for one, other in zip((x, ids, gates), others, strict=True):
        other[7] = one[7]
    calls = [((*arrays, matrices, down), {}) for arrays in ((x, ids, gates), others)]
    one, other = triton_runs.interpreted("expert_mixes:mixed", calls)
    assert one[7].tobytes() == other[7].tobytes()
    assert one[6].tobytes() != other[6].tobytes()


@pytest.mark.device
def test_kernels_are_those_of_the_reference_on_a_device():
    cases = [(40, 32, 4, 256, 128, dtype) for dtype in ("bfloat16", "float32")]
    arrays = [(*(one := given(*case)), slope_of(one)) for case in cases]
    for case, one, (few, tiled) in zip(cases, arrays, on_device("mixes", arrays), strict=True):
        y, slopes = reference(*one)
        close(few, y, case[-1])
        close(tiled, (y, slopes), case[-1])
