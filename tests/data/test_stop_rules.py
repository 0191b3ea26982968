"""Stop texts are found in every tokenization, and only they."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.data.stop_rules import StopRules, stop_texts, stop_tokens
from tlt_jax.spec_decode.decode_state import follow


def end_of(rules: StopRules, answer: list[int], cuts: list[int]) -> int:
    """The position of the token that ends the answer, or len(answer); reads it in pieces, as rounds do."""
    state, read = jnp.zeros(1, jnp.int32), 0
    for piece in np.split(np.array(answer, np.int32), cuts):
        if not len(piece):
            continue
        after = np.asarray(follow(rules, state, jnp.asarray(piece)[None]))[0]
        if (after == rules.end).any():
            return read + int(np.argmax(after == rules.end))
        state, read = jnp.asarray(after[-1:]), read + len(piece)
    return len(answer)


@pytest.mark.parametrize(
    "texts",
    [
        ["ab"],
        ["abca", "bc"],
        ["abab", "bb"],
        ["a", "ba"],
        ["abcab", "cabb", "aabc"],
        ["éa", "\n\n"],
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_text(texts):
    rng = np.random.default_rng(0)
    alphabet = "abcé\n" if "éa" in texts else "abc"
    pieces = {letters.encode() for letters in alphabet} | {bytes([0xC3]), bytes([0xA9])}
    for size in (2, 3, 5, 9):
        pieces |= {"".join(rng.choice(list(alphabet), size)).encode() for _ in range(8)}
    tokens = sorted(pieces)
    rules = stop_texts(texts, tokens)
    ended = 0
    for _ in range(120):
        answer = rng.integers(
            0, len(tokens) + 2, 12
        ).tolist()  # two ids have no bytes: they are padding
        expected = len(answer)
        for count in range(1, len(answer) + 1):
            spelled = b"".join(tokens[t] if t < len(tokens) else b"\xff" for t in answer[:count])
            if any(text.encode() in spelled for text in texts):
                expected = count - 1
                break
        cuts = sorted(rng.integers(0, len(answer) + 1, 3).tolist())
        assert end_of(rules, answer, cuts) == expected, [tokens[t : t + 1] for t in answer]
        ended += expected < len(answer)
    assert 30 < ended, "answers that end say something"


def test_token_stops_are_found_and_other_ids_are_not():
    rules = stop_tokens(((7, 7, 3), (7, 3), (11,)))
    for answer, expected in (
        ([7, 7, 3], 2), ([7, 5, 3, 7, 3], 4), ([11], 0), ([5, 99, 7, 99, 3], 5), ([3, 3, 7], 3),
    ):  # fmt: skip
        assert end_of(rules, answer, [1]) == expected


def test_rules_are_equal_by_content():
    first, second = stop_texts(["ab"], [b"a", b"b"]), stop_texts(["ab"], [b"a", b"b"])
    assert first == second and hash(first) == hash(second) and first is not second
    assert first != stop_texts(["ab"], [b"a", b"c"]) and first != stop_texts(["b"], [b"a", b"b"])
    assert stop_texts([], [b"a"]) is None and stop_tokens(()) is None
    with pytest.raises(ValueError, match="an empty stop"):
        stop_tokens([()])
