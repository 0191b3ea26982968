"""Stop texts are found in every tokenization, and only they."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.data.stop_rules import StopRules, stop_texts, stop_tokens
from tlt_jax.spec_decode.decode_state import follow


def ends_of(rules: StopRules, answers: np.ndarray, cuts: list[int]) -> list[int]:
    """Of each answer the position of the token that ends it, or its length; reads them in pieces, as rounds do."""
    states, after = jnp.zeros(len(answers), jnp.int32), []
    for piece in np.split(np.asarray(answers, np.int32), cuts, axis=1):
        after.append(follow(rules, states, jnp.asarray(piece)))
        states = after[-1][:, -1]
    is_end = np.concatenate(after, axis=1) == rules.end
    return np.where(is_end.any(axis=1), is_end.argmax(axis=1), is_end.shape[1]).tolist()


@pytest.mark.parametrize(
    "texts",
    [["ab"], ["abca", "bc"], ["abab", "bb"], ["a", "ba"], ["abcab", "cabb", "aabc"], ["éa", "\n\n"]],
)  # fmt: skip
def test_an_answer_ends_with_the_token_that_completes_a_text(texts):
    rng = np.random.default_rng(0)
    alphabet = "abcé\n" if "éa" in texts else "abc"
    pieces = {letters.encode() for letters in alphabet} | {bytes([0xC3]), bytes([0xA9])}
    for size in (2, 3, 5, 9):
        pieces |= {"".join(rng.choice(list(alphabet), size)).encode() for _ in range(8)}
    tokens = sorted(pieces)
    answers = rng.integers(0, len(tokens) + 2, (120, 12))  # two ids have no bytes: padding
    expected = []
    for answer in answers:
        spelled = [tokens[t] if t < len(tokens) else b"\xff" for t in answer]
        read = [b"".join(spelled[: count + 1]) for count in range(12)]
        ended = [any(text.encode() in one for text in texts) for one in read]
        expected.append(ended.index(True) if True in ended else 12)
    for cuts in ([], [3, 6, 9]):
        assert ends_of(stop_texts(texts, tokens), answers, cuts) == expected
    assert 30 < sum(end < 12 for end in expected), "answers that end say something"


def test_token_stops_are_found_and_other_ids_are_not():
    rules = stop_tokens(((7, 7, 3), (7, 3), (11,)))
    answers = [
        [7, 7, 3, 0, 0],
        [7, 5, 3, 7, 3],
        [11, 0, 0, 0, 0],
        [5, 99, 7, 99, 3],
        [3, 3, 7, 0, 0],
    ]
    assert ends_of(rules, answers, [1]) == [2, 4, 0, 5, 5]


def test_rules_are_equal_by_content():
    first, second = stop_texts(["ab"], [b"a", b"b"]), stop_texts(["ab"], [b"a", b"b"])
    assert first == second and hash(first) == hash(second) and first is not second
    assert first != stop_texts(["ab"], [b"a", b"c"]) and first != stop_texts(["b"], [b"a", b"b"])
    assert stop_texts([], [b"a"]) is None and stop_tokens(()) is None
    with pytest.raises(ValueError, match="an empty stop"):
        stop_tokens([()])
