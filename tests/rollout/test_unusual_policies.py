"""Rollouts of tiny policies with unusual layers: no drafter, strategy or mesh changes a token, exactly in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
import references
import tiny_engine as tiny
from test_speculation import MANY, NO, ONE, WIDE, accepted, speculating

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.keys import TRAIN_STREAM, sequence_keys
from tlt_jax.models import architecture, decoder_layer, hf, hf_config, transformer
from tlt_jax.models.architecture import ModelConfig, Rope
from tlt_jax.spec_decode import noise

small_pool = tiny.small_pool
pytestmark = pytest.mark.usefixtures("small_pool")

# All that a layer may have, but norms of the whole width; prompts and answers are longer than the window and a round.
UNUSUAL = replace(
    tiny.MODEL, num_layers=3, qkv_bias=False, qk_norm="head", norms="both", norm_offset=1.0, activation="gelu_tanh",
    windows=(3, 0, 3), window_rope=Rope(100.0), unrotated=(2,), embed_scale=4.0, residual_scale=0.5, score_scale=2.0,
    logit_scale=3.0, score_cap=2.0, logit_cap=5.0,
)  # fmt: skip


# Layers of different shapes, the last two without keys and values, and embeddings for each layer.
UNLIKE = replace(
    tiny.MODEL, num_layers=4, qkv_bias=False, qk_norm="head", norms="both", windows=(3, 0, 3, 0), shared_layers=2,
    full_head_dim=12, full_kv_heads=1, shared_mlp_dim=24, value_norm=True, token_inputs=4, out_scale=True, score_scale=2.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "drafter, strategies, data, model",
    [("none", NO, 1, 1), ("eagle3", WIDE, 1, 2), ("ngram", ONE, 2, 1)],
)
def test_they_do_with_layers_of_different_shapes(x64, drafter, strategies, data, model):
    engine, weights = speculating(
        drafter, strategies, data, model, policy=UNLIKE, slots=5, chunk=3, batch_buckets=[1, 5], cache_buckets=[32]
    )  # fmt: skip
    cache = engine.programs.shapes[0].target.empty(1, 32)
    assert [keys.shape[2:] for keys in cache.keys] == [(4, 11), (12, 40)]
    for setting in (tiny.NUCLEUS, tiny.GREEDY):
        accepted(engine, weights, setting, UNLIKE)


# A mixture of experts, of which the middle layer has none, and one with an MLP that all tokens have.
SPARSE = replace(
    tiny.MODEL, num_layers=3, qk_norm="head", num_experts=6, experts_per_token=2, expert_dim=8, normed_gates=True,
    dense_layers=(1,),
)  # fmt: skip
SHARED = replace(
    SPARSE, num_layers=2, dense_layers=(), num_experts=5, experts_per_token=3, shared_dim=12
)


@pytest.mark.parametrize(
    "policy, drafter, strategies, data, model",
    [
        pytest.param(SPARSE, "none", NO, 1, 1, marks=pytest.mark.matrix),
        (SPARSE, "eagle3", WIDE, 1, 2),
        (SHARED, "ngram", ONE, 2, 1),
        pytest.param(SHARED, "dspark", MANY, 1, 1, marks=pytest.mark.matrix),
    ],
)
def test_they_do_with_experts_which_are_recorded(x64, policy, drafter, strategies, data, model):
    """The recorded experts of all tokens but the last are those that the training forward chooses."""
    engine, weights = speculating(
        drafter, strategies, data, model, policy=policy, slots=5, chunk=3, batch_buckets=[1, 5], cache_buckets=[32],
        records=True,
    )  # fmt: skip
    for setting in (tiny.NUCLEUS, tiny.GREEDY):
        accepted(engine, weights, setting, policy)
    shape = tiny.PROMPTS, tiny.SAMPLES, tiny.NUCLEUS, tiny.LIMIT
    result = tiny.roll_out(engine, weights, *shape, stream=TRAIN_STREAM, step=0, records=True)
    params = architecture.init(policy, make_mesh(1, 1), jax.random.key(0), "float64")

    texts = [[*tiny.PROMPTS[one.prompt], *one.tokens][:-1] for one in result.completions]
    tokens = np.array([np.pad(text, (0, 32 - len(text))) for text in texts])
    is_text = np.arange(32) < np.array([*map(len, texts)])[:, None]
    found = ids_of(params, policy, tokens, np.arange(32) * np.ones_like(tokens), 1 * is_text)
    for one, ids, here in zip(result.completions, found, is_text, strict=True):
        ids = ids[here]
        np.testing.assert_array_equal(np.sort(one.record.reshape(ids.shape)), np.sort(ids))


@pytest.mark.parity
@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe"])
def test_tokens_of_experts_are_those_that_transformers_logits_choose(case, tmp_path, x64):
    """Greedy and sampled, token by token, each from transformers' logits of the whole prefix in float64."""
    import make_goldens
    import torch

    folder = model_cases.write(case, tmp_path / case)
    policy, theirs = hf_config.read_config(folder), make_goldens.reference(folder)
    settings = {
        "policy": policy,
        "slots": 5,
        "chunk": 3,
        "batch_buckets": [5],
        "cache_buckets": [32],
    }
    engine, _ = speculating("ngram", ["2_1_3"], **settings)
    weights = engine.publish(hf.load(folder, policy, engine.mesh, "float64"))

    @cache  # greedy answers to a prompt are the same
    def logits_of(*prefix: int) -> np.ndarray:
        with make_goldens.all_float64(), torch.no_grad():
            return theirs(torch.tensor([prefix])).logits[0, -1].numpy()

    keys = sequence_keys(0, TRAIN_STREAM, 0, np.arange(len(tiny.PROMPTS) * tiny.SAMPLES))
    places = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (len(keys), 32))
    drawn = np.asarray(noise.gumbel(jnp.asarray(keys), places, policy.vocab_size, jnp.float64))
    for setting in (tiny.GREEDY, tiny.NUCLEUS):
        shape = tiny.PROMPTS, tiny.SAMPLES, setting, tiny.LIMIT
        result = tiny.roll_out(engine, weights, *shape, stream=TRAIN_STREAM, step=0)
        for one, noise_of in zip(result.completions, drawn, strict=True):
            prompt, ends = tiny.PROMPTS[one.prompt], (tiny.STOPS, tiny.LIMIT)
            found = references.decode(
                lambda prefix: logits_of(*prefix), noise_of.__getitem__, prompt, setting, policy.eos_ids, *ends
            )  # fmt: skip
            assert (one.tokens.tolist(), one.finish) == (found[0], found[2])


def ids_of(params, policy: ModelConfig, tokens, positions, segments) -> np.ndarray:
    """Experts of the tokens of rows by layer [B, T, L, k], with the router's logits computed here from hidden states."""
    layers = tuple(range(policy.num_layers + 1))

    @jax.jit
    def attended(params, tokens, positions, segments):
        """Of each layer with experts: what it gets, and what its heads attended to."""
        _, states = transformer.hidden(
            params, policy, tokens, positions, segments, compute_dtype="float64", captures=layers
        )
        states, kept = jnp.split(states, len(layers), axis=-1), []

        def keep(layer, config, x, heads, *_):
            kept.append((x, heads))
            return x, None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder_layer, "finish", keep)
            for index in policy.expert_layers:
                layer, kind = (
                    architecture.layer_at(params.layers, policy, index),
                    policy.kinds[index],
                )
                angles = decoder_layer.packed_angles(kind, positions, "float64")
                decoder_layer.packed_layer(layer, kind, states[index], angles, segments, 16)
        return kept

    found = []
    kept = attended(params, *(jnp.asarray(one, jnp.int32) for one in (tokens, positions, segments)))
    for index, (x, heads) in zip(policy.expert_layers, kept, strict=True):
        layer = architecture.layer_at(params.layers, policy, index)
        x = np.asarray(x) + np.asarray(heads) @ np.asarray(layer.o).T
        x = (
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + policy.rms_eps)
            * np.asarray(layer.mlp_norm)
        )
        scores = x @ np.asarray(layer.router).T
        found.append(np.argsort(-scores)[..., : policy.experts_per_token])
    return np.stack(found, -2)


@pytest.mark.parametrize(
    "drafter, strategies, data, model",
    [
        ("none", NO, 1, 1),
        ("eagle3", WIDE, 1, 2),
        ("ngram", ONE, 2, 1),
        pytest.param("dspark", MANY, 1, 1, marks=pytest.mark.matrix),
    ],
)
def test_they_do_with_windows_caps_and_factors(x64, drafter, strategies, data, model):
    caches = [20, 25, 32] if drafter == "none" else [32]
    engine, weights = speculating(
        drafter, strategies, data, model, policy=UNUSUAL, slots=5, chunk=3, batch_buckets=[1, 5], cache_buckets=caches
    )  # fmt: skip
    cache = engine.programs.shapes[0].target.empty(1, 32)
    assert [keys.shape[3] for keys in cache.keys] == [11, 40, 11]
    for setting in (tiny.NUCLEUS, tiny.GREEDY):
        accepted(engine, weights, setting, UNUSUAL)
