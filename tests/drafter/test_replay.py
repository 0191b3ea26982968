"""Laws of the replay buffer: the content of a batch, what is stored, and which programs it needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replays import (
    TOKEN,
    T,
    feed,
    filled,
    numbers,
    replay_of,
    request_of,
    segments_of,
    texts_of,
)

from tlt_jax.rollout.recorder import Emitted, Ended, Harvested, Poll
from tlt_jax.spec_decode.decode_state import RUNNING, Features


def assert_same(one, other) -> None:
    """Bit by bit equal."""
    jax.tree.map(np.testing.assert_array_equal, one, other)


# The content of a batch


def test_held_out_windows_are_never_trained_on_and_are_drawn_separately():
    sizes = tuple((2, 6 + uid % 5) for uid in range(60))
    given = texts_of(sizes)
    replay = filled(given, width=16, max_bytes=100 * 16 * TOKEN, held_out=4)
    out = {window.uid for window in replay.held if replay.is_held_out(window)}
    assert 60 / 4 / 2 < len(out) < 60 / 4 * 2  # n = 60, one in 4
    texts = {uid: tuple(np.concatenate(pair)[:-1].tolist()) for uid, pair in given.items()}
    for held_out in (False, True):
        allowed = {texts[uid] for uid in texts if (uid in out) == held_out}
        drawn = set()
        for draw in range(6):
            batch = replay.sample(draw, 2 * T, held_out=held_out)
            drawn |= {tuple(tokens) for tokens, *_ in segments_of(batch)}
        whole = {tokens for tokens in drawn if tokens in set(texts.values())}
        assert whole and whole <= allowed


def test_every_position_holds_the_features_of_its_token_and_of_no_root():
    texts = list(texts_of().values())
    replay, features = filled(max_bytes=100 * TOKEN), numbers(texts_of())[0]
    assert len(replay.held) == 10, "as many as fit"
    seen = set()
    for draw in range(12):
        batch = replay.sample(draw, 32 if draw else 240)
        is_padding = np.asarray(batch.segments) == 0
        assert is_padding.any() == (draw == 0)
        for values in (batch.features, batch.states, batch.tokens, batch.positions):
            assert not np.asarray(values)[is_padding].any()
        for tokens, positions, mask, found, states in segments_of(batch):
            row = int(found[0, 0] - 1) // 100
            prompt, answer = texts[row]
            known = len(prompt) + len(answer) - 1
            assert (np.diff(positions) == 1).all() and positions[-1] < known
            np.testing.assert_array_equal(tokens, np.concatenate([prompt, answer])[positions])
            np.testing.assert_array_equal(found, features[row, positions])
            np.testing.assert_array_equal(states, -found[:, :4])
            learned = (positions >= len(prompt) - 1) & (positions > positions[0])
            np.testing.assert_array_equal(mask, learned)
            seen.add((row, positions[0] > 0))
    assert seen >= {(row, False) for row in (2, 5)} | {(row, True) for row in (0, 3, 4)}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_what_is_drawn_does_not_depend_on_the_order_of_arrival(dtype):
    texts, one = texts_of(), filled(dtype=dtype)
    backwards = replay_of(width=10)
    backwards.begin(0, request_of(texts))
    values = [one.astype(dtype) for one in numbers(texts)]
    feed(backwards, texts, *values, together=2, order=-1)
    drawn = [[replay.sample(draw, 32) for draw in range(3)] for replay in (one, backwards)]
    assert_same(*drawn)
    assert drawn[0][0].features.dtype == dtype
    assert_same(drawn[0][1], one.sample(1, 32))
    texts = [{tuple(tokens) for tokens, *_ in segments_of(batch)} for batch in drawn[0]]
    assert texts[0] != texts[1] != texts[2], "every draw is another one"
    later = filled(dtype=dtype, seed=1).sample(0, 32)
    assert {tuple(tokens) for tokens, *_ in segments_of(later)} != texts[0]


def test_states_that_are_not_captured_are_the_features():
    texts = texts_of()
    replay = replay_of(width=10)
    replay.begin(0, request_of(texts))
    feed(replay, texts, numbers(texts)[0], None)
    batch = replay.sample(0, 32)
    assert batch.states is batch.features


# What is stored


def test_a_sequence_whose_logits_were_not_finite_is_not_stored():
    texts, kept = texts_of(), {0, 4, 6}
    whole, replay = replay_of(width=10), replay_of(width=10)
    replay.begin(0, request_of(texts))
    feed(replay, texts, *numbers(texts), broken=texts.keys() - kept)
    whole.begin(0, request_of(texts))
    feed(whole, texts, *numbers(texts))
    places = [sorted((one.uid, one.start) for one in each.held) for each in (whole, replay)]
    assert {uid for uid, _ in places[0]} == texts.keys()
    assert [place for place in places[0] if place[0] in kept] == places[1]
    assert set(replay.answers[0]) == kept


def test_the_previous_step_stands_in_for_answers_that_are_not_finished():
    texts = texts_of(((3, 4), (3, 30), (3, 12), (3, 20)))
    replay = filled(texts=texts, step=4, width=40)
    assert len(replay.held) == 4 and "drafter/replay_age" not in replay.metrics()
    replay.begin(5, request_of(texts))
    assert len(replay.held) == 4 and replay.sample(0, T) is not None, "it has one before any ends"
    replay.begin(5, request_of(texts))
    now = {uid: pair for uid, pair in texts.items() if len(pair[1]) in (4, 12)}
    feed(replay, now, *numbers(now))
    found = sorted(len(tokens) for tokens, *_ in segments_of(replay.sample(0, 2 * T)))
    # Both current answers, and the two longer previous ones once each: the others have 16 tokens in both steps.
    assert found == [6, 14, 22, 32]
    assert replay.metrics() == {
        "drafter/replay_tokens": 2 * (6 + 14) + 22 + 32,
        "drafter/replay_bytes": (2 * (6 + 14) + 22 + 32) * TOKEN,
        "drafter/replay_age": (22 + 32) / (6 + 14 + 22 + 32),
    }
    replay.begin(6, request_of(texts))
    assert sorted(one.size for one in replay.held) == [6, 14]
    replay.begin(8, request_of(texts))
    assert not replay.held and replay.sample(0, T) is None


def test_a_step_that_starts_again_drops_its_windows():
    texts = texts_of()
    replay = filled(step=3)
    replay.begin(3, request_of(texts))
    assert not replay.held and not replay.answers[3]
    uid, (prompt, answer) = next(iter(texts.items()))
    feature = jnp.zeros((1, 10, 6))
    replay.listen(Poll(3, 0, 0, (Harvested(((uid, 0),), Features(feature, None), feature),)))
    assert not replay.held, "nobody awaits it"
    ends = Emitted(uid, answer[:3], np.zeros(3), RUNNING), Ended(uid, 0, len(prompt) + len(answer))
    with pytest.raises(ValueError, match="has 29 tokens, 5 were reported"):
        replay.listen(Poll(3, 0, 0, ends))


def test_bytes_are_bounded_and_the_longest_answers_stay():
    window = 10 * TOKEN
    texts = texts_of(tuple((4, answer) for answer in (7, 12, 20, 30, 9, 14, 25, 8)))
    longest = {}
    for count in (1, 2, 3, 5, 50):
        limit = count * window + window // 2
        replay = replay_of(width=10, max_bytes=limit, most=1)
        for step in (0, 1):
            replay.begin(step, request_of(texts))
            feed(replay, texts, *numbers(texts))
            assert 0 < replay.metrics()["drafter/replay_bytes"] <= limit
            held = jax.tree.leaves(list(replay.held.values()))
            assert sum(leaf.nbytes for leaf in held) == replay.metrics()["drafter/replay_bytes"]
        longest[count] = sorted((one.answer for one in replay.held if one.step == 1), reverse=True)
        assert (count < 9) == all(one.step == 1 for one in replay.held), "the older went first"
        assert replay.sample(0, 32) is not None
    order = [30, 25, 20, 14, 12, 9, 8, 7]
    assert all(found == order[:count] for count, found in longest.items())


def test_a_bound_below_one_window_is_refused():
    with pytest.raises(ValueError, match="takes 400 bytes, the replay may have 399"):
        filled(max_bytes=399)


def test_windows_that_arrive_later_do_not_change_a_batch():
    texts = texts_of()
    replay = filled(max_bytes=30 * TOKEN)
    batch = replay.sample(0, 32)
    kept = jax.tree.map(np.array, batch)
    replay.begin(1, request_of(texts))
    feed(replay, texts, *(one + 1 for one in numbers(texts)), together=1)
    assert_same(batch, kept)
    assert all(one.step == 1 for one in replay.held)
