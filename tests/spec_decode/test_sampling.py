"""Sampling: filters against a sort, the exact distribution of the chosen token, ties, and the recorded log-probs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from jax.sharding import NamedSharding, PartitionSpec

from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.spec_decode import noise, sampling
from tlt_jax.spec_decode.interface import Sampling

SETTINGS = [  # pairwise over temperature, top-k, top-p
    Sampling(0.5, 0, 1.0), Sampling(0.5, 3, 0.8), Sampling(0.5, 6, 0.5), Sampling(1.0, 0, 0.8), Sampling(1.0, 3, 0.5),
    Sampling(1.0, 6, 1.0), Sampling(2.0, 0, 0.5), Sampling(2.0, 3, 1.0), Sampling(2.0, 6, 0.8), Sampling(1.0, 0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(
    "setting, unrolls",
    [*((one, False) for one in (*SETTINGS, Sampling(0.0, 1, 0.1))), (SETTINGS[2], True)],
)
def test_filter_keeps_what_a_sort_keeps(x64, setting, unrolls):
    # Rounded, so that there are ties.
    logits = np.round(np.random.default_rng(0).normal(size=(40, 11)), 1)
    logits[0] = [0.0, -0.0, 0.0, -1.0, 2.0, 0.0, -0.0, 1.0, -3.0, 0.5, 0.0]
    scaled = sampling.scale(jnp.asarray(logits), setting)
    found = jax.jit(partial(sampling.filter, sampling=setting, unrolls=unrolls))(scaled)
    for row, exact in zip(np.asarray(found), logits, strict=True):
        np.testing.assert_array_equal(
            row, references.filtered(exact, setting.temperature, setting.top_k, setting.top_p)
        )


@pytest.mark.parametrize("unrolls", [False, True])
def test_filter_of_one_precision_keeps_as_many_as_requested(unrolls):
    logits = jax.random.normal(jax.random.key(0), (5, 1000))
    filter = jax.jit(partial(sampling.filter, unrolls=unrolls), static_argnames="sampling")
    kept = jnp.isfinite(filter(logits, sampling=Sampling(1.0, 37, 1.0))).sum(-1)
    np.testing.assert_array_equal(kept, 37)
    nucleus = jnp.isfinite(filter(logits, sampling=Sampling(1.0, 0, 0.9)))
    mass = (jnp.where(nucleus, jax.nn.softmax(logits), 0)).sum(-1)
    smallest = jnp.where(nucleus, jax.nn.softmax(logits), 1).min(-1)
    assert ((mass >= 0.9 - 1e-5) & (mass - smallest < 0.9 + 1e-5)).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_follow_the_exact_law(setting):
    n, logits = 200_000, np.random.default_rng(1).normal(size=8).astype(np.float32) * 1.5
    keys, positions = (
        jnp.asarray(sequence_keys(3, 0, 0, np.arange(n // 100))),
        jnp.arange(100, dtype=jnp.int32),
    )

    @jax.jit
    def tokens(keys):
        gumbel = noise.gumbel(keys, jnp.broadcast_to(positions, (len(keys), 100)), 8)
        return sampling.choose(
            sampling.filter(sampling.scale(jnp.asarray(logits), setting), setting) + gumbel
        )

    counts = np.bincount(np.asarray(tokens(keys)).ravel(), minlength=8)
    law = references.softmax(
        references.filtered(logits, setting.temperature, setting.top_k, setting.top_p)
    )
    assert counts[law == 0].sum() == 0
    expected = n * law[law > 0]
    statistic = ((counts[law > 0] - expected) ** 2 / expected).sum()
    # Chi-square, 10 tests at alpha 1e-5 each (45.3 for 7 degrees of freedom). With n = 200,000 a total-variation distance of
    # 0.01 gives a noncentrality of at least 4 n TV^2 = 80: it is found with probability 0.99; 0.005 would be missed.
    assert statistic < 45.3
    assert 0.5 * np.abs(counts / n - law).sum() < 0.01


def test_ties_go_to_the_lowest_id_whatever_the_sharding():
    values = np.random.default_rng(0).integers(0, 3, size=(64, 1, 32)).astype(np.float32)
    values[0, 0] = -np.inf
    values[0, 0, 9] = 0.0
    exact = values.argmax(-1)
    np.testing.assert_array_equal(sampling.choose(jnp.asarray(values)), exact)
    placed = jax.device_put(
        values, NamedSharding(meshes.make_mesh(1, 4), PartitionSpec(None, None, "model"))
    )
    choose = jax.jit(sampling.choose).lower(placed).compile()
    np.testing.assert_array_equal(choose(placed), exact)
    assert "all-gather" not in choose.as_text(), "only maxima cross the shards"


@pytest.mark.parametrize("unrolls", [False, True])
def test_sharded_filters_and_logprobs_equal_whole_ones(unrolls):
    setting, logits = Sampling(0.7, 20, 0.9), jax.random.normal(jax.random.key(1), (6, 1, 256))
    tokens = jnp.arange(6, dtype=jnp.int32)[:, None] * 11

    def both(logits):
        scaled = sampling.scale(logits, setting)
        kept = jnp.isfinite(sampling.filter(scaled, setting, unrolls=unrolls))
        return kept, sampling.logprob(scaled, tokens)[0]

    placed = jax.device_put(
        logits, NamedSharding(meshes.make_mesh(1, 4), PartitionSpec(None, None, "model"))
    )
    compiled = jax.jit(both).lower(placed).compile()
    kept, logprobs = compiled(placed)
    whole = jax.jit(both)(logits)
    np.testing.assert_array_equal(kept, whole[0])
    np.testing.assert_allclose(logprobs, whole[1], rtol=1e-6)
    text = compiled.as_text()
    assert "[6,1,256]" not in text and "[6,1,64,4]" not in text, "logits are never gathered"
    assert "all-gather" not in text and (" while(" in text) != unrolls


def test_recorded_logprobs_ignore_the_filters():
    logits = np.random.default_rng(2).normal(size=(3, 9)).astype(np.float32)
    tokens = jnp.array([0, 4, 8], jnp.int32)
    for setting in (Sampling(0.0), Sampling(0.6, 2, 0.5)):
        found, _ = sampling.logprob(sampling.scale(jnp.asarray(logits), setting), tokens)
        exact = np.log([references.softmax(row / (setting.temperature or 1)) for row in logits])
        np.testing.assert_allclose(found, exact[np.arange(3), tokens], rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_logits_that_no_token_can_be_drawn_from_are_detected(temperature):
    low = np.finfo(np.float32).min
    rows = {
        (1.0, 2.0, low): False, (-50.0, 80.0, low): False, (-np.inf, 0.0, low): False, (-1e4, -1e4, low): False,
        (np.nan, 1.0, 2.0): True, (1.0, np.nan, low): True, (np.inf, 1.0, 2.0): True, (-np.inf, -np.inf, low): True,
        (-np.inf, -np.inf, -np.inf): True, (np.nan, np.nan, np.nan): True, (-np.nan, 1.0, 0.0): True,
    }  # fmt: skip
    setting = Sampling(temperature, 2, 0.9)
    scaled = sampling.scale(jnp.array(list(rows), jnp.float32), setting)
    tokens = sampling.choose(sampling.filter(scaled, setting))
    _, broken = sampling.logprob(scaled, tokens)
    assert broken.tolist() == list(rows.values())
    assert all(
        token < 2 for token, bad in zip(tokens.tolist(), rows.values(), strict=True) if not bad
    )


# The smallest vocabulary for which a filter reads the largest blocks first.
WIDE = 2 * sampling.BLOCK * sampling.BLOCKS
# Standard deviations of logits: the filter keeps few tokens, and nearly all.
PEAKED, FLAT = 4.0, 0.05
FILTERS = [
    Sampling(1.0, 0, 0.9), Sampling(0.6, 20, 1.0), Sampling(0.6, 50, 0.95), Sampling(1.0, 3000, 0.7),
    Sampling(1.0, 300, 1.0),
]  # fmt: skip


def drawn(
    logits, wanted, setting: Sampling, looked: list | None = None, unrolls: bool = False
) -> np.ndarray:
    """The tokens of `draw`; `looked` collects the number of ids that noise was requested for, None for all."""
    batch, vocab = logits.shape
    keys = jnp.asarray(sequence_keys(5, 0, 0, np.arange(batch)))
    positions = jnp.full(batch, 3, jnp.int32)

    def values(rows, ids):
        every = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), (len(rows), vocab))
        if looked is not None and ids is None:
            jax.debug.callback(lambda rows: looked.extend(rows.tolist()), rows)
        ids = every if ids is None else ids
        return noise.gumbel_at(keys[rows], positions[rows], ids, logits.dtype)

    scaled = sampling.scale(jnp.asarray(logits), setting)
    draw = jax.jit(sampling.draw, static_argnums=(2, 3, 4))
    found = np.asarray(draw(scaled, jnp.asarray(wanted), setting, values, unrolls))
    jax.effects_barrier()
    return found


def chosen_from_all(logits, setting: Sampling) -> np.ndarray:
    """The same, by a sort of the whole vocabulary in NumPy."""
    keys = jnp.asarray(sequence_keys(5, 0, 0, np.arange(len(logits))))
    positions = jnp.full((len(logits), 1), 3, jnp.int32)
    ahead = np.asarray(noise.gumbel(keys, positions, logits.shape[1], logits.dtype))[:, 0]
    kept = [
        references.filtered(row, setting.temperature, setting.top_k, setting.top_p)
        for row in logits
    ]
    return np.argmax(np.array(kept) + ahead, axis=1)


def rows(kinds) -> np.ndarray:
    """Logits in float64, a row of each standard deviation, in tenths: many ties."""
    rng = np.random.default_rng(4)
    return np.round(np.array([rng.normal(size=WIDE) * kind for kind in kinds]), 1)


@pytest.mark.parametrize("setting", FILTERS)
@pytest.mark.parametrize("kinds", [(PEAKED,) * 24, (PEAKED, FLAT) * 12])
def test_the_largest_blocks_give_the_token_of_the_whole_vocabulary(x64, setting, kinds):
    logits = rows(kinds)
    found = drawn(logits, np.ones(len(kinds), bool), setting)
    np.testing.assert_array_equal(found, chosen_from_all(logits, setting))


def test_a_token_is_the_same_without_a_loop(x64):
    setting = FILTERS[2]
    logits = rows((PEAKED, FLAT) * 3)
    found = drawn(logits, np.ones(6, bool), setting, unrolls=True)
    np.testing.assert_array_equal(found, chosen_from_all(logits, setting))
    shapes = jax.ShapeDtypeStruct(logits.shape, "float32"), jax.ShapeDtypeStruct((6,), bool)

    def draw(scaled, wanted):
        return sampling.draw(scaled, wanted, setting, lambda rows, ids: scaled[rows], unrolls=True)

    assert "while" not in jax.jit(draw).lower(*shapes).as_text()


def test_the_whole_vocabulary_is_filtered_only_for_a_wanted_row_that_may_keep_more(x64):
    setting, logits = Sampling(1.0, 0, 0.9), rows((PEAKED, FLAT, PEAKED))
    for wanted, expected in (((True, False, True), []), ((True, True, True), [1])):
        looked: list[int] = []
        drawn(logits, np.array(wanted), setting, looked)
        assert looked == expected, "rows that were filtered over the whole vocabulary"


@pytest.mark.parametrize("unrolls", [False, True])
def test_a_filtered_token_does_not_depend_on_the_other_rows(unrolls):
    logits = rows((PEAKED, PEAKED, FLAT, FLAT)).astype(np.float32)
    together = drawn(logits, np.ones(4, bool), FILTERS[0], unrolls=unrolls)
    quiet = np.where(np.arange(4)[:, None] < 2, logits, rows((PEAKED,) * 4).astype(np.float32))
    alone = drawn(quiet, np.ones(4, bool), FILTERS[0], unrolls=unrolls)
    np.testing.assert_array_equal(alone[:2], together[:2])


def test_drawing_from_shards_gathers_no_logits():
    setting, mesh = Sampling(0.7, 20, 0.9), meshes.make_mesh(1, 4)
    logits = rows((PEAKED,) * 6).astype(np.float32)
    placed = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "model")))
    keys = jnp.asarray(sequence_keys(5, 0, 0, np.arange(6)))

    def draw(logits):
        at = jnp.full(6, 3, jnp.int32)
        return sampling.draw(
            sampling.scale(logits, setting), jnp.ones(6, bool), setting,
            lambda rows, ids: noise.gumbel(keys[rows], at[rows][:, None], WIDE)[:, 0]
            if ids is None
            else noise.gumbel_at(keys[rows], at[rows], ids),
        )  # fmt: skip

    compiled = jax.jit(draw).lower(placed).compile()
    np.testing.assert_array_equal(compiled(placed), drawn(logits, np.ones(6, bool), setting))
    text = compiled.as_text()
    assert (
        f"[6,{WIDE}]" not in text and f"[6,{WIDE // sampling.BLOCK},{sampling.BLOCK}]" not in text
    )


def test_the_largest_blocks_are_found_without_a_sort_of_all():
    """XLA has a program for top_k; other uses of top_k compile to a full sort, 50 times as slow."""
    wide = jax.ShapeDtypeStruct((4, 4 * WIDE), jnp.float32)
    text = jax.jit(sampling.largest_blocks).lower(wide).compile().as_text()
    assert "TopK" in text and f"f32[4,{4 * WIDE // sampling.BLOCK}]{{1,0}} sort" not in text
