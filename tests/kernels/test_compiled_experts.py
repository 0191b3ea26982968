"""Mixtures of experts of Qwen3-30B-A3B's sizes, compiled for devices that are absent: memory, kernels and what they read."""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels import triton_runs
from kernels.test_projections import MOST_SHARED

from tlt_jax.distributed.mesh import is_gpu, make_mesh, sharding
from tlt_jax.distributed.topology import describe
from tlt_jax.kernels import experts
from tlt_jax.kernels.experts import TILES, Form
from tlt_jax.kernels.fused import Fused
from tlt_jax.plan import launches
from tlt_jax.plan.launches import collectives

N, K, D, F = 128, 8, 2048, 768
T, LAYERS = 4096, 48
PLACES = [
    ("cpu", 1, 1),
    pytest.param("h200:1", 1, 1, marks=pytest.mark.gpu),
    pytest.param("h200:4", 2, 2, marks=pytest.mark.gpu),
    pytest.param("v5p:2x2x1", 1, 1, marks=pytest.mark.tpu),
    pytest.param("v5p:2x2x1", 2, 2, marks=pytest.mark.tpu),
]
SERVED = [
    pytest.param("h200:1", 1, marks=pytest.mark.gpu),
    pytest.param("h200:2", 2, marks=pytest.mark.gpu),
    pytest.param("v5p:2x2x1", 4, marks=pytest.mark.tpu),
]


def arrays(mesh, layout: str, tokens: int) -> tuple:
    """x, ids, gates, matrices and down, in bfloat16."""

    def array(*shape: int, axes: tuple, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axes, layout))

    rows, wide = ("batch",), (None, "mlp", "embed")
    gate = array(N, F, D, axes=wide)
    joined = array(N, 2, F, D, axes=(None, *wide))
    return (
        array(tokens, D, axes=rows), array(tokens, K, axes=rows, dtype="int32"),
        array(tokens, K, axes=rows, dtype="float32"),
        (gate, gate) if layout == "train" else (joined,), array(N, D, F, axes=(None, "embed", "mlp")),
    )  # fmt: skip


def most_of_a_product(hlo: str) -> int:
    """Numbers in the largest result of XLA's products."""
    found = re.findall(r"= \(?\w+\[([\d,]+)\]\S* (?:dot\(|convolution\(|custom-call\(.*gemm)", hlo)
    return max((math.prod(map(int, shape.split(","))) for shape in found), default=0)


@pytest.mark.parametrize("has_slopes", [False, True])
@pytest.mark.parametrize(("topology", "data", "model"), PLACES)
def test_training_fits_and_multiplies_no_token_by_all_experts(topology, data, model, has_slopes):
    """Temporaries are at most twice what is given, with all of the matrices of `data`, and returned."""
    mesh = make_mesh(data, model, None if topology == "cpu" else describe(topology).devices)
    x, ids, *given = arrays(mesh, "train", T)

    def mix(ids, x, gates, matrices, down):
        return experts.mix(x, ids, gates, matrices, down, jax.nn.silu, mesh)

    def both(slope, ids, *given):
        y, backward = jax.vjp(partial(mix, ids), *given)
        return y, backward(slope)

    first, run = ((x, ids), both) if has_slopes else ((ids,), mix)
    compiled = jax.jit(run).lower(*first, x, *given).compile()
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    most = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + 6 * N * F * D // model * (data > 1)
    )
    assert memory.temp_size_in_bytes <= 2 * most
    assert most_of_a_product(hlo) <= F * D
    moved = {name.split(" over ")[0] for name in collectives(hlo, mesh)}
    assert ("all-gather" in moved) == (data > 1)
    assert ("all-reduce" in moved) == (
        model > 1
    ) or topology == "cpu"  # which keeps those of one device


@pytest.mark.gpu
def test_gradients_of_layers_are_added_where_they_lie():
    """No form of the whole sums is made: temporaries are smaller than these."""
    mesh = make_mesh(2, 2, describe("h200:4").devices)
    x, ids, gates, *weights = arrays(mesh, "train", T)

    def stacked(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, PartitionSpec(None, *one.sharding.spec))
        return jax.ShapeDtypeStruct((3, *one.shape), "float32", sharding=place)

    def accumulate(sums, weights, x, ids, gates):
        @jax.checkpoint
        def layer(y, weights):
            own = jax.tree.map(lambda one: one.astype(y.dtype), weights)
            return y + experts.mix(y, ids, gates, *own, jax.nn.silu, mesh), None

        value, backward = jax.vjp(lambda weights: jax.lax.scan(layer, x, weights)[0].sum(), weights)
        references = jax.tree.map(jax.new_ref, sums)
        backward.with_refs(references)(jnp.ones_like(value))
        return jax.tree.map(jax.freeze, references)

    layers = jax.tree.map(stacked, weights)
    run = jax.jit(accumulate, donate_argnums=0).lower(layers, layers, x, ids, gates)
    memory = run.compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize(("topology", "model"), SERVED)
def test_few_tokens_copy_no_matrix(topology, model, tokens):
    mesh = make_mesh(1, model, describe(topology).devices)
    fused = Fused.of(mesh) if is_gpu(mesh) else None

    def layers(count, x, *given):
        mix = partial(experts.mix, mesh=mesh, fused=fused, layout="rollout")
        return jax.lax.fori_loop(0, count, lambda _, x: mix(x, *given, jax.nn.silu), x)

    lowered = jax.jit(layers).lower(LAYERS, *arrays(mesh, "rollout", tokens))
    if fused is None:
        compiled = lowered.compile()
    else:
        compiled, found = launches.compile_and_read(lowered)
        # With the loop's own, and the sum over devices.
        assert not fused.on or (found.kernels <= 2 + 2 * model and not found.host_loops), found
    assert compiled.memory_analysis().temp_size_in_bytes < 32 << 20
    assert launches.largest_copy(compiled.as_text()) < 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, T])
@pytest.mark.parametrize(("model", "dtype"), [(1, "bfloat16"), (8, "bfloat16"), (1, "float32")])
def test_kernels_read_16_bytes_at_once_and_spill_nothing(
    tokens, model, dtype, monkeypatch, tmp_path
):
    x, ids, gates, (gate, _), down = arrays(make_mesh(1, 1), "train", tokens)
    x = x.update(dtype=dtype)
    wide = F // model
    gate, down = (jax.ShapeDtypeStruct(one, dtype) for one in ((N, wide, D), (N, D, wide)))
    joined = jax.ShapeDtypeStruct((N, 2, wide, D), dtype)

    def both(x, ids, gates, gate, down, joined):
        if tokens < T:
            return experts.mix(
                x, ids, gates, (joined,), down, jax.nn.silu, None, triton_runs.FUSED, "rollout"
            )
        form = Form(TILES, 128, triton_runs.FUSED)
        mix = partial(experts.mix_sorted, activation=jax.nn.silu, form=form)
        y, backward = jax.vjp(lambda x, gate: mix(x, ids, gates, (gate, gate), down), x, gate)
        return backward(y)

    made = triton_runs.kernels(both, monkeypatch, x, ids, gates, gate, down, joined)
    for kernel in {str(one.source.constants) + one.name: one for one in made}.values():
        usage = triton_runs.resource_usage(kernel, tmp_path)
        code = triton_runs.compiled(kernel)
        assert code.metadata.shared <= MOST_SHARED, (kernel.name, code.metadata.shared)
        assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage
        copied = re.findall(
            r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", code.asm["ptx"]
        )
        assert copied.count("0x10") >= 0.8 * len(copied) > 0, (kernel.name, copied)
