"""Tiny drafters of every kind and flag, with random weights, a policy to share with, and blocks in NumPy without a cache."""

from __future__ import annotations

import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import architecture, drafter as drafters, hf_config, kv_cache

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
LEVELS = {
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
BLOCKS = {
    "dflash": {"kind": "dflash", "block_size": 4, "num_layers": 2},
    "dflash_causal": {"kind": "dflash", "block_size": 3, "causal": True, "num_kv_heads": 4},
    "dspark": {"kind": "dspark", "block_size": 4, "markov_rank": 6, "draft_vocab_size": len(IDS)},
    "dspark_whole": {"kind": "dspark", "block_size": 3, "markov_rank": 6, "mask_token_id": 5,
                     "num_kv_heads": 1, "num_layers": 3, "captures": (0, 3, 7)},
    "dspark_bare": {"kind": "dspark", "block_size": 4, "markov_rank": 0, "confidence": False, "head_dim": 6},
}  # fmt: skip
CASES = LEVELS | BLOCKS


def policy(**changes):
    """The policy that the drafters are for."""
    return hf_config.new_config(POLICY | changes, VOCAB, ())


def config(case: str, **changes) -> drafters.DrafterConfig:
    """The DrafterConfig of a case."""
    return drafters.for_policy(policy(), **CASES[case] | changes)


def params(case: str, dtype="float64", mesh=None) -> drafters.DrafterParams:
    """Weights of a case in the "train" layout: norms near 1, biases and heads that are not 0, matrices that keep sizes."""
    spec = drafters.abstract(config(case), mesh or meshes.make_mesh(1, 1), "train", dtype)
    gain = 1.2 if config(case).is_block else 0.8

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        noise = np.array(np.random.RandomState(zlib.crc32(name.encode())).randn(*leaf.shape))
        if name == ".ids":
            noise = IDS
        elif "norm" in name:
            noise = 1 + 0.3 * noise
        elif name in (".head", ".markov_in", ".markov_out"):
            noise[VOCAB:] = 0
        elif noise.ndim > 1 and "bias" not in name:
            noise = gain * noise / np.sqrt(leaf.shape[-1])
        return jax.device_put(noise.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(draw, spec)


def shared(dtype="float64") -> drafters.Shared:
    """Embedding and head of a policy, its padding included."""
    embed, head = np.random.RandomState(7).randn(2, 64, POLICY["hidden_size"]).astype(dtype) / 2
    return drafters.Shared(jnp.asarray(embed), jnp.asarray(head))


def rolled(case: str, mesh, dtype="float64"):
    """The drafter as the programs of the last data group read it, what it shares with the policy there, and that group."""
    own, group = config(case), meshes.data_group(mesh, mesh.shape["data"] - 1)
    reshard = partial(drafters.to_rollout, config=own, mesh=mesh, dtype=dtype)
    layout = drafters.shardings(own, mesh, "rollout")
    found = meshes.view(jax.jit(reshard, out_shardings=layout)(params(case, dtype, mesh)), group)
    base = jax.device_put(shared(dtype), jax.NamedSharding(group, jax.P()))
    target = architecture.Params(base.embed, (), found.final_norm, base.head)
    return drafters.bind(found, own, target, group), base, group


def used_cache(config, batch: int, slots: int, mesh, dtype="float64"):
    """A drafter's cache full of large numbers."""
    spec = kv_cache.abstract(config.layers, batch, slots, 0, dtype, mesh)
    return jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, 1e3, leaf.dtype, device=leaf.sharding), spec
    )


def one_segment(tokens):
    """Positions and segments of rows of one segment each."""
    counted = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return counted, jnp.ones_like(tokens)


def line(case: str, rows: int, length: int, dtype="float64"):
    """Random tokens [rows, length] and features [rows, length, F]."""
    rng = np.random.RandomState(1)
    tokens = rng.randint(0, VOCAB, (rows, length))
    features = rng.randn(rows, length, config(case).feature_width).astype(dtype)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(features)


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def turned(heads, positions, rope):
    """Heads [n, H, E] as complex numbers, multiplied by exp(i angle)."""
    half = heads.shape[-1] // 2
    rates = rope.theta ** (-np.arange(half) / half) / rope.factor
    angle = np.asarray(positions)[:, None, None] * rates
    whole = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angle)
    return np.concatenate([whole.real, whole.imag], -1)


def reference(case: str, token: int, before: np.ndarray) -> np.ndarray:
    """Hidden states [P, Z] of the block at `token`, from the features [t, F] of the tokens before it, all at once."""
    p, own, base = jax.tree.map(np.asarray, params(case)), config(case), shared()
    E, eps, t = own.layers.head_dim, own.layers.rms_eps, len(before)
    token, before = int(token), np.asarray(before)
    c = norm(before @ p.fuse.T, p.hidden_norm, eps)
    ids = [token, *[own.mask_token_id] * (own.block_size - 1)]
    x = np.asarray(base.embed)[ids]
    count = len(ids)
    visible = np.ones((count, t + count), bool)
    if own.causal:
        visible = np.tri(count, t + count, t, dtype=bool)
    for index in range(own.layers.num_layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], p.layers)
        rows = np.concatenate([c, norm(x, layer.attention_norm, eps)])
        q, k, v = (
            (rows @ matrix.T).reshape(len(rows), -1, E) for matrix in (layer.q, layer.k, layer.v)
        )
        places = np.arange(t + count)
        q = turned(norm(q, layer.q_norm, eps), places, own.layers.rope)[t:]
        k = turned(norm(k, layer.k_norm, eps), places, own.layers.rope)
        k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, v))
        scores = np.einsum("nhe,she->hns", q, k) / np.sqrt(E)
        scores = np.exp(np.where(visible, scores, -np.inf))
        mixed = np.einsum("hns,she->nhe", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(count, -1) @ layer.o.T
        y = norm(x, layer.mlp_norm, eps)
        gate = y @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer.up.T)) @ layer.down.T
    return norm(x, p.final_norm, eps)[int(own.kind == "dflash") :]
