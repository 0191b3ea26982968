"""Trees from one pass over a block against plain loops: Markov bias of the parent, confidence, noise, draft vocabulary."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from test_tree_drafter import PREFIXES, expected_noise, setting

from tlt_jax.spec_decode import tree_drafter
from tlt_jax.spec_decode.interface import ABSENT
from tlt_jax.spec_decode.network import BlockPass, Network
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import rerank
from tlt_jax.spec_decode.tree_growth import Coupling

V, DEPTH, WIDTH = 9, 5, 4
pytestmark = pytest.mark.usefixtures("x64")
RANDOM = np.random.default_rng(5)
HIDDEN = RANDOM.normal(size=(len(PREFIXES), DEPTH, WIDTH))
HEAD, BIAS = RANDOM.normal(size=(V, WIDTH)), 1.5 * RANDOM.normal(size=(V, V))
ODDS = RANDOM.normal(size=(V, WIDTH))  # of a position's hidden state, by the token before


def network(ids, has_bias, has_confidence, unrolls=False, **changes) -> Network:
    """A network whose cache, weights and hidden states are constants; it checks the roots and lengths that it gets."""

    def draft(weights, cache, roots, starts, levels):
        wanted = [prefix[-1] for prefix in PREFIXES], [len(prefix) - 1 for prefix in PREFIXES]
        right = (roots == jnp.array(wanted[0])) & (starts == jnp.array(wanted[1]))
        return jnp.where(right[:, None, None], jnp.asarray(HIDDEN)[:, :levels], jnp.nan)

    def bias(weights, tokens):
        return jnp.asarray(BIAS)[tokens][:, :, ids]

    def confidence(weights, hidden, tokens):
        return jax.nn.log_sigmoid(jnp.einsum("bkz,bkz->bk", hidden, jnp.asarray(ODDS)[tokens]))

    whole = len(ids) == V
    passes = BlockPass(
        draft, DEPTH, bias if has_bias else None, confidence if has_confidence else None
    )
    own = {name: changes.pop(name) for name in BlockPass._fields if name in changes}
    empty = Network(*[None] * len(Network._fields))
    return empty._replace(
        logits=lambda weights, hidden: hidden @ jnp.asarray(HEAD)[ids].T, passes=passes._replace(**own),
        ids=lambda weights: None if whole else jnp.asarray(ids, jnp.int32),
        hidden=jax.ShapeDtypeStruct((1, 0), jnp.float64), top=jax.lax.top_k, unrolls=unrolls,
    )._replace(**changes)  # fmt: skip


def drawn(net, coupling, strategy, temperature):
    drafter = tree_drafter.learned_drafter(net, coupling)
    context = setting(temperature)
    state = tree_drafter.LearnedState(
        None, context.lengths, jnp.zeros((len(PREFIXES), 0), jnp.float64)
    )
    roots = jnp.array([prefix[-1] for prefix in PREFIXES], jnp.int32)

    def run(state, context):
        candidates = drafter.draft((), state, context, strategy, temperature)
        return rerank(candidates, roots, strategy.nodes)

    return jax.jit(run)(state, context)


def log_softmax(value):
    return value - np.log(np.exp(value).sum())


def grown(row, coupling, strategy, temperature, ids, has_bias, has_confidence):
    """The best paths below the root with their scores and ranks, by growing every level from its k best."""
    beams, found, root = [((), 0.0, 0)], [], PREFIXES[row][-1]
    noise = expected_noise(row) if temperature else None
    for level in range(strategy.depth):
        here = []
        for path, score, rank in beams:
            before = path[-1] if path else root
            logits = HEAD[ids] @ HIDDEN[row, level] + (BIAS[before][ids] if has_bias else 0)
            value = log_softmax(logits / (temperature or 1.0))
            value = value + (0 if noise is None else coupling.strength * noise[level][ids])
            value = log_softmax(coupling.sharpness * value)
            if has_confidence:
                value = value - np.log1p(np.exp(-HIDDEN[row, level] @ ODDS[before]))
            for place, index in enumerate(np.argsort(-value, kind="stable")[: strategy.topk]):
                here.append(((*path, int(ids[index])), score + value[index], max(rank, place)))
        found += here
        beams = sorted(here, key=lambda node: -node[1])[: strategy.topk]
    best = sorted(found, key=lambda node: -node[1])[: strategy.nodes - 1]
    return {path: (score, rank) for path, score, rank in best}


SOME = np.array([0, 1, 4, 5, 7])


ALL = np.arange(V)


@pytest.mark.parametrize("unrolls", [False, True])
@pytest.mark.parametrize(("strategy", "coupling", "temperature", "ids", "has_bias", "has_confidence"), [
    (Strategy(1, 3, 4), Coupling(0.75), 1.0, ALL, True, True),
    (Strategy(5, 1, 6), Coupling(0.75), 1.0, ALL, True, True),
    (Strategy(4, 3, 12), Coupling(1.0, 2.0), 1.0, ALL, True, False),
    (Strategy(3, 2, 6), Coupling(0.5), 0.0, ALL, False, False),
    (Strategy(5, 4, 40), Coupling(0.75, 0.5), 0.6, SOME, True, True),
    (Strategy(3, 4, 20), Coupling(0.0), 1.0, SOME, False, True),
])  # fmt: skip
def test_trees_are_those_of_plain_loops(
    strategy, coupling, temperature, ids, has_bias, has_confidence, unrolls
):
    net = network(ids, has_bias, has_confidence, unrolls=unrolls)
    tree = drawn(net, coupling, strategy, temperature)
    assert not references.orphans(tree).any()
    for row in range(len(PREFIXES)):
        expected = grown(row, coupling, strategy, temperature, ids, has_bias, has_confidence)
        paths = {0: ()}
        for node in range(1, strategy.nodes):
            paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
        assert set(list(paths.values())[1:]) == set(expected)
        for node in range(1, strategy.nodes):
            score, rank = expected[paths[node]]
            assert len(paths[node]) == tree.depths[row, node] and rank == tree.ranks[row, node]
            np.testing.assert_allclose(tree.scores[row, node], score, atol=1e-9)


@pytest.mark.parametrize("shift", ["parents", "levels"])
def test_the_loops_tell_a_wrong_parent_and_a_wrong_level_apart(shift):
    """What the equality above would miss: the bias of another node of the level, the hidden state of another level."""
    strategy, rule = Strategy(4, 3, 12), (Coupling(0.75), Strategy(4, 3, 12), 1.0)
    right = network(ALL, True, True)
    draft, bias = right.passes.draft, right.passes.bias
    wrong = {
        "parents": {"bias": lambda weights, tokens: bias((), jnp.roll(tokens, 1, 1))},
        "levels": {"draft": lambda *rest: jnp.roll(draft(*rest), 1, 1)},
    }
    wrong = network(ALL, True, True, **wrong[shift])
    trees = [drawn(net, *rule) for net in (right, wrong)]
    assert any(
        (one != other).any()
        for one, other in zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
    )
    np.testing.assert_allclose(
        trees[0].scores[0, 1:].sum(),
        sum(score for score, _ in grown(0, rule[0], strategy, 1.0, ALL, True, True).values()),
        atol=1e-9,
    )
    assert abs(float(trees[1].scores[0, 1:].sum() - trees[0].scores[0, 1:].sum())) > 1e-3


def test_what_is_not_finite_becomes_no_node():
    strategy = Strategy(3, 2, 6)
    for broken in (
        {"logits": lambda weights, hidden: (hidden @ jnp.asarray(HEAD).T).at[..., 4].set(jnp.nan)},
        {"confidence": lambda weights, hidden, tokens: jnp.full(tokens.shape, jnp.nan)},
    ):
        tree = drawn(network(ALL, True, True, **broken), Coupling(), strategy, 1.0)
        assert (tree.tokens[:, 1:] == ABSENT).all() and (tree.parents == 0).all()


def test_a_strategy_deeper_than_the_block_is_refused():
    with pytest.raises(
        ValueError, match="strategy 6_1_7: the drafter drafts 5 levels: use depth 5"
    ):
        drawn(network(ALL, True, True), Coupling(), Strategy(6, 1, 7), 1.0)


def test_rows_without_a_token_before_the_root_draft_nothing():
    net = network(ALL, False, False)
    drafter = tree_drafter.learned_drafter(net, Coupling())
    context = setting(0.0)
    context = context.replace(lengths=jnp.zeros_like(context.lengths))
    state = tree_drafter.LearnedState(None, context.lengths, jnp.zeros((len(PREFIXES), 0)))
    draft = partial(drafter.draft, (), state, context, Strategy(2, 2, 4), 0.0)
    assert (draft().scores == -jnp.inf).all()
