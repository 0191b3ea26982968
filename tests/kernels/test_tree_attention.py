"""Tree attention against NumPy: XLA's implementation, and the GPU's in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import triton_runs
from kernels.tree_cases import Arguments, Case, arguments, attend

from benchmarks.device import tune
from tlt_jax.kernels import tree_attention
from tlt_jax.kernels.tree_attention import Sizes

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
    Sizes(tile, slots, 1, warps, 3)
    for each in tune.TILES.values()
    for tile, slots, warps, _ in each
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
UNSEEN = Case(1, 2, 3, 64, 4, 512, "float32", (0, 3))


def xla(case: Arguments) -> np.ndarray:
    """`case` without a mesh."""
    compiled = jax.jit(partial(tree_attention.attend, slots_last=False))
    return np.asarray(compiled(*map(jnp.asarray, case))[0])


def rule(case: Case) -> Sizes:
    return tree_attention.rule(case.G * case.N, case.E, np.dtype(case.dtype).itemsize)


def interpreted(
    cases: list[tuple[Arguments, Sizes]], is_reversed: bool = False
) -> list[np.ndarray]:
    """The cases by the kernel in Triton's interpreter, in a separate process; its counters are zero again."""
    calls = []
    for given, sizes in cases:
        B, K, G, N, _ = given.q.shape
        arrivals = np.zeros((B, K, sizes.tiles(G * N)), np.int32)
        calls.append(((*given, arrivals), {"sizes": sizes}))
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
            *given, np.zeros((1, 1, 1), np.int32), triton_runs.FUSED, Sizes(16, 64, 128, 4, 3)
        )


# Sizes


def splits(sizes: Sizes, length: int, slots: int) -> int:
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
