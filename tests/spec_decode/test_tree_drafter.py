"""Trees of a learned drafter against plain loops: beams, scores, coupling, closure, and values that are not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import toys

from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.spec_decode import noise, tree_drafter, tree_growth
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import ABSENT, Candidates, Context, score_order
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import rerank
from tlt_jax.spec_decode.tree_growth import Coupling

V, SLOTS = 9, 32
TABLE = toys.table(V, seed=3)
PREFIXES = [[3, 1, 4, 1, 5], [2, 7], [8, 2, 8, 1, 8, 2, 8]]
pytestmark = pytest.mark.usefixtures("x64")


def setting(temperature: float) -> Context:
    """Three sequences with their features and noise."""
    history = np.zeros((len(PREFIXES), SLOTS), np.int32)
    features = np.zeros((len(PREFIXES), SLOTS, V))
    for row, prefix in enumerate(PREFIXES):
        history[row, : len(prefix)] = prefix
        for t in range(len(prefix) - 1):
            features[row, t] = toys.table_logits(TABLE, prefix[: t + 1])
    lengths = jnp.array([len(prefix) - 1 for prefix in PREFIXES], jnp.int32)
    keys = jnp.asarray(sequence_keys(0, 0, 0, np.arange(len(PREFIXES))))
    ahead = noise.nothing_drawn(lengths + 1, 5, V, jnp.float64)
    ahead = noise.draw_ahead(ahead, keys, lengths + 1, lengths > 0)
    return Context(
        jnp.asarray(history), lengths, jnp.asarray(features), (), ahead if temperature else None
    )


def expected_noise(row: int) -> np.ndarray:
    """The noise of the positions after a prefix."""
    key = jnp.asarray(sequence_keys(0, 0, 0, np.array([row])))
    positions = len(PREFIXES[row]) + jnp.arange(5, dtype=jnp.int32)[None]
    return np.asarray(noise.gumbel(key, positions, V, jnp.float64))[0]


def drawn(
    coupling: Coupling,
    strategy: Strategy,
    temperature: float,
    ids=None,
    guess=TABLE,
    width: int = 3,
):
    """The trees of the toy network, after catching up by windows of `width`."""
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    drafter = tree_drafter.learned_drafter(toys.table_network(group, V, ids), coupling)
    context, weights = setting(temperature), Weights(jnp.asarray(TABLE), jnp.asarray(guess))
    state = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        drafter.empty(len(PREFIXES), SLOTS - toys.TAIL),
    )
    for _ in range(4):
        state = drafter.extend(weights, state, context, width)
    assert state.built.tolist() == context.lengths.tolist()
    candidates = drafter.draft(weights, state, context, strategy, temperature)
    roots = jnp.array([prefix[-1] for prefix in PREFIXES], jnp.int32)
    return rerank(candidates, roots, strategy.nodes), context


def children(prefix, ahead, coupling, temperature, ids, k):
    """Tokens and log-probabilities of the k best children, best first."""
    logits = toys.table_logits(TABLE, prefix)[ids]
    value = logits / (temperature or 1.0)
    value = value - np.log(np.exp(value).sum())
    if ahead is not None:
        value = value + coupling.strength * ahead[ids]
    value = coupling.sharpness * value
    value = value - np.log(np.exp(value).sum())
    best = np.argsort(-value, kind="stable")[:k]
    return [(int(ids[i]), value[i]) for i in best]


def grown(prefix, ahead, coupling, strategy, temperature, ids):
    """The best paths below the root with their scores and ranks, by growing every level from its k best."""
    beams, found = [((), 0.0, 0)], []
    for level in range(strategy.depth):
        here = None if ahead is None else ahead[level]
        level_nodes = [
            ((*path, token), score + logp, max(rank, place))
            for path, score, rank in beams
            for place, (token, logp) in enumerate(
                children(prefix + list(path), here, coupling, temperature, ids, strategy.topk)
            )
        ]
        found += level_nodes
        beams = sorted(level_nodes, key=lambda node: -node[1])[: strategy.topk]
    return {
        path: (score, rank)
        for path, score, rank in sorted(found, key=lambda node: -node[1])[: strategy.nodes - 1]
    }


@pytest.mark.parametrize(("strategy", "coupling", "temperature", "ids"), [
    (Strategy(1, 3, 4), Coupling(0.75), 1.0, None), (Strategy(3, 1, 4), Coupling(0.0), 0.6, None),
    (Strategy(4, 3, 12), Coupling(1.0, 2.0), 1.0, None), (Strategy(3, 2, 6), Coupling(0.5), 0.0, None),
    (Strategy(4, 2, 9), Coupling(0.75, 0.5), 0.6, np.array([0, 1, 4, 5, 7])), (Strategy(2, 4, 20), Coupling(0.25), 1.0, None),
])  # fmt: skip
def test_trees_are_those_of_plain_loops(strategy, coupling, temperature, ids):
    tree, context = drawn(coupling, strategy, temperature, ids)
    assert not references.orphans(tree).any()
    for row, prefix in enumerate(PREFIXES):
        ahead = expected_noise(row) if temperature else None
        expected = grown(
            prefix, ahead, coupling, strategy, temperature, np.arange(V) if ids is None else ids
        )
        paths = {0: ()}
        for node in range(1, strategy.nodes):
            paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
        assert set(list(paths.values())[1:]) == set(expected)
        for node in range(1, strategy.nodes):
            score, rank = expected[paths[node]]
            assert len(paths[node]) == tree.depths[row, node] and rank == tree.ranks[row, node]
            np.testing.assert_allclose(tree.scores[row, node], score, atol=1e-9)


def test_random_candidates_never_leave_an_orphan():
    rng = np.random.default_rng(0)
    k, depth, count = 3, 4, 400
    tokens, parents, depths, scores = [], [], [], []
    for _ in range(count):
        ids, ups, deep, total = [], [], [], []
        beams = [(-1, 0.0)]
        for level in range(1, depth + 1):
            new = []
            for up, score in beams:
                logp = np.minimum(np.round(-rng.exponential(1.0, k), 1), 0)  # rounded: many ties
                for place in range(k):
                    new.append((len(ids), score + logp[place]))
                    (
                        ids.append(place),
                        ups.append(up),
                        deep.append(level),
                        total.append(score + logp[place]),
                    )
            beams = sorted(new, key=lambda node: -node[1])[:k]
        tokens.append(ids), parents.append(ups), depths.append(deep), scores.append(total)
    arrays = [jnp.asarray(np.array(one), jnp.int32) for one in (tokens, parents, depths)]
    candidates = Candidates(
        *arrays, jnp.asarray(np.array(scores)), jnp.zeros((count, len(ids)), jnp.int32)
    )
    for nodes in (2, 8, 16, 31):
        tree = rerank(candidates, jnp.zeros(count, jnp.int32), nodes)
        unsorted = rerank(candidates, jnp.zeros(count, jnp.int32), nodes, counts=True)
        jax.tree.map(np.testing.assert_array_equal, unsorted, tree)
        assert not references.orphans(tree).any()
        best = np.sort(np.array(scores), axis=1)[:, ::-1][:, : nodes - 1]
        np.testing.assert_allclose(np.sort(tree.scores[:, 1:], axis=1)[:, ::-1], best)


def test_what_is_not_finite_becomes_no_node():
    table = TABLE.copy()
    table[:, 4] = np.nan  # the logit of token 4 is NaN after every token: no child is finite
    strategy = Strategy(3, 2, 6)
    tree, _ = drawn(Coupling(), strategy, 1.0, guess=table)
    assert (tree.tokens[:, 1:] == ABSENT).all() and (tree.parents == 0).all()
    logits = jnp.array([[[1.0, jnp.nan, 3.0]], [[0.0, jnp.inf, 1.0]]])
    tokens, scores = tree_growth.score_children(
        logits, None, None, coupling=Coupling(), temperature=1.0, k=2
    )
    assert (scores == -jnp.inf).all() and tokens.shape == (2, 1, 2)


def test_nodes_are_ordered_by_score_and_the_root_is_first():
    scores = jnp.array([[0.0, -2.0, -1.0, -1.0, -jnp.inf, -0.0]])
    assert score_order(scores).tolist() == [[0, 4, 2, 3, 5, 1]]
