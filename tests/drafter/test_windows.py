"""Laws of windows of finished sequences: which are stored, how they are drawn, and how they are packed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tlt_jax.drafter import replay as windows
from tlt_jax.drafter.replay import Piece, Window


def window(uid=0, start=0, size=4, prompt=2, length=None, step=1) -> Window:
    """A window whose tokens encode their sequence and position."""
    length = length or start + size + 1
    text = 1000 * uid + np.arange(length, dtype=np.int32)
    return windows.cut(text, np.arange(length) >= prompt, step, uid, start, size)


def kept(step: int, answers: list[int], width: int, most: int, random, prompt=8) -> list[Window]:
    """The windows that are stored of answers of these lengths."""
    return [
        window(uid, start, width, prompt, prompt + answer, step)
        for uid, answer in enumerate(answers)
        for start in windows.wanted(prompt, prompt + answer, width, most, random)
    ]


# Which windows are stored


@pytest.mark.parametrize("prompt, length, width, starts", [
    (5, 13, 12, [0]),  # features of 12 positions are known: a whole answer
    (5, 14, 12, [0, 1]),
    (3, 21, 8, [0, 6, 12]),  # 20 known positions in 3 windows
    (30, 41, 8, [26, 32]),  # half a window of the prompt
    (30, 32, 8, [23]),
    (30, 31, 40, [0]),  # one token enters the loss, at position 29
    (2, 3, 8, [0]),
    (1, 3, 8, [0]),
    (1, 2, 8, []),  # position 0 has no slot before it
])  # fmt: skip
def test_windows_cover_the_answer(prompt, length, width, starts):
    found = windows.wanted(prompt, length, width, 9, np.random.default_rng(0))
    assert found == starts
    cut = [window(0, start, width, prompt, length) for start in found]
    seen = {position for one in cut for position in range(one.start, one.start + one.size)}
    if starts:
        assert seen >= set(range(prompt - 1, length - 1)) and length - 1 not in seen
        assert all(one.loss_mask[1:].any() for one in cut)
        assert all(one.loss_mask.sum() == one.learned for one in cut)


def test_every_part_of_a_long_answer_is_equally_likely_to_be_stored():
    """4,000 draws of 2 of 5 windows: shares are off by less than 0.04, 5 standard deviations."""
    counts = Counter()
    for seed in range(4000):
        starts = windows.wanted(3, 41, 8, 2, np.random.default_rng([seed]))
        assert len(starts) == 2 and starts == sorted(set(starts))
        counts.update(starts)
    assert set(counts) == {0, 8, 16, 24, 32}
    assert np.allclose([count / 4000 for count in counts.values()], 2 / 5, atol=0.04)


def test_over_the_bound_older_steps_are_dropped_first_and_then_shorter_answers():
    old, older = window(1, size=9, step=4), window(2, size=8, step=4)
    short, long = window(3, size=5, step=5), window(4, size=6, step=5)
    order = [long, short, old, older]
    sizes = dict.fromkeys((older, short, long, old), 10)
    for limit in range(45):
        assert windows.within(sizes, limit) == set(order[: limit // 10])
    assert windows.within(sizes | {short: 25}, 24) == {long}, "no other takes the place of one"
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = {window(i, size=int(random.integers(2, 9))): 0 for i in range(20)}
        sizes = {one: int(random.integers(1, 9)) for one in sizes}
        stay = windows.within(sizes, 40)
        assert sum(sizes[one] for one in stay) <= 40
        gone = set(sizes) - stay
        assert max(one.answer for one in gone) <= min(one.answer for one in stay)


# How windows are drawn


def test_weights_worked_by_hand():
    """Answers of 4 and 6 tokens finished now; those of 10 and 20, 30 tokens of 38, stand in for the rest."""
    held = [
        window(0, 0, 5, 2, 6, step=3),
        window(1, 0, 7, 2, 8, step=3),
        # An answer of 5: it is not longer than the longest of this step.
        window(0, 0, 6, 2, 7, step=2),
        window(1, 10, 5, 2, 22, step=2),  # 5 tokens of an answer of 20; that of 10 is not stored
        window(1, 0, 30, 2, 32, step=1),
    ]
    found = windows.weights(held, 3, [4, 6], [3, 5, 10, 20])
    # 5 learned tokens that weigh as all 30, when 10 now are 8 then
    np.testing.assert_allclose(found, [1, 1, 0, 30 / 5 * 10 / 8, 0], rtol=1e-12)
    # The answer of 4 was dropped: that of 6 stands for it.
    found = windows.weights(held[1:], 3, [4, 6], [3, 5, 10, 20])
    np.testing.assert_allclose(found, [10 / 6, 0, 30 / 5 * 10 / 8, 0], rtol=1e-12)
    # No answer finished yet: all previous ones, with all of their tokens.
    found = windows.weights(held[2:], 3, [], [3, 5, 10, 20])
    np.testing.assert_allclose(found, [38 / 25, 38 / 25 * 20 / 5, 0], rtol=1e-12)
    np.testing.assert_allclose(windows.weights(held[:2], 3, [4, 6], []), [1, 1], rtol=1e-12)
    assert len(windows.weights([], 3, [], [])) == 0


def lengths_drawn(steps: int, has_previous: bool, seed=0) -> tuple[float, float, float]:
    """Mean answer length of drawn and of all tokens, and the standard error of the first.

    In each step 64 answers have long-tailed lengths, and the shortest 60 % have finished.
    """
    random, drawn, everything = np.random.default_rng(seed), [], []
    for _ in range(steps):
        before, now = (
            np.ceil(np.minimum(np.exp(random.normal(4, 1, 64)), 600)).astype(int) for _ in range(2)
        )
        ended = now[now <= np.quantile(now, 0.6)].tolist()
        before = before.tolist() if has_previous else []
        held = kept(1, ended, 64, 2, random) + kept(0, before, 64, 2, random)
        pieces = windows.draw(held, windows.weights(held, 1, ended, before), 512, random)
        learned = [one.window.loss_mask[one.first : one.first + one.size].sum() for one in pieces]
        drawn.append((np.dot(learned, [one.window.answer for one in pieces]), sum(learned)))
        everything.append((np.sum(now**2), np.sum(now)))
    mean, all_tokens = (np.divide(*np.sum(pairs, axis=0)) for pairs in (drawn, everything))
    return mean, all_tokens, np.std([one / count for one, count in drawn]) / np.sqrt(steps)


def test_the_previous_step_removes_the_length_bias():
    """n = 400 steps: a distance of 10 % (20 of 198 tokens) is 6 standard errors."""
    mean, everything, error = lengths_drawn(400, has_previous=True)
    assert error < 0.1 * everything / 6
    assert abs(mean - everything) < 0.1 * everything
    mean, everything, error = lengths_drawn(400, has_previous=False)
    assert mean + 6 * error < 0.3 * everything, "without it the tokens are of short answers"


@pytest.mark.parametrize("each, tokens", [(1, 21), (1, 45), (5, 30), (40, 40)])
def test_tokens_are_drawn_in_proportion_to_weights_whatever_the_windows_sizes(each, tokens):
    """6,000 draws: shares are off by less than 0.012, at least 3 standard errors."""
    sizes, weights = (2, 3, 5, 8, 13, 21), np.array([1.0, 3.0, 1.0, 0.5, 2.0, 1.0])
    held = [window(kind, size=size) for kind, size in enumerate(sizes) for _ in range(each)]
    counts = Counter()
    for seed in range(6000):
        pieces = windows.draw(held, weights.repeat(each), tokens, np.random.default_rng([seed]))
        assert sum(piece.size for piece in pieces) == tokens
        for piece in pieces:
            assert piece.size > 0 and piece.first + piece.size <= piece.window.size
            counts[piece.window.uid] += piece.size
    expected = weights * sizes
    found = np.array([counts[kind] for kind in range(6)]) / counts.total()
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=0, atol=0.012)


def test_a_draw_is_an_arc_that_cuts_two_windows_at_the_most():
    held = [window(uid, size=2 + uid) for uid in range(12)]
    for seed in range(300):
        pieces = windows.draw(held, np.ones(12), 30, np.random.default_rng([seed]))
        assert sum(piece.size for piece in pieces) == 30
        assert len({piece.window.uid for piece in pieces}) == len(pieces), (
            "no sequence is drawn twice"
        )
        middle = pieces[1:-1]
        assert all((one.first, one.size) == (0, one.window.size) for one in middle)
        assert pieces[0].first + pieces[0].size == pieces[0].window.size or len(pieces) == 1
        assert pieces[-1].first == 0 or len(pieces) == 1
    whole = windows.draw(held, np.ones(12), 200, np.random.default_rng(0))
    assert sorted((one.window.uid, one.first, one.size) for one in whole) == [
        (uid, 0, 2 + uid) for uid in range(12)
    ]
    assert windows.draw([], np.zeros(0), 30, np.random.default_rng(0)) == []
    assert windows.draw(held, np.zeros(12), 30, np.random.default_rng(0)) == []


# How they are packed


def test_every_token_of_the_pieces_is_in_one_place_of_the_row():
    random = np.random.default_rng(0)
    for _ in range(200):
        row_tokens = int(random.integers(6, 160))
        held = [window(uid, 3, int(random.integers(1, 20)), 5, 40) for uid in range(30)]
        pieces = windows.draw(held, np.ones(30), row_tokens, random)
        row = windows.packed(pieces, row_tokens)
        wanted = [one.window.tokens[one.first : one.first + one.size].tolist() for one in pieces]
        there = row.segments[0] > 0
        assert row.tokens[0][there].tolist() == sum(wanted, [])
        assert row.segments[0][there].tolist() == [
            n for n, one in enumerate(wanted, 1) for _ in one
        ]
        assert (row.positions == row.tokens % 1000).all(), "positions are real"
        assert not there[np.argmin(there) :].any() or there.all(), "padding is behind"


def test_packed_rows_worked_by_hand():
    whole, long = window(1, 0, 9, 3, 6), window(2, 7, 4, 9, 30)
    row = windows.packed([Piece(whole, 0, 5), Piece(long, 1, 3)], 9)
    assert row.tokens.tolist() == [[1000, 1001, 1002, 1003, 1004, 2008, 2009, 2010, 0]]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 8, 9, 10, 0]]
    assert row.segments.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2, 0]]
    # Positions 2 to 4 predict the whole answer of 3; 8 of the window is the first place of its piece.
    assert row.is_answer.astype(int).tolist() == [[0, 0, 1, 1, 1, 0, 1, 1, 0]]
