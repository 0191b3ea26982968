"""Candidates of two drafters in one set against dicts of paths, and the best tree of a set."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from pairwise import marked

from tlt_jax.spec_decode.interface import ABSENT, Candidates
from tlt_jax.spec_decode.tree import merge, ranks_of, rerank

merged = jax.jit(partial(merge, depth=17))  # the longest chain here
ROWS, VOCAB = 80, 3


def proposed(seed: int, count: int, depth: int) -> Candidates:
    """Random candidates, some of them padding; of few scores, so that many are equal."""
    rng = np.random.default_rng(seed)
    tokens, parents, depths = (np.zeros((ROWS, count), np.int32) for _ in range(3))
    scores = np.full((ROWS, count), -np.inf, np.float32)
    for b in range(ROWS):
        empty = rng.choice([0, 0.2, 0.9])
        for i in range(count):
            absent = rng.random() < empty
            above = [
                j for j in range(-1, i)
                if j < 0 or (depths[b, j] < depth and (absent or scores[b, j] > -np.inf))
            ]  # fmt: skip
            parents[b, i] = up = rng.choice(above)
            there = (parents[b, :i] == up) & (scores[b, :i] > -np.inf)
            free = [v for v in range(VOCAB) if v not in tokens[b, :i][there]]
            depths[b, i] = 1 if up < 0 else depths[b, up] + 1
            tokens[b, i] = rng.integers(VOCAB) if absent or not free else rng.choice(free)
            if not absent and free:
                scores[b, i] = (0 if up < 0 else scores[b, up]) - rng.integers(0, 4) / 4
    arrays = map(jnp.asarray, (tokens, parents, depths, scores))
    candidates = Candidates(*arrays, ranks=jnp.full((ROWS, count), 99, jnp.int32))
    return candidates.replace(ranks=ranks_of(candidates))


def paths(candidates: Candidates, row: int) -> dict[tuple[int, ...], int]:
    """The candidates that are not padding: path -> place."""
    tokens, parents, depths, scores = (
        np.asarray(leaf)[row].tolist()
        for leaf in (candidates.tokens, candidates.parents, candidates.depths, candidates.scores)
    )
    ways, found = {-1: ()}, {}
    for i, score in enumerate(scores):
        if score > -np.inf:
            assert parents[i] < i and score <= (scores[parents[i]] if parents[i] >= 0 else 0)
            ways[i] = (*ways[parents[i]], tokens[i])  # KeyError: the parent is missing
            assert len(ways[i]) == depths[i] and ways[i] not in found
            found[ways[i]] = i
    return found


def union(first: Candidates, second: Candidates, row: int) -> dict[tuple, tuple[int, float, int]]:
    """The expected result of `merge`: path -> place, score and rank."""
    ours, theirs, count = paths(first, row), paths(second, row), first.tokens.shape[1]
    places = {path: count + place for path, place in theirs.items()} | ours
    scores = {
        path: max(
            float(one.scores[row, known[path]])
            for one, known in ((first, ours), (second, theirs)) if path in known
        )
        for path in places
    }  # fmt: skip
    order = sorted(places, key=lambda path: (-scores[path], places[path]))

    def rank(path: tuple[int, ...]) -> int:
        ways = [path[: end + 1] for end in range(len(path))]
        return max(
            [one for one in order if len(one) == len(way) and one[:-1] == way[:-1]].index(way)
            for way in ways
        )

    return {path: (places[path], scores[path], rank(path)) for path in places}


SIZES = [(12, 12, 4), (5, 20, 6), (20, 7, 2), (1, 9, 9), (9, 1, 1)]
PAIRS = pytest.mark.parametrize(
    ("C", "E", "depth"), marked([(size, size not in ((20, 7, 2), (9, 1, 1))) for size in SIZES])
)


@PAIRS
def test_the_merged_set_is_the_union_of_paths_with_the_larger_scores(C, E, depth):
    first, second = jax.device_get((proposed(1, C, depth), proposed(2, E, depth)))
    both = jax.device_get(merged(first, second))
    shared = 0
    for row in range(ROWS):
        found = {
            path: (place, float(both.scores[row, place]), int(both.ranks[row, place]))
            for path, place in paths(both, row).items()
        }
        assert found == union(first, second, row)
        twice = [place for path, place in paths(second, row).items() if path in paths(first, row)]
        shared += len(twice)
        assert (both.tokens[row, C:][twice] == ABSENT).all()
        assert np.isneginf(both.scores[row, C:][twice]).all()
    assert shared > ROWS / 4
    assert (both.parents < np.arange(C + E)).all(), "also where nothing is"
    for name in ("tokens", "parents", "depths"):
        np.testing.assert_array_equal(getattr(both, name)[:, :C], getattr(first, name))


@PAIRS
def test_the_tree_of_a_merged_set_is_sound_and_has_its_best(C, E, depth):
    both = merged(proposed(3, C, depth), proposed(4, E, depth))
    best = np.sort(np.asarray(both.scores), axis=1)[:, ::-1]
    for nodes in {2, 1 + min(C, E), 1 + (C + E) // 2, 1 + C + E}:
        tree = jax.device_get(rerank(both, jnp.zeros(ROWS, jnp.int32), nodes))
        unsorted = rerank(both, jnp.zeros(ROWS, jnp.int32), nodes, counts=True)
        jax.tree.map(np.testing.assert_array_equal, unsorted, tree)
        assert not references.orphans(tree).any()
        np.testing.assert_array_equal(-np.sort(-tree.scores[:, 1:], axis=1), best[:, : nodes - 1])
        for row in range(ROWS):
            below = zip(tree.parents[row, 1:], tree.tokens[row, 1:], strict=True)
            here = [(parent, token) for parent, token in below if token != ABSENT]
            assert len(set(here)) == len(here) == min(nodes - 1, np.isfinite(best[row]).sum())


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 9, 17])
def test_a_rank_is_passed_down_to_the_end_of_a_chain(length):
    steps = list(range(length))
    better, chain = (0, -1, 1, 0.0), [(1, i if i else -1, 1 + i, -1.0 - i) for i in steps]
    tokens, parents, depths, scores = zip(better, *chain, strict=True)
    arrays = (jnp.array([one], jnp.int32) for one in (tokens, parents, depths))
    chain = Candidates(*arrays, jnp.array([scores]), jnp.zeros((1, length + 1), jnp.int32))
    assert ranks_of(chain).tolist() == [[0] + [1] * length]
    assert merged(chain, chain).ranks[:, : length + 1].tolist() == [[0] + [1] * length]
