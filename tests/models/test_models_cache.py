"""The KV cache is filled, resized and, in a decoding loop, updated in place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import architecture, hf_config, kv_cache, transformer
from tlt_jax.models.kv_cache import Scratch


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2)])
def test_a_decoding_loop_updates_the_donated_cache_in_place(shape, nodes):
    config = hf_config.new_config(model_cases.SMALL | {"head_dim": 32}, 37, ())
    mesh = meshes.make_mesh(*shape)
    batch, slots = 4, 512
    seen = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (batch, nodes, nodes))

    def loop(weights, cache, tokens, lengths):
        def body(carry):
            step, cache, tokens, lengths = carry
            positions = lengths[:, None] + jnp.arange(nodes)
            logits, scratch = transformer.tree_forward(
                weights, config, tokens, positions, seen, cache, lengths
            )
            path = jnp.zeros((batch, nodes), jnp.int32)
            cache = kv_cache.commit(cache, scratch, path, lengths)
            return step + 1, cache, jnp.argmax(logits, -1).astype(jnp.int32), lengths + 1

        return jax.lax.while_loop(lambda carry: carry[0] < 9, body, (0, cache, tokens, lengths))[1:]

    cache = kv_cache.abstract(config, batch, slots, 0, "float32", mesh)
    weights = architecture.abstract(config, mesh, "rollout", "float32")
    integers = (
        jax.ShapeDtypeStruct((batch, nodes), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    memory = (
        jax.jit(loop, donate_argnums=1).lower(weights, cache, *integers).compile().memory_analysis()
    )
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache)) // mesh.shape["model"]
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 4


@pytest.mark.parametrize("nodes", [1, 3])
def test_values_with_their_slots_last_decode_alike(nodes):
    config = hf_config.new_config(model_cases.SMALL, 37, ())
    mesh = meshes.make_mesh(1, 1)
    params = architecture.init(config, mesh, jax.random.key(0), "float32")
    reshard = jax.jit(partial(architecture.to_rollout, config=config, mesh=mesh, dtype="float32"))
    params = reshard(params)
    forward = jax.jit(partial(transformer.tree_forward, params, config))
    prompts = jax.random.randint(jax.random.key(1), (2, 4), 0, 37)
    prefill = jax.jit(partial(transformer.prefill, params, config))
    prefilled = prefill(prompts, jnp.array([4, 3]))
    tokens = jax.random.randint(jax.random.key(2), (3, nodes), 0, 37)
    seen = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (3, nodes, nodes))
    path, found = jnp.tile(jnp.arange(nodes)[::-1], (3, 1)), []
    insert, commit = jax.jit(kv_cache.insert), jax.jit(kv_cache.commit)
    for slots_last in (False, True):
        cache = model_cases.empty_cache(config, 3, 11, 0, "float32", mesh)
        if slots_last:
            cache = cache.replace(
                values=tuple(jnp.swapaxes(v, 2, 3) for v in cache.values), slots_last=True
            )
        lengths = jnp.array([4, 3, 4])
        cache = insert(cache, prefilled, jnp.arange(3), jnp.array([0, 1, 0]))
        cache = jax.jit(kv_cache.resize, static_argnums=2)(cache, jnp.array([0, 1, 2]), 14)
        for _ in range(3):
            positions = lengths[:, None] + jnp.arange(nodes)
            logits, scratch = forward(tokens, positions, seen, cache, lengths)
            cache, lengths = commit(cache, scratch, path, lengths), lengths + 1
        found.append(logits)
    np.testing.assert_allclose(*found, atol=1e-5)
    nothing = jax.tree.map(jnp.zeros_like, cache)
    unseen = forward(tokens, positions, seen, nothing, lengths - 1)[0]
    assert not jnp.allclose(found[0], unseen), "it reads the cache"


def test_insert_fans_rows_out_and_resize_gathers_them():
    config = hf_config.new_config(model_cases.SMALL, 37, ())
    mesh = meshes.make_mesh(1, 1)
    cache = model_cases.empty_cache(config, 3, 6, 2, "float32", mesh)
    cache = jax.tree.map(lambda leaf: leaf + jnp.arange(leaf.size).reshape(leaf.shape), cache)
    key = jax.random.key(0)
    shapes = [(2, 2, 8, 4), (2, 2, 4, 8), (2, 4, 2)]
    keys, values, features = (jax.random.normal(key, shape) for shape in shapes)
    prefill = Scratch((keys, 2 * keys, 3 * keys), (values, 2 * values, 3 * values), features)
    filled = jax.jit(kv_cache.insert)(cache, prefill, jnp.array([2, 3, 0]), jnp.array([1, 0, 1]))
    np.testing.assert_array_equal(filled.features[0, :4], features[1])
    np.testing.assert_array_equal(filled.features[1], cache.features[1])
    np.testing.assert_array_equal(filled.features[:, 4:], cache.features[:, 4:])
    for layer, (keys, values) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
        for slot in (0, 2):
            np.testing.assert_array_equal(filled.keys[layer][slot, :, :, :4], keys[1])
            np.testing.assert_array_equal(filled.values[layer][slot, :, :4], values[1])
        np.testing.assert_array_equal(filled.keys[layer][1], cache.keys[layer][1])
        np.testing.assert_array_equal(filled.values[layer][:, :, 4:], cache.values[layer][:, :, 4:])
    for slots in (4, 9):
        fitted = jax.jit(kv_cache.resize, static_argnums=2)(filled, jnp.array([2, -1]), slots)
        kept = min(slots, 6)
        assert fitted.keys[0].shape == (2, 2, 8, slots)
        assert fitted.values[0].shape == (2, 2, slots, 8)
        np.testing.assert_array_equal(
            fitted.keys[1][0, :, :, :kept], filled.keys[1][2, :, :, :kept]
        )
        np.testing.assert_array_equal(fitted.values[1][0, :, :kept], filled.values[1][2, :, :kept])
        np.testing.assert_array_equal(fitted.features[0, :kept], filled.features[2, :kept])


def test_prefill_beyond_the_cache_is_refused_by_its_shape():
    config = hf_config.new_config(model_cases.SMALL, 37, ())
    cache = model_cases.empty_cache(config, 1, 2, 0, "float32", meshes.make_mesh(1, 1))
    prefill = Scratch(
        (jnp.ones((1, 2, 8, 4)),) * 3, (jnp.ones((1, 2, 4, 8)),) * 3, jnp.ones((1, 4, 0))
    )
    with pytest.raises(ValueError, match="4 slots.*2"):
        kv_cache.insert(cache, prefill, jnp.array([0]), jnp.array([0]))


@pytest.mark.parametrize("slots_last", [False, True])
@pytest.mark.parametrize("written", ["commit", "write", "insert"])
def test_all_that_is_written_but_keys_is_finite(written, slots_last):
    config = hf_config.new_config(model_cases.SMALL, 37, ())
    cache = kv_cache.abstract(config, 3, 6, 2, "float32", meshes.make_mesh(1, 1), True)
    if slots_last:
        turned = jax.ShapeDtypeStruct((3, 2, 8, 6), jnp.float32)
        cache = cache.replace(values=(turned,) * 3, slots_last=True)
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    random = np.random.default_rng(0)

    def spoiled(*shape: int) -> np.ndarray:
        numbers = random.choice([np.nan, np.inf, -np.inf], shape)
        return np.where(random.random(shape) < 0.3, numbers, random.normal(size=shape))

    shapes = (3, 2, 8, 4), (3, 2, 4, 8), (3, 4, 2), (3, 4, cache.states.shape[-1])
    keys, values, features, states = (jnp.asarray(spoiled(*shape), "float32") for shape in shapes)
    scratch = Scratch((keys,) * 3, (values,) * 3, features, states)
    rows, zeros = jnp.arange(3), jnp.zeros(3, jnp.int32)
    given = {
        "commit": (jnp.tile(jnp.arange(4), (3, 1)), zeros),
        "write": (rows, zeros),
        "insert": (rows, rows),
    }
    found = jax.jit(getattr(kv_cache, written))(cache, scratch, *given[written])
    np.testing.assert_array_equal(found.keys[1][..., :4], keys)
    stored = jnp.swapaxes(found.values[1], 2, 3) if slots_last else found.values[1]
    for new, given in (
        (stored[:, :, :4], values),
        (found.features[:, :4], features),
        (found.states[:, :4], states),
    ):
        assert not np.isfinite(given).all()
        np.testing.assert_array_equal(new, np.where(np.isfinite(given), given, 0))


def test_a_prompt_that_is_not_finite_keeps_keys_of_nan_where_its_values_were_not():
    """Its padding is finite, though the embedding of the token there is not, and so are other prompts."""
    config = hf_config.new_config(model_cases.SMALL | {"tie_word_embeddings": False}, 37, ())
    params = architecture.init(config, meshes.make_mesh(1, 1), jax.random.key(0), "float32")
    to_rollout = jax.jit(architecture.to_rollout, static_argnums=(1, 2, 3))
    params = to_rollout(params, config, meshes.make_mesh(1, 1), "float32")
    numbers = jnp.array([jnp.nan, jnp.inf])[:, None]
    spoiled = params.replace(embed=params.embed.at[jnp.array([0, 5])].set(numbers))
    prefill = jax.jit(lambda params, *given: transformer.prefill(params, config, *given))
    prompts, lengths = jnp.array([[3, 4, 0, 0, 0], [7, 8, 5, 9, 0]]), jnp.array([2, 4])
    clean, found = (prefill(one, prompts, lengths) for one in (params, spoiled))
    for k, v, other_k, other_v in zip(
        found.keys, found.values, clean.keys, clean.values, strict=True
    ):
        np.testing.assert_array_equal(k[0, :, :, :2], other_k[0, :, :, :2])
        np.testing.assert_array_equal(v[0, :, :2], other_v[0, :, :2])
        assert (
            np.isfinite(v).all() and np.isfinite(k[0]).all() and np.isfinite(k[1, :, :, 4:]).all()
        )
        assert np.isnan(k[1, :, :, 2]).all()
    assert np.isnan(found.keys[1][1, :, :, 2:4]).all(), "a token that sees it is not finite either"

    bias = params.layers[1].qkv_bias.at[1, -1, 3].set(jnp.inf)  # of the values of one head
    layers = list(params.layers)
    layers[1] = layers[1].replace(qkv_bias=bias)
    found = prefill(params.replace(layers=tuple(layers)), prompts, lengths)
    assert np.isfinite(found.keys[1][:, 0]).all() and np.isfinite(found.values[1]).all()
    assert (
        np.isnan(found.keys[1][0, 1, :, :2]).all() and np.isfinite(found.keys[1][0, 1, :, 2:]).all()
    )
