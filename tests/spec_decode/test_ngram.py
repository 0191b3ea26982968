"""N-gram drafts against a search and a trie in plain Python, and the pools of the host's memory of answers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from rounds import match

from tlt_jax.data import tasks
from tlt_jax.rollout.ngram_memory import NGramMemory
from tlt_jax.spec_decode import ngram
from tlt_jax.spec_decode.interface import ABSENT
from tlt_jax.spec_decode.ngram import ESCAPE, POWER, SEPARATOR
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import rerank

TREE = Strategy(depth=4, topk=2, nodes=8)
S, R = 24, 12


def limit(monkeypatch, max_match: int, matches: int) -> None:
    monkeypatch.setattr(ngram, "MAX_MATCH", max_match)
    monkeypatch.setattr(ngram, "MATCHES", matches)


def proposing(strategy: Strategy):
    """Jitted (history, lengths, pool) -> the best tree of the proposed candidates, with the limits of this test."""

    @jax.jit
    def propose(history, lengths, pool):
        candidates = ngram.propose(history, lengths, pool, strategy)
        roots = jnp.take_along_axis(history, lengths[:, None], axis=1)[:, 0]
        return rerank(candidates, roots, strategy.nodes)

    return propose


def texts(seed: int, rows: int = 40, vocab: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random histories, lengths and pools with separators; what is behind a history's root is junk."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, vocab, (rows, S)).astype(np.int32)
    lengths = rng.integers(0, S, rows).astype(np.int32)
    pool = np.where(
        rng.random((rows, R)) < 0.2, SEPARATOR, rng.integers(0, vocab, (rows, R))
    ).astype(np.int32)
    return history, lengths, pool


def places(
    sequence: list[int], pool: list[int], depth: int, max_match: int, matches: int
) -> list[tuple[int, list[int]]]:
    """The expected result of `search`, best first: number of matching tokens, and the tokens that follow."""
    found = []
    for source, text in enumerate((pool, sequence)):
        for end in range(len(text) - 1):
            matched = 0
            while (
                matched < min(max_match, end + 1, len(sequence))
                and text[end - matched] == sequence[-1 - matched] != SEPARATOR
            ):
                matched += 1
            after = text[end + 1 :]
            if source:  # periodic
                after = (after * depth)[:depth]
            stop = after.index(SEPARATOR) if SEPARATOR in after else len(after)
            if matched and stop:
                found.append((matched, source, end, after[: min(stop, depth)]))
    found.sort(key=lambda one: one[:3], reverse=True)
    return [(matched, after) for matched, _, _, after in found[:matches]]


def trie(
    found: list[tuple[int, list[int]]], topk: int, depth: int
) -> dict[tuple[int, ...], tuple[float, int]]:
    """Every node that `grow` makes: path -> (score, rank)."""
    nodes = {(): (0.0, 0)}
    for level in range(depth):
        weights: dict[tuple[int, ...], float] = {}
        for matched, after in found:
            if len(after) > level:
                path = tuple(after[: level + 1])
                weights[path] = weights.get(path, 0) + (matched + level) ** POWER
        for path, weight in weights.items():
            siblings = [other for other in weights if other[:-1] == path[:-1]]
            total = sum(weights[other] for other in siblings)
            order = sorted(
                siblings, key=lambda other: (-round(weights[other], 9), list(weights).index(other))
            )
            if path[:-1] in nodes:
                score, rank = nodes[path[:-1]]
                rank = max(rank, order.index(path))
                if rank < topk:
                    nodes[path] = (score + float(np.log(weight / (total + ESCAPE))), rank)
    del nodes[()]
    return nodes


def paths(tree, row: int) -> dict[tuple[int, ...], tuple[float, int]]:
    """The nodes of a tree that are not padding: path -> (score, rank)."""
    tokens, parents, depths = (
        np.asarray(leaf)[row] for leaf in (tree.tokens, tree.parents, tree.depths)
    )
    way, found = {0: ()}, {}
    for node in range(1, len(tokens)):
        if tokens[node] != ABSENT:
            way[node] = (*way[int(parents[node])], int(tokens[node]))
            assert len(way[node]) == depths[node]
            found[way[node]] = (float(tree.scores[row, node]), int(tree.ranks[row, node]))
    assert len(found) == len(way) - 1, "siblings are distinct"
    return found


def known(history: np.ndarray, lengths: np.ndarray, row: int) -> list[int]:
    return history[row, : lengths[row] + 1].tolist()


@pytest.mark.parametrize("limits", [(4, 6), (3, 100), (1, 4)])
def test_the_search_finds_what_a_scan_of_the_text_finds(monkeypatch, limits):
    limit(monkeypatch, *limits)
    history, lengths, pool = texts(0)
    search = jax.jit(partial(ngram.search, depth=TREE.depth, matches=limits[1]))
    found = jax.device_get(search(history, lengths, pool))
    for row in range(len(history)):
        expected = places(known(history, lengths, row), pool[row].tolist(), TREE.depth, *limits)
        count = int((found.matched[row] > 0).sum())
        assert found.matched[row, :count].tolist() == [matched for matched, _ in expected]
        for place, (_, after) in enumerate(expected):
            follows = [*found.follows[row, place].tolist(), SEPARATOR]
            assert follows[: follows.index(SEPARATOR)] == after


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "strategy", [TREE, Strategy(3, 1, 4), Strategy(2, 3, 13), Strategy(1, 2, 3)]
)
def test_the_tree_is_the_best_part_of_the_trie(monkeypatch, strategy):
    limit(monkeypatch, 4, 6)
    history, lengths, pool = texts(1)
    tree = jax.device_get(proposing(strategy)(history, lengths, pool))
    assert tree.scores.dtype == np.float64
    for row in range(len(history)):
        sequence = known(history, lengths, row)
        expected = trie(
            places(sequence, pool[row].tolist(), strategy.depth, 4, 6),
            strategy.topk,
            strategy.depth,
        )
        found = paths(tree, row)
        for path, (score, rank) in found.items():
            assert (pytest.approx(score), rank) == expected[path]
        best = sorted((score for score, _ in expected.values()), reverse=True)[: strategy.nodes - 1]
        np.testing.assert_allclose(
            sorted((score for score, _ in found.values()), reverse=True), best
        )
        assert tree.tokens[row, 0] == sequence[-1] and tree.scores[row, 0] == 0


@pytest.mark.parametrize("vocab", [2, 50])
def test_trees_are_sound(vocab):
    tree = proposing(Strategy(3, 3, 16))(*texts(2, vocab=vocab))
    here = np.asarray(tree.tokens) != ABSENT
    assert not references.orphans(tree).any()
    assert (np.asarray(tree.ranks)[here] < 3).all()
    above = np.take_along_axis(np.asarray(tree.scores), np.asarray(tree.parents), axis=1)
    assert (np.asarray(tree.scores) <= above)[here].all()
    assert np.isneginf(np.asarray(tree.scores)[~here]).all()
    assert here.any() and (vocab == 2 or not here.all())


def test_a_tree_may_have_more_nodes_than_the_text_can_fill(monkeypatch):
    limit(monkeypatch, 12, 1)
    history = np.array([[1, 2, 1, 3, 1]], np.int32)
    tree = proposing(Strategy(2, 6, 40))(
        history, np.array([4], np.int32), np.zeros((1, 0), np.int32)
    )
    assert set(paths(tree, 0)) == {(3,), (3, 1), (2,), (2, 1)}


def test_texts_beyond_exact_floats_are_refused():
    wide = jax.ShapeDtypeStruct((1, 2**20), jnp.int32)
    with pytest.raises(ValueError, match="at most"):
        jax.eval_shape(
            partial(ngram.search, depth=1, matches=4),
            wide, jax.ShapeDtypeStruct((1,), jnp.int32), wide,
        )  # fmt: skip


def test_memory_grows_with_the_text_and_no_faster():
    def temporary(slots: int) -> int:
        wide = jax.ShapeDtypeStruct((4, slots), jnp.int32)
        search = jax.jit(partial(ngram.search, depth=TREE.depth, matches=16))
        lowered = search.lower(wide, jax.ShapeDtypeStruct((4,), jnp.int32), wide)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 4.4 * temporary(2048)


def test_scores_are_the_probabilities_that_proposals_hold():
    """On worked solutions, and on copies of them with errors, the expected accept length is near the measured one."""
    rows = tasks.make("fold", {"min_length": 6, "max_length": 12}).rows(0, range(24), "train")
    rng, strategy = np.random.default_rng(0), Strategy(4, 4, 16)
    propose = proposing(strategy)
    got = expected = 0.0
    for row in rows:
        text = np.frombuffer((row.prompt + row.solution).encode(), np.uint8).astype(np.int32)[:64]
        errors = rng.random(len(text)) < 0.25
        sibling = np.where(errors, rng.integers(48, 58, len(text)), text).astype(np.int32)
        history = np.broadcast_to(np.pad(text, (0, 64 - len(text))), (64, 64))
        pool = np.broadcast_to(
            np.pad(sibling, (64 - len(text), 0), constant_values=SEPARATOR), (64, 64)
        )
        tree = jax.device_get(propose(history, np.arange(64, dtype=np.int32), pool))
        answer = slice(len(row.prompt) - 1, len(text) - strategy.depth - 1)
        after = np.minimum(np.arange(64)[:, None] + 1 + tree.depths, 63)
        accepted = match(
            tree, jnp.asarray(np.take_along_axis(history, after, axis=1)), strategy.depth
        ).accepted
        got += float(np.asarray(accepted)[answer].sum())
        expected += float(np.exp(tree.scores[answer, 1:]).sum())
    assert 0.75 < expected / got < 1.35, (expected, got)


def test_pools_hold_the_other_answers_to_the_prompt_newest_last():
    texts = NGramMemory(budget=12, capacity=1000, context=2)
    texts.begin([np.array(prompt) for prompt in ([1, 2, 3], [1, 2, 3], [8], [1, 2, 3])], samples=1)
    texts.write(0, np.array([10]))
    texts.write(1, np.array([20, 21]))
    texts.write(0, np.array([11, 12]))
    texts.write(2, np.array([30]))
    texts.write(3, np.array([40]))
    x = SEPARATOR
    pools = texts.siblings([0, 1, 2, 3, None])
    assert pools.dtype == np.int32
    assert pools.tolist() == [
        [x, x, x, x, 2, 3, 20, 21, x, 2, 3, 40], [x, x, x, 2, 3, 10, 11, 12, x, 2, 3, 40], [x] * 12,
        [x, x, 2, 3, 10, 11, 12, x, 2, 3, 20, 21], [x] * 12,
    ]  # fmt: skip


def test_answers_of_earlier_rollouts_come_first_and_the_oldest_are_cut():
    texts, prompts = NGramMemory(budget=8, capacity=1000, context=1), [np.array([5, 6])]
    texts.begin(prompts, samples=1)
    texts.write(0, np.arange(10, 16))
    texts.begin(prompts, samples=2)
    assert texts.siblings([0])[0].tolist() == [SEPARATOR, 6, 10, 11, 12, 13, 14, 15]
    texts.write(0, np.array([9]))
    assert texts.siblings([0])[0].tolist() == [SEPARATOR, 6, 10, 11, 12, 13, 14, 15], (
        "its own of this rollout is left out"
    )
    texts.write(1, np.array([20]))
    assert texts.siblings([0])[0].tolist() == [11, 12, 13, 14, 15, SEPARATOR, 6, 20]
    texts.write(1, np.arange(30, 50))
    texts.begin(prompts, samples=1)
    assert texts.size == 8, "what no pool can show any more is forgotten"


def test_the_memory_is_bounded_and_forgets_the_prompts_unused_for_longest():
    texts = NGramMemory(budget=8, capacity=20, context=0)
    for step in range(3):
        texts.begin([np.array([1]), np.array([2 + step])], samples=1)
        for uid in range(2):
            texts.write(uid, np.full(6, 10 * step + uid))
            assert texts.size <= 20
    texts.begin([np.array([1]), np.array([2])], samples=1)
    assert (texts.siblings([0, 1]) != SEPARATOR).any(axis=1).tolist() == [True, False]
    texts.write(0, np.zeros(100))
    texts.write(0, np.zeros(3))
    assert (texts.size, (texts.siblings([0]) == SEPARATOR).all()) == (0, True), (
        "dropped while it was written"
    )
