"""A simulated chunk equals the plain loop over its rounds, row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tlt_jax.rollout.executables.programs import Decode, StateShape
from tlt_jax.simulate import decoding, trees as drafting
from tlt_jax.simulate.decoding import Rows
from tlt_jax.spec_decode.decode_state import RUNNING, STOPPED
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.verify import BINS

STRATEGIES = PLAIN, Strategy(1, 1, 2), Strategy(6, 4, 16), Strategy(3, 1, 4)


def round_by_round(trees, program, rows, min_live, most):
    """(rounds, tokens by row, rounds by row, live rows, accepted nodes [D, N, K], counts of scores [3, BINS])."""
    tokens, done, live = rows.tokens.copy(), rows.rounds.copy(), rows.live.copy()
    strategy, rounds = program.strategy, 0
    hits = np.zeros((strategy.depth, strategy.nodes, strategy.topk), int)
    scores = np.zeros((3, BINS))
    while rounds < min(most, program.rounds) and live.sum() >= min_live:
        for row in np.flatnonzero(live):
            left, more = rows.ends[row] - tokens[row], 0
            if strategy != PLAIN:
                start = int(decoding.hashed(*rows.keys[row])[0]) % len(trees.rank)
                here = (start + done[row]) % len(trees.rank)
                rank, chance = trees.rank[here], trees.chance[here]
                more = min((rank >= 0).sum(), left - 1)
                bins = np.minimum(BINS * chance, BINS - 1).astype(int)
                np.add.at(scores[0], bins, 1)
                np.add.at(scores[1], bins, chance)
                for depth in range(more):
                    hits[depth, rank[depth], trees.sibling[here, depth]] += 1
                    scores[2, bins[rank[depth]]] += 1
            tokens[row] += more + 1
            live[row] = left > more + 1
            done[row] += 1
        rounds += 1
    return rounds, tokens - rows.tokens, done - rows.rounds, live, hits, scores


@pytest.mark.parametrize("seed", range(12))
def test_a_chunk_equals_the_loop_over_its_rounds(seed):
    random, strategy = np.random.default_rng(seed), STRATEGIES[seed % len(STRATEGIES)]
    batch = int(random.integers(1, 9))
    tokens = random.integers(1, 50, batch).astype(np.int32)
    rows = Rows(
        keys=random.integers(0, 1 << 32, (batch, 2)).astype(np.uint32),
        rounds=random.integers(0, 99, batch).astype(np.int32),
        tokens=tokens,
        ends=tokens + random.integers(1, [20, 900][seed % 2], batch).astype(np.int32),
        finish=np.full(batch, STOPPED, np.int32),
        live=random.random(batch) < 0.8,
    )
    program = Decode(StateShape(0, batch, 2048), int(random.choice([3, 64, 300])), strategy)
    min_live, most = int(random.integers(1, 1 + rows.live.sum())), int(random.choice([4, 1 << 30]))
    trees = None
    if strategy != PLAIN:
        trees = drafting.drafts(seed, 50, 0.7, 1.0, strategy)
    after, report = decoding.decode_chunk(lambda _: trees, program, rows, min_live, most)
    rounds, counts, row_rounds, live, hits, scores = round_by_round(
        trees, program, rows, min_live, most
    )
    assert report.rounds == rounds > 0
    np.testing.assert_array_equal(report.counts, counts)
    np.testing.assert_array_equal(report.stats.row_rounds, row_rounds)
    np.testing.assert_array_equal(after.rounds, rows.rounds + row_rounds)
    np.testing.assert_array_equal(after.tokens, rows.tokens + counts)
    np.testing.assert_array_equal(after.live, live)
    np.testing.assert_array_equal(report.finish, np.where(rows.live & ~live, STOPPED, RUNNING))
    np.testing.assert_array_equal(report.stats.hits, hits)
    found = report.stats.nodes, report.stats.promised, report.stats.accepted
    np.testing.assert_allclose(found, scores, rtol=1e-9)


def test_a_row_that_ends_within_a_chunk_holds_tokens_until_then():
    """Of 10 rounds one row runs 4 with 22 tokens on average, another all with 25; a third is free."""
    before, none = decoding.empty(3), np.zeros(3, np.int32)
    before = replace(before, tokens=none + [20, 20, 5], live=np.array([True, True, False]))
    after = replace(before, tokens=none + [24, 30, 5], rounds=none + [4, 10, 0])
    assert decoding.held(before, after, 10) == pytest.approx((4 * 22 + 10 * 25) / 10 / 3)
