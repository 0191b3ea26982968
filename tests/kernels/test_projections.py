"""Norms, projections and the write of cache rows as kernels, in Triton's interpreter, against NumPy in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from kernels import triton_runs

from tlt_jax.kernels import projections
from tlt_jax.kernels.fused import ADDED, GATED, HEADS
from tlt_jax.kernels.projections import Product, Sizes

EPS = 1e-6
# Of the largest number. bfloat16 is rounded to 8 bits: normed inputs, and results.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
MODULE = "tlt_jax.kernels.projections:"


class Case(NamedTuple):
    """A layer's sizes (T: tokens, N of a tree), what it has, dtype, and the kernels' sizes."""

    T: int
    N: int
    D: int
    K: int
    G: int
    E: int
    dtype: str
    sizes: Sizes
    has_bias: bool = False
    has_head_norm: bool = False
    inputs: int = 1
    is_joined: bool = True


CASES = [
    Case(1, 1, 896, 1, 7, 64, "bfloat16", Sizes(16, 256, 4, 4), has_bias=True),
    Case(5, 1, 576, 3, 3, 64, "float32", Sizes(16, 128, 4, 4)),
    Case(33, 3, 160, 2, 2, 64, "bfloat16", Sizes(32, 128, 4, 3), has_bias=True),
    Case(64, 8, 96, 1, 3, 128, "float32", Sizes(64, 64, 4, 3)),
    Case(6, 2, 128, 2, 2, 128, "float32", Sizes(128, 64, 4, 3), has_head_norm=True),
    Case(6, 3, 128, 1, 2, 40, "float32", Sizes(64, 64, 4, 3), has_bias=True, has_head_norm=True),
    Case(12, 4, 192, 2, 3, 64, "float32", Sizes(32, 64, 4, 4), inputs=2, is_joined=False),
    Case(8, 8, 192, 1, 7, 64, "bfloat16", Sizes(16, 256, 4, 4), True, True, 2, False),
    Case(4, 2, 64, 2, 1, 80, "float32", Sizes(32, 64, 4, 4), True, is_joined=False),
]  # fmt: skip


class Random:
    """Arrays of one dtype, of normal numbers."""

    def __init__(self, dtype: str):
        self.random = np.random.default_rng(0)
        self.dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * self.random.normal(size=shape)).astype(self.dtype)


def wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPS) * weight


def check(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    error = np.abs(wide(found) - wanted).max() / np.abs(wanted).max()
    assert found.shape == wanted.shape and found.dtype.name == dtype
    assert error < TOLERANCE[dtype], error


def heads_given(case: Case) -> tuple[tuple, dict[str, Any]]:
    """The arguments of `projections.heads`."""
    T, K, G, E, In = case.T, case.K, case.G, case.E, case.D * case.inputs
    normal = Random(case.dtype)
    parts = [(K, G + 2, E)] if case.is_joined else [(K * G * E,), (K * E,), (K * E,)]
    angle = 3 * normal.random.normal(size=(T, E // 2))
    given = (
        [3 * normal(T, case.D).T for _ in range(case.inputs)],
        [normal(case.D) for _ in range(case.inputs)],
        [normal(*part, In, scale=In**-0.5) for part in parts],
        [normal(*part) if case.has_bias else None for part in parts],
        (normal(E), normal(E)) if case.has_head_norm else (None, None),
        (np.cos(angle).astype(normal.dtype).T, np.sin(angle).astype(normal.dtype).T),
        (K, G, E), T // case.N, EPS,
    )  # fmt: skip
    return given, {"chosen": case.sizes}


def heads_wanted(case: Case, given: tuple) -> list[np.ndarray]:
    """Queries, keys and values in float64."""
    T, N, K, G, E = case.T, case.N, case.K, case.G, case.E
    inputs, norms, matrices, biases, head_norms, (cos, sin), *_ = given
    pairs = zip(inputs, norms, strict=True)
    y = np.concatenate([normed(wide(x.T), wide(norm)) for x, norm in pairs], axis=-1)
    biases = [0 if bias is None else bias for bias in biases]
    results = [
        y @ wide(matrix).reshape(-1, matrix.shape[-1]).T + wide(bias).reshape(-1)
        for matrix, bias in zip(matrices, biases, strict=True)
    ]
    if case.is_joined:
        joined = results[0].reshape(T, K, G + 2, E)
        q, k, v = joined[:, :, :G], joined[:, :, G], joined[:, :, G + 1]
    else:
        q, k, v = (part.reshape(T, K, -1, E) for part in results)
        k, v = k[:, :, 0], v[:, :, 0]
    if case.has_head_norm:
        q, k = normed(q, wide(head_norms[0])), normed(k, wide(head_norms[1]))

    def rotated(x: np.ndarray) -> np.ndarray:
        c, s = (wide(a.T).reshape(T, *[1] * (x.ndim - 2), -1) for a in (cos, sin))
        a, b = x[..., : E // 2], x[..., E // 2 :]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    q, k, v = (x.reshape(T // N, N, *x.shape[1:]) for x in (rotated(q), rotated(k), v))
    return [q.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)]


def test_normed_and_rotated_heads():
    calls = [heads_given(case) for case in CASES]
    found = triton_runs.interpreted(MODULE + "heads", calls)
    for case, (given, _), results in zip(CASES, calls, found, strict=True):
        for result, wanted in zip(results, heads_wanted(case, given), strict=True):
            check(result, wanted, case.dtype)


# Tokens, rows of a matrix and its width, whether there is a bias, dtype, sizes.
MATRICES = [
    (1, 896, 896, False, "bfloat16", Sizes(8, 256, 4, 4)),
    (5, 72, 576, True, "float32", Sizes(16, 128, 4, 4)),
    (33, 100, 160, True, "bfloat16", Sizes(32, 128, 4, 3)),
    (64, 64, 1536, False, "float32", Sizes(64, 64, 4, 3)),
]
SPLITS = [
    (9, 72, 576, True, "float32", Sizes(16, 128, 4, 4, 4)),
    (64, 96, 1000, False, "bfloat16", Sizes(64, 128, 4, 3, 8)),
]


def test_products_that_are_added():
    calls = []
    for T, out, width, has_bias, dtype, tiles in MATRICES + SPLITS:
        normal = Random(dtype)
        bias = normal(out) if has_bias else None
        arrays = normal(T, out).T, normal(T, width).T, normal(out, width, scale=width**-0.5), bias
        arrivals = np.zeros(8, np.int32)
        calls.append(((*arrays, arrivals), {"chosen": tiles}))
    found, other = (
        triton_runs.interpreted(MODULE + "added", calls, is_reversed)
        for is_reversed in (False, True)
    )
    for (given, _), result, again in zip(calls, found, other, strict=True):
        assert result.tobytes() == again.tobytes()  # whichever program comes last
        x, y, matrix, bias = (0 if array is None else wide(array) for array in given[:4])
        check(result.T, x.T + y.T @ matrix.T + bias, given[0].dtype.name)


@pytest.mark.parametrize("is_joined", [True, False])
def test_normed_gates(is_joined):
    calls = []
    for T, out, width, has_bias, dtype, tiles in MATRICES:
        normal = Random(dtype)
        parts = [(2, out)] if is_joined else [(out,), (out,)]
        given = (
            3 * normal(T, width).T, normal(width), [normal(*part, width, scale=width**-0.5) for part in parts],
            [normal(*part) if has_bias else None for part in parts], EPS,
        )  # fmt: skip
        tiles = tiles if tiles.rows > 8 else Sizes(16, 256, 4, 4)
        calls.append((given, {"chosen": tiles}))
    found = triton_runs.interpreted(MODULE + "gated", calls)
    for (given, _), (result, arrivals) in zip(calls, found, strict=True):
        assert not arrivals.any()
        x, norm, matrices, biases, _ = given
        gate, up = (wide(m) for m in (matrices[0] if is_joined else matrices))
        biases = (0, 0) if biases[0] is None else biases[0] if is_joined else biases
        y = normed(wide(x.T), wide(norm))
        gate, up = y @ gate.T + wide(biases[0]), y @ up.T + wide(biases[1])
        check(result.T, gate / (1 + np.exp(-gate)) * up, x.dtype.name)


def test_a_token_does_not_depend_on_the_others():
    case = Case(9, 1, 96, 1, 2, 64, "bfloat16", Sizes(16, 64, 4, 3), has_bias=True)
    given, keywords = heads_given(case)
    x = given[0][0].copy()
    x[:, 4:] = 77 * x[:, 4:]
    one, other = triton_runs.interpreted(
        MODULE + "heads", [(given, keywords), (([x], *given[1:]), keywords)]
    )
    for first, second in zip(one, other, strict=True):
        assert first[:4].tobytes() == second[:4].tobytes() and first.tobytes() != second.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cache_rows_are_the_nodes_of_each_path_with_finite_values(dtype):
    def finite(x):
        return np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), x.dtype))

    B, K, E, S, N = 3, 2, 40, 32, 5
    normal, starts = Random(dtype), np.array([0, 7, 31], np.int32)
    arrays = normal(B, K, E, S), normal(B, K, S, E), normal(B, K, E, N), normal(B, K, N, E)
    arrays[3][:, :, :2, 0], arrays[3][1, 1, 3, 2] = (np.nan, np.inf), -np.inf
    path = np.array([[0, 3], [0, 0], [4, 1]], np.int32)
    after = normal(2, 2)
    calls = [((*arrays, starts, after, *more), {}) for more in ((), (path,))]
    found = triton_runs.interpreted("tlt_jax.kernels.cache_rows:write_in_kernel", calls)
    for nodes, (keys, values) in zip((np.arange(N)[None].repeat(B, 0), path), found, strict=True):
        wanted_keys, wanted_values = arrays[0].copy(), arrays[1].copy()
        for b in range(B):
            start = min(starts[b], S - nodes.shape[1])
            slots = slice(start, start + nodes.shape[1])
            wanted_keys[b, :, :, slots] = arrays[2][b][:, :, nodes[b]]
            wanted_values[b, :, slots] = finite(arrays[3][b][:, nodes[b]])
        assert keys.tobytes() == wanted_keys.tobytes()
        assert values.tobytes() == wanted_values.tobytes()


# Policy, dtype, trees and nodes of a tree. bfloat16 is rounded after every operation of XLA's, and once in a kernel.
LAYERS = [
    ("biases", "bfloat16", 5, 3), ("biases", "float32", 1, 1), ("head norms", "float32", 2, 3), ("split", "float32", 5, 3)
]  # fmt: skip


def test_layers_by_kernels_equal_those_of_xla():
    found = triton_runs.interpreted("node_layers:interpreted", [(case, {}) for case in LAYERS])
    for (_, dtype, *_), (kernels, xla) in zip(LAYERS, found, strict=True):
        for one, other in zip(kernels, xla, strict=True):
            error = np.abs(wide(one) - wide(other)).max() / np.abs(wide(other)).max()
            assert one.shape == other.shape and one.dtype == other.dtype
            assert error < TOLERANCE[dtype], error
            assert one.tobytes() != other.tobytes()  # else both are XLA's


@pytest.mark.parametrize(
    ("product", "runs"),
    [
        (
            Product(GATED, 2 * 18944, 3584, 1, 2),
            False,
        ),  # a 7B policy: XLA reads large matrices well
        (Product(HEADS, 1152, 896, 64, 2), True),
        (Product(HEADS, 1152, 896, 65, 2), False),
        (Product(HEADS, 1152, 896, 17, 4), False),  # float32
        (
            Product(ADDED, 896, 4864, 64, 2),
            False,
        ),  # every program would read all tokens of a wide reduction
        (Product(ADDED, 896, 4864, 64, 2, can_split=True), True),
    ],
)
def test_kernels_run_where_reading_the_matrix_takes_about_as_long_as_a_launch(product, runs):
    assert (projections.rule(product) is not None) == runs
