"""Profiles of both networks are readable: operations of a program carry the names of their parts."""

from __future__ import annotations

import re

import drafter_cases
import jax
import jax.numpy as jnp
import model_cases

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import (
    architecture,
    drafter as drafters,
    eagle,
    hf_config,
    kv_cache,
    transformer,
)


def array(*shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def paths(function, *args):
    """The scopes that operations of the lowered program lie in, transformations left out."""
    text = jax.jit(function).lower(*args).as_text(debug_info=True)
    names = re.findall(r'loc\("([^"]*)"', text)
    return {
        re.sub(r"jit\(.*?\)/|while/|body/|closed_call/|checkpoint/", "", name) for name in names
    }


def assert_named(found, *wanted):
    missing = [scope for scope in wanted if not any(f"{scope}/" in path for path in found)]
    assert not missing, (missing, sorted(found))


def test_the_policy_names_its_parts():
    config, mesh = hf_config.from_hf_config(model_cases.raw_config("llama")), meshes.make_mesh(1, 1)
    layer, rows = ("layer/attention", "layer/mlp"), array(2, 4)
    train = architecture.abstract(config, mesh, "train", "float32")
    weights = architecture.abstract(config, mesh, "rollout", "float32")
    cache = kv_cache.abstract(config, 2, 8, 0, "float32", mesh)

    def score(params, *rows):
        hidden, _ = transformer.hidden(params, config, *rows, compute_dtype="float32")
        return transformer.logits(params, config, hidden)

    def prefill(params, tokens, lengths):
        return transformer.prefill(params, config, tokens, lengths)

    def grow(params, *rest):
        return transformer.tree_forward(params, config, *rest)

    assert_named(paths(score, train, rows, rows, rows), "embed", "head", *layer)
    scopes = ("prefill/embed", *(f"prefill/{scope}" for scope in layer))
    assert_named(paths(prefill, weights, rows, array(2)), *scopes)
    tree = (rows, rows, array(2, 4, 4, dtype="bool"), cache, array(2))
    assert_named(paths(grow, weights, *tree), "embed", "head", *layer)


def test_the_drafter_names_its_parts():
    config, mesh = drafter_cases.config("eagle3"), meshes.make_mesh(1, 1)
    params = drafters.abstract(config, mesh, "rollout", "float32")
    shared = jax.eval_shape(lambda: drafter_cases.shared("float32"))
    cache = kv_cache.abstract(config.layers, 2, 8, 0, "float32", mesh)

    def draft(params, shared, cache, tokens, features, lengths):
        cache, hidden = eagle.extend(
            params, config, shared, cache, tokens, features, lengths, lengths
        )
        node = jnp.argmax(eagle.logits(params, config, shared, hidden), -1)[:, None]
        scratch, seen = eagle.scratch(config, 2, 1, "float32"), jnp.ones((2, 1, 1), bool)
        nodes = (node, hidden[:, None], lengths[:, None], lengths, seen)
        return eagle.draft_level(params, config, shared, cache, scratch, *nodes, 0)

    features = array(2, 4, config.feature_width, dtype="float32")
    found = paths(draft, params, shared, cache, array(2, 4), features, array(2))
    inner = [
        f"drafter/{part}/{scope}" for part in ("extend", "step") for scope in ("attention", "mlp")
    ]
    assert_named(found, "drafter/head", *inner)
