"""Training and rollout compute one block drafter, which an independent reference computes too; masks are pinned."""

from __future__ import annotations

import drafter_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import marked

from tlt_jax.distributed import mesh as meshes
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import block_drafter

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def drafted(case, tokens, features, lengths, mesh, levels=None):
    """Hidden states [B, P, Z] and logits of a block after `lengths` slots, written in windows of 4 to a used cache.

    P is `levels`, by default all that the block drafts.
    """
    config, (params, shared, group) = cases.config(case), cases.rolled(case, mesh)
    B, levels = tokens.shape[0], levels or config.depth
    rows = jnp.arange(B, dtype=jnp.int32)
    cache = cases.used_cache(config, B, 16, group)

    @jax.jit
    def run(params, shared, cache, tokens, features):
        starts = jnp.zeros(B, jnp.int32)
        for turn in range(3):
            at = starts[:, None] + jnp.arange(4)
            window = tokens[rows[:, None], at + 1], features[rows[:, None], at]
            if turn == 1:
                cache = block_drafter.fill(params, config, shared, cache, *window, rows, starts)
            else:
                cache, _ = block_drafter.extend(
                    params, config, shared, cache, *window, starts, starts
                )
            starts = jnp.minimum(starts + 4, jnp.asarray(lengths))
        hidden = block_drafter.draft_block(
            params,
            config,
            shared,
            cache,
            tokens[rows, lengths],
            jnp.asarray(lengths),
            levels,
            Fused.of(group),
        )
        return hidden, block_drafter.logits(params, config, shared, hidden)

    return jax.tree.map(
        np.asarray, run(params, shared, cache, *map(jnp.asarray, (tokens, features)))
    )


def trained(case, tokens, features, anchors, segments=None, mesh=None, block=512, positions=None):
    """Hidden states [R, A, P, Z] of forward_blocks; by default every row is one segment."""
    config = cases.config(case)
    if segments is None:
        positions, segments = cases.one_segment(tokens)

    def run(params, shared, *rows):
        return block_drafter.forward_blocks(params, config, shared, *rows, block=block, mesh=mesh)

    rows = tokens, features, positions, segments, anchors
    return np.asarray(jax.jit(run)(cases.params(case, mesh=mesh), cases.shared(), *rows))


LENGTHS = np.array([3, 7], np.int32)


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        *((case, (1, 1)) for case in cases.BLOCKS),
        ("dspark", (2, 2)),
        ("dflash2", (2, 2)),
        ("dspark_whole", (2, 4)),
    ],
)
def test_a_draft_and_training_compute_what_the_reference_computes(case, shape, x64):
    tokens, features = cases.line(case, 2, 15)
    mesh = meshes.make_mesh(*shape)
    hidden, logits = drafted(case, tokens, features, LENGTHS, mesh)
    if cases.config(case).kind != "dspark":
        some, _ = drafted(case, tokens, features, LENGTHS, mesh, levels=2)
        np.testing.assert_allclose(some, hidden[:, :2], **EXACT)
    blocks = trained(case, tokens, features, LENGTHS[:, None], mesh=mesh)[:, 0]
    for row, length in enumerate(np.asarray(LENGTHS)):
        wanted = cases.reference(case, tokens[row, length], features[row, :length])
        np.testing.assert_allclose(hidden[row], wanted, **EXACT)
        np.testing.assert_allclose(blocks[row], wanted, **EXACT)
        head = np.asarray(cases.shared().head)
        head = head[: cases.VOCAB] if cases.config(case).has_full_vocab else head[cases.IDS]
        np.testing.assert_allclose(logits[row, :, : len(head)], wanted @ head.T, **EXACT)
        assert (logits[row, :, len(head) :] == np.finfo(np.float64).min).all()


# Two rows of two segments and padding; anchors at the first token of a segment, and at its last.
SEGMENTS = np.array([[1] * 6 + [2] * 5 + [0] * 2, [1] * 3 + [2] * 10], np.int32)
PLACES = np.array([[*range(6), *range(5), 0, 0], [*range(3), *range(10)]], np.int32)
ANCHORS = np.array([[5, 6, 0, 9, -1], [2, 12, 3, -1, 7]], np.int32)


@pytest.mark.parametrize(
    ("case", "block"),
    marked([
        ((case, block), (case, block) in (("dflash", 8), ("dflash_causal", 1), ("dflash2", 8), ("dspark", 512)))
        for case in ("dflash", "dflash_causal", "dflash2", "dspark") for block in (512, 8, 1)
    ]),
)  # fmt: skip
def test_a_block_sees_its_segment_before_its_anchor_and_itself(case, block, x64):
    tokens, features = cases.line(case, 2, 13)
    found = trained(case, tokens, features, ANCHORS, SEGMENTS, block=block, positions=PLACES)
    for row, anchor in np.argwhere(ANCHORS >= 0):
        at = ANCHORS[row, anchor]
        begin = at - PLACES[row, at]
        wanted = cases.reference(case, tokens[row, at], features[row, begin:at])
        np.testing.assert_allclose(found[row, anchor], wanted, **EXACT)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    "case", ["dspark", "dflash2_some", pytest.param("dflash_causal", marks=pytest.mark.matrix)]
)
def test_gradients_do_not_depend_on_the_chunks(case, x64):
    config, shared = cases.config(case), cases.shared()
    tokens, features = cases.line(case, 2, 13)

    def gradient(block):
        def total(trained, features):
            params = trained.replace(ids=cases.params(case).ids)
            rows = (*map(jnp.asarray, (tokens, features, PLACES, SEGMENTS, ANCHORS)),)
            hidden = block_drafter.forward_blocks(params, config, shared, *rows, block=block)
            scores = block_drafter.logits(params, config, shared, hidden)
            return jnp.sum(jnp.where((ANCHORS >= 0)[..., None], scores[..., 3], 0))

        trained = cases.params(case).replace(ids=None)
        return jax.jit(jax.grad(total, argnums=(0, 1)))(trained, features)

    (one, seen), (other, _) = gradient(512), gradient(4)
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        name = jax.tree_util.keystr(path)
        assert ("markov" in name or "confidence" in name) == (np.abs(leaf).max() < 1e-4), name
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    # The tokens of each segment that lie before one of its anchors.
    used = {(0, t) for t in (*range(5), *range(6, 9))} | {
        (1, t) for t in (*range(2), *range(3, 12))
    }
    touched = {tuple(map(int, place)) for place in np.argwhere(np.abs(seen).max(-1) > 0)}
    assert touched == used


def test_the_heads_of_dspark_are_linear_in_what_they_read(x64):
    params, reference = cases.params("dspark"), cases.files("dspark")
    random = np.random.RandomState(3)
    hidden, tokens = random.randn(2, 3, 16), random.randint(0, cases.VOCAB, (2, 3))
    embedding = block_drafter.markov_embedding(params, jnp.asarray(tokens), "float64")
    wanted = reference.files["markov_head.markov_w1.weight"][tokens]
    np.testing.assert_array_equal(embedding, wanted)
    bias = block_drafter.markov_bias(params, embedding, jnp.asarray(hidden))
    wanted = reference.linear("markov_head.markov_w2", wanted)[..., cases.IDS]
    np.testing.assert_allclose(bias, wanted, **EXACT)
    both = np.concatenate([hidden, embedding], -1)
    odds = block_drafter.confidence(params, jnp.asarray(hidden), embedding)
    np.testing.assert_allclose(
        odds, reference.linear("confidence_head.proj", both)[..., 0], **EXACT
    )
    bare = block_drafter.markov_embedding(
        cases.params("dspark_bare"), jnp.asarray(tokens), "float64"
    )
    assert bare.shape == (2, 3, 0)


@pytest.mark.parametrize("case", ["dflash2", "dflash2_some"])
def test_a_selector_gates_the_token_before_by_the_hidden_state(case, x64):
    """And shares among its candidates what they had, as their sums say."""
    params, reference = cases.params(case), cases.files(case)
    random = np.random.RandomState(3)
    hidden, tokens = random.randn(2, 1, 16), random.randint(0, cases.VOCAB, (2, 3))
    places = random.randint(0, len(cases.IDS), (2, 1, 4))
    ids = np.arange(cases.VOCAB) if cases.config(case).has_full_vocab else cases.IDS
    embedding = block_drafter.markov_embedding(params, jnp.asarray(tokens), "float64")
    given = params, embedding, jnp.asarray(hidden)
    names = "hidden_projection.weight", "predecessor_codebook", "successor_codebook"
    gate, before, after = (reference.files[f"candidate_selector.{name}"] for name in names)
    wanted = np.zeros((2, 3, len(ids)))
    for row, node, place in np.ndindex(wanted.shape):
        gated = before[tokens[row, node]] * (gate @ hidden[row, 0])
        wanted[row, node, place] = gated @ after[ids[place]]
    found = block_drafter.markov_bias(*given)[..., : len(ids)]
    np.testing.assert_allclose(found, wanted, **EXACT)
    found = block_drafter.markov_bias(*given, jnp.asarray(places))
    np.testing.assert_allclose(found, np.take_along_axis(wanted, places, -1), **EXACT)

    shares, bias = np.array([0.4, 0.2, 0.1]), np.array([0.5, -1.0, 3.0])
    found = np.exp(block_drafter.selected(jnp.log(shares), jnp.asarray(bias)))
    weights = shares * np.exp(bias)
    np.testing.assert_allclose(found, 0.7 * weights / weights.sum(), **EXACT)
    nothing = block_drafter.selected(jnp.full(2, -jnp.inf), jnp.zeros(2))
    assert (nothing == -jnp.inf).all()
