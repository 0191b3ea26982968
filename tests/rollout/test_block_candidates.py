"""The candidates of a block drafter as a rollout binds it, against a reference in NumPy: tokens, and scores of whole paths."""

from __future__ import annotations

import drafter_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.distributed import mesh as meshes
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import architecture
from tlt_jax.rollout import bindings
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import Context
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree_drafter import learned_drafter

LENGTHS = np.array([3, 7, 5], np.int32)
STRATEGY = Strategy(3, 2, 11)


def candidates(case: str, tokens, features, model: int):
    """All candidates of a greedy round after LENGTHS tokens, which the drafter has read in windows of 3."""
    mesh = meshes.make_mesh(1, model)
    params, shared, group = cases.rolled(case, mesh)
    own = cases.config(case)
    target = bindings.bind_target(
        cases.policy(), Fused.of(group), "float64", own.captures, STRATEGY.path
    )
    drafter = learned_drafter(own, target, Fused.of(group), "float64")
    policy = architecture.Params(shared.embed, (), params.final_norm, shared.head)
    context = Context(*map(jnp.asarray, (tokens, LENGTHS, features)), ())
    empty = drafter.empty(len(LENGTHS), tokens.shape[1])

    @jax.jit
    def run(weights: Weights, context: Context):
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)
        for _ in range(3):
            state = drafter.extend(weights, state, context, 3)
        return drafter.draft(weights, state, context, STRATEGY, 0.0)

    return jax.tree.map(np.asarray, run(Weights(policy, params), context))


def log_softmax(x):
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def children(case: str, hidden, token: int) -> dict[int, float]:
    """The score of every token at a position with this hidden state, after this token."""
    own, params = cases.config(case), jax.tree.map(np.asarray, cases.params(case))
    ids = np.arange(cases.VOCAB) if own.has_full_vocab else cases.IDS
    logits, sure = np.asarray(cases.shared().head)[ids] @ hidden, 0.0
    before = params.markov_in[token] if own.markov_rank else np.zeros(0)
    if own.selector_top_k:
        best = np.argsort(-logits)[: own.selector_top_k]
        paths = logits[best] + params.markov_out[best] @ (before * (params.markov_gate @ hidden))
        shared = np.log(np.exp(log_softmax(logits)[best]).sum())
        return dict(zip(ids[best].tolist(), (log_softmax(paths) + shared).tolist(), strict=True))
    if own.markov_rank:
        logits = logits + params.markov_out[: len(ids)] @ before
    if own.confidence:
        odds = params.confidence @ np.concatenate([hidden, before]) + params.confidence_bias
        sure = -np.log1p(np.exp(-odds))
    return dict(zip(ids.tolist(), (log_softmax(logits) + sure).tolist(), strict=True))


@pytest.mark.parametrize(
    ("case", "model"),
    [
        ("dflash", 1),
        ("dflash2", 2),
        ("dflash2_some", 1),
        ("dspark", 2),
        ("dspark_whole", 1),
        ("dspark_bare", 1),
    ],
)
def test_candidates_and_their_scores_are_those_of_the_equations(case, model, x64):
    tokens, features = cases.line(case, len(LENGTHS), 15)
    found = candidates(case, tokens, features, model)
    for row, length in enumerate(LENGTHS):
        hidden = cases.reference(case, tokens[row, length], features[row, :length])
        paths = {-1: ((int(tokens[row, length]),), 0.0)}
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(found.parents[row]):
            (path, score), token = paths[int(parent)], int(found.tokens[row, node])
            each = children(case, hidden[len(path) - 1], path[-1])
            np.testing.assert_allclose(found.scores[row, node], score + each[token], atol=1e-9)
            paths[node] = (*path, token), score + each[token]
            below.setdefault(int(parent), []).append(token)
        for parent, siblings in below.items():
            path, _ = paths[parent]
            each = children(case, hidden[len(path) - 1], path[-1])
            assert siblings == sorted(each, key=lambda token: -each[token])[: STRATEGY.topk]
        assert len(paths) == 1 + 2 + 2 * 4
