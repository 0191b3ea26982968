"""Tiny drafters of every kind and flag, with random weights, a policy to share with, and their files in NumPy."""

from __future__ import annotations

import json
import zlib
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import architecture, drafter as drafters, hf_config, hf_drafter, kv_cache

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
    "eagle3_normed": {
        "kind": "eagle3",
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": True,
    },
}
BLOCKS = {
    "dflash": {"kind": "dflash", "block_size": 4, "num_layers": 2},
    "dflash_windows": {"kind": "dflash", "block_size": 4, "num_layers": 3, "windows": (5, 0, 5)},
    "dflash_causal": {"kind": "dflash", "block_size": 3, "causal": True, "num_kv_heads": 4},
    "dflash2": {"kind": "dflash2", "block_size": 4, "num_layers": 2, "markov_rank": 6, "selector_top_k": 5,
                "conv_group_size": 4},
    "dflash2_some": {"kind": "dflash2", "block_size": 5, "causal": True, "conv_kernel_size": 3, "num_kv_heads": 1,
                     "selector_top_k": 3, "markov_rank": 4, "draft_vocab_size": len(IDS)},
    "dflash2_windows": {"kind": "dflash2", "block_size": 5, "causal": True, "num_layers": 2, "markov_rank": 6,
                        "selector_top_k": 5, "windows": (6, 0)},
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


class Files:
    """The directory of a case in NumPy, without a cache, written from the papers' equations."""

    def __init__(self, case: str, dtype: str):
        with TemporaryDirectory() as folder:
            hf_drafter.save(params(case, dtype), config(case), folder, dtype)
            self.raw = json.loads(Path(folder, "config.json").read_text())
            self.files = load_file(Path(folder, "model.safetensors"))
        base = shared(dtype)
        self.embed, self.head = np.asarray(base.embed), np.asarray(base.head)[:VOCAB]
        self.is_eagle3 = "Eagle3" in self.raw["architectures"][0]

    def linear(self, name: str, x):
        return x @ self.files[f"{name}.weight"].T + self.files.get(f"{name}.bias", 0)

    def norm(self, name: str, x):
        scale = np.sqrt(np.mean(x * x, -1, keepdims=True) + self.raw["rms_norm_eps"])
        return x / scale * self.files[f"{name}.weight"]

    def turned(self, heads):
        """Heads [n, H, E] of positions from 0 on, as complex numbers, multiplied by exp(i angle)."""
        half = heads.shape[-1] // 2
        rates = self.raw["rope_theta"] ** (-np.arange(half) / half)
        angle = np.arange(len(heads))[:, None, None] / self.raw["rope_scaling"]["factor"] * rates
        whole = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angle)
        return np.concatenate([whole.real, whole.imag], -1)

    def attention(self, at: str, count: int, inner, is_causal: bool):
        """Attention's result for the last rows of `inner`, which the projections read; a row sees all, or no later ones."""
        E, rows = self.raw["head_dim"], len(inner)
        q, k, v = (
            self.linear(f"{at}self_attn.{name}_proj", inner).reshape(rows, -1, E) for name in "qkv"
        )
        if f"{at}self_attn.q_norm.weight" in self.files:
            q, k = (self.norm(f"{at}self_attn.{n}_norm", one) for n, one in (("q", q), ("k", k)))
        q, k = self.turned(q)[-count:], self.turned(k)
        k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, v))
        scores = np.exp(np.einsum("nhe,she->hns", q, k) / np.sqrt(E))
        if is_causal:
            scores *= np.tri(count, rows, rows - count)
        kinds = self.raw.get("layer_types")
        if kinds and kinds[int(at.split(".")[1])] == "sliding_attention":
            scores *= 1 - np.tri(count, rows, rows - count - self.raw["sliding_window"])
        mixed = np.einsum("hns,she->nhe", scores / scores.sum(-1, keepdims=True), v)
        return self.linear(f"{at}self_attn.o_proj", mixed.reshape(count, -1))

    def mlp(self, at: str, y):
        """The MLP's result for rows y, which are normed."""
        gate = self.linear(f"{at}mlp.gate_proj", y)
        return self.linear(
            f"{at}mlp.down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{at}mlp.up_proj", y)
        )

    def convolved(self, name: str, side: int, read, y):
        """Rows y [N, Z] of one block mixed with those before them, as the normed rows `read` say; as they are without taps."""
        if f"{name}.base_kernel" not in self.files:
            return y
        base = self.files[f"{name}.base_kernel"][side]
        more = self.linear(f"{name}.kernel_projection", read).reshape(len(y), 2, len(base), -1)
        group = np.arange(y.shape[1]) // self.raw["dflash_config"]["conv_group_size"]
        mixed = np.zeros_like(y)
        for n in range(len(y)):
            for o in range(min(n + 1, len(base))):
                mixed[n] += (base[o] + more[n, side, o, group]) * y[n - o]
        return mixed

    def enter(self, token: int, state, given: bool):
        """Residual stream and input of attention of one row of EAGLE; `given`: the state is the policy's features."""
        e = self.embed[token]
        if not self.is_eagle3:
            x = self.linear("fc", np.concatenate([e, state]))
            return x, x
        if given and self.raw["fc_norm"]:
            parts = np.split(state, len(state) // len(e))
            state = np.concatenate([self.norm(f"fc_norm.{i}", x) for i, x in enumerate(parts)])
        x = self.linear("fc", state) if given else state
        normed = self.norm("midlayer.hidden_norm", x)
        inner = np.concatenate([self.norm("midlayer.input_layernorm", e), normed])
        return normed if self.raw.get("norm_before_residual") else x, inner

    def levels(self, rows):
        """Hidden states of EAGLE's rows of (token, state, given); a row attends to earlier rows and itself."""
        x, inner = map(np.stack, zip(*(self.enter(*row) for row in rows), strict=True))
        at = "midlayer." if self.is_eagle3 else "layers.0."
        x = x + self.attention(at, len(x), inner, True)
        x = x + self.mlp(at, self.norm(f"{at}post_attention_layernorm", x))
        return self.norm("norm", x) if self.raw.get("norm_output") else x

    def logits(self, x):
        """EAGLE's logits of the draft vocabulary."""
        if not self.is_eagle3:
            return x @ self.head.T
        x = x if self.raw["norm_output"] else self.norm("norm", x)
        return x @ self.files["lm_head.weight"].T

    def block(self, token: int, before):
        """Hidden states [P, Z] of the block at `token`, from the features [t, F] of the tokens before it, all at once."""
        shape, c = self.raw["dflash_config"], self.norm("hidden_norm", self.linear("fc", before))
        size = shape.get("block_size") or self.raw["block_size"]
        x = self.embed[[token, *[shape["mask_token_id"]] * (size - 1)]]
        for index in range(self.raw["num_hidden_layers"]):
            at = f"layers.{index}."
            one, two = f"{at}attention_conv", f"{at}mlp_conv"
            read = self.norm(f"{at}input_layernorm", x)
            inner = np.concatenate([c, self.convolved(one, 0, read, read)])
            y = self.attention(at, size, inner, shape.get("causal", False))
            x = x + self.convolved(one, 1, read, y)
            read = self.norm(f"{at}post_attention_layernorm", x)
            y = self.mlp(at, self.convolved(two, 0, read, read))
            x = x + self.convolved(two, 1, read, y)
        return self.norm("norm", x)[int(self.raw["architectures"] != ["Qwen3DSparkModel"]) :]


@cache
def files(case: str, dtype: str = "float64") -> Files:
    """The reference of a case."""
    return Files(case, dtype)


def reference(case: str, token: int, before: np.ndarray) -> np.ndarray:
    """`Files.block` of a case."""
    return files(case).block(int(token), np.asarray(before))
