"""Drafters against independent torch references that read the files, written from the papers' equations."""

from __future__ import annotations

import json
import math

import drafter_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_block_drafter

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import block_drafter, eagle, hf_drafter

pytestmark = pytest.mark.parity
LENGTHS = np.array([3, 7], np.int32)


class Files:
    """A drafter directory on torch."""

    def __init__(self, folder, shared):
        import torch
        from safetensors.torch import load_file

        self.torch, self.raw = torch, json.loads((folder / "config.json").read_text())
        self.files = load_file(folder / "model.safetensors")
        self.embed, self.head = (
            torch.tensor(np.asarray(part)) for part in (shared.embed, shared.head)
        )

    def linear(self, name, x):
        bias = self.files.get(f"{name}.bias")
        return x @ self.files[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(self, name, x):
        scale = (x.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).sqrt()
        return x / scale * self.files[f"{name}.weight"]

    def turned(self, heads, positions):
        """Heads [rows, H, E] as complex numbers, multiplied by exp(i angle)."""
        half = heads.shape[-1] // 2
        rates = self.raw["rope_theta"] ** (-self.torch.arange(half, dtype=heads.dtype) / half)
        angles = (
            self.torch.tensor([*positions])[:, None, None]
            / self.raw["rope_scaling"]["factor"]
            * rates
        )
        turned = self.torch.complex(heads[..., :half], heads[..., half:]) * self.torch.polar(
            angles * 0 + 1, angles
        )
        return self.torch.cat([turned.real, turned.imag], -1)


class Levels(Files):
    """EAGLE without a cache: all rows at once, under a mask."""

    @property
    def new(self):
        return "Eagle3" in self.raw["architectures"][0]

    @property
    def prefix(self):
        return "midlayer." if self.new else "layers.0."

    def enter(self, token, state, given):
        """Residual stream and input of attention of one row."""
        e = self.embed[token]
        if not self.new:
            x = self.linear("fc", self.torch.cat([e, state]))
            return x, x
        if given and self.raw["fc_norm"]:
            state = self.torch.cat(
                [self.norm(f"fc_norm.{i}", part) for i, part in enumerate(state.split(e.shape[0]))]
            )
        x = self.linear("fc", state) if given else state
        norms = self.norm("midlayer.input_layernorm", e), self.norm("midlayer.hidden_norm", x)
        return x, self.torch.cat(norms)

    def hidden(self, rows, positions):
        """Hidden states of rows of (token, state, given); a row attends to earlier rows and itself."""
        x, inner = (
            self.torch.stack(part) for part in zip(*(self.enter(*row) for row in rows), strict=True)
        )
        at, E = f"{self.prefix}self_attn.", self.raw["head_dim"]
        q, k, v = (self.linear(f"{at}{name}_proj", inner).unflatten(-1, (-1, E)) for name in "qkv")
        q, k = self.turned(q, positions), self.turned(k, positions)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        scores = self.torch.einsum("thd,shd->hts", q, k) / math.sqrt(E)
        later = self.torch.ones(len(rows), len(rows)).triu(1).bool()
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        x = x + self.linear(f"{at}o_proj", self.torch.einsum("hts,shd->thd", weights, v).flatten(1))
        y, mlp = self.norm(f"{self.prefix}post_attention_layernorm", x), f"{self.prefix}mlp."
        gate = self.torch.nn.functional.silu(self.linear(f"{mlp}gate_proj", y))
        x = x + self.linear(f"{mlp}down_proj", gate * self.linear(f"{mlp}up_proj", y))
        return self.norm("norm", x) if self.raw.get("norm_output") else x

    def logits(self, x):
        """Logits of every token of the policy, -inf where the draft vocabulary lacks it."""
        if not self.new:
            return x @ self.head[: cases.VOCAB].T
        drafted = (x if self.raw["norm_output"] else self.norm("norm", x)) @ self.files[
            "lm_head.weight"
        ].T
        if "d2t" not in self.files:
            return drafted
        tokens = self.files["d2t"] + self.torch.arange(drafted.shape[-1])
        scores = self.torch.full((*x.shape[:-1], cases.VOCAB), -math.inf, dtype=x.dtype)
        return scores.index_copy(-1, tokens, drafted)


class Blocks(Files):
    """A block drafter without a cache: the context and one block at once."""

    def hidden(self, anchor, features):
        """Hidden states of all positions of the block at token `anchor`, after tokens with these features."""
        torch, E = self.torch, self.raw["head_dim"]
        size, mask = self.raw["block_size"], self.raw["dflash_config"]["mask_token_id"]
        context = self.norm("hidden_norm", self.linear("fc", torch.tensor(features)))
        x = self.embed[[anchor, *[mask] * (size - 1)]]
        hides = torch.zeros(size, len(context) + size, dtype=bool)
        if self.raw["dflash_config"].get("causal"):
            hides[:, len(context) :] = torch.ones(size, size).triu(1).bool()
        for layer in range(self.raw["num_hidden_layers"]):
            at = f"layers.{layer}."
            rows = torch.cat([context, self.norm(f"{at}input_layernorm", x)])
            q, k, v = (
                self.linear(f"{at}self_attn.{name}_proj", rows).unflatten(-1, (-1, E))
                for name in "qkv"
            )
            places = range(len(rows))
            q = self.turned(self.norm(f"{at}self_attn.q_norm", q), places)[len(context) :]
            k = self.turned(self.norm(f"{at}self_attn.k_norm", k), places)
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(E)
            weights = scores.masked_fill(hides, -math.inf).softmax(-1)
            mixed = torch.einsum("hts,shd->thd", weights, v).flatten(1)
            x = x + self.linear(f"{at}self_attn.o_proj", mixed)
            y = self.norm(f"{at}post_attention_layernorm", x)
            gate = torch.nn.functional.silu(self.linear(f"{at}mlp.gate_proj", y))
            x = x + self.linear(f"{at}mlp.down_proj", gate * self.linear(f"{at}mlp.up_proj", y))
        return self.norm("norm", x)

    def outputs(self, anchor, features, following):
        """Logits [P, V] of the tokens after the anchor, and log-odds [P] that they are accepted (None: no such head).

        DFlash predicts the token of a masked position; DSpark the one after it, with a bias by the token before, which is
        the anchor or one of `following`.
        """
        torch, hidden = self.torch, self.hidden(anchor, features)
        if self.raw["architectures"] == ["DFlashDraftModel"]:
            return hidden[1:] @ self.head[: cases.VOCAB].T, None
        logits, before = hidden @ self.head[: cases.VOCAB].T, [anchor, *following[:-1]]
        known = [hidden]
        if self.raw["markov_rank"]:
            known.append(self.files["markov_head.markov_w1.weight"][before])
            logits = logits + self.linear("markov_head.markov_w2", known[1])
        if not self.raw["enable_confidence_head"]:
            return logits, None
        head = "confidence_head.proj"
        return logits, self.linear(head, torch.cat(known, -1))[:, 0]


TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
BLOCK_TOLERANCE = {"float32": 2e-4, "float64": 1e-9}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", cases.LEVELS)
def test_hidden_states_and_logits_equal_the_reference(case, dtype, tmp_path, x64):
    import torch

    params, config, shared = cases.params(case, dtype), cases.config(case), cases.shared(dtype)
    hf_drafter.save(params, config, tmp_path, dtype)
    reference = Levels(tmp_path, shared)
    config, params = hf_drafter.load(tmp_path, cases.policy(), meshes.make_mesh(1, 1), dtype)
    tokens, features = cases.line(case, 1, 9, dtype)

    def run(params, shared):
        rows = tokens, features, jnp.arange(9)[None], jnp.ones_like(tokens)
        hidden = eagle.unroll(params, config, shared, *rows, 2)
        return hidden[:, 0], eagle.logits(params, config, shared, hidden[:, 0])

    hidden, logits = (np.asarray(part) for part in jax.jit(run)(params, shared))
    if params.ids is not None:
        found, logits = logits, np.full((2, 9, cases.VOCAB), -np.inf, dtype)
        logits[..., np.asarray(params.ids)] = found
    slots = [
        (int(tokens[0, t + 1]), torch.tensor(np.asarray(features[0, t])), True) for t in range(7)
    ]
    line = reference.hidden(slots, list(range(7)))
    for t in range(7):
        node = (int(tokens[0, t + 2]), line[t], False)
        drafted = reference.hidden([*slots[: t + 1], node], list(range(t + 2)))[-1]
        for step, state in enumerate((line[t], drafted)):
            close = {
                "rtol": TOLERANCE[dtype],
                "atol": TOLERANCE[dtype],
                "err_msg": f"step {step} at slot {t}",
            }
            np.testing.assert_allclose(hidden[step, t], state.numpy(), **close)
            np.testing.assert_allclose(
                logits[step, t, : cases.VOCAB], reference.logits(state).numpy(), **close
            )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", cases.BLOCKS)
def test_a_block_equals_the_reference(case, dtype, tmp_path, x64):
    shared = cases.shared(dtype)
    hf_drafter.save(cases.params(case, dtype), cases.config(case), tmp_path, dtype)
    reference = Blocks(tmp_path, shared)
    config, params = hf_drafter.load(tmp_path, cases.policy(), meshes.make_mesh(1, 1), dtype)
    assert config == cases.config(case)
    tokens, features = map(np.asarray, cases.line(case, 2, 15, dtype))
    for row, at in enumerate(LENGTHS):
        following = tokens[row, at + 1 : at + 1 + config.depth]
        rows = (
            tokens[row : row + 1],
            features[row : row + 1],
            np.arange(15)[None],
            np.ones((1, 15), np.int32),
        )
        hidden = block_drafter.forward_blocks(
            params, config, shared, *map(jnp.asarray, (*rows, np.array([[at]], np.int32)))
        )[0, 0]
        before = jnp.asarray([tokens[row, at], *following[:-1]])
        embedding = block_drafter.markov_embedding(params, before, dtype)
        logits = block_drafter.logits(params, config, shared, hidden)
        if config.markov_rank:
            logits += block_drafter.markov_bias(params, embedding)
        wanted, odds = reference.outputs(
            int(tokens[row, at]), features[row, :at], following.tolist()
        )
        close = {"rtol": BLOCK_TOLERANCE[dtype], "atol": BLOCK_TOLERANCE[dtype]}
        kept = np.arange(cases.VOCAB) if config.has_full_vocab else cases.IDS
        np.testing.assert_allclose(logits[:, : len(kept)], wanted.numpy()[:, kept], **close)
        if odds is not None:
            found = block_drafter.confidence(params, hidden, embedding)
            np.testing.assert_allclose(found, odds.numpy(), **close)
    # Drafting reads the same weights.
    if dtype == "float64":
        drafted, _ = test_block_drafter.drafted(
            case, tokens, features, LENGTHS, meshes.make_mesh(1, 1)
        )
        for row, at in enumerate(LENGTHS):
            whole = reference.hidden(int(tokens[row, at]), features[row, :at]).numpy()
            np.testing.assert_allclose(drafted[row], whole[config.skipped :], rtol=1e-9, atol=1e-9)
