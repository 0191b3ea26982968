"""Norms, projections and the write of cache rows as kernels: interpreted, against NumPy in float64, and compiled for a GPU."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels import triton_runs
from kernels.on_device import on_device
from kernels.triton_runs import FUSED, REASON, compiled, kernels, resource_usage

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import projections
from tlt_jax.kernels.fused import ADDED, GATED, HEADS, Fused
from tlt_jax.kernels.projections import Product, ProjectionTiles
from tlt_jax.models import drafter as drafters, eagle, hf_config, kv_cache

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
    sizes: ProjectionTiles
    has_bias: bool = False
    has_head_norm: bool = False
    inputs: int = 1
    is_joined: bool = True


CASES = [
    Case(1, 1, 896, 1, 7, 64, "bfloat16", ProjectionTiles(16, 256, 4, 4), has_bias=True),
    Case(5, 1, 576, 3, 3, 64, "float32", ProjectionTiles(16, 128, 4, 4)),
    Case(33, 3, 160, 2, 2, 64, "bfloat16", ProjectionTiles(32, 128, 4, 3), has_bias=True),
    Case(64, 8, 96, 1, 3, 128, "float32", ProjectionTiles(64, 64, 4, 3)),
    Case(6, 2, 128, 2, 2, 128, "float32", ProjectionTiles(128, 64, 4, 3), has_head_norm=True),
    Case(6, 3, 128, 1, 2, 40, "float32", ProjectionTiles(64, 64, 4, 3), has_bias=True, has_head_norm=True),
    Case(12, 4, 192, 2, 3, 64, "float32", ProjectionTiles(32, 64, 4, 4), inputs=2, is_joined=False),
    Case(8, 8, 192, 1, 7, 64, "bfloat16", ProjectionTiles(16, 256, 4, 4), True, True, 2, False),
    Case(4, 2, 64, 2, 1, 80, "float32", ProjectionTiles(32, 64, 4, 4), True, is_joined=False),
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


def layer_arrays(normal, T, K, G, E, width, is_joined, has_bias, has_norm) -> tuple:
    """Matrices of this width, biases, head norms and angles of T tokens, and (K, G, E), as kernels of heads take them."""
    parts = [(K, G + 2, E)] if is_joined else [(K * G * E,), (K * E,), (K * E,)]
    angle = 3 * normal.random.normal(size=(T, E // 2))
    return (
        [normal(*part, width, scale=width**-0.5) for part in parts],
        [normal(*part) if has_bias else None for part in parts],
        (normal(E), normal(E)) if has_norm else (None, None),
        (np.cos(angle).astype(normal.dtype).T, np.sin(angle).astype(normal.dtype).T),
        (K, G, E),
    )  # fmt: skip


def heads_given(case: Case) -> tuple[tuple, dict[str, Any]]:
    """The arguments of `projections.heads`."""
    T, normal = case.T, Random(case.dtype)
    inputs = [3 * normal(T, case.D).T for _ in range(case.inputs)]
    norms = [normal(case.D) for _ in range(case.inputs)]
    has = case.is_joined, case.has_bias, case.has_head_norm
    arrays = layer_arrays(normal, T, case.K, case.G, case.E, case.D * case.inputs, *has)
    return (inputs, norms, *arrays, T // case.N, EPS), {"chosen": case.sizes}


def heads_wanted(y, matrices, biases, norms, angles, shape, batch, change=None) -> list[np.ndarray]:
    """Queries, keys and values in float64, from what the matrices read, [T, In]."""
    (K, G, E), (cos, sin) = shape, (wide(a.T)[:, None, None] for a in angles)
    y = np.concatenate([
        y @ wide(matrix).reshape(-1, y.shape[1]).T + (0 if bias is None else wide(bias).reshape(-1))
        for matrix, bias in zip(matrices, biases, strict=True)
    ], axis=1)  # fmt: skip
    if change is not None:
        y += wide(change).reshape(-1, len(y)).T
    if len(matrices) == 1:
        y = y.reshape(-1, K, G + 2, E)
    else:
        q, k, v = np.split(y.reshape(-1, K * (G + 2), E), (K * G, K * G + K), axis=1)
        q = q.reshape(-1, K, G, E)
        y = np.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)
    qk, v = y[:, :, :-1], y[:, :, -1]
    if norms[0] is not None:
        q, k = normed(qk[:, :, :-1], wide(norms[0])), normed(qk[:, :, -1:], wide(norms[1]))
        qk = np.concatenate([q, k], axis=2)
    first, second = np.split(qk, 2, axis=-1)
    qk = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    qk, v = (x.reshape(batch, -1, *x.shape[1:]) for x in (qk, v))
    q, k = qk[..., :-1, :], qk[..., -1, :]
    return [q.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)]


def test_normed_and_rotated_heads():
    calls = [heads_given(case) for case in CASES]
    found = triton_runs.interpreted(MODULE + "heads", calls)
    for case, ((inputs, norms, *rest, _), _), results in zip(CASES, calls, found, strict=True):
        pairs = zip(inputs, norms, strict=True)
        y = np.concatenate([normed(wide(x.T), wide(norm)) for x, norm in pairs], axis=-1)
        for result, wanted in zip(results, heads_wanted(y, *rest), strict=True):
            check(result, wanted, case.dtype)


# Tokens, rows of a matrix and its width, whether there is a bias, dtype, sizes.
MATRICES = [
    (1, 896, 896, False, "bfloat16", ProjectionTiles(8, 256, 4, 4)),
    (5, 72, 576, True, "float32", ProjectionTiles(16, 128, 4, 4)),
    (33, 100, 160, True, "bfloat16", ProjectionTiles(32, 128, 4, 3)),
    (64, 64, 1536, False, "float32", ProjectionTiles(64, 64, 4, 3)),
]
SPLITS = [
    (9, 72, 576, True, "float32", ProjectionTiles(16, 128, 4, 4, 4)),
    (64, 96, 1000, False, "bfloat16", ProjectionTiles(64, 128, 4, 3, 8)),
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
        tiles = tiles if tiles.rows > 8 else ProjectionTiles(16, 256, 4, 4)
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
    case = Case(9, 1, 96, 1, 2, 64, "bfloat16", ProjectionTiles(16, 64, 4, 3), has_bias=True)
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
    for (_, dtype, *_), (ours, xla) in zip(LAYERS, found, strict=True):
        for one, other in zip(ours, xla, strict=True):
            error = np.abs(wide(one) - wide(other)).max() / np.abs(wide(other)).max()
            assert one.shape == other.shape and one.dtype == other.dtype
            assert error < TOLERANCE[dtype], error
            assert one.tobytes() != other.tobytes()  # else both are XLA's


@pytest.mark.parametrize(
    ("product", "runs"),
    [
        # Of a 7B policy: XLA reads large matrices well.
        (Product(GATED, 2 * 18944, 3584, 1, 2), False),
        (Product(HEADS, 1152, 896, 64, 2), True),
        (Product(HEADS, 1152, 896, 65, 2), False),
        (Product(HEADS, 1152, 896, 17, 4), False),  # float32
        # Every program would read all tokens of a wide reduction.
        (Product(ADDED, 896, 4864, 64, 2), False),
        (Product(ADDED, 896, 4864, 64, 2, can_split=True), True),
    ],
)
def test_kernels_run_where_reading_the_matrix_takes_about_as_long_as_a_launch(product, runs):
    assert (projections.rule(product) is not None) == runs


# Compiled for an H200, and run on the GPU of a machine that has one

# (D, F, K, G, E) of Qwen2.5-0.5B, SmolLM2-135M and Qwen3-0.6B; the last norms heads.
POLICIES = {
    "0.5b": (896, 4864, 2, 7, 64),
    "smollm2": (576, 1536, 3, 3, 64),
    "qwen3": (1024, 3072, 8, 2, 128),
}
# Of a level's layer: embedding, rotary angles, heads, their write to the scratch, attention, its mask and the merge of its
# splits, three products, norm; and of the loop: its condition and counter. Only ever lower it.
MOST_OF_A_LEVEL = 11
STATIC = [
    ("0.5b", 1, "bfloat16"), ("0.5b", 33, "bfloat16"), ("smollm2", 8, "bfloat16"), ("smollm2", 64, "bfloat16"),
    ("qwen3", 16, "bfloat16"), ("0.5b", 1, "float32"), ("smollm2", 16, "float32"),
]  # fmt: skip
MOST_SHARED = 113 << 10  # bytes of shared memory, so that two programs fit a multiprocessor


def calls(policy: str, tokens: int, dtype: str):
    """(function, arrays) of the kernels of one layer, and of a drafter's queries, keys, values."""
    (D, F, K, G, E), T = POLICIES[policy], tokens

    def array(*shape: int, kind: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind)

    x, norm, angle, of_head = array(D, T), array(D), array(E // 2, T), array(E)
    turned = (of_head, of_head) if policy == "qwen3" else (None, None), (angle, angle)

    def heads(*given):
        return projections.heads(*given, (K, G, E), T, 1e-6, FUSED)

    parts = [array(K * G * E, 2 * D), array(K * E, 2 * D), array(K * E, 2 * D)]
    yield heads, ([x], [norm], [array(K, G + 2, E, D)], [array(K, G + 2, E)], *turned)
    yield heads, ([x] * 2, [norm] * 2, parts, [None] * 3, *turned)
    for width, counters in ((K * G * E, None), (F, array(1024, kind="int32"))):
        added = partial(projections.added, fused=FUSED)
        yield added, (x, array(width, T), array(D, width), norm, counters)
    gated = partial(projections.gated, eps=1e-6, fused=FUSED)
    yield gated, (x, norm, [array(2, F, D)], [array(2, F)])


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "tokens", "dtype"), STATIC)
def test_kernels_read_16_bytes_at_once_and_fit_a_multiprocessor_twice(
    policy, tokens, dtype, monkeypatch, tmp_path
):
    for function, arrays in calls(policy, tokens, dtype):
        for kernel in kernels(function, monkeypatch, *arrays):
            usage, code = resource_usage(kernel, tmp_path), compiled(kernel)
            # Registers on the stack are stored before the loop over tiles and read after it: at most 4.
            assert int(re.search(r" STACK:(\d+) ", usage)[1]) <= 16 and " LOCAL:0 " in usage, usage
            assert code.metadata.shared <= MOST_SHARED, kernel.name
            copied = re.findall(
                r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", code.asm["ptx"]
            )
            wide = copied.count("0x10")
            assert wide >= 0.8 * len(copied) > 0, (kernel.name, copied)


@pytest.mark.gpu
def test_a_level_of_a_draft_is_a_kernel_a_product():
    from tlt_jax.distributed import topology
    from tlt_jax.plan import launches

    pytest.importorskip("jax_triton", reason=REASON)
    mesh = make_mesh(1, 1, topology.describe("h200:1").devices)
    place = NamedSharding(mesh, PartitionSpec())
    policy = hf_config.new_config(
        {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "intermediate_size": 4864, "max_position_embeddings": 4096},
        2048, (),
    )  # fmt: skip
    config = drafters.for_policy(policy, "eagle3")
    B, k, levels = 8, 4, 3

    def placed(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)

    def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def loop(params, embed, cache, tokens, hidden, starts, seen):
        shared = drafters.Shared(embed, embed)
        scratch = eagle.scratch(config, B, k * levels, "bfloat16")

        def body(carry):
            level, scratch, hidden = carry
            positions = jnp.broadcast_to(starts[:, None], (B, k))
            step = tokens, hidden, positions, starts, seen, 1, Fused.of(mesh)
            return level + 1, *eagle.draft_level(params, config, shared, cache, scratch, *step)

        return jax.lax.while_loop(lambda carry: carry[0] < levels, body, (0, scratch, hidden))

    given = (
        placed(drafters.abstract(config, mesh, "rollout", "bfloat16")), array(2048, 896, dtype="bfloat16"),
        placed(kv_cache.abstract(config.layers, B, 1152, 0, "bfloat16", mesh)), array(B, k),
        array(B, k, 896, dtype="bfloat16"), array(B), array(B, k, k * levels, dtype="bool"),
    )  # fmt: skip
    compiled, found = launches.compile_and_read(jax.jit(loop).lower(*given))
    assert found.kernels <= MOST_OF_A_LEVEL, found
    assert launches.largest_copy(compiled.as_text()) < 1 << 20


@pytest.mark.device
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-3), ("bfloat16", 3e-2)])
def test_on_a_gpu_layers_by_kernels_equal_those_of_xla(dtype, tolerance):
    """XLA may round float32 to TF32 in products, which our kernels do not."""
    policies = ("biases", "head norms", "split")
    trees = [(1, 1), (5, 3)] if dtype == "float32" else [(1, 1), (5, 1), (11, 3), (8, 8)]
    cases = [(policy, dtype, *tree) for policy in policies for tree in trees]
    for case, (ours, xla) in zip(cases, on_device("layers", cases), strict=True):
        for one, other in zip(ours, xla, strict=True):
            one, other = one.astype(float), other.astype(float)
            assert np.abs(one - other).max() < tolerance * np.abs(other).max(), case


@pytest.mark.device
def test_on_a_gpu_a_layer_by_kernels_repeats_bit_for_bit():
    """Whichever program of a product with splits comes last."""
    first, *others = on_device("layers", [("split", "bfloat16", 8, 8)] * 5)
    for again in others:
        assert all(
            one.tobytes() == two.tobytes() for one, two in zip(first[0], again[0], strict=True)
        )
