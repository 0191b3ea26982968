"""Block drafters against an independent torch reference that reads the files, written from the papers' equations."""

from __future__ import annotations

import json
import math

import block_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest
import test_block_drafter

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import block_drafter, hf_drafter

pytestmark = pytest.mark.parity
TOLERANCE = {"float32": 2e-4, "float64": 1e-9}
LENGTHS = np.array([3, 7], np.int32)


class Reference:
    """A drafter directory on torch, without a cache: the context and one block at once."""

    def __init__(self, folder, shared):
        import torch
        from safetensors.torch import load_file

        self.torch, self.raw = torch, json.loads((folder / "config.json").read_text())
        self.files = load_file(folder / "model.safetensors")
        self.embed, self.head = (
            torch.tensor(np.asarray(part)) for part in (shared.embed, shared.head)
        )

    def linear(self, name, x):
        return x @ self.files[f"{name}.weight"].T

    def norm(self, name, x):
        scale = (x.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).sqrt()
        return x / scale * self.files[f"{name}.weight"]

    def turned(self, heads):
        """Heads [rows, H, E] at positions 0, 1, ... as complex numbers, multiplied by exp(i angle)."""
        torch, half = self.torch, heads.shape[-1] // 2
        rates = self.raw["rope_theta"] ** (-torch.arange(half, dtype=heads.dtype) / half)
        rates = rates / self.raw["rope_scaling"]["factor"]
        angles = torch.arange(heads.shape[0], dtype=heads.dtype)[:, None, None] * rates
        turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
            angles * 0 + 1, angles
        )
        return torch.cat([turned.real, turned.imag], -1)

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
            q = self.turned(self.norm(f"{at}self_attn.q_norm", q))[len(context) :]
            k = self.turned(self.norm(f"{at}self_attn.k_norm", k))
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
        return logits, self.linear(head, torch.cat(known, -1))[:, 0] + self.files[f"{head}.bias"]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", cases.CASES)
def test_a_block_equals_the_reference(case, dtype, tmp_path, x64):
    shared = cases.shared(dtype)
    hf_drafter.save(cases.params(case, dtype), cases.config(case), tmp_path, dtype)
    reference = Reference(tmp_path, shared)
    config, params = hf_drafter.load(tmp_path, cases.policy(), meshes.make_mesh(1, 1), dtype)
    assert config == cases.config(case)
    tokens, features = cases.line(case, 2, 15, dtype)
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
        close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
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
