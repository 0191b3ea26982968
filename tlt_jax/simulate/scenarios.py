"""Scenarios for testing tuners: drafts, cost functions, stalls, long tails; knows no rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import MERGED, NGRAM, PLAIN, Strategy
from tlt_jax.spec_decode.verify import BINS
from tlt_jax.tuner.interface import Choice, Tuner, unchanged

ROUNDS = 2000  # simulated rounds of each strategy in a scenario
SLOWER = 1.6  # largest slowdown of a first run or a stall


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


def table(rank: np.ndarray, sibling: np.ndarray, arm: Strategy) -> np.ndarray:
    """hits[D, N, K] of rounds with these ranks: the counts of accepted nodes."""
    row, depth = np.nonzero(rank >= 0)
    return counted(depth, rank[row, depth], sibling[row, depth], np.ones(len(row)), arm)


def counted(
    depth: np.ndarray, rank: np.ndarray, sibling: np.ndarray, times: np.ndarray, arm: Strategy
) -> np.ndarray:
    """hits[D, N, K] of nodes with these depths, ranks and largest sibling ranks, each accepted so many `times`."""
    shape = max(arm.depth, 1), arm.nodes, max(arm.topk, 1)
    at = (depth * shape[1] + rank) * shape[2] + sibling
    return np.bincount(at, times, math.prod(shape)).astype(int).reshape(shape)


def gpu(batch: int, slots: int, arm: Strategy) -> float:
    """Milliseconds of a round that is memory-bound up to 200 nodes."""
    verify = 20 * max(1.0, batch * arm.nodes / 200) + batch * slots / 4096
    return (
        verify + arm.drafted_levels * (0.7 + batch * arm.topk / 400) + draft_overhead(arm, 0.8, 0.1)
    )


def cpu(batch: int, slots: int, arm: Strategy) -> float:
    """Milliseconds of a round that is compute-bound from a few nodes on."""
    verify = 1.2 + 0.12 * (batch * arm.nodes) ** 0.95 + batch * slots / 65536
    return (
        verify
        + arm.drafted_levels * (0.15 + 0.012 * batch * arm.topk)
        + draft_overhead(arm, 0.2, 0.05)
    )


def draft_overhead(arm: Strategy, network: float, text: float) -> float:
    """Milliseconds of a draft besides its levels: of the network, of the n-gram search, or of both."""
    search = text if arm.drafter in (NGRAM, MERGED) else 0.0
    return search + (network if arm.drafted_levels else 0.0)


@dataclass
class Scenario:
    """A machine and a drafter, whose `quality` may change between rollouts.

    `drafters`: quality and agreement of the drafters that arms name. `noise`, `stalls` and `bursts` perturb the clock.
    """

    cost: Callable[[int, int, Strategy], float]
    quality: float
    agreement: float = 1.0
    seed: int = 0
    noise: float = 0.04
    stalls: float = 0.02
    bursts: bool = False
    drafters: dict[str, tuple[float, float]] = field(default_factory=dict)
    library: dict = field(default_factory=dict)

    def trees(self, arm: Strategy) -> Trees:
        """A sample of ROUNDS rounds of the arm, from which its rounds are drawn."""
        qualities = self.drafters.get(arm.drafter, (self.quality, self.agreement))
        key = (arm, *qualities)
        if key not in self.library:
            self.library[key] = drafts(self.seed, ROUNDS, *qualities, arm)
        return self.library[key]

    def levels(self, drafter: str, depth: int = 8) -> list[float]:
        """The probability that this drafter's best draft is accepted to each depth, given the depth before."""
        held = (self.trees(Strategy(depth, 1, depth + 1, drafter)).rank >= 0).mean(axis=0)
        return (held / np.maximum([1.0, *held[:-1]], 1e-9)).tolist()

    def accepted(self, arm: Strategy) -> float:
        """Mean accepted tokens of a round."""
        return 0.0 if arm == PLAIN else float(self.trees(arm).accepted.mean())

    def speed(self, batch: int, slots: int, arm: Strategy) -> float:
        """Tokens per second of a live row, without noise."""
        return (1 + self.accepted(arm)) / self.cost(batch, slots, arm) * 1e3

    def best(self, batch: int, slots: int, arms: Sequence[Strategy]) -> Strategy:
        """The fastest arm."""
        return max((PLAIN, *arms), key=lambda arm: self.speed(batch, slots, arm))

    def with_noise(self, random: np.random.Generator, seconds: float, is_first: bool) -> float:
        """Seconds with jitter, and with a slowdown for first runs and stalls."""
        seconds *= random.lognormal(0, self.noise)
        if is_first or random.random() < self.stalls:
            seconds *= random.uniform(1.0, SLOWER)
        return seconds

    def load(self, at: float) -> int:
        """The slowdown at this second by other load, which comes in bursts."""
        return 2 if self.bursts and int(at / 4) % 3 == 2 else 1


def lengths(random: np.random.Generator, count: int, longest: int = 2000) -> np.ndarray:
    """Heavy-tailed answer lengths."""
    return np.clip(random.lognormal(5.3, 0.9, count), 8, longest).astype(int)


def oracle(
    scenario: Scenario,
    arms: Sequence[Strategy],
    allowed: Callable[[int], Sequence[Strategy]] | None = None,
) -> Tuner:
    """A tuner that knows every cost and hit rate."""

    def choose(state, live, batch, slots, compiled=()):
        known = compiled or (allowed(batch) if allowed else arms)
        arm = scenario.best(batch, slots, [arm for arm in known if arm != PLAIN])
        return state, Choice(arm, live * scenario.speed(batch, slots, arm), "oracle")

    def predict(state, cells):
        speeds = [math.log(scenario.speed(*cell)) for cell in cells]
        return np.array(speeds), np.zeros(len(cells))

    return Tuner(
        dict, choose, unchanged, unchanged, lambda *_: arms, predict, has_fixed_policy=False
    )
