"""The policy equals transformers' numbers on every mesh, and its implementations of one thing agree."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from pairwise import matrix

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import (
    architecture,
    decoder_layer,
    hf,
    hf_config,
    kv_cache,
    layers as ops,
    transformer,
)

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The Hugging Face directory of a case, written once."""
    root = tmp_path_factory.mktemp("models")
    written = {}

    def directory(case):
        if case not in written:
            written[case] = model_cases.write(case, root / case)
        return written[case]

    return directory


@pytest.fixture(scope="module")
def goldens():
    return np.load(model_cases.GOLDENS)


def load(directory, mesh, dtype="float64"):
    config = hf_config.read_config(directory).for_sequences(model_cases.LENGTH)
    return config, hf.load(directory, config, mesh, dtype)


@cache
def program(config, dtype, **options):
    """Logits, compiled once for each shape of rows."""

    @jax.jit
    def forward(params, tokens, positions, segments):
        x, _ = transformer.hidden(
            params, config, tokens, positions, segments, compute_dtype=dtype, **options
        )
        return transformer.logits(params, config, x)

    return forward


def plain(params, config, tokens, positions=None, segments=None, dtype="float64", **options):
    """Logits of rows of tokens, without vocabulary padding; by default one segment with positions from 0."""
    tokens = jnp.asarray(tokens, jnp.int32)
    counted = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    positions = counted if positions is None else jnp.asarray(positions, jnp.int32)
    segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
    logits = program(config, dtype, **options)(params, tokens, positions, segments)
    return np.asarray(logits)[..., : config.vocab_size]


def last(params, config, line):
    """Logits after the last token of a line; no token attends to the padding behind it."""
    row = np.pad(line, (0, -len(line) % 16))[None]
    return plain(params, config, row)[0, len(line) - 1]


def rollout(params, config, mesh, dtype="float64"):
    """The weights of the last data group."""
    shardings = architecture.shardings(config, mesh, "rollout")
    reshard = jax.jit(
        partial(architecture.to_rollout, config=config, mesh=mesh, dtype=dtype),
        out_shardings=shardings,
    )
    group = meshes.data_group(mesh, mesh.shape["data"] - 1)
    return meshes.view(reshard(params), group), group


# Each family is compared in float32 on a mesh.
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.matrix), "float64"])
@pytest.mark.parametrize("case", model_cases.CASES)
def test_logits_equal_those_of_transformers(case, dtype, directories, goldens, x64):
    config, params = load(directories(case), meshes.make_mesh(1, 1), dtype)
    logits = plain(params, config, model_cases.TOKENS, dtype=dtype)
    assert logits.dtype == dtype
    np.testing.assert_allclose(logits, goldens[case], rtol=0, atol=TOLERANCE[dtype])


@matrix(dtype=TOLERANCE, shape=MESHES[1:], family=model_cases.FAMILIES)
def test_logits_are_the_same_on_every_mesh(family, shape, dtype, directories, goldens, x64):
    mesh = meshes.make_mesh(*shape)
    config, params = load(directories(family), mesh, dtype)
    tokens = np.repeat(model_cases.TOKENS, 2, axis=0)
    logits = plain(params, config, tokens, dtype=dtype, mesh=mesh)
    np.testing.assert_allclose(
        logits, np.repeat(goldens[family], 2, axis=0), rtol=0, atol=TOLERANCE[dtype]
    )


# Node 0 is the root; 1 and 2 its children, 3 a child of 1, 4 junk that attends to itself only and that no node attends to.
PARENTS = [0, 0, 0, 1, 4]
DEPTHS = [0, 1, 1, 2, 0]
PATHS = {1: [0, 1], 2: [0, 2], 3: [0, 1, 3]}


def ancestors():
    seen = np.eye(len(PARENTS), dtype=bool)
    for node, parent in enumerate(PARENTS):
        if node < 4:
            seen[node] |= seen[parent]
    return np.stack([seen, seen])


def prefilled(
    weights, config, group, tokens, lengths, slots, captures=(), captures_states=False, rings=()
):
    """A cache of two sequences that hold their first `lengths` tokens."""
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    rest = tokens, lengths, captures, 4, captures_states
    prefill = partial(transformer.prefill, rings=rings)
    kept = jax.jit(lambda weights: prefill(weights, config, *rest))(weights)
    width = len(captures) * config.hidden_size
    sizes = 2, slots, width, weights.embed.dtype, group, captures_states, rings
    cache = model_cases.empty_cache(config, *sizes)
    return jax.jit(kv_cache.insert)(cache, kept, jnp.arange(2), jnp.arange(2))


@cache
def tree_program(config, captures):
    """The forward of tree nodes, compiled once for each shape of them and of the cache."""

    @jax.jit
    def forward(weights, cache, lengths, *nodes):
        return transformer.tree_forward(weights, config, *nodes, cache, lengths, *captures)

    return forward


def grow(weights, config, cache, nodes, lengths, depths, seen, *captures):
    positions = np.asarray(lengths)[:, None] + np.asarray(depths)
    arrays = (jnp.asarray(nodes, jnp.int32), jnp.asarray(positions, jnp.int32), jnp.asarray(seen))
    return tree_program(config, captures)(weights, cache, jnp.asarray(lengths, jnp.int32), *arrays)


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        *[("qwen2", (1, 1)), ("qwen3", (2, 2)), ("llama_bias", (1, 4)), ("smollm3", (1, 1))],
        *[("granite", (1, 2)), ("olmo3", (1, 4)), ("gemma3", (1, 1)), ("qwen2_windows", (2, 1))],
        *[("phi3_long", (1, 2)), ("gemma4", (1, 1)), ("gemma4_keys", (1, 2))],
    ],
)
def test_a_tree_node_gets_the_logits_of_its_own_path(case, shape, directories, x64):
    mesh = meshes.make_mesh(*shape)
    config, params = load(directories(case), mesh)
    weights, group = rollout(params, config, mesh)
    lengths, tokens = [6, 3], model_cases.TOKENS
    cache = prefilled(weights, config, group, tokens[:, :7], lengths, slots=16)
    nodes = np.array([[tokens[0, 6], 5, 8, 2, 9], [tokens[1, 3], 30, 1, 7, 9]])
    logits, scratch = grow(weights, config, cache, nodes, lengths, DEPTHS, ancestors())
    assert scratch.features.shape == (2, 5, 0)
    for row in range(2):
        for node, path in PATHS.items():
            line = np.concatenate([tokens[row, : lengths[row]], nodes[row, path]])
            expected = last(params, config, line)
            np.testing.assert_allclose(
                logits[row, node, : config.vocab_size], expected, rtol=0, atol=1e-9
            )
    check_commit(weights, config, params, cache, scratch, nodes, lengths)


def check_commit(weights, config, params, cache, scratch, nodes, lengths):
    """After the path 0, 1, 3 (then junk) is committed, the next token sees what a fresh forward pass sees."""
    path, kept = jnp.array([[0, 1, 3], [0, 2, 2]], jnp.int32), np.array([3, 2])
    cache = jax.jit(kv_cache.commit)(cache, scratch, path, jnp.asarray(lengths, jnp.int32))
    following = np.array([[11], [12]])
    logits, _ = grow(
        weights, config, cache, following, lengths + kept, [0], np.ones((2, 1, 1), bool)
    )
    for row in range(2):
        line = [
            *model_cases.TOKENS[row, : lengths[row]],
            *nodes[row, path[row, : kept[row]]],
            following[row, 0],
        ]
        expected = last(params, config, line)
        np.testing.assert_allclose(logits[row, 0, : config.vocab_size], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("gemma3", (1, 1)),
        ("smollm3_windows", (1, 2)),
        ("mistral_window", (2, 1)),
        ("gemma4", (1, 2)),
    ],
)
def test_a_layer_with_a_window_needs_slots_for_it_and_for_a_path(case, shape, directories, x64):
    """Of two sequences one is longer than the slots from the start, the other after some rounds; the cache grows once."""
    mesh, random = meshes.make_mesh(*shape), np.random.RandomState(1)
    config, params = load(directories(case), mesh)
    weights, group = rollout(params, config, mesh)
    windows = [config.windows[layer] for layer in config.cached_layers]
    rings = tuple(window + 3 if window else 0 for window in windows)
    lines = [[*model_cases.TOKENS[0, :10]], [*model_cases.TOKENS[1, :2]]]
    tokens = np.stack([np.pad(line, (0, 10 - len(line))) for line in lines])
    cache = prefilled(weights, config, group, tokens, [10, 2], 13, rings=rings)
    for number in range(5):
        lengths = [len(line) for line in lines]
        nodes = random.randint(0, config.vocab_size, (2, len(PARENTS)))
        logits, scratch = grow(weights, config, cache, nodes, lengths, DEPTHS, ancestors())
        for row in range(2):
            for node, path in PATHS.items():
                expected = last(params, config, np.array([*lines[row], *nodes[row, path]]))
                found = logits[row, node, : config.vocab_size]
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        path, kept = jnp.array([[0, 1, 3], [0, 2, 2]], jnp.int32), (3, 2)
        cache = jax.jit(kv_cache.commit)(cache, scratch, path, jnp.asarray(lengths, jnp.int32))
        lines = [line + [*nodes[i, path[i, : kept[i]]]] for i, line in enumerate(lines)]
        if not number:
            cache = kv_cache.resize(cache, jnp.array([1, 0]), 32)
            lines = lines[::-1]
    slots = [keys.shape[3] for keys in cache.keys]
    assert slots == [ring or 32 for ring in rings] and min(slots) < min(map(len, lines))


def test_features_are_the_captured_hidden_states_in_every_forward(directories, x64):
    mesh = meshes.make_mesh(1, 2)
    config, params = load(directories("qwen2"), mesh)
    weights, group = rollout(params, config, mesh)
    tokens, lengths, captures = (
        model_cases.TOKENS,
        [4, 4],
        (1, config.num_layers, architecture.NORMED),
    )
    cache = prefilled(
        weights, config, group, tokens[:, :4], lengths, 8, captures, captures_states=True
    )
    chain = np.broadcast_to(np.tril(np.ones((2, 2), bool)), (2, 2, 2))
    _, scratch = grow(
        weights, config, cache, tokens[:, 4:6], lengths, [0, 1], chain, captures, True
    )
    path = jnp.array([[0, 1], [0, 1]])
    cache = jax.jit(kv_cache.commit)(cache, scratch, path, jnp.asarray(lengths))
    ones, positions = jnp.ones((2, 6), jnp.int32), jnp.broadcast_to(jnp.arange(6), (2, 6))
    arrays = (jnp.asarray(tokens[:, :6], jnp.int32), positions, ones)
    forward = partial(transformer.hidden, compute_dtype="float64", captures=captures)
    hidden, features = jax.jit(forward, static_argnums=1)(params, config, *arrays)
    np.testing.assert_allclose(cache.features[:, :6], features, rtol=0, atol=1e-9)
    np.testing.assert_allclose(cache.states[:, :6], hidden, rtol=0, atol=1e-9)
    assert kv_cache.resize(cache, jnp.array([1]), 10).states.shape == (1, 10, config.hidden_size)
    first, last, normed = jnp.split(features, 3, axis=-1)
    np.testing.assert_array_equal(normed, hidden)
    x = params.embed[arrays[0]]
    layer = jax.tree.map(lambda leaf: leaf[0], params.layers)

    @jax.jit
    def one_layer(layer, x):
        angles = decoder_layer.packed_angles(config, positions, "float64")
        return decoder_layer.packed_layer(layer, config, x, angles, ones, 512)[0]

    np.testing.assert_allclose(first, one_layer(layer, x), atol=1e-12)
    np.testing.assert_allclose(
        ops.rms_norm(last, params.final_norm, config.rms_eps), normed, atol=1e-12
    )


def test_packed_segments_equal_separate_rows_and_padding_changes_nothing(directories, x64):
    config, params = load(directories("qwen3"), meshes.make_mesh(1, 1))
    first, second = model_cases.TOKENS[0, :7], model_cases.TOKENS[1, :4]
    row = np.concatenate([first, [17], second, [0, 0, 0]])[None]
    positions = np.array([[*range(7), 0, *range(4), 0, 0, 0]])
    segments = np.array([[1] * 7 + [0] + [2] * 4 + [0] * 3])
    for block in (4, 512):
        packed = plain(params, config, row, positions, segments, block=block)[0]
        np.testing.assert_allclose(
            packed[:7], plain(params, config, first[None])[0], rtol=0, atol=1e-9
        )
        np.testing.assert_allclose(
            packed[8:12], plain(params, config, second[None])[0], rtol=0, atol=1e-9
        )
        assert np.isfinite(packed).all()


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(("full",) * 2, marks=pytest.mark.matrix),
        ("attention",) * 2,
        pytest.param(("products",) * 2, marks=pytest.mark.matrix),
        ("products", "full"),
    ],
)
def test_remat_and_blocks_leave_gradients_alone(directories, x64, remat):
    config, params = load(directories("llama_bias"), meshes.make_mesh(1, 1))
    tokens = jnp.asarray(model_cases.TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def gradient(**options):
        def total(params):
            args = (params, config, tokens, positions, jnp.ones_like(tokens))
            return jnp.sum(transformer.hidden(*args, compute_dtype="float64", **options)[0] ** 3)

        return jax.jit(jax.grad(total))(params)

    for one, other in zip(
        *map(jax.tree.leaves, (gradient(), gradient(remat=remat, block=4))), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_padded_vocabulary_is_never_chosen(directories):
    config, params = load(directories("qwen2"), meshes.make_mesh(1, 1), "float32")
    logits = transformer.logits(params, config, jnp.ones((2, config.hidden_size)))
    assert logits.shape == (2, architecture.padded_vocab(config, 1)) == (2, 64)
    assert (logits[:, 37:] == jnp.finfo(jnp.float32).min).all()
    assert (logits[:, :37] > -1e3).all()


def test_bfloat16_is_computed_with_float32_logits(directories):
    mesh = meshes.make_mesh(1, 2)
    config, params = load(directories("llama"), mesh, "float32")
    weights, group = rollout(params, config, mesh, "bfloat16")
    cache = model_cases.empty_cache(config, 2, 8, 0, "bfloat16", group)
    logits, scratch = grow(
        weights, config, cache, [[1], [2]], [0, 0], [0], np.ones((2, 1, 1), bool)
    )
    assert logits.dtype == jnp.float32
    assert scratch.keys[0].dtype == jnp.bfloat16
    expected = plain(params, config, [[1], [2]], dtype="bfloat16")
    np.testing.assert_allclose(logits[..., :37], expected, atol=0.1)
    np.testing.assert_allclose(
        expected, plain(params, config, [[1], [2]], dtype="float32"), atol=0.2
    )


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((1, 3), {}, "4 attention heads.*use one of \\[1, 2, 4\\]"),
        ((1, 8), {}, "use one of \\[1, 2, 4\\]"),
        (
            (1, 2),
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "3 attention heads.*use one of \\[1\\]",
        ),
        ((3, 1), {}, "hidden_size 32: use one of \\[1, 2, 4\\]"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(shape, sizes, message):
    config = hf_config.new_config(model_cases.SMALL | sizes, 37, ())
    with pytest.raises(ValueError, match=message):
        architecture.abstract(config, meshes.make_mesh(*shape), "train", "float32")


def test_fewer_kv_heads_than_the_model_axis_are_repeated(directories):
    mesh = meshes.make_mesh(1, 4)
    config, params = load(directories("llama"), mesh, "float32")
    assert architecture.rollout_kv_heads(config, 4) == 4
    assert kv_cache.abstract(config, 2, 8, 0, "float32", mesh).keys[0].shape == (2, 4, 8, 8)
    weights, _ = rollout(params, config, mesh, "float32")
    heads = np.asarray(weights.layers[1].qkv)  # of each KV head: its query, its key, its value
    assert heads.shape == (4, 3, 8, 32)
    q, k, v = (np.asarray(getattr(params.layers, name)[1]) for name in "qkv")
    np.testing.assert_array_equal(heads[:, 0], q.reshape(4, 8, 32))
    np.testing.assert_array_equal(heads[:, 1], np.repeat(k.reshape(2, 8, 32), 2, axis=0))
    np.testing.assert_array_equal(heads[:, 2], np.repeat(v.reshape(2, 8, 32), 2, axis=0))


def test_products_over_tokens_have_the_gradients_that_jax_derives(x64):
    random = np.random.default_rng(0)
    x, weight = jnp.asarray(random.normal(size=(2, 5, 3))), jnp.asarray(random.normal(size=(4, 3)))
    slope = random.normal(size=(2, 5, 4))

    def gradient(product):
        return jax.grad(lambda given: jnp.sum(product(*given) * slope))((x, weight))

    derived = gradient(lambda x, weight: jnp.einsum("...i,oi->...o", x, weight))
    for one, other in zip(derived, gradient(ops.linear), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
