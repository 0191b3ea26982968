"""Trees of learned drafters against plain loops, by a pass for each level and by one pass over a block.

Beams, scores, coupling, draft vocabulary, closure, and values that are not finite; of blocks the Markov bias of the parent,
and the confidence.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import toys

from tlt_jax.distributed import mesh as meshes
from tlt_jax.kernels.fused import Fused
from tlt_jax.keys import sequence_keys
from tlt_jax.models import drafter as drafters
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.spec_decode import noise, tree_drafter
from tlt_jax.spec_decode.interface import ABSENT, Context, DraftTree, score_order
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import rerank
from tlt_jax.spec_decode.tree_drafter import Coupling, LearnedState

V, SLOTS, DEPTH, WIDTH = 9, 32, 5, 4
TABLE = toys.table(V, seed=3)
PREFIXES = [[3, 1, 4, 1, 5], [2, 7], [8, 2, 8, 1, 8, 2, 8]]
ROOTS = jnp.array([prefix[-1] for prefix in PREFIXES], jnp.int32)
RANDOM = np.random.default_rng(5)
HIDDEN = RANDOM.normal(size=(len(PREFIXES), DEPTH, WIDTH))  # of the positions of a block
HEAD, BIAS = RANDOM.normal(size=(V, WIDTH)), 1.5 * RANDOM.normal(size=(V, V))
ODDS = RANDOM.normal(size=(V, WIDTH))  # of a position's hidden state, by the token before
SOME = np.array([0, 1, 4, 5, 7])
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
    ahead = noise.nothing_drawn(lengths + 1, DEPTH, V, jnp.float64)
    ahead = noise.draw_ahead(ahead, keys, lengths + 1, lengths > 0)
    return Context(
        jnp.asarray(history), lengths, jnp.asarray(features), (), ahead if temperature else None
    )


def levels(coupling: Coupling, strategy, temperature, ids=None, guess=TABLE, width=3) -> DraftTree:
    """The trees of the toy, after catching up by windows of `width`."""
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    drafter = toys.table_drafter(coupling)(group, V)
    context, weights = setting(temperature), toys.weights(TABLE, guess, ids)
    empty = drafter.empty(len(PREFIXES), SLOTS - toys.TAIL)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)

    @jax.jit
    def run(weights, state, context):
        for _ in range(4):
            state = drafter.extend(weights, state, context, width)
        candidates = drafter.draft(weights, state, context, strategy, temperature)
        return state.built, rerank(candidates, ROOTS, strategy.nodes)

    built, tree = run(weights, state, context)
    assert built.tolist() == context.lengths.tolist()
    return tree


def block(
    coupling, strategy, temperature, ids=None, has_bias=True, has_confidence=True, unrolls=False,
    context=None, top=0, **changes,
) -> DraftTree:  # fmt: skip
    """The trees of a block whose hidden states are constants; it checks the roots and lengths that it gets."""

    def draft_block(params, config, shared, cache, roots, lengths, levels, fused):
        right = (roots == ROOTS) & (lengths == jnp.array([len(prefix) - 1 for prefix in PREFIXES]))
        return jnp.where(right[:, None, None], jnp.asarray(HIDDEN)[:, :levels], jnp.nan)

    def bias(params, embedding, hidden, places=None):
        found = embedding @ jnp.asarray(BIAS)
        found = found if params.ids is None else found[..., params.ids]
        return found if places is None else jnp.take_along_axis(found, places, -1)

    def logits(params, config, shared, hidden, fused):
        return hidden @ jnp.asarray(HEAD if ids is None else HEAD[ids]).T

    functions = {
        "draft_block": draft_block,
        "logits": logits,
        "markov_embedding": lambda params, tokens, dtype: jax.nn.one_hot(tokens, V, dtype=dtype),
        "markov_bias": bias,
        "confidence": lambda params, hidden, embedding: jnp.einsum(
            "bkz,bkz->bk", hidden, embedding @ jnp.asarray(ODDS)
        ),
    }
    policy = ModelConfig("qwen3", V, 8, 2, 1, 1, 8, 8, 64, qk_norm="head")
    heads = {"markov_rank": 4 if has_bias else 0, "confidence": has_confidence, "block_size": DEPTH}
    if top:
        heads = {"selector_top_k": top, "block_size": DEPTH + 1}
    config = drafters.for_policy(
        policy,
        "dflash2" if top else "dspark",
        draft_vocab_size=V if ids is None else len(ids),
        **heads,
    )
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    drafter = tree_drafter.learned_drafter(
        config, SimpleNamespace(unrolls=unrolls, choose=None), Fused.of(group), "float64", coupling,
        SimpleNamespace(**functions | changes),
    )  # fmt: skip
    context = context or setting(temperature)
    state = LearnedState(None, context.lengths, jnp.zeros((len(PREFIXES), 0)))

    def run(weights, state, context):
        candidates = drafter.draft(weights, state, context, strategy, temperature)
        return rerank(candidates, ROOTS, strategy.nodes)

    return jax.jit(run)(toys.weights(TABLE, TABLE, ids), state, context)


def log_softmax(value):
    return value - np.log(np.exp(value).sum())


def level_logits(row: int, path: tuple[int, ...]) -> tuple[np.ndarray, float]:
    """Logits after a path below the root, and the log-probability that the confidence adds."""
    return toys.table_logits(TABLE, [*PREFIXES[row], *path]), 0.0


def block_logits(row: int, path: tuple[int, ...], has_bias=True, has_confidence=True):
    """As `level_logits`, of a block."""
    before = path[-1] if path else PREFIXES[row][-1]
    hidden = HIDDEN[row, len(path)]
    sure = -np.log1p(np.exp(-hidden @ ODDS[before])) if has_confidence else 0.0
    return HEAD @ hidden + (BIAS[before] if has_bias else 0), sure


def grown(logits_after, row: int, coupling, strategy, temperature, ids=None, top=0):
    """The best paths below the root with their scores and ranks, by growing every level from its k best.

    `top`: of a selector, which shares among the best so many what they have, by BIAS.
    """
    key = jnp.asarray(sequence_keys(0, 0, 0, np.array([row])))
    positions = len(PREFIXES[row]) + jnp.arange(DEPTH, dtype=jnp.int32)[None]
    ahead = np.asarray(noise.gumbel(key, positions, V, jnp.float64))[0]
    ids = np.arange(V) if ids is None else ids
    beams, found = [((), 0.0, 0)], []
    for level in range(strategy.depth):
        here = []
        for path, score, rank in beams:
            logits, sure = logits_after(row, path)
            value = log_softmax(logits[ids] / (temperature or 1.0))
            if temperature:
                value = value + coupling.strength * ahead[level][ids]
            value = log_softmax(coupling.sharpness * value) + sure
            if top:
                best, before = (
                    np.argsort(-value)[: max(top, strategy.topk)],
                    path[-1] if path else PREFIXES[row][-1],
                )
                more = coupling.sharpness / (temperature or 1.0) * BIAS[before][ids[best]]
                found_here = log_softmax(value[best] + more) + np.log(np.exp(value[best]).sum())
                value = np.full(len(value), -np.inf)
                value[best] = found_here
            for place, index in enumerate(np.argsort(-value, kind="stable")[: strategy.topk]):
                here.append(((*path, int(ids[index])), score + value[index], max(rank, place)))
        found += here
        beams = sorted(here, key=lambda node: -node[1])[: strategy.topk]
    best = sorted(found, key=lambda node: -node[1])[: strategy.nodes - 1]
    return {path: (score, rank) for path, score, rank in best}


def assert_is_that_of_loops(tree: DraftTree, logits_after, coupling, strategy, *rest) -> None:
    """Checks the paths, scores and ranks of every row."""
    assert not references.orphans(tree).any()
    for row in range(len(PREFIXES)):
        expected, paths = grown(logits_after, row, coupling, strategy, *rest), {0: ()}
        for node in range(1, strategy.nodes):
            paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
        assert set(list(paths.values())[1:]) == set(expected)
        for node in range(1, strategy.nodes):
            score, rank = expected[paths[node]]
            assert len(paths[node]) == tree.depths[row, node] and rank == tree.ranks[row, node]
            np.testing.assert_allclose(tree.scores[row, node], score, atol=1e-9)


@pytest.mark.parametrize(("strategy", "coupling", "temperature", "ids"), [
    (Strategy(1, 3, 4), Coupling(0.75), 1.0, None), (Strategy(3, 1, 4), Coupling(0.0), 0.6, None),
    (Strategy(4, 3, 12), Coupling(1.0, 2.0), 1.0, None), (Strategy(3, 2, 6), Coupling(0.5), 0.0, None),
    (Strategy(4, 2, 9), Coupling(0.75, 0.5), 0.6, SOME), (Strategy(2, 4, 20), Coupling(0.25), 1.0, None),
])  # fmt: skip
def test_trees_of_a_pass_a_level_are_those_of_plain_loops(strategy, coupling, temperature, ids):
    tree = levels(coupling, strategy, temperature, ids)
    assert_is_that_of_loops(tree, level_logits, coupling, strategy, temperature, ids)


@pytest.mark.parametrize("unrolls", [False, True])
@pytest.mark.parametrize(("strategy", "coupling", "temperature", "ids", "has_bias", "has_confidence"), [
    (Strategy(1, 3, 4), Coupling(0.75), 1.0, None, True, True),
    (Strategy(5, 1, 6), Coupling(0.75), 1.0, None, True, True),
    (Strategy(4, 3, 12), Coupling(1.0, 2.0), 1.0, None, True, False),
    (Strategy(3, 2, 6), Coupling(0.5), 0.0, None, False, False),
    (Strategy(5, 4, 40), Coupling(0.75, 0.5), 0.6, SOME, True, True),
    (Strategy(3, 4, 20), Coupling(0.0), 1.0, SOME, False, True),
])  # fmt: skip
def test_trees_of_a_block_are_those_of_plain_loops(
    strategy, coupling, temperature, ids, has_bias, has_confidence, unrolls
):
    rule, heads = (coupling, strategy, temperature, ids), (has_bias, has_confidence)
    tree = block(*rule, *heads, unrolls)
    assert_is_that_of_loops(tree, lambda row, path: block_logits(row, path, *heads), *rule)


@pytest.mark.parametrize("unrolls", [False, True])
@pytest.mark.parametrize(("strategy", "coupling", "temperature", "ids", "top"), [
    (Strategy(4, 3, 12), Coupling(0.75, 2.0), 1.0, None, 5), (Strategy(5, 2, 9), Coupling(0.5), 0.0, None, 3),
    (Strategy(3, 2, 6), Coupling(0.75), 0.6, SOME, 4), (Strategy(3, 3, 9), Coupling(0.0), 1.0, SOME, 9),
    (Strategy(2, 4, 12), Coupling(0.75), 1.0, None, 2),
])  # fmt: skip
def test_trees_of_a_selector_are_those_of_plain_loops(
    strategy, coupling, temperature, ids, top, unrolls
):
    """With more siblings than candidates, all siblings are candidates; with more candidates than tokens, all tokens."""
    tree = block(coupling, strategy, temperature, ids, unrolls=unrolls, top=top)

    def after(row, path):
        return block_logits(row, path, False, False)

    assert_is_that_of_loops(tree, after, coupling, strategy, temperature, ids, top)


def test_what_is_not_finite_becomes_no_node():
    table = TABLE.copy()
    table[:, 4] = np.nan  # the logit of token 4 is NaN after every token: no child is finite
    rule = Coupling(), Strategy(3, 2, 6), 1.0
    trees = [levels(*rule, guess=table)]
    for broken in (
        {"logits": lambda *given: (given[3] @ jnp.asarray(HEAD).T).at[..., 4].set(jnp.nan)},
        {"confidence": lambda params, hidden, _: jnp.full(hidden.shape[:2], jnp.nan)},
    ):
        trees.append(block(*rule, **broken))
    trees.append(block(*rule, top=3, markov_bias=lambda *given: jnp.full((3, 1, 3), jnp.nan)))
    for tree in trees:
        assert (tree.tokens[:, 1:] == ABSENT).all() and (tree.parents == 0).all()
    logits = jnp.array([[[1.0, jnp.nan, 3.0]], [[0.0, jnp.inf, 1.0]]])
    tokens, scores = tree_drafter.score_children(
        logits, None, None, coupling=Coupling(), temperature=1.0, k=2
    )
    assert (scores == -jnp.inf).all() and tokens.shape == (2, 1, 2)


def test_a_strategy_deeper_than_the_block_is_refused():
    with pytest.raises(
        ValueError, match="strategy 6_1_7: the drafter drafts 5 levels: use depth 5"
    ):
        block(Coupling(), Strategy(6, 1, 7), 1.0)


def test_rows_without_a_token_before_the_root_draft_nothing():
    context = setting(0.0)
    context = context.replace(lengths=jnp.zeros_like(context.lengths))
    tree = block(Coupling(), Strategy(2, 2, 4), 0.0, context=context)
    assert (tree.scores[:, 1:] == -jnp.inf).all()


def test_nodes_are_ordered_by_score_and_the_root_is_first():
    scores = jnp.array([[0.0, -2.0, -1.0, -1.0, -jnp.inf, -0.0]])
    assert score_order(scores).tolist() == [[0, 4, 2, 3, 5, 1]]
