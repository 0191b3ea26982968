"""The tree attention kernels compiled for an H200 without one, and run on the GPU of a machine that has one."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels.devices import on_device
from kernels.tree_cases import Arguments, Case, arguments, attend
from kernels.triton_runs import FUSED, REASON, Kernel, compiled, kernels, resource_usage
from pairwise import matrix

from benchmarks.device import tune
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.tree_attention import Sizes

# Rows of a key/value head: plain decoding, trees of 4, 8, 12, 24 and 48 nodes, a drafter's extension.
ROWS = [(7, 1, 1), (7, 4, 4), (7, 8, 8), (7, 12, 12), (7, 24, 24), (7, 48, 48), (1, 1, 9)]
DTYPES = ["bfloat16", "float32"]
REGISTERS, SHARED = 65536, 227 << 10  # of a multiprocessor of an H200; bytes


def kernel(case: Case, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The one kernel that attention of this case calls."""
    pytest.importorskip("jax_triton", reason=REASON)
    given, queries = arguments(case), case.G * case.N
    arrivals = np.zeros((len(case.lengths), case.K, sizes.tiles(queries)), np.int32)
    attend = partial(tree_attention.attend_in_kernel, fused=FUSED, sizes=sizes)
    (found,) = kernels(attend, monkeypatch, *given, arrivals)
    return found


def check_what_is_compiled(case: Case, sizes: Sizes, monkeypatch, folder: Path) -> None:
    """No register is spilled, a multiprocessor holds 4 warps or more, and the cache is read 16 bytes at a time."""
    one = kernel(case, sizes, monkeypatch)
    usage, code = resource_usage(one, folder), compiled(one)
    assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    held = min(REGISTERS // (32 * sizes.warps * registers), SHARED // code.metadata.shared)
    assert held * sizes.warps >= 4, (registers, code.metadata.shared)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], .*?\], 0x10\b", code.asm["ptx"])
    tile = sizes.slots * case.E * np.dtype(case.dtype).itemsize
    assert 16 * 32 * sizes.warps * len(copies) >= sizes.stages * 2 * tile


@pytest.mark.gpu
@matrix(rows=ROWS, width=[64, 128], dtype=DTYPES)
def test_the_rule_gives_one_kernel_without_spills_that_reads_wide(
    rows, width, dtype, monkeypatch, tmp_path
):
    G, N, M = rows
    sizes = tree_attention.rule(G * N, width, np.dtype(dtype).itemsize)
    case = Case(4, G, N, width, M, 4224, dtype, (0, 0))
    check_what_is_compiled(case, sizes, monkeypatch, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("width", tune.WIDTHS)
@pytest.mark.parametrize("nodes", tune.NODES)
def test_so_does_every_candidate_that_is_tuned(nodes, width, monkeypatch, tmp_path):
    case = Case(4, 7, nodes, width, nodes, 4096, "bfloat16", (0, 0))
    for sizes in tune.candidates(7 * nodes, width, 4096):
        check_what_is_compiled(case, sizes, monkeypatch, tmp_path)


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
    for one, result in zip(given, on_device("tree_attention_on_device.py", given), strict=True):
        np.testing.assert_allclose(result.astype(float), attend(one), rtol=0, atol=tolerance)


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_a_row_does_not_depend_on_its_neighbours(dtype):
    given = arguments(Case(4, 7, 8, 128, 8, 4224, dtype, (0, 1, 63, 64, 65, 2000, 4096, 4224)))
    alone = [Arguments(*(array[b : b + 1] for array in given)) for b in range(8)]
    together, *rows = on_device("tree_attention_on_device.py", [given, *alone])
    for b, row in enumerate(rows):
        assert together[b].tobytes() == row[0].tobytes()
