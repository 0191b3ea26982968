"""Collectives of compiled programs, and a GPU program's launches from texts of XLA, shortened by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tlt_jax.distributed import topology
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.plan import launches

ONE_GRAPH = """\
000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kWhile        [prev=001 (1) | next=008 (2)]
condition:
        003: kCustomKernel [source       | sink] compare grid: [1, 1, 1]
      body:
        004: kCustomKernel [source       | next=005 (1)] gemm_fusion_dot_1 grid: [1, 1, 1]
        005: kWhile        [prev=004 (1) | sink]
condition:
            006: kCustomKernel [source       | sink] compare grid: [1, 1, 1]
          body:
            007: kCustomKernel [source       | sink] search grid: [1, 1, 1]
        008: kGemm         [prev=005 (1) | sink] gemm
    009: kCopy         [prev=002 (2) | sink        ] kCopy
"""
FROM_THE_HOST = """\
000: kCommandBuffer [source       | next=006 (1)]
    001: kCopy         [source | sink] kCopy
006: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    007: kCustomKernel [source       | sink] compare grid: [1, 1, 1]
  body:
    011: kAsyncStart    [source       | next=000 (3)] stream=communication_stream[0], async_id=11
        012: kAllReduce [source | sink] kAllReduce
    014: kAsyncDone     [source        | sink        ] async_id=11
    000: kCommandBuffer [prev=013 (2)  | next=028 (1)]
        015: kCustomKernel [source       | next=016 (2)] fusion_1 grid: [1, 1, 1]
        016: kCustomKernel [prev=015 (1) | sink] fusion_2 grid: [1, 1, 1]
    020: kConditional   [prev=000 (1) | next=000 (1)]
    021: kWhile         [prev=000 (1) | next=000 (1)]
condition:
        022: kCopy [source | sink] kCopy
      body:
        023: kCustomKernel [source | sink] search grid: [1, 1, 1]
    000: kCommandBuffer [prev=023 (1)  | sink]
        024: kCustomKernel [source       | sink] fusion_3 grid: [1, 1, 1]
030: kCopy [prev=006 (1) | sink] kCopy
"""
METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer"
  }
  thunk_kind: "kCommandBuffer"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "gemm_fusion_dot.1"
    thunk_id: 4
  }
}
thunk_metadata {
  thunk_info {
    profile_annotation: "search"
    thunk_id: 7
  }
}
thunk_metadata {
  thunk_info {
    profile_annotation: "gemm"
    thunk_id: 8
  }
}
"""
NAMES = """
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %gemm_fusion_dot.1 = f32[4]{0} fusion(%p), calls=%dot, metadata={op_name="jit(f)/while/body/layer/mlp/dot"}
  %search = f32[4]{0} negate(%p), metadata={op_name="jit(f)/while/body/player/search"}
  %drawn = f32[4]{0} negate(%p), metadata={op_name="jit(f)/while/body/verify/sample/max"}
  %grown = f32[4]{0} negate(%p), metadata={op_name="jit(f)/while/body/draft/noise/max"}
  %once = f32[4]{0} negate(%p), metadata={op_name="jit(f)/while/body/draft/drafter/extend/dot"}
  %block = f32[4]{0} negate(%p), metadata={op_name="jit(f)/while/body/draft/drafter/block/layer/mlp/dot"}
  ROOT %gemm = f32[4]{0} negate(%p), metadata={op_name="jit(f)/while/body/commit/scatter"}
}
"""


def test_a_chunk_that_is_one_graph_has_its_loop_in_it():
    found = launches.read_round(ONE_GRAPH, METADATA, NAMES)
    # A round runs 4, the condition and the body of the inner loop, and 8, without the condition of the chunk's own loop.
    assert found == launches.Round(4, 2, outside=0, graphs=0, host_loops=0, is_one_graph=True)


@pytest.mark.parametrize(
    ("name", "levels", "end"),
    [("drawn", 0, 1), ("grown", 1, 0), ("once", 0, 0), ("block", 1, 0), ("search", 0, 0)],
)
def test_kernels_of_draft_levels_and_of_the_end_are_told_by_their_scopes(name, levels, end):
    found = launches.read_round(ONE_GRAPH, METADATA.replace('"search"', f'"{name}"'), NAMES)
    assert (found.in_levels, found.in_end, found.in_layers) == (levels, end, 2)


def test_steps_outside_the_graph_are_launched_by_the_host():
    beside = ONE_GRAPH + "010: kCopy [prev=000 (1) | sink] kCopy\n"
    assert not launches.read_round(beside, METADATA, NAMES).is_one_graph


def test_a_loop_that_the_host_drives_launches_graphs_kernels_and_loops_in_every_round():
    found = launches.read_round(FROM_THE_HOST, METADATA, NAMES)
    kernels = {12, 15, 16, 22, 23, 24}
    assert found.kernels == len(kernels) and found.in_layers == 0
    assert (found.outside, found.graphs, found.host_loops) == (len({12, 22, 23}), 2, 2)
    assert not found.is_one_graph


@pytest.mark.parametrize("text", ["", "000: kCopy [source | sink] kCopy", ONE_GRAPH + ONE_GRAPH])
def test_a_program_that_is_no_chunk_is_rejected(text):
    with pytest.raises(ValueError, match="have [02] loops, not one"):
        launches.read_round(text, METADATA, NAMES)


FUSED = {
    "turned": """
%turned (t: bf16[8,4]) -> bf16[4,8] {
  %t = bf16[8,4]{1,0} parameter(0)
  %turn = bf16[4,8]{1,0} transpose(%t), dimensions={1,0}
  ROOT %cast = bf16[4,8]{0,1} bitcast(%turn)
}
""",
    "joined": """
%joined (j: bf16[4,8]) -> (f32[2], bf16[4,16]) {
  %j = bf16[4,8]{1,0} parameter(0)
  %both = bf16[4,16]{1,0} concatenate(%j, %j), dimensions={1}
  %few = f32[2]{0} constant({1, 2})
  ROOT %all = (f32[2]{0}, bf16[4,16]{1,0}) tuple(%few, %both)
}
""",
    "kept": """
%kept (k: bf16[4,8]) -> bf16[4,8] {
  %k = bf16[4,8]{1,0} parameter(0)
  %wide = bf16[4,800]{1,0} concatenate(%k, %k), dimensions={1}
  ROOT %put = bf16[4,8]{1,0} scatter(%k, %wide, %k), to_apply=%later
}
""",
}


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("bf16[4,8]{1,0} copy(%p)", 4 * 8 * 2),
        ("(bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]) copy-start(%p)", 4 * 8 * 2),
        ("pred[16]{0} copy(%q)", 16),
        ("bf16[4,8]{1,0} negate(%p)", 0),
        ("bf16[4,8]{0,1} fusion(%p), kind=kLoop, calls=%turned", 4 * 8 * 2),
        ("(f32[2]{0}, bf16[4,16]{1,0}) fusion(%p), kind=kInput, calls=%joined", 4 * 16 * 2),
        ("bf16[4,8]{1,0} fusion(%p), kind=kInput, calls=%kept", 0),
    ],
)
def test_copies_are_written_arrays_and_not_inputs_that_a_kernel_reads(call, written):
    fused = FUSED.get(call.partition("calls=%")[2], "")
    main = f"""
ENTRY %main (p: bf16[4,8], q: pred[16]) -> bf16[4,8] {{
  %p = bf16[4,8]{{1,0}} parameter(0)
  %q = pred[16]{{0}} parameter(1)
  %c = {call}
  ROOT %end = bf16[4,8]{{1,0}} negate(%p)
}}
"""
    assert launches.largest_copy(fused + main) == written


@pytest.mark.gpu
def test_a_program_too_small_for_a_graph_is_read():
    """XLA writes its thunks only once, since no pass changes them."""
    mesh = make_mesh(1, 1, topology.describe("h200:1").devices)
    shape = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

    def halved(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x[0] > 1, lambda x: jnp.cumsum(x[::-1]) / 2, x)

    found = launches.compile_and_read(jax.jit(halved).lower(shape))[1]
    assert found.kernels > 0 and found.graphs == 0 and not found.is_one_graph


@pytest.mark.parametrize(
    ("named", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=add", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,2},{2,0}}", [[0, 2], [2, 0]]),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=2] {'c'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
    ],
)
def test_device_groups_in_every_notation(named, groups):
    assert launches.device_groups(f"x = all-reduce(y), {named}", 4) == groups


def test_axes_crossed_are_those_along_which_members_differ():
    mesh = make_mesh(2, 4)
    for groups, axes in (
        ([[0, 1, 2, 3], [4, 5, 6, 7]], ["model"]),
        ([[0, 4], [1, 5]], ["data"]),
        ([list(range(8))], ["data", "model"]),
        ([[0], [1]], []),
    ):
        assert launches.axes_crossed(groups, mesh) == axes


@pytest.mark.parametrize("axis", ["data", "model"])
def test_a_sharded_contraction_reduces_over_its_axis(axis):
    mesh = make_mesh(2, 4)
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, PartitionSpec(None, axis)))
    program = jax.jit(lambda x: x.sum(axis=1)).lower(x).compile()
    assert launches.collectives(program.as_text(), mesh) == {f"all-reduce over {axis}": 1}
