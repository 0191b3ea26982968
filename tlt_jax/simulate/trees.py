"""Draft trees of simulated rounds: drawn by how often the best draft of each depth is the policy's token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.verify import BINS


class Drafts(NamedTuple):
    """The drafts of S rounds of one strategy, and their accepted nodes.

    rank[S, D]: rank by score in the tree of the accepted node of each depth; sibling[S, D]: largest
    rank among siblings on the path to it (-1: none accepted). chance[S, N - 1]: the probability that
    each node's score predicts, in descending order.
    """

    rank: np.ndarray
    sibling: np.ndarray
    chance: np.ndarray


class Trees(Drafts):
    """Drafts, with sums over them that are computed once."""

    @cached_property
    def accepted(self) -> np.ndarray:
        """Accepted nodes of each round, int[S]."""
        return (self.rank >= 0).sum(1)

    @cached_property
    def emitted(self) -> np.ndarray:
        """Tokens that the first s of the rounds emit, int[S + 1]."""
        return np.append(0, np.cumsum(self.accepted + 1))

    @cached_property
    def bins(self) -> np.ndarray:
        """The bin of each node in the reliability diagram of spec_decode.verify, int[S, N - 1]."""
        return np.minimum((BINS * self.chance).astype(int), BINS - 1)

    @cached_property
    def found(self) -> tuple[np.ndarray, ...]:
        """Round, depth, rank, largest sibling rank and bin of every accepted node, int[F] each."""
        row, depth = np.nonzero(self.rank >= 0)
        rank = self.rank[row, depth]
        return row, depth, rank, self.sibling[row, depth], self.bins[row, rank]

    @cached_property
    def diagram(self) -> np.ndarray:
        """Nodes and the sum of their predicted probabilities by bin, float[S, 2, BINS]."""
        is_in = self.bins[:, None] == np.arange(BINS)[:, None]
        return np.stack([is_in.sum(2), (is_in * self.chance[:, None]).sum(2)], axis=1)


def children(
    random: np.random.Generator, shape: tuple[int, ...], quality: float, topk: int
) -> np.ndarray:
    """Probabilities of the topk best tokens after each node.

    The first has a mean of about `quality`, and is often near 1.
    """
    first = random.beta(1.2 * quality / (1 - quality), 1.2, shape)[..., None]
    ratio = random.uniform(0.3, 0.7, shape)[..., None]
    rest = (1 - first) * (1 - ratio) * ratio ** np.arange(max(topk, 8) - 1)
    return np.sort(np.concatenate([first, rest], axis=-1))[..., ::-1][..., :topk]


QUALITIES = np.linspace(0.5, 0.999, 200)


@lru_cache(1024)
def quality_of(level: float) -> tuple[float, float]:
    """The quality and the agreement with which the best draft is the target's token with this probability.

    Drafts of the least quality hold half of the time: below that the target follows another distribution more often.
    """
    best = best_by_quality()
    return float(np.interp(level, best, QUALITIES)), min(level / float(best[0]), 1.0)


@cache
def best_by_quality() -> np.ndarray:
    """Mean probability of the best child [200] for each of QUALITIES; ascending."""
    random = np.random.default_rng(0)
    found = [children(random, (4000,), quality, 1).mean() for quality in QUALITIES]
    return np.maximum.accumulate(found)


def drafts(
    seed: int,
    samples: int,
    quality: float | Sequence[float],
    agreement: float | Sequence[float],
    arm: Strategy,
) -> Trees:
    """Simulates drafting, reranking and verification of one strategy; `quality` and `agreement` may differ by depth.

    The target's token follows the drafter's distribution with probability `agreement`. `nodes` is not
    part of the seed: trees of different sizes come from the same candidates.
    """
    random = np.random.default_rng([seed, arm.depth, arm.topk])
    qualities, agreements = (np.broadcast_to(one, arm.depth) for one in (quality, agreement))
    rows = np.arange(samples)[:, None]
    score, true = np.zeros((samples, 1)), np.ones((samples, 1), bool)
    sibling = np.zeros((samples, 1), int)
    scores, trues, siblings, depths = [], [], [], []
    for depth in range(arm.depth):
        prob = children(random, score.shape, float(qualities[depth]), arm.topk)
        uniform = random.random(score.shape)[..., None]
        drawn = (uniform > prob.cumsum(-1)).sum(-1)  # topk: none of them
        drawn[random.random(drawn.shape) > agreements[depth]] = arm.topk
        order = np.arange(arm.topk)
        new_score = (score[..., None] + np.log(np.maximum(prob, 1e-30))).reshape(samples, -1)
        new_true = (true[..., None] & (drawn[..., None] == order)).reshape(samples, -1)
        new_sibling = np.maximum(sibling[..., None], order).reshape(samples, -1)
        scores.append(new_score), trues.append(new_true), siblings.append(new_sibling)
        depths += [depth] * new_score.shape[1]
        beam = np.argsort(-new_score, axis=1, kind="stable")[:, : arm.topk]
        score, true, sibling = new_score[rows, beam], new_true[rows, beam], new_sibling[rows, beam]
    scores = np.concatenate(scores, 1)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : arm.nodes - 1]
    true, sibling = np.concatenate(trues, 1)[rows, best], np.concatenate(siblings, 1)[rows, best]
    rank, widest = np.full((samples, arm.depth), -1), np.full((samples, arm.depth), -1)
    row, place = np.nonzero(true)
    at = np.array(depths)[best[row, place]]
    rank[row, at], widest[row, at] = place, sibling[row, place]
    return Trees(rank, widest, np.exp(scores[rows, best]))


def counted(
    depth: np.ndarray, rank: np.ndarray, sibling: np.ndarray, times: np.ndarray, arm: Strategy
) -> np.ndarray:
    """hits[D, N, K] of nodes with these depths, ranks and largest sibling ranks, each accepted so many `times`."""
    shape = max(arm.depth, 1), arm.nodes, max(arm.topk, 1)
    at = (depth * shape[1] + rank) * shape[2] + sibling
    return np.bincount(at, times, math.prod(shape)).astype(int).reshape(shape)
