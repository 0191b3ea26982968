"""Sums of the parts of large products with what follows, in Triton's interpreter, against NumPy in float64."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import triton_runs
from kernels.test_projections import EPS, Random, check, heads_wanted, layer_arrays, normed, wide

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import product_parts
from tlt_jax.kernels.fused import PART_ADDED, PART_HEADS

MODULE = "tlt_jax.kernels.product_parts:"
# Parts, tokens, nodes of a tree, K, G, E, dtype, whether one matrix has all heads, and whether there are a bias, head norms and
# a change.
HEADS = [
    (4, 1, 1, 1, 7, 64, "bfloat16", True, True, False, False),
    (8, 6, 3, 2, 2, 128, "float32", True, True, True, True),
    (1, 12, 4, 3, 2, 40, "float32", False, True, False, False),
    (2, 5, 1, 2, 4, 128, "bfloat16", False, False, True, False),
]
# Parts, tokens, width of the result, dtype, whether there are a bias and a change.
ROWS = [
    (8, 1, 896, "bfloat16", False, False),
    (4, 5, 160, "float32", True, True),
    (1, 33, 96, "bfloat16", True, False),
    (2, 3, 4100, "float32", False, True),
]
# (T, D, K, G, E) of a Qwen2.5-7B layer's rows, of Qwen3-8B's, and of a 32B policy's.
STATIC = [(32, 3584, 4, 7, 128), (64, 4096, 8, 4, 128), (1, 5120, 8, 5, 128)]


def heads_given(S, T, N, K, G, E, dtype, is_joined, has_bias, has_norm, has_change) -> tuple:
    """The arguments of `product_parts.heads`, of a product in S parts."""
    normal, width = Random(dtype), S * product_parts.LEAST_WIDTH
    arrays = layer_arrays(normal, T, K, G, E, width, is_joined, has_bias, has_norm)
    change = normal.random.normal(size=(K, G + 2, E, T)).astype(np.float32)
    return normal(width, T), *arrays, T // N, EPS, change if has_change else None


def test_parts_become_rotated_heads():
    calls = [heads_given(*case) for case in HEADS]
    found = triton_runs.interpreted(MODULE + "heads", [as_call(given) for given in calls])
    for case, given, results in zip(HEADS, calls, found, strict=True):
        x, *rest, _, change = given
        for result, wanted in zip(results, heads_wanted(wide(x).T, *rest, change), strict=True):
            check(result, wanted, case[6])


def as_call(given: tuple) -> tuple[tuple, dict]:
    """The arguments with the change by name."""
    return given[:-1], {"change": given[-1]}


def test_parts_are_added_and_normed():
    calls = []
    for S, T, out, dtype, has_bias, has_change in ROWS:
        normal, width = Random(dtype), S * product_parts.LEAST_WIDTH
        change = normal.random.normal(size=(out, T)).astype(np.float32) if has_change else None
        calls.append((
            3 * normal(out, T), normal(width, T), normal(out, width, scale=width**-0.5),
            normal(out) if has_bias else None, normal(out), EPS, change,
        ))  # fmt: skip
    found = triton_runs.interpreted(MODULE + "added", [as_call(given) for given in calls])
    for (*_, dtype, _, _), (x, y, matrix, bias, norm, _, change), (total, row) in zip(
        ROWS, calls, found, strict=True
    ):
        wanted = wide(x) + wide(matrix) @ wide(y)
        wanted += 0 if bias is None else wide(bias)[:, None]
        check(total, wanted + (0 if change is None else wide(change)), dtype)
        check(row.T, normed(wide(total).T, wide(norm)), dtype)  # of the result as it is stored


@pytest.mark.parametrize(
    ("out", "width", "tokens", "splits"),
    [
        (37888, 3584, 5, 1),  # gate and up of 7B fill a GPU
        (4608, 3584, 64, 4),
        (4608, 3584, 65, 4),
        (4608, 3584, 256, 2),
        (3584, 18944, 1, 8),
        (3584, 18944, 256, 4),
        (96, 1600, 5, 2),  # 400 numbers in each of four parts would be too few
        (96, 1001, 5, 1),
    ],
)
def test_a_product_is_the_sum_of_as_many_parts_as_keep_a_gpu_busy(out, width, tokens, splits):
    assert product_parts.splits(out, width, tokens) == splits
    normal = np.random.default_rng(0).normal
    matrix, y = normal(size=(min(out, 96), width)), normal(size=(width, 5))
    parts = np.asarray(product_parts.product(jnp.float32(y), jnp.float32(matrix)), np.float64)
    assert parts.shape == (product_parts.splits(len(matrix), width, 5), 5, len(matrix))
    assert np.abs(parts.sum(0) - y.T @ matrix.T).max() < 1e-5 * np.abs(y.T @ matrix.T).max()


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "D", "K", "G", "E"), STATIC)
def test_kernels_read_parts_16_bytes_at_once_and_spill_nothing(
    T, D, K, G, E, monkeypatch, tmp_path
):
    F = 4 * D

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    def both(x, y, row, down, matrix, bias, head, angle):
        product_parts.added(x, y, down, None, row, EPS, triton_runs.FUSED)
        given = (head, head), (angle, angle), (K, G, E), T, EPS, triton_runs.FUSED
        return product_parts.heads(x, [matrix], [bias], *given)

    made = triton_runs.kernels(
        both, monkeypatch, array(D, T), array(F, T), array(D), array(D, F),
        array(K, G + 2, E, D), array(K, G + 2, E), array(E), array(E // 2, T),
    )  # fmt: skip
    assert [kernel.name for kernel in made] == ["add_norm", "bias_rotary"]
    for kernel in made:
        usage = triton_runs.resource_usage(kernel, tmp_path)
        assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage
        assert int(re.search(r" REG:(\d+) ", usage)[1]) <= 128, usage
        ptx = triton_runs.compiled(kernel).asm["ptx"]
        assert ".v4.b32" in "".join(re.findall(r"ld\.global[^;]*", ptx)), kernel.name


# Policy, dtype, trees and nodes of a tree.
LAYERS = [
    ("biases", "bfloat16", 5, 3),
    ("head norms", "float32", 2, 3),
    ("adapters", "bfloat16", 2, 3),
]


def test_layers_by_parts_equal_those_of_xla():
    calls = [((*case, True), {}) for case in LAYERS]
    found = triton_runs.interpreted("node_layers:interpreted", calls)
    for (_, dtype, *_), (kernels, xla) in zip(LAYERS, found, strict=True):
        for one, other in zip(kernels, xla, strict=True):
            check(one, wide(other), dtype)
            assert one.tobytes() != other.tobytes()  # else both are XLA's


def test_many_tokens_small_matrices_and_tensor_parallelism_are_left_to_xla():
    one, large = triton_runs.FUSED, 3584 * 3584
    two, off = replace(one, mesh=make_mesh(1, 2)), replace(one, on=frozenset({PART_ADDED}))
    for tokens, dtype, numbers, fused, runs in [
        (256, "bfloat16", large, one, True),
        (257, "bfloat16", large, one, False),
        (1, "bfloat16", large, two, False),
        (1, "bfloat16", large, None, False),
        (1, "bfloat16", large, off, False),
        (1, "bfloat16", 896 * 4864, one, False),
        (1, "float16", large, one, False),
    ]:
        x = jax.ShapeDtypeStruct((8, tokens), dtype)
        assert product_parts.runs(PART_HEADS, x, numbers, fused) == runs
