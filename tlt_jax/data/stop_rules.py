"""An automaton that finds stop texts in the tokens of an answer, for every tokenization. Imports no JAX."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

OTHER = 0  # symbol of the automaton for all symbols that no stop contains


class StopRules:
    """table[state, classes[token]] is the state after a token; a sequence starts in state 0 and ends in state `end`.

    `classes` int32 by token id; ids beyond it have the class `other`; `table` int32. Equal and hashed by content.
    """

    def __init__(self, classes: np.ndarray, other: int, table: np.ndarray):
        self.classes, self.other, self.table = classes, other, table
        self.end = len(table) - 1
        content = b".".join([classes.tobytes(), str(other).encode(), table.tobytes()])
        self.digest = hashlib.sha256(content).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopRules) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"StopRules({self.digest})"


def stop_texts(texts: Iterable[str], tokens: Sequence[bytes]) -> StopRules | None:
    """The rules for these texts; tokens[id] are the bytes of a token. None without a text.

    An answer stops with the token that completes one of the texts, also when the token has more bytes.
    """
    return build([text.encode() for text in texts], tokens)


def stop_tokens(stops: Iterable[Sequence[int]]) -> StopRules | None:
    """The rules for these sequences of token ids; None for no sequences."""
    stops = [list(stop) for stop in stops]
    count = max((token for stop in stops for token in stop), default=-1) + 1
    return build(stops, [(token,) for token in range(count)])


def build(stops: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> StopRules | None:
    """The rules for stops and tokens, both given as sequences of symbols (Aho and Corasick 1975).

    Raises ValueError for an empty stop.
    """
    if not stops:
        return None
    if not all(map(len, stops)):
        raise ValueError("an empty stop would end every answer")
    step, symbols = automaton(stops)
    end = len(step)
    # One more row for the final state, and one more column that keeps the state, for tokens with no symbols left.
    step = np.vstack([step, np.full((1, step.shape[1]), end)])
    step = np.hstack([step, np.arange(end + 1)[:, None]]).astype(np.int32)

    spelled = [[symbols.get(symbol, OTHER) for symbol in token] for token in tokens] + [[OTHER]]
    after = np.tile(np.arange(end + 1, dtype=np.int32), (len(spelled), 1))  # [token, state before]
    longest = max(map(len, spelled))
    for position in range(longest):
        there = [number for number, token in enumerate(spelled) if position < len(token)]
        read = np.asarray([spelled[number][position] for number in there])
        after[there] = step[after[there], read[:, None]]
    kinds, classes = np.unique(after, axis=0, return_inverse=True)
    classes = classes.reshape(-1).astype(np.int32)
    return StopRules(classes[:-1], int(classes[-1]), np.ascontiguousarray(kinds.T))


def automaton(stops: Sequence[Sequence[int]]) -> tuple[np.ndarray, dict[int, int]]:
    """step[state, symbol], with the number of states as the final state, and the numbers of the symbols."""
    symbols = {symbol: i for i, symbol in enumerate(sorted({s for stop in stops for s in stop}), 1)}
    children: list[dict[int, int]] = [{}]
    is_end = [False]
    for stop in stops:
        node = 0
        for symbol in stop:
            if symbols[symbol] not in children[node]:
                children[node][symbols[symbol]] = len(children)
                children.append({})
                is_end.append(False)
            node = children[node][symbols[symbol]]
        is_end[node] = True

    step = np.zeros((len(children), len(symbols) + 1), np.int32)
    # Failure links: the longest proper suffix of a node that is a node.
    shorter = [0] * len(children)
    waiting = deque([0])
    while waiting:
        node = waiting.popleft()
        is_end[node] |= is_end[shorter[node]]
        if node:
            step[node] = step[shorter[node]]
        for symbol, child in children[node].items():
            shorter[child] = int(step[shorter[node], symbol]) if node else 0
            step[node, symbol] = child
            waiting.append(child)
    ends = np.flatnonzero(is_end)
    step[np.isin(step, ends)] = len(children)
    return step, symbols
