"""The comparison of float32 rollouts finds planted errors, and excuses near-ties only."""

from __future__ import annotations

from dataclasses import replace

import identity
import numpy as np
import pytest
import references
import toys

from tlt_jax.keys import sequence_keys
from tlt_jax.rollout.recorder import Completion
from tlt_jax.spec_decode.interface import Sampling

VOCAB, ERROR = 11, 1e-5
WEIGHTS = toys.table(VOCAB)
PROMPTS, SAMPLES, LIMITS = [[1, 2], [3], [4, 5, 6]], 4, (24, 12, 16)
EOS, STOPS = (0,), ((7, 7),)
SETTINGS = [
    Sampling(1.0),
    Sampling(0.6, 4),
    Sampling(1.2, 0, 0.8),
    Sampling(0.9, 5, 0.9),
    Sampling(0.0),
]
KEYS = sequence_keys(3, 0, 0, np.arange(len(PROMPTS) * SAMPLES))
NOISE = np.asarray(identity.draw(KEYS, 32, VOCAB))


def law_of(
    sampling: Sampling, nudge: dict[tuple[int, ...], np.ndarray] | None = None, error: float = ERROR
):
    """The law of the table, with more on the logits after some prefixes, whose float32 forward is off by the error."""

    def score(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide, state = np.zeros((*rows.shape, VOCAB)), 0.0
        for at, tokens in enumerate(rows.T):
            state = toys.DECAY * state + WEIGHTS[tokens]
            wide[:, at] = state
        for prefix, more in (nudge or {}).items():
            wide[(rows[:, : len(prefix)] == prefix).all(axis=1), len(prefix) - 1] += more
        return wide + error * (np.arange(VOCAB) % 2), wide

    return identity.Law(score, PROMPTS, LIMITS, KEYS, sampling, EOS, STOPS)


def logits_of(
    prefix: list[int], nudge: dict[tuple[int, ...], np.ndarray] | None = None
) -> np.ndarray:
    return toys.table_logits(WEIGHTS, prefix) + (nudge or {}).get(tuple(prefix), 0)


def decode(sampling: Sampling, uid: int, nudge=None, forced=()) -> Completion:
    """An answer by the plain reference, but for the tokens forced at some positions."""
    forced, prompt = dict(forced), uid // SAMPLES

    def pushed(prefix: list[int]) -> np.ndarray:
        return logits_of(prefix, nudge) + 50 * (np.arange(VOCAB) == forced.get(len(prefix), -1))

    tokens, logprobs, finish = references.decode(
        pushed, lambda t: NOISE[uid, t], PROMPTS[prompt], sampling, EOS, STOPS, LIMITS[prompt]
    )
    return Completion(
        uid,
        prompt,
        uid % SAMPLES,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        finish,
    )


def rollout(sampling: Sampling, **rest) -> list[Completion]:
    return [decode(sampling, uid, **rest) for uid in range(len(KEYS))]


def swap(base: list[Completion], one: Completion) -> list[Completion]:
    return [one if one.uid == same.uid else same for same in base]


def second(
    sampling: Sampling, base: list[Completion], uid: int, after: int
) -> tuple[tuple[int, ...], int, int, float]:
    """A prefix of an answer, the next token, the second best token, and its distance."""
    prefix = [*PROMPTS[uid // SAMPLES], *base[uid].tokens[:after].tolist()]
    scores = references.filtered(
        logits_of(prefix), sampling.temperature, sampling.top_k, sampling.top_p
    )
    scores = scores + (NOISE[uid, len(prefix)] if sampling.temperature else 0)
    order = np.argsort(-scores)
    assert order[0] == base[uid].tokens[after] and np.isfinite(scores[order[1]])
    return tuple(prefix), int(order[0]), int(order[1]), float(scores[order[0]] - scores[order[1]])


def long_one(base: list[Completion]) -> int:
    return max(base, key=lambda one: len(one.tokens)).uid


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_rollout_is_itself_and_a_single_wrong_token_is_found_anywhere(sampling):
    base, law = rollout(sampling), law_of(sampling)
    verdict = identity.compare(law, base, base)
    assert verdict.is_same and verdict.excused == 0
    assert verdict.tokens == 2 * sum(len(one.tokens) for one in base)
    uid = long_one(base)
    for after in range(len(base[uid].tokens) - 1):
        scaled = logits_of([*PROMPTS[uid // SAMPLES], *base[uid].tokens[:after].tolist()])
        if (
            np.isfinite(
                references.filtered(scaled, sampling.temperature, sampling.top_k, sampling.top_p)
            ).sum()
            == 1
        ):
            continue
        prefix, _, other, gap = second(sampling, base, uid, after)
        assert gap > 1e-3, "another seed of the toy"
        planted = swap(base, decode(sampling, uid, forced={len(prefix): other}))
        for pair in ((base, planted), (planted, base), (planted, planted)):
            verdict = identity.compare(law, *pair)
            assert not verdict.is_same and verdict.excused == 0
            assert {f"uid {uid}, position {len(prefix)}: token {other}"} == {
                line.split(" where")[0] for line in verdict.wrong
            }


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_near_tie_is_excused_and_counted_but_nothing_after_it(sampling):
    plain = rollout(sampling)
    uid, after = long_one(plain), 3
    prefix, _, other, gap = second(sampling, plain, uid, after)
    temperature = sampling.temperature or 1.0
    margin = identity.FACTOR * ERROR / temperature
    for share, excused in ((0.5, 1), (2.0, 0)):
        nudge = {prefix: temperature * (gap - share * margin) * (np.arange(VOCAB) == other)}
        law, base = law_of(sampling, nudge), rollout(sampling, nudge=nudge)
        planted = swap(base, decode(sampling, uid, nudge, {len(prefix): other}))
        verdict = identity.compare(law, base, planted)
        assert verdict.margin == pytest.approx(margin, rel=1e-6)
        assert (verdict.excused, len(verdict.wrong)) == (excused, 1 - excused), str(verdict)
        assert identity.compare(law, planted, base).excused == excused
        assert not verdict.is_same, "one in so few tokens is too many"
        assert replace(verdict, tokens=10_000).is_same == bool(excused)
    nudge = {prefix: temperature * (gap - 0.5 * margin) * (np.arange(VOCAB) == other)}
    law, base = law_of(sampling, nudge), rollout(sampling, nudge=nudge)
    at = len(prefix) + 2
    tail = decode(sampling, uid, nudge, {len(prefix): other}).tokens
    assert len(tail) > after + 2
    wrong = (int(tail[after + 2]) + 1) % VOCAB
    planted = swap(base, decode(sampling, uid, nudge, {len(prefix): other, at: wrong}))
    verdict = identity.compare(law, base, planted)
    assert verdict.excused == 1 and verdict.wrong[0].startswith(
        f"uid {uid}, position {at}: token {wrong} "
    )


def test_no_measured_error_is_large_enough_to_excuse_a_thousandth():
    base = rollout(SETTINGS[0])
    assert identity.compare(law_of(SETTINGS[0], error=1.0), base).margin == 1e-3
    assert identity.compare(law_of(SETTINGS[0], error=0.0), base).margin == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens, finish: (tokens[:-1], finish),
        lambda tokens, finish: (tokens[:-1], "length"),
        lambda tokens, finish: (tokens, {"stop": "length", "length": "stop"}[finish]),
        lambda tokens, finish: ([*tokens, 1], finish),
    ],
)
def test_answers_that_end_elsewhere_are_found(change):
    base = rollout(SETTINGS[0])
    assert {one.finish for one in base} == {"stop", "length"}
    for uid, one in enumerate(base):
        tokens, finish = change(one.tokens.tolist(), one.finish)
        planted = swap(base, replace(one, tokens=np.array(tokens, np.int32), finish=finish))
        verdict = identity.compare(law_of(SETTINGS[0]), base, planted)
        assert any(
            line.startswith(f"uid {uid}: ") and "the rules say" in line for line in verdict.wrong
        )


def test_rollouts_of_other_uids_are_refused():
    base = rollout(SETTINGS[0])
    for others in (base[:-1], base[::-1], [*base, base[-1]]):
        with pytest.raises(ValueError, match="instead of 0 to 11"):
            identity.compare(law_of(SETTINGS[0]), base, others)


# The sets of tokens at the borders of top-k and top-p


@pytest.mark.parametrize("sampling", SETTINGS)
def test_without_slack_the_kept_tokens_are_those_of_the_plain_filter(sampling):
    random = np.random.default_rng(0)
    logits = np.concatenate(
        [3 * random.normal(size=(200, VOCAB)), random.integers(0, 4, (200, VOCAB))]
    )
    scaled = logits / (sampling.temperature or 1)
    settings = (sampling.temperature, sampling.top_k, sampling.top_p)
    expected = [np.isfinite(references.filtered(row, *settings)) for row in logits]
    np.testing.assert_array_equal(identity.kept(scaled, sampling, 0), expected)
    more, less = (identity.kept(scaled, sampling, slack) for slack in (0.1, -0.1))
    assert (less <= expected).all() and (expected <= more).all()
    if sampling.top_k or sampling.top_p < 1:
        assert less.sum() < np.sum(expected) < more.sum()


TOP_2, TOP_P = Sampling(1.0, 2), Sampling(1.0, 0, 0.8)
NEAR, FAR = 1e-6, 1e-3  # on either side of the margin of 1e-5


def mass_of_two(mass: float) -> np.ndarray:
    """Log-probabilities of three tokens, of which the best two have this mass."""
    return np.log([0.5, mass - 0.5, 1 - mass])


@pytest.mark.parametrize(
    ("sampling", "scaled", "drawn", "token", "best", "excused"),
    [
        (TOP_2, [3, 2, 2 - NEAR, 0], [0, 0, 5, 9], 2, 0, True),  # just outside, and would win
        (TOP_2, [3, 2, 2 - FAR, 0], [0, 0, 5, 9], 2, 0, False),
        (TOP_2, [3, 2, 2 - NEAR, 0], [0, 0, 5, 9], 3, 0, False),  # far outside
        (TOP_2, [3, 2, 2 - NEAR, 0], [0, 0, 0, 0], 2, 0, False),  # just outside, and would lose
        (TOP_2, [3, 2, 2 - NEAR, 0], [0, 5, 0, 0], 0, 1, True),  # the winner may be outside
        (TOP_2, [3, 2, 2 - FAR, 0], [0, 5, 0, 0], 0, 1, False),
        (TOP_P, mass_of_two(0.8 + NEAR), [0, 0, 5], 2, 0, True),  # barely enough
        (TOP_P, mass_of_two(0.8 + FAR), [0, 0, 5], 2, 0, False),
        (TOP_P, mass_of_two(0.8 - NEAR), [0, 0, 5], 0, 2, True),  # and barely not enough
        (TOP_P, mass_of_two(0.8 - FAR), [0, 0, 5], 0, 2, False),
        (Sampling(0.0), [3, 3 - NEAR, 0], [0, 0, 0], 1, 0, True),
        (Sampling(0.0), [3, 3 - FAR, 0], [0, 0, 0], 1, 0, False),
    ],
)
def test_tokens_at_a_border_are_excused(sampling, scaled, drawn, token, best, excused):
    rows = [np.array([row], np.float64) for row in (scaled, drawn)]
    found = identity.judge(*rows, np.array([token]), sampling, margin=1e-5)
    assert (found[0][0], found[2][0]) == (best, excused)
    right = identity.judge(*rows, np.array([best]), sampling, margin=1e-5)
    assert not right[2][0], "what needs no excuse is not counted"
