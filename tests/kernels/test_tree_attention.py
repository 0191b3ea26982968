"""Tree attention against NumPy: XLA's implementation, and the GPU's in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import triton_runs
from kernels.tree_cases import Arguments, Case, arguments, attend

from tlt_jax.kernels import tree_attention

CASES = [
    Case(2, 7, 1, 128, 1, 512, "float32", (0, 1, 511)),  # plain decoding
    Case(2, 7, 3, 64, 5, 1024, "float32", (1024, 515)),  # a tile that is not full, several splits
    Case(1, 1, 1, 128, 9, 512, "float32", (300, 3)),  # a drafter's extension
    Case(1, 3, 6, 32, 37, 256, "float32", (255,)),  # a drafter's level, more nodes than a tile
    Case(1, 7, 1, 128, 1, 1024, "bfloat16", (0, 700, 1024)),
    Case(1, 7, 10, 64, 10, 512, "bfloat16", (512, 130)),  # several tiles of queries
    Case(1, 2, 3, 40, 4, 128, "bfloat16", (100,)),  # heads of no power of two
]
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
UNSEEN = Case(1, 2, 3, 64, 4, 512, "float32", (0, 3))


def xla(case: Arguments) -> np.ndarray:
    """`case` without a mesh."""
    compiled = jax.jit(partial(tree_attention.attend, slots_last=False))
    return np.asarray(compiled(*map(jnp.asarray, case)))


def interpreted(cases: list[Arguments]) -> list[np.ndarray]:
    """The cases by the kernels in Triton's interpreter, in a separate process."""
    calls = [(tuple(case), {"capability": 90}) for case in cases]
    return triton_runs.interpreted("tlt_jax.kernels.tree_attention_triton:attend", calls)


def check(result: np.ndarray, case: Case, given: Arguments) -> None:
    """The result is NumPy's, and of the dtype of the queries."""
    assert result.dtype == given.q.dtype
    np.testing.assert_allclose(
        result.astype(np.float64), attend(given), rtol=0, atol=TOLERANCE[case.dtype]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_xla_compiles_is_attention_to_the_committed_slots_and_the_ancestors(case):
    check(xla(arguments(case)), case, arguments(case))


def test_the_kernels_are_attention_to_the_committed_slots_and_the_ancestors():
    given = [arguments(case) for case in CASES]
    for case, one, result in zip(CASES, given, interpreted(given), strict=True):
        check(result, case, one)


def test_a_row_of_the_kernels_does_not_depend_on_its_neighbours():
    case = Case(1, 7, 2, 64, 2, 1024, "bfloat16", (600, 0, 1024))
    given = arguments(case)
    alone = [Arguments(*(array[b : b + 1] for array in given)) for b in range(3)]
    together, *rows = interpreted([given, *alone])
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(together[b].view(np.uint16), row[0].view(np.uint16))


def test_a_node_that_sees_nothing_is_finite():
    given = arguments(UNSEEN)
    given.ancestors[:] = False
    results = [xla(given), *interpreted([given])]
    assert all(np.isfinite(result).all() for result in results)


def test_slots_that_do_not_divide_into_tiles_are_refused():
    pytest.importorskip("jax_triton", reason=triton_runs.REASON)
    from tlt_jax.kernels import tree_attention_triton

    with pytest.raises(ValueError, match="200 cache slots do not divide into tiles of 64"):
        tree_attention_triton.blocks(rows=7, width=128, slots=200, dtype=jnp.bfloat16)
