"""Training and rollout compute one drafter: unrolled steps, cache, trees, meshes and layouts agree."""

from __future__ import annotations

import drafter_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import marked

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import (
    architecture,
    block_drafter,
    drafter as drafters,
    eagle,
    kv_cache,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
STEPS = 3


def unrolled(case, tokens, features, positions=None, segments=None, steps=STEPS, **options):
    """Hidden states [steps, B, T, Z]; by default every row is one segment."""
    if segments is None:
        positions, segments = cases.one_segment(tokens)
    config, dtype = cases.config(case), features.dtype.name
    run = jax.jit(
        lambda params, shared, *rows: eagle.unroll(params, config, shared, *rows, steps, **options)
    )
    params = cases.params(case, dtype, options.get("mesh"))
    return np.asarray(run(params, cases.shared(dtype), tokens, features, positions, segments))


def drafted(case, tokens, features, lengths, mesh):
    """Hidden states [B, STEPS, Z]: `lengths` slots built by windows of 4, then drafting along the given tokens."""
    config, (params, shared, group) = cases.config(case), cases.rolled(case, mesh)
    B = tokens.shape[0]
    rows = jnp.arange(B)

    @jax.jit
    def run(params, shared, cache, tokens, features):
        starts = jnp.zeros(B, jnp.int32)
        for _ in range(2):
            index = starts[:, None] + jnp.arange(4)
            window = jnp.take_along_axis(tokens, index + 1, axis=1), features[rows[:, None], index]
            cache, hidden = eagle.extend(
                params, config, shared, cache, *window, starts, jnp.minimum(lengths - 1 - starts, 3)
            )
            state = hidden[:, None]
            starts = jnp.minimum(starts + 4, lengths - 1)  # a short row writes its last slot again
        scratch, states = (
            eagle.scratch(config, B, STEPS - 1, "float64", mesh.shape["model"]),
            [state],
        )
        for level in range(STEPS - 1):
            token = tokens[rows, lengths + level + 1][:, None]
            args = (cache, scratch, token, states[-1], (lengths + level)[:, None], lengths)
            scratch, state = eagle.draft_level(
                params, config, shared, *args, jnp.ones((B, 1, level + 1), bool), level
            )
            states.append(state)
        return jnp.concatenate(states, axis=1)

    return np.asarray(run(params, shared, cases.used_cache(config, B, 16, group), tokens, features))


@pytest.mark.parametrize(
    ("case", "shape"), [*((case, (1, 1)) for case in cases.LEVELS), ("eagle3_plain", (2, 4))]
)
def test_unrolled_steps_are_what_extension_and_drafting_compute(case, shape, x64):
    tokens, features = cases.line(case, 2, 15)
    lengths = jnp.array([3, 7])
    expected = unrolled(case, tokens, features)
    found = drafted(case, tokens, features, lengths, meshes.make_mesh(*shape))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row], expected[:, row, length - 1], **EXACT)


TOLERANCE = {"float32": 1e-4, "float64": 1e-9}


@pytest.mark.parametrize(
    ("case", "dtype"),
    marked([((case, dtype), dtype == "float64") for case in cases.LEVELS for dtype in TOLERANCE]),
)
def test_hidden_states_and_logits_are_those_of_the_equations(case, dtype, x64):
    reference, tolerance = cases.files(case, dtype), TOLERANCE[dtype]
    tokens, features = cases.line(case, 1, 9, dtype)
    params, config, shared = cases.params(case, dtype), cases.config(case), cases.shared(dtype)
    hidden = unrolled(case, tokens, features, steps=2)[:, 0]
    logits = jax.jit(eagle.logits, static_argnums=1)(params, config, shared, hidden)
    slots = [(int(tokens[0, t + 1]), np.asarray(features[0, t]), True) for t in range(7)]
    line = reference.levels(slots)
    for t in range(7):
        node = int(tokens[0, t + 2]), line[t], False
        drafted = reference.levels([*slots[: t + 1], node])[-1]
        for step, state in enumerate((line[t], drafted)):
            close = {"rtol": tolerance, "atol": tolerance, "err_msg": f"step {step} at slot {t}"}
            np.testing.assert_allclose(hidden[step, t], state, **close)
            known = reference.logits(state)
            np.testing.assert_allclose(logits[step, t, : len(known)], known, **close)
            assert (logits[step, t, len(known) :] == np.finfo(dtype).min).all()


# Two rows of three levels of three nodes below children 0..2 of the root: the parent of every node is one level up.
PARENTS = [[[2, 0, 2], [1, 1, 0]], [[0, 0, 1], [2, 2, 2]]]


def test_a_node_sees_its_own_branch_only(x64):
    case = "eagle3"
    config, mesh = cases.config(case), meshes.make_mesh(1, 1)
    params, shared, _ = cases.rolled(case, mesh)
    tokens, features = cases.line(case, 2, 12)
    lengths = np.array([6, 4])
    nodes = np.random.RandomState(3).randint(0, cases.VOCAB, (3, 2, 3))

    @jax.jit
    def grow(cache):
        zeros, last = jnp.zeros(2, jnp.int32), jnp.asarray(lengths - 1, jnp.int32)
        cache, hidden = eagle.extend(
            params, config, shared, cache, tokens[:, 1:9], features[:, :8], zeros, last
        )
        state = jnp.repeat(hidden[:, None], 3, axis=1)
        scratch, seen, found = (
            eagle.scratch(config, 2, 9, "float64"),
            jnp.zeros((2, 3, 0), bool),
            [],
        )
        for level in range(3):
            if level:
                above = jnp.array([row[level - 1] for row in PARENTS])[:, :, None]
                state, seen = (jnp.take_along_axis(leaf, above, axis=1) for leaf in (state, seen))
            seen = jnp.concatenate(
                [seen, jnp.broadcast_to(jnp.eye(3, dtype=bool), (2, 3, 3))], axis=2
            )
            positions = jnp.broadcast_to(jnp.array(lengths)[:, None] + level, (2, 3))
            args = (
                cache,
                scratch,
                jnp.asarray(nodes[level], jnp.int32),
                state,
                positions,
                jnp.array(lengths),
                seen,
            )
            scratch, state = eagle.draft_level(params, config, shared, *args, level)
            found.append(state)
        return jnp.stack(found)

    found = np.asarray(grow(cases.used_cache(config, 2, 12, mesh)))
    lines, last = [], []
    for row, length in enumerate(lengths):
        for leaf in range(3):
            middle = PARENTS[row][1][leaf]
            path = [
                nodes[0, row, PARENTS[row][0][middle]],
                nodes[1, row, middle],
                nodes[2, row, leaf],
            ]
            lines.append(np.asarray(tokens[row]).copy())
            lines[-1][length + 1 : length + 4] = path
            last.append(length - 1)
    many = jnp.asarray(np.stack(lines)), jnp.repeat(features, 3, axis=0)
    expected = unrolled(case, *many, steps=4)[3, np.arange(6), last].reshape(2, 3, -1)
    np.testing.assert_allclose(found[2], expected, **EXACT)


def test_packed_segments_blocks_and_meshes_leave_every_sequence_alone(x64):
    case, steps = "eagle3_plain", 2
    tokens, features = cases.line(case, 2, 12)
    spans = [(0, 0, 7), (0, 7, 11), (1, 0, 5), (1, 5, 12)]
    segments, positions = np.zeros((2, 2, 12), np.int32)
    for number, (row, start, end) in enumerate(spans):
        segments[row, start:end], positions[row, start:end] = number + 1, np.arange(end - start)
    packed = jnp.asarray(positions), jnp.asarray(segments)
    whole = unrolled(case, tokens, features, *packed, steps=steps)
    for options in ({"block": 5}, {"mesh": meshes.make_mesh(2, 2)}):
        np.testing.assert_allclose(
            unrolled(case, tokens, features, *packed, steps=steps, **options), whole, **EXACT
        )
    alone = [
        (
            jnp.pad(tokens[r, a:b], (0, 7 - b + a)),
            jnp.pad(features[r, a:b], ((0, 7 - b + a), (0, 0))),
        )
        for r, a, b in spans
    ]
    expected = unrolled(case, *(jnp.stack(part) for part in zip(*alone, strict=True)), steps=steps)
    for number, (row, start, end) in enumerate(spans):
        for step in range(steps):
            known = end - start - 1 - step
            np.testing.assert_allclose(
                whole[step, row, start : start + known], expected[step, number, :known], **EXACT
            )
    assert np.isfinite(whole).all()


def test_gradients_reach_every_weight_alike_through_blocks(x64):
    config, shared = cases.config("eagle3"), cases.shared()
    tokens, features = cases.line("eagle3", 1, 8)
    rows = tokens, features, *cases.one_segment(tokens)
    params = cases.params("eagle3")

    def gradient(block):
        def total(learned):
            whole = learned.replace(ids=params.ids)
            hidden = eagle.unroll(whole, config, shared, *rows, 2, block)
            return jnp.sum(
                jax.nn.log_softmax(eagle.logits(whole, config, shared, hidden[1]))[..., 3]
            )

        return jax.jit(jax.grad(total))(params.replace(ids=None))

    for one, other in zip(*map(jax.tree.leaves, (gradient(8), gradient(3))), strict=True):
        assert np.abs(one).max() > 1e-4
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", ["eagle3", "dspark"])
def test_memory_of_training_grows_linearly_with_the_row(case):
    config, mesh = cases.config(case), meshes.make_mesh(1, 1)
    params = drafters.abstract(config, mesh, "train", "float32").replace(ids=None)
    shared = jax.eval_shape(lambda: cases.shared("float32"))

    def total(params, shared, features, tokens, anchors):
        rows = params, config, shared, tokens, features, tokens, tokens
        if config.is_block:
            return block_drafter.forward_blocks(*rows, anchors, block=64).sum()
        return eagle.unroll(*rows, 2, block=128).sum()

    def temporary(length):
        features = jax.ShapeDtypeStruct((1, length, config.feature_width), jnp.float32)
        rows = (jax.ShapeDtypeStruct((1, size), jnp.int32) for size in (length, length // 4))
        program = jax.jit(jax.grad(total)).lower(params, shared, features, *rows)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.2 * temporary(2048)


def test_a_drafting_loop_updates_the_donated_cache_in_place():
    config, mesh = cases.config("eagle3", head_dim=32), meshes.make_mesh(1, 1)
    batch, slots, width = 4, 512, 3
    params = drafters.abstract(config, mesh, "rollout", "float32")
    shared = jax.eval_shape(lambda: cases.shared("float32"))

    def loop(params, shared, cache, tokens, features, lengths):
        def body(carry):
            turn, cache, tokens, lengths = carry
            cache, hidden = eagle.extend(
                params, config, shared, cache, tokens, features, lengths, lengths % width
            )
            hidden = jnp.broadcast_to(hidden[:, None], (batch, width, hidden.shape[-1]))
            best = jnp.argmax(eagle.logits(params, config, shared, hidden), -1)
            scratch, seen = (
                eagle.scratch(config, batch, width, "float32"),
                jnp.ones((batch, width, width), bool),
            )
            positions = lengths[:, None] + jnp.arange(width)
            scratch, hidden = eagle.draft_level(
                params,
                config,
                shared,
                cache,
                scratch,
                best,
                hidden,
                positions,
                lengths + width,
                seen,
                0,
            )
            best = jnp.argmax(eagle.logits(params, config, shared, hidden), -1)
            return turn + 1, cache, best.astype(jnp.int32), lengths + width

        return jax.lax.while_loop(lambda carry: carry[0] < 9, body, (0, cache, tokens, lengths))[1:]

    cache = kv_cache.abstract(config.layers, batch, slots, 0, "float32", mesh)
    integers = (
        jax.ShapeDtypeStruct((batch, width), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    features = jax.ShapeDtypeStruct((batch, width, config.feature_width), jnp.float32)
    args = (params, shared, cache, integers[0], features, integers[1])
    memory = jax.jit(loop, donate_argnums=2).lower(*args).compile().memory_analysis()
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 4


def test_shift_stays_within_segments():
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0]])
    values = jnp.arange(7)[None, :, None] * jnp.ones(2)
    for by, inside in (
        (1, [1, 1, 0, 1, 0, 0, 0]),
        (2, [1, 0, 0, 0, 0, 0, 0]),
        (7, [0] * 7),
        (9, [0] * 7),
    ):
        moved, there = eagle.shift(values, segments, by)
        np.testing.assert_array_equal(there[0], np.array(inside, bool))
        np.testing.assert_array_equal(
            np.asarray(moved)[there][:, 0], np.arange(7)[np.array(inside, bool)] + by
        )
        assert moved.shape == values.shape


def test_the_head_of_a_tied_policy_is_its_embedding():
    embed = cases.shared("float32").embed
    params = architecture.Params(embed=embed, layers=(), final_norm=embed[0], head=None)
    assert drafters.shared(params).head is embed


def test_bfloat16_keeps_its_dtype_and_float32_logits():
    tokens, features = cases.line("eagle3", 1, 6, "float32")
    rough = unrolled("eagle3", tokens, features.astype("bfloat16"), steps=2)
    exact = unrolled("eagle3", tokens, features, steps=2)
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_allclose(rough[:, :, :4].astype("float32"), exact[:, :, :4], atol=0.1)
    params, config = cases.params("eagle3", "bfloat16"), cases.config("eagle3")
    assert params.ids.dtype == drafters.cast(params, "float32").ids.dtype == jnp.int32
    assert (
        eagle.logits(params, config, cases.shared("bfloat16"), jnp.asarray(rough)).dtype
        == jnp.float32
    )
