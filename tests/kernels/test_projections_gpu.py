"""The kernels of a layer with few tokens, compiled for an H200 without one, and run on the GPU of a machine that has one."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels.devices import on_device
from kernels.triton_runs import FUSED, REASON, compiled, kernels, resource_usage

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import projections
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import drafter as drafters, eagle, hf, kv_cache

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
    pytest.importorskip("jax_triton", reason=REASON)
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
    policy = hf.new_config(
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
    for case, (ours, xla) in zip(cases, on_device("node_layers.py", cases), strict=True):
        for one, other in zip(ours, xla, strict=True):
            one, other = one.astype(float), other.astype(float)
            assert np.abs(one - other).max() < tolerance * np.abs(other).max(), case


@pytest.mark.device
def test_on_a_gpu_a_layer_by_kernels_repeats_bit_for_bit():
    """Whichever program of a product with splits comes last."""
    first, *others = on_device("node_layers.py", [("split", "bfloat16", 8, 8)] * 5)
    for again in others:
        assert all(
            one.tobytes() == two.tobytes() for one, two in zip(first[0], again[0], strict=True)
        )
