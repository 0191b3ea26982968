"""Tree attention against NumPy: XLA's form, and the kernel, interpreted and compiled for a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels import triton_runs
from kernels.on_device import on_device
from kernels.triton_runs import FUSED, REASON, Kernel, compiled, kernels, resource_usage
from pairwise import matrix

from benchmarks.device import tune
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.tree_attention import TreeTiles


class Case(NamedTuple):
    """Sizes of a call, dtype and committed slots; by the letters of tlt_jax/kernels/tree_attention."""

    K: int
    G: int
    N: int
    E: int
    M: int
    S: int
    dtype: str
    lengths: tuple[int, ...]


class Arguments(NamedTuple):
    """The arrays that `attend` takes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    ancestors: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray


def arguments(case: Case, seed: int = 0) -> Arguments:
    """Random arrays; slots past a row's length are large, and a node sees itself or node 0, and others by chance."""
    random, B = np.random.default_rng(seed), len(case.lengths)
    K, G, N, E, M, S, dtype, lengths = case

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(ml_dtypes.bfloat16 if dtype != "float32" else dtype)

    ancestors = random.random((B, N, M)) < 0.4
    ancestors[:, np.arange(N), np.arange(N) % M] = True
    keys, values = normal(B, K, E, S), normal(B, K, S, E)
    for row, length in enumerate(lengths):
        keys[row, :, :, length:] = 99
        values[row, :, length:] = 99
    return Arguments(
        normal(B, K, G, N, E), normal(B, K, E, M), normal(B, K, M, E), ancestors, keys, values,
        np.asarray(lengths, np.int32),
    )  # fmt: skip


def attend(case: Arguments) -> np.ndarray:
    """Attention in float64, a row at a time."""
    q, k, v, ancestors, keys, values, lengths = case
    result = np.empty(q.shape)
    for b, length in enumerate(lengths):
        slots = np.concatenate([keys[b, :, :, :length], k[b]], axis=-1).astype(np.float64)
        mixed = np.concatenate([values[b, :, :length], v[b]], axis=1).astype(np.float64)
        scores = np.einsum("kgne,kes->kgns", q[b].astype(np.float64), slots) / np.sqrt(q.shape[-1])
        seen = np.concatenate([np.ones((q.shape[3], length), bool), ancestors[b]], axis=-1)
        weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        result[b] = np.einsum("kgns,kse->kgne", weights, mixed) / weights.sum(-1)[..., None]
    return result


CASES = [
    Case(2, 7, 1, 128, 1, 512, "float32", (0, 1, 511)),  # plain decoding
    Case(2, 7, 3, 64, 5, 1024, "float32", (1024, 515)),  # a tile that is not full, several splits
    Case(1, 1, 1, 128, 9, 512, "float32", (300, 3)),  # a drafter's extension
    Case(1, 3, 6, 32, 37, 256, "float32", (255,)),  # a drafter's level, more nodes than a tile
    Case(1, 7, 1, 128, 1, 1024, "bfloat16", (0, 700, 1024)),
    Case(1, 7, 10, 64, 10, 512, "bfloat16", (512, 130)),  # several tiles of queries
    Case(1, 2, 3, 40, 4, 128, "bfloat16", (100,)),  # heads of no power of two
]
# All tiles that are tried on a device, once each.
CANDIDATES = {
    TreeTiles(tile, slots, 1, warps, 3)
    for each in tune.TILES.values()
    for tile, slots, warps, _ in each
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
UNSEEN = Case(1, 2, 3, 64, 4, 512, "float32", (0, 3))


def xla(case: Arguments) -> np.ndarray:
    """`case` without a mesh."""
    compiled = jax.jit(partial(tree_attention.attend, slots_last=False))
    return np.asarray(compiled(*map(jnp.asarray, case))[0])


def rule(case: Case) -> TreeTiles:
    return tree_attention.rule(case.G * case.N, case.E, np.dtype(case.dtype).itemsize)


def interpreted(
    cases: list[tuple[Arguments, TreeTiles]],
    is_reversed: bool = False,
    firsts: tuple[np.ndarray, ...] = (),
) -> list[np.ndarray]:
    """The cases by the kernel in Triton's interpreter, in a separate process; its counters are zero again.

    `firsts`: of cases whose slots are rings.
    """
    calls = []
    for index, (given, sizes) in enumerate(cases):
        B, K, G, N, _ = given.q.shape
        arrivals = np.zeros((B, K, sizes.tiles(G * N)), np.int32)
        known = {"sizes": sizes, "wraps": bool(firsts)}
        calls.append(((*given, arrivals, *firsts[index : index + 1]), known))
    name = "tlt_jax.kernels.tree_attention:attend_in_kernel"
    found = triton_runs.interpreted(name, calls, is_reversed)
    assert not any(arrivals.any() for _, arrivals in found)
    return [mixed for mixed, _ in found]


def check(result: np.ndarray, case: Case, given: Arguments) -> None:
    """The result is NumPy's, and of the dtype of the queries."""
    assert result.dtype == given.q.dtype
    np.testing.assert_allclose(
        result.astype(np.float64), attend(given), rtol=0, atol=TOLERANCE[case.dtype]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_xla_compiles_is_attention_to_the_committed_slots_and_the_ancestors(case):
    check(xla(arguments(case)), case, arguments(case))


def test_the_kernel_is_attention_to_the_committed_slots_and_the_ancestors():
    given = [(arguments(case), rule(case)) for case in CASES]
    for case, (one, _), result in zip(CASES, given, interpreted(given), strict=True):
        check(result, case, one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_attention_with_all_sizes_that_are_tried(dtype):
    """Tiles of the queries, splits and numbers of a chunk of the merge that fit and that do not."""
    case = Case(1, 3, 7, 64, 7, 768, dtype, (768, 0, 333))
    given = arguments(case)
    tried = {replace(one, split=split) for one in CANDIDATES for split in (64, 300)}
    for result in interpreted([(given, sizes) for sizes in tried]):
        check(result, case, given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_which_program_is_last(dtype):
    """In the interpreter a program runs after the other, so the last split merges, or the first."""
    case = Case(1, 7, 2, 64, 2, 1024, dtype, (1000,))
    cases = [(arguments(case), replace(rule(case), split=split)) for split in (128, 300)]
    for one, other in zip(interpreted(cases), interpreted(cases, is_reversed=True), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_row_of_the_kernel_does_not_depend_on_its_neighbours():
    case = Case(1, 7, 2, 64, 2, 1024, "bfloat16", (600, 0, 1024))
    given, sizes = arguments(case), replace(rule(case), split=200)
    alone = [Arguments(*(array[b : b + 1] for array in given)) for b in range(3)]
    together, *rows = interpreted([(one, sizes) for one in (given, *alone)])
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(together[b].view(np.uint16), row[0].view(np.uint16))


def test_a_node_that_sees_nothing_is_finite():
    given = arguments(UNSEEN)
    given.ancestors[:] = False
    results = [xla(given), *interpreted([(given, rule(UNSEEN))])]
    assert all(np.isfinite(result).all() for result in results)


# Cases with a window; the lengths are of positions, the slots those of rings.
WINDOWS = [
    (Case(2, 7, 3, 64, 5, 512, "float32", (700, 5, 512, 1300)), 480),
    (Case(1, 7, 1, 128, 1, 256, "bfloat16", (255, 256, 257, 2000)), 250),
    (Case(1, 2, 6, 40, 6, 128, "bfloat16", (1000, 0)), 3),  # most splits of a row see nothing
]


def windowed(case: Case, window: int) -> tuple[Arguments, np.ndarray, np.ndarray]:
    """Arguments with rings, the first position that each node sees, and attention to these positions in float64."""
    random, most = np.random.default_rng(1), max(*case.lengths, case.S)
    whole = arguments(case._replace(S=most))
    depths = random.integers(0, 3, (len(case.lengths), case.N))
    first = (whole.lengths[:, None] + depths - (window - 1)).astype(np.int32)
    expected = np.empty(whole.q.shape)
    keys = np.full((*whole.keys.shape[:3], case.S), 99, whole.keys.dtype)
    values = np.full((*whole.values.shape[:2], case.S, case.E), 99, whole.values.dtype)
    for b, length in enumerate(case.lengths):
        for place in range(max(length - case.S, 0), length):
            keys[b, :, :, place % case.S] = whole.keys[b, :, :, place]
            values[b, :, place % case.S] = whole.values[b, :, place]
        for n in range(case.N):
            begin = max(first[b, n], 0)
            one = Arguments(
                whole.q[b : b + 1, :, :, n : n + 1], whole.k[b : b + 1], whole.v[b : b + 1],
                whole.ancestors[b : b + 1, n : n + 1], whole.keys[b : b + 1, :, :, begin:],
                whole.values[b : b + 1, :, begin:], np.array([max(length - begin, 0)]),
            )  # fmt: skip
            expected[b : b + 1, :, :, n : n + 1] = attend(one)
    return whole._replace(keys=keys, values=values), first, expected


@pytest.mark.parametrize(("case", "window"), WINDOWS, ids=str)
def test_with_a_window_and_a_ring_of_slots_xla_attends_to_the_last_positions(case, window):
    given, first, expected = windowed(case, window)
    call = partial(tree_attention.attend, slots_last=False, wraps=True)
    found = jax.jit(call)(*map(jnp.asarray, given), first=jnp.asarray(first))[0]
    found = np.asarray(found).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[case.dtype])


def test_with_a_window_and_a_ring_of_slots_the_kernel_does():
    made = [windowed(*one) for one in WINDOWS]
    cases = [(given, rule(case)) for (given, *_), (case, _) in zip(made, WINDOWS, strict=True)]
    results = interpreted(cases, firsts=tuple(first for _, first, _ in made))
    for (case, _), (*_, expected), found in zip(WINDOWS, made, results, strict=True):
        found = found.astype(np.float64)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[case.dtype])


# Case, what of node 1 is not finite, and the number there and in all keys past a row's length.
SPOILED = [
    (CASES[1], "k", np.nan), (CASES[1], "v", np.inf), (CASES[5], "k", np.nan), (CASES[5], "v", np.nan),
    (CASES[5], "v", -np.inf),
]  # fmt: skip


def spoil(case: Case, name: str, number: float) -> tuple[Arguments, Arguments]:
    """The case, and that with these numbers."""
    given, bad = arguments(case), arguments(case)
    for row, length in enumerate(case.lengths):
        bad.keys[row, :, :, length:] = number
    node = bad.k[:, :, :, 1] if name == "k" else bad.v[:, :, 1]
    node[..., 3] = number
    return given, bad


def check_spoiled(given: Arguments, whole: np.ndarray, found: np.ndarray) -> None:
    """Nodes that see node 1 are NaN; the others have the bits that they have without."""
    sees = np.broadcast_to(given.ancestors[:, None, None, :, 1], whole.shape[:-1])
    assert 0 < sees.sum() < sees.size
    assert np.isnan(found[sees].astype(np.float32)).all()
    assert found[~sees].tobytes() == whole[~sees].tobytes()


@pytest.mark.parametrize(("case", "name", "number"), SPOILED, ids=str)
def test_a_node_that_is_not_finite_makes_those_that_see_it_nan_and_no_other(case, name, number):
    given, bad = spoil(case, name, number)
    check_spoiled(given, xla(given), xla(bad))


def test_so_it_does_in_the_kernel():
    pairs = [(spoil(*one), rule(one[0])) for one in SPOILED]
    results = interpreted([(given, sizes) for pair, sizes in pairs for given in pair])
    for (pair, _), whole, found in zip(pairs, results[::2], results[1::2], strict=True):
        check_spoiled(pair[0], whole, found)


def test_slots_that_do_not_divide_into_tiles_are_refused():
    pytest.importorskip("jax_triton", reason=triton_runs.REASON)
    given = arguments(Case(1, 7, 1, 128, 1, 200, "bfloat16", (5,)))
    with pytest.raises(ValueError, match="200 cache slots do not divide into tiles of 64"):
        tree_attention.attend_in_kernel(
            *given,
            np.zeros((1, 1, 1), np.int32),
            fused=triton_runs.FUSED,
            sizes=TreeTiles(16, 64, 128, 4, 3),
        )


# Sizes


def splits(sizes: TreeTiles, length: int, slots: int) -> int:
    """How many splits a row of this length has, as the kernel divides it."""
    most = min(sizes.splits(slots), 1 + length // sizes.split)
    return max(1, -(-length // (-(-length // most // sizes.slots) * sizes.slots))) if length else 1


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16, 48])
def test_partial_results_are_at_most_a_twentieth_of_the_cache_that_is_read(nodes, width, itemsize):
    """The last split of a row to finish stores nothing; each of the others stores a result and a level for every query."""
    queries = 7 * nodes
    sizes = tree_attention.rule(queries, width, itemsize)
    for slots in (1024, 4096, 32768):
        for length in range(1, slots + 1, 37):
            others = splits(sizes, length, slots) - 1
            stored = others * queries * (width * itemsize + 4)
            assert 2 * stored <= 0.05 * (2 * length * width * itemsize)


def test_a_row_half_of_4096_slots_has_as_many_splits_as_that_allows():
    found = [splits(tree_attention.rule(7 * nodes, 128, 2), 2048, 4096) for nodes in (1, 4, 8, 48)]
    assert found == [11, 4, 2, 1]


# Compiled for an H200, and run on the GPU of a machine that has one

# Rows of a key/value head: plain decoding, trees of 4, 8, 12, 24 and 48 nodes, a drafter's extension.
ROWS = [(7, 1, 1), (7, 4, 4), (7, 8, 8), (7, 12, 12), (7, 24, 24), (7, 48, 48), (1, 1, 9)]
DTYPES = ["bfloat16", "float32"]
REGISTERS, SHARED = 65536, 227 << 10  # of a multiprocessor of an H200; bytes


def kernel(case: Case, sizes: TreeTiles, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The one kernel that attention of this case calls."""
    given, queries = arguments(case), case.G * case.N
    arrivals = np.zeros((len(case.lengths), case.K, sizes.tiles(queries)), np.int32)
    attend = partial(tree_attention.attend_in_kernel, fused=FUSED, sizes=sizes)
    (found,) = kernels(attend, monkeypatch, *given, arrivals)
    return found


@pytest.mark.gpu
@matrix(rows=ROWS, width=[64, 128], dtype=DTYPES)
def test_the_rule_gives_one_kernel_without_spills_that_reads_wide(
    rows, width, dtype, monkeypatch, tmp_path
):
    """No register is spilled, a multiprocessor holds 4 warps or more, and the cache is read 16 bytes at a time."""
    G, N, M = rows
    sizes = tree_attention.rule(G * N, width, np.dtype(dtype).itemsize)
    one = kernel(Case(4, G, N, width, M, 4224, dtype, (0, 0)), sizes, monkeypatch)
    usage, code = resource_usage(one, tmp_path), compiled(one)
    assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    held = min(REGISTERS // (32 * sizes.warps * registers), SHARED // code.metadata.shared)
    assert held * sizes.warps >= 4, (registers, code.metadata.shared)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], .*?\], 0x10\b", code.asm["ptx"])
    tile = sizes.slots * width * np.dtype(dtype).itemsize
    assert 16 * 32 * sizes.warps * len(copies) >= sizes.stages * 2 * tile


@pytest.mark.gpu
def test_partial_results_are_stored_before_they_are_counted_and_counted_before_they_are_read(
    monkeypatch,
):
    """The order of memory: all threads store, a barrier, a release; an acquire, a barrier, loads that bypass the L1 cache."""
    case = Case(4, 7, 1, 128, 1, 4224, "bfloat16", (0, 0))
    one = kernel(case, tree_attention.rule(7, 128, 2), monkeypatch)
    found = re.findall(
        r"st\.global|ld\.global\.cg|bar\.sync|(?:atom|red|ld)\.global\.gpu\.(?:release|acquire)",
        compiled(one).asm["ptx"],
    )
    names = [name.split(".")[-1] for name in found]
    release, acquire = names.index("release"), names.index("acquire")
    assert names[:release].count("global") >= 2 and "sync" in names[release - 2 : release]
    assert "cg" not in names[:acquire] and names[acquire + 1] == "sync"
    assert "cg" in names[acquire:]


def lowered(model: int, rounds: int) -> jax.stages.Lowered:
    """A loop of two layers of attention that writes the cache it reads, on `model` GPUs of one host."""
    from tlt_jax.distributed import topology

    pytest.importorskip("jax_triton", reason=REASON)
    mesh = make_mesh(1, model, topology.describe("h200:8" if model > 1 else "h200:1").devices)
    case = arguments(Case(4, 7, 8, 128, 8, 1152, "bfloat16", (5, 900)))

    def loop(q, k, v, ancestors, keys, values, lengths):
        def body(state):
            (i, q, values), arrivals = state, None
            for _ in range(2):
                q, arrivals = tree_attention.attend(
                    q, k, v, ancestors, keys, values, lengths, False, Fused.of(mesh), arrivals
                )
            return i + 1, q, values.at[:, :, i, :].set(q[:, :, 0, 0])

        return jax.lax.while_loop(lambda state: state[0] < rounds, body, (0, q, values))[1:]

    def described(name: str, array: np.ndarray) -> jax.ShapeDtypeStruct:
        whole = name in ("ancestors", "lengths")
        place = NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec(None, "model"))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    shapes = map(described, Arguments._fields, case)
    return jax.jit(loop, donate_argnums=5).lower(*shapes)


@pytest.mark.gpu
def test_a_round_with_the_kernels_is_one_cuda_graph_and_copies_no_cache():
    from tlt_jax.plan import launches

    compiled, found = launches.compile_and_read(lowered(model=1, rounds=3))
    hlo = compiled.as_text()
    assert hlo.count('custom_call_target="triton_kernel_call') == 2
    assert (found.outside, found.host_loops) == (0, 0) and found.graphs <= 1
    assert launches.largest_copy(hlo) < 2 * 4 * 1152 * 128 * 2


@pytest.mark.gpu
def test_counters_are_filled_once_a_round_and_no_mask_is_converted():
    hlo = lowered(model=1, rounds=3).compile().as_text()
    made = re.findall(r"= s32\[2,4,1\]\S* (fusion|copy)\(", hlo)
    assert made == ["fusion"]
    assert "s8[" not in hlo


@pytest.mark.gpu
def test_no_device_gathers_the_heads_of_others():
    hlo = lowered(model=4, rounds=3).compile().as_text()
    assert hlo.count('custom_call_target="triton_kernel_call') == 2
    assert "all-gather" not in hlo and "all-to-all" not in hlo


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_on_a_gpu_are_attention(dtype):
    cases = [
        Case(4, G, N, 128, M, 4224, dtype, (0, 1, 63, 64, 65, 2000, 4096, 4224)) for G, N, M in ROWS
    ]
    given = [arguments(case) for case in cases]
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for one, result in zip(given, on_device("attended", given), strict=True):
        np.testing.assert_allclose(result.astype(float), attend(one), rtol=0, atol=tolerance)


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_a_row_does_not_depend_on_its_neighbours(dtype):
    given = arguments(Case(4, 7, 8, 128, 8, 4224, dtype, (0, 1, 63, 64, 65, 2000, 4096, 4224)))
    alone = [Arguments(*(array[b : b + 1] for array in given)) for b in range(8)]
    together, *rows = on_device("attended", [given, *alone])
    for b, row in enumerate(rows):
        assert together[b].tobytes() == row[0].tobytes()
