"""Compiled update and prefill of a policy with a library's attention, for devices that are absent."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from objectives import algorithm

from tlt_jax.distributed.mesh import make_mesh, sharding
from tlt_jax.distributed.topology import describe
from tlt_jax.models import architecture, transformer
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.optimizer import Adam
from tlt_jax.plan.launches import collectives
from tlt_jax.train import batch as batches, policy_update
from tlt_jax.train.policy_update import Recipe

T, BLOCK = 2048, 640
MODEL = ModelConfig(
    family="qwen2", vocab_size=6144, hidden_size=768, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=128,
    mlp_dim=1536, max_positions=T, qkv_bias=True,
)  # fmt: skip
PLACES = [
    pytest.param("h200:1", 1, 1, marks=pytest.mark.gpu),
    pytest.param("h200:4", 2, 2, marks=pytest.mark.gpu),
    pytest.param("v5p:2x2x1", 2, 2, marks=pytest.mark.tpu),
]
CALLS = {
    "h200": ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"),
    "v5p": ("splash_mha_fwd", "splash_mha_dkv", "splash_mha_dq"),
}
MOVED = re.compile(r" (all-gather|all-to-all|collective-permute)(-start)?\(")


def compiled(topology: str, data: int, model: int):
    """The program of an accumulation step with a row for every data group."""
    mesh = make_mesh(data, model, describe(topology).devices)
    recipe = Recipe(
        MODEL, mesh, Adam(1e-3, 10), algorithm(), compute_dtype="bfloat16",
        remat=("full",) * MODEL.num_layers, logits_chunk=512,
        attention_block=BLOCK,
    )  # fmt: skip
    rows = batches.abstract_rows(mesh, data, T, ("rollout_logprobs",))
    sums, params = (
        policy_update.abstract_sums(recipe, rows),
        policy_update.abstract_state(recipe).params,
    )
    return policy_update.programs(recipe).accumulate.lower(sums, params, rows).compile()


def scores(text: str) -> list[str]:
    """Shapes of arrays with an axis of T keys and an axis of queries: a block, times some heads, or all."""
    group = MODEL.num_heads // MODEL.num_kv_heads
    queries = {BLOCK, group * BLOCK}
    found = []
    for shape in set(re.findall(r"(?:f32|bf16|pred)\[([\d,]+)\]", text)):
        sizes = [int(size) for size in shape.split(",")]
        if T in sizes and (queries & set(sizes) or sizes.count(T) > 1):
            found.append(shape)
    return found


@pytest.mark.parametrize(("topology", "data", "model"), PLACES)
def test_the_update_calls_the_library_and_gathers_no_activations(topology, data, model):
    """Heads are sharded over `model` and rows over `data`: each device calls the library on its shard."""
    text = compiled(topology, data, model).as_text()
    for call in CALLS[topology.split(":")[0]]:
        assert call in text
    assert scores(text) == []
    moved = [line for line in text.splitlines() if MOVED.search(line) and "embed" not in line]
    assert bool(moved) == (data > 1)  # weights
    results = [line[: MOVED.search(line).start()] for line in moved]
    assert [result for result in results if re.search(rf"[\[,]{T}[\],]", result)] == []


@pytest.mark.parametrize(("topology", "data", "model"), PLACES)
def test_prefill_calls_the_library_and_gathers_nothing(topology, data, model):
    mesh = make_mesh(1, model, describe(topology).devices)
    params = architecture.abstract(MODEL, mesh, "rollout", "bfloat16")
    place = sharding(mesh, ("batch",), "rollout")
    tokens = jax.ShapeDtypeStruct((4, 1024), jnp.int32, sharding=place)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=place)

    def prefill(params, tokens, lengths):
        return transformer.prefill(params, MODEL, tokens, lengths, mesh=mesh)

    text = jax.jit(prefill).lower(params, tokens, lengths).compile().as_text()
    assert CALLS[topology.split(":")[0]][0] in text
    assert {name.split(" over ")[0] for name in collectives(text, mesh)} <= {"all-reduce"}
