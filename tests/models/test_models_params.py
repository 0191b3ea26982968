"""New weights of both networks are pinned bit by bit: which part of the key draws what, and what is not drawn."""

from __future__ import annotations

import drafter_cases
import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import architecture, drafter as drafters, hf_config, layers, params as trees
from tlt_jax.models.params import Weight, abstract, init, shardings

IN_LAYER = (
    "attention_norm", "q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm", "mlp_norm",
    "gate", "up", "down", "gate_bias", "up_bias", "down_bias",
)  # fmt: skip
POLICY = (".embed", *(f".layers.{name}" for name in IN_LAYER), ".final_norm", ".head")
DRAFTER = (
    ".fuse", ".fuse_bias", ".feature_norms", ".hidden_norm", *(f".layers.{name}" for name in IN_LAYER),
    ".attention_conv.taps", ".attention_conv.change", ".mlp_conv.taps", ".mlp_conv.change", ".final_norm", ".markov_gate",
    ".markov_in", ".markov_out", ".confidence", ".confidence_bias", ".head", ".ids",
)  # fmt: skip


def expected(params, order, key, std, vocab, padded, ids=None):
    """The expected draws for arrays of these shapes: part i of the key for the i-th array of `order` that exists."""
    found = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    names = [name for name in order if name in found]
    assert set(names) == set(found)

    def start(name, key):
        shape, dtype = found[name].shape, found[name].dtype
        if name == ".ids":
            return jnp.asarray(ids)
        if "norm" in name:
            return jnp.ones(shape, dtype)
        if "bias" in name or name in (".markov_out", ".confidence") or name.endswith("change"):
            return jnp.zeros(shape, dtype)
        if name.endswith("taps"):
            return jnp.zeros(shape, dtype).at[:, :, 0].set(1)
        if name == ".markov_gate":
            return jax.random.uniform(key, shape, dtype, -(shape[1] ** -0.5), shape[1] ** -0.5)
        drawn = std * jax.random.normal(key, shape, dtype)
        return (
            jnp.where(jnp.arange(shape[0])[:, None] < vocab, drawn, 0) if name in padded else drawn
        )

    def start_all(key):
        parts = jax.random.split(key, len(names))
        return {name: start(name, part) for name, part in zip(names, parts, strict=True)}

    wanted = jax.jit(start_all)(key)
    return {name: (found[name], wanted[name]) for name in names}


def assert_drawn(pairs):
    for name, (found, wanted) in pairs.items():
        assert found.dtype == wanted.dtype, name
        np.testing.assert_array_equal(np.asarray(found), wanted, err_msg=name)


@pytest.mark.parametrize(
    ("case", "shape", "dtype"),
    [
        ("qwen2", (2, 2), "bfloat16"),
        ("qwen3_bias", (1, 1), "float32"),
        pytest.param("llama_bias", (2, 2), "float32", marks=pytest.mark.matrix),
    ],
)
def test_each_weight_of_a_new_policy_has_its_part_of_the_key(case, shape, dtype, key):
    config = hf_config.from_hf_config(model_cases.raw_config(case))
    params = architecture.init(config, meshes.make_mesh(*shape), key, dtype)
    padded = (".embed", ".head")
    assert_drawn(expected(params, POLICY, key, config.init_std, config.vocab_size, padded))
    assert params.embed.shape == (64, 32), "padding is drawn too, then zero"


@pytest.mark.parametrize(
    ("case", "shape", "dtype"),
    [
        pytest.param("eagle", (1, 1), "float32", marks=pytest.mark.matrix),
        ("eagle_bias", (2, 2), "bfloat16"),
        ("eagle3", (2, 2), "float32"),
        ("dspark", (2, 2), "float32"),
        ("dflash2", (2, 2), "float32"),
        pytest.param("eagle3_plain", (1, 1), "bfloat16", marks=pytest.mark.matrix),
    ],
)
def test_each_weight_of_a_new_drafter_has_its_part_of_the_key(case, shape, dtype, key):
    config = drafter_cases.config(case)
    ids = None if config.has_full_vocab else drafter_cases.IDS.astype(np.int32)
    params = drafters.init(config, meshes.make_mesh(*shape), key, dtype, ids)
    padded = (".markov_in", *([".head"] if config.has_full_vocab else []))
    sizes = config.layers
    pairs = expected(params, DRAFTER, key, sizes.init_std, sizes.vocab_size, padded, ids)
    assert_drawn(pairs)
    np.testing.assert_array_equal(params.ids, ids)


def test_a_tree_of_weights_gives_shardings_abstract_arrays_and_values_alike(key):
    mesh = meshes.make_mesh(2, 4)
    spec = {
        "ids": Weight((3,), (None,), "ids"),
        "norm": Weight((8,), (None,), "ones"),
        "table": Weight((8, 4), ("vocab", "embed"), num_rows=5),
    }
    values = init(spec, mesh, key, "bfloat16", 0.5, ids=[4, 5, 7])
    wanted = abstract(spec, mesh, "train", "bfloat16")
    assert jax.tree.map(lambda leaf: leaf.sharding, values) == shardings(spec, mesh, "train")
    for name, leaf in values.items():
        described = (wanted[name].shape, wanted[name].dtype, wanted[name].sharding)
        assert (leaf.shape, leaf.dtype, leaf.sharding) == described
    assert values["ids"].dtype == jnp.int32
    assert values["ids"].tolist() == [4, 5, 7]
    assert (values["table"][:5] != 0).all()
    assert (values["table"][5:] == 0).all()


def test_matrices_are_split_over_both_axes_in_training_and_over_model_in_a_rollout():
    """By hand, as in Megatron: rows of q, gate and the head, columns of o and down; k and v where their heads divide."""
    mesh, config = meshes.make_mesh(2, 4), drafter_cases.config("eagle3")
    names = ("q", "o", "gate", "down")
    for sizes in (config, config.layers):
        module = drafters if sizes is config else architecture
        train, rollout = (module.shardings(sizes, mesh, layout) for layout in ("train", "rollout"))
        depth = () if sizes is config else (None,)  # a policy's layers are stacked in training
        split = P(*depth, "model", "data"), P(*depth, "data", "model")
        assert [getattr(train.layers, name).spec for name in names] == [*split, *split]
        layer = rollout.layers[0] if depth else rollout.layers
        assert (layer.o.spec, layer.down.spec) == (P(None, "model"), P(None, "model"))
        assert (train.head.spec, rollout.head.spec) == (P("model", "data"), P("model"))
        assert not train.final_norm.spec


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_a_tiled_matrix_multiplies_as_the_whole(x64, monkeypatch, count):
    for name, value in {"TILE": 4, "GROUP": 3, "COLUMNS": 8}.items():
        monkeypatch.setattr(trees, name, value)
    random = np.random.default_rng(0)
    matrix, x = random.normal(size=(2, 5, 4, 7)), random.normal(size=(7, count, 1))
    tiles = jax.jit(trees.tile)(matrix)
    assert tiles.shape == matrix.shape and {len(part) for part in tiles.parts} == {2, 3}
    found = jax.jit(layers.project, static_argnums=3)(jnp.asarray(x), tiles, None, 0)
    np.testing.assert_allclose(found, np.einsum("kjei,icd->kjecd", matrix, x), atol=1e-12)
    found = jax.jit(layers.project, static_argnums=3)(jnp.moveaxis(x, 0, -1), tiles, None, -1)
    np.testing.assert_allclose(found, np.einsum("kjei,icd->cdkje", matrix, x), atol=1e-12)


def test_a_rollout_tiles_large_matrices_on_a_cpu_that_does_not_split_them(monkeypatch):
    config = drafter_cases.config("eagle3").layers
    monkeypatch.setattr(trees, "FEWEST", config.vocab_size * config.hidden_size)

    def of(model_axis, layout="rollout", dtype="float32"):
        return architecture.abstract(config, meshes.make_mesh(1, model_axis), layout, dtype)

    assert isinstance(of(1).head, trees.Tiles)
    assert not isinstance(of(1).layers[0].o, trees.Tiles), "small"
    assert not isinstance(of(1, dtype="bfloat16").head, trees.Tiles)
    assert not isinstance(of(2).head, trees.Tiles) and not isinstance(
        of(1, "train").head, trees.Tiles
    )
