"""After rounds with a drafter, the caches of policy and drafter equal those of fresh passes over the emitted tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds

from tlt_jax.keys import sequence_keys
from tlt_jax.models import block_drafter, drafter as drafters, eagle
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.spec_decode import tree_drafter
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import Strategy

MODEL = ModelConfig("qwen2", 37, 16, 2, 4, 2, 4, 32, 64, qkv_bias=True, tied=True, init_std=0.2)
PROMPTS, SAMPLES, LIMIT, ROUNDS = (
    [[3, 1, 4, 1, 5], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [9], [36, 10]],
    2,
    40,
    8,
)
TREE = Strategy(depth=3, topk=3, nodes=9)


SMALL = ((3, 4), (2, 2))  # of catching up: the prompts take several steps of both


@pytest.mark.parametrize(
    "kind, blocks",
    [
        ("eagle", tree_drafter.BLOCKS),
        ("dspark", SMALL),
        *(
            pytest.param(kind, blocks, marks=pytest.mark.matrix)
            for kind, blocks in (
                ("eagle3", SMALL),
                ("dflash", tree_drafter.BLOCKS),
                ("dflash2", SMALL),
            )
        ),
    ],
)
def test_after_many_rounds_both_caches_are_those_of_fresh_passes(x64, monkeypatch, kind, blocks):
    monkeypatch.setattr(tree_drafter, "BLOCKS", blocks)
    decoder, weights = rounds.tiny(MODEL, kind, "float64", DecodingParams(Sampling(1.0)), TREE)
    target, drafter, batch = decoder.target, decoder.drafter, len(PROMPTS) * SAMPLES
    keys = jnp.asarray(sequence_keys(0, 0, 0, np.arange(batch)))
    run = rounds.program(decoder, PROMPTS, LIMIT, ROUNDS)
    state, report = run(weights, keys)
    assert int(report.stats.hits.sum()) > batch / 2, "paths of several lengths were committed"
    assert len(set(report.counts.tolist())) > 2 and state.live.all()
    size = state.history.shape[1]
    history = np.zeros((batch, size), np.int32)
    for uid, answer in enumerate(rounds.answers(report)):
        whole = [*PROMPTS[uid // SAMPLES], *answer]
        history[uid, : len(whole)] = whole
        assert int(state.lengths[uid]) == len(whole) - 1

    @jax.jit
    def fresh(weights, history, lengths, built):
        prefilled = target.prefill(weights.target, history, lengths)
        like = drafter.empty(batch, size - target.padded_slots(0)).cache
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        own, shared = (
            drafters.for_policy(MODEL, kind),
            drafters.shared(weights.target),
        )
        # Slot t comes from the features of token t, and token t + 1.
        lines = history[:, 1:], prefilled.features[:, :-1]
        zeros = jnp.zeros(batch, jnp.int32)
        network = block_drafter if own.is_block else eagle
        return prefilled, *network.extend(
            weights.drafter, own, shared, empty, *lines, zeros, built - 1
        )

    prefilled, drafted, hidden = fresh(
        weights, jnp.asarray(history), state.lengths, state.drafter.built
    )
    behind = np.asarray(state.lengths - state.drafter.built)
    assert (behind >= 1).all() and (behind <= TREE.path).all(), (
        "all but what the last round accepted"
    )
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-9)
    for uid in range(batch):
        here, known = slice(int(state.lengths[uid])), slice(int(state.drafter.built[uid]))
        for layer in range(MODEL.num_layers):
            close(state.cache.keys[layer][uid, ..., here], prefilled.keys[layer][uid, ..., here])
            close(state.cache.values[layer][uid, :, here], prefilled.values[layer][uid, :, here])
        close(state.cache.features[uid, here], prefilled.features[uid, here])
        for name, place in (("keys", (uid, ..., known)), ("values", (uid, slice(None), known))):
            pairs = zip(getattr(state.drafter.cache, name), getattr(drafted, name), strict=True)
            for own, fresh_one in pairs:
                close(own[place], fresh_one[place])
        close(state.drafter.hidden[uid], hidden[uid])
    assert state.cache.features.shape[-1] > 0


@pytest.mark.parametrize(
    "blocks", [pytest.param(tree_drafter.BLOCKS, marks=pytest.mark.matrix), SMALL]
)
def test_the_first_round_of_a_chunk_drafts_from_all_that_was_committed_before_it(
    x64, monkeypatch, blocks
):
    monkeypatch.setattr(tree_drafter, "BLOCKS", blocks)
    decoder, weights = rounds.tiny(MODEL, "eagle", "float64", DecodingParams(Sampling(1.0)), TREE)
    keys = jnp.asarray(sequence_keys(0, 0, 0, np.arange(len(PROMPTS) * SAMPLES)))
    state, report = rounds.program(decoder, PROMPTS, LIMIT, 1)(weights, keys)
    assert max(map(len, PROMPTS)) - 1 > 2 * TREE.path, (
        "a round alone does not catch up with a prompt"
    )
    np.testing.assert_array_equal(state.lengths - state.drafter.built, report.counts)
