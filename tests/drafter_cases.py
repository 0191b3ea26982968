"""Tiny drafters of every kind and flag, with random weights whose norms are not ones, and a policy to share with."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import drafter as drafters, hf

POLICY = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
VOCAB = 37
IDS = np.array([0, 3, 4, 9, 11, 20, 30, 36])
CASES = {
    "eagle": {"kind": "eagle"},
    "eagle_bias": {
        "kind": "eagle",
        "fc_bias": True,
        "family": "llama",
        "qkv_bias": False,
        "num_kv_heads": 4,
    },
    "eagle3": {"kind": "eagle3", "draft_vocab_size": len(IDS), "head_dim": 8},
    "eagle3_plain": {"kind": "eagle3", "fc_norm": False, "norm_output": False, "num_kv_heads": 1},
}


def policy(**changes):
    """The policy that the drafters are for."""
    return hf.new_config(POLICY | changes, VOCAB, ())


def config(case: str, **changes) -> drafters.DrafterConfig:
    """The DrafterConfig of a case."""
    return drafters.for_policy(policy(), **CASES[case] | changes)


def params(case: str, dtype="float64", mesh=None) -> drafters.DrafterParams:
    """Weights of a case in the "train" layout: norms near 1, biases that are not 0, matrices that keep sizes."""
    spec = drafters.abstract(config(case), mesh or meshes.make_mesh(1, 1), "train", dtype)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        noise = np.random.RandomState(zlib.crc32(name.encode())).randn(*leaf.shape)
        if name == ".ids":
            noise = IDS
        elif "norm" in name:
            noise = 1 + 0.3 * noise
        elif name == ".head":
            noise[VOCAB:] = 0
        elif len(leaf.shape) == 2:
            noise = 0.8 * noise / np.sqrt(leaf.shape[-1])
        return jax.device_put(noise.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(draw, spec)


def shared(dtype="float64") -> drafters.Shared:
    """Embedding and head of a policy, its padding included."""
    embed, head = np.random.RandomState(7).randn(2, 64, POLICY["hidden_size"]).astype(dtype) / 2
    return drafters.Shared(jnp.asarray(embed), jnp.asarray(head))


def line(case: str, rows: int, length: int, dtype="float64"):
    """Random tokens [rows, length] and features [rows, length, F]."""
    rng = np.random.RandomState(1)
    tokens = rng.randint(0, VOCAB, (rows, length))
    features = rng.randn(rows, length, config(case).feature_width).astype(dtype)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(features)
