"""What a draft of a 7B policy costs on devices that are absent, as compiled for them: kernels and bytes by kind of drafter."""

from __future__ import annotations

import re

import pytest
import rounds

from tlt_jax.distributed import topology
from tlt_jax.distributed.mesh import data_group, make_mesh
from tlt_jax.kernels import cache_rows
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import drafter as drafters
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.plan import launches
from tlt_jax.plan.launches import collectives
from tlt_jax.rollout import bindings
from tlt_jax.rollout.executables.programs import GroupShapes, StateShape
from tlt_jax.spec_decode.strategy import parse
from tlt_jax.spec_decode.tree_drafter import learned_drafter

# Qwen2.5-7B; the weights of its layers are no part of a draft.
POLICY = ModelConfig("qwen2", 152_064, 3584, 28, 28, 4, 128, 18_944, 32_768, qkv_bias=True)
DRAFT_VOCAB = 32_000
# Bytes of a layer's keys in a cache of 4096 slots, padded, of one row.
KEYS = (4096 + 128) * 4 * 128 * 2
SLICES = "gather", "dynamic-slice", "slice"
FREE = "parameter", "constant", "tuple", "get-tuple-element", "bitcast"


def lowered(kind: str, chip: str, strategy: str, batch: int, model: int, temperature: float):
    """The program that drafts alone, of a new drafter of this kind; `chip` "cpu": on the devices that are here."""
    mesh = make_mesh(1, model, None if chip == "cpu" else topology.describe(chip).devices)
    group, shape = data_group(mesh, 0), parse(strategy)
    own = drafters.for_policy(POLICY, kind, draft_vocab_size=DRAFT_VOCAB)
    target = bindings.bind_target(POLICY, Fused.of(group), "bfloat16", own.captures, shape.path)
    drafter = learned_drafter(own, target, Fused.of(group), "bfloat16")
    shapes = GroupShapes(target, drafter, group, {})
    return rounds.drafting(shapes, StateShape(0, batch, 4096), 4, shape, temperature)


def weight_bytes(kind: str) -> int:
    """Bytes of the matrices of a draft of 7 levels that have to be read, by hand, in bfloat16."""
    D, F, KV, U = 3584, 18_944, 2 * 4 * 128, DRAFT_VOCAB
    if kind == "eagle3":
        level = 2 * D * (D + KV) + D * D + 3 * D * F
        return 2 * (3 * D * D + 7 * U * D + 6 * level + level)
    layer = D * (D + 2 * KV) + D * D + 3 * D * F  # keys and values twice: also of new tokens
    return 2 * (5 * D * D + 2 * layer + U * D + 7 * U * 256)


def round_bytes(hlo: str) -> int:
    """Bytes that the instructions of the largest computation, a round, read and write.

    Of an array of which a fusion only gathers rows or takes a slice, those count; XLA's own count has the whole array.
    """
    computations, _ = launches.read_hlo(hlo)
    fused = {one.called for inner in computations.values() for one in inner.values() if one.called}
    body = max((one for name, one in computations.items() if name not in fused), key=len)
    numbers = dict(re.findall(r"%([\w.\-]+) = \S+ parameter\((\d+)\)", hlo))

    def read(one: launches.Instruction, place: int, whole: int) -> int:
        inner = computations.get(one.called, {})
        own = {name for name in inner if numbers.get(name) == str(place)}
        own |= {
            name for name, it in inner.items() if it.operation == "bitcast" and own & {*it.operands}
        }
        users = [
            user
            for user in inner.values()
            if own & {*user.operands} and user.operation != "bitcast"
        ]
        if users and all(user.operation in SLICES and user.operands[0] in own for user in users):
            return sum(launches.size(user.shape) for user in users)
        return whole

    total, sizes = 0, {name: arrays(one.shape) for name, one in body.items()}
    for name, one in body.items():
        if one.operation not in FREE:
            whole = (sizes.get(operand, 0) for operand in one.operands)
            total += sizes[name] + sum(read(one, place, size) for place, size in enumerate(whole))
    return total


def arrays(shape: str) -> int:
    """Bytes of all arrays in the text of a type."""
    return sum(launches.size(f"{kind}[{axes}]") for kind, axes in launches.ARRAY.findall(shape))


@pytest.mark.parametrize(("kind", "batch"), [("dflash", 1), ("dflash", 4), ("dflash2", 4)])
def test_on_a_cpu_no_product_with_the_head_reads_its_tokens_along_columns(kind, batch):
    """Such a product took three times as long."""
    hlo = lowered(kind, "cpu", "7_1_8", batch, 1, 1.0).compile().as_text()
    heads = [line for line in hlo.splitlines() if f",{DRAFT_VOCAB}]" in line and " dot(" in line]
    assert heads and not any("lhs_contracting_dims={0}" in line for line in heads), heads


@pytest.mark.gpu
def test_on_a_gpu_a_block_of_seven_levels_moves_half_the_bytes_of_seven_passes_at_most():
    """And runs half the kernels. Each draft reads its weights once a pass, and little else.

    Without Triton some versions of XLA copy one array of the cache to write rows into it, and move a tenth more of DSpark's
    bytes.
    """
    found, mesh = {}, make_mesh(1, 1, topology.describe("h200:1").devices)
    most, more = (1 << 20, 1.1) if cache_rows.runs(Fused.of(mesh), False) else (KEYS, 1.2)
    for kind in ("eagle3", "dspark"):
        compiled, one_round = launches.compile_and_read(lowered(kind, "h200:1", "7_1_8", 1, 1, 1.0))
        hlo = compiled.as_text()
        found[kind] = round_bytes(hlo), one_round.kernels
        assert weight_bytes(kind) < found[kind][0] < more * weight_bytes(kind), found
        assert launches.largest_copy(hlo) <= most and one_round.host_loops == 0
    pairs = zip(found["dspark"], found["eagle3"], strict=True)
    assert all(2 * one <= other for one, other in pairs), found


@pytest.mark.tpu
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_on_four_tpus_a_block_draft_compiles_and_copies_no_cache(kind):
    """Its collectives stay within the data group, and its temporaries are a part of the drafter's cache."""
    batch, slots, model = 32, 4096, 4
    compiled = lowered(kind, "v5p:2x2x1", "6_4_16", batch, model, 0.0).compile()
    cache = batch * slots * 2 * 2 * (4 // model) * 128 * 2  # two layers, keys and values, bfloat16
    assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * cache
    group = make_mesh(1, model, topology.describe("v5p:2x2x1").devices)
    crossed = {name.split(" over ")[1] for name in collectives(compiled.as_text(), group)}
    assert crossed == {"model"}
