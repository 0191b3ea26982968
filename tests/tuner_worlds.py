"""Simulated rollouts for the tuners: drafts with calibrated scores, cost laws of a CPU and a GPU, stalls, heavy tails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name
from tlt_jax.tuner.interface import Measurement, Tuner

BATCHES = (1, 4, 16, 64)
SLOTS = (256, 512, 1024, 2048)


def children(random: np.random.Generator, shape: tuple[int, ...], quality: float, topk: int) -> np.ndarray:
    """Probabilities of the topk best tokens after each node: the first is about `quality` in the mean, often near 1."""
    first = random.beta(1.2 * quality / (1 - quality), 1.2, shape)[..., None]
    ratio = random.uniform(0.3, 0.7, shape)[..., None]
    rest = (1 - first) * (1 - ratio) * ratio ** np.arange(7)
    return np.sort(np.concatenate([first, rest], axis=-1))[..., ::-1][..., :topk]


def drafts(seed: int, samples: int, quality: float, agreement: float, arm: Strategy) -> tuple[np.ndarray, np.ndarray]:
    """rank[S, D] and sibling[S, D] of the accepted node of each depth (-1: none): beams, rerank and walk of one strategy.

    A token agrees with the drafter's distribution with probability `agreement`. Only `nodes` is not part of the seed: trees
    of other sizes come from the same candidates.
    """
    random = np.random.default_rng([seed, arm.depth, arm.topk])
    rows = np.arange(samples)[:, None]
    score, true, sibling = np.zeros((samples, 1)), np.ones((samples, 1), bool), np.zeros((samples, 1), int)
    scores, trues, siblings, depths = [], [], [], []
    for depth in range(arm.depth):
        prob = children(random, score.shape, quality, arm.topk)
        drawn = (random.random(score.shape)[..., None] > prob.cumsum(-1)).sum(-1)  # topk: none of them
        drawn[random.random(drawn.shape) > agreement] = arm.topk
        order = np.arange(arm.topk)
        new_score = (score[..., None] + np.log(prob)).reshape(samples, -1)
        new_true = (true[..., None] & (drawn[..., None] == order)).reshape(samples, -1)
        new_sibling = np.maximum(sibling[..., None], order).reshape(samples, -1)
        scores.append(new_score), trues.append(new_true), siblings.append(new_sibling)
        depths += [depth] * new_score.shape[1]
        beam = np.argsort(-new_score, axis=1, kind="stable")[:, : arm.topk]
        score, true, sibling = new_score[rows, beam], new_true[rows, beam], new_sibling[rows, beam]
    best = np.argsort(-np.concatenate(scores, 1), axis=1, kind="stable")[:, : arm.nodes - 1]
    true, sibling = np.concatenate(trues, 1)[rows, best], np.concatenate(siblings, 1)[rows, best]
    rank, beside = np.full((samples, arm.depth), -1), np.full((samples, arm.depth), -1)
    row, place = np.nonzero(true)
    at = np.array(depths)[best[row, place]]
    rank[row, at], beside[row, at] = place, sibling[row, place]
    return rank, beside


def table(rank: np.ndarray, sibling: np.ndarray, arm: Strategy) -> np.ndarray:
    """hits[D, N, K] of some rounds."""
    hits = np.zeros((max(arm.depth, 1), arm.nodes, max(arm.topk, 1)), int)
    row, depth = np.nonzero(rank >= 0)
    np.add.at(hits, (depth, rank[row, depth], sibling[row, depth]), 1)
    return hits


def gpu(batch: int, slots: int, arm: Strategy) -> float:
    """Milliseconds of a round that is bound by memory up to 200 nodes."""
    verify = 20 * max(1.0, batch * arm.nodes / 200) + batch * slots / 4096
    return verify + arm.depth * (0.7 + batch * arm.topk / 400) + (0.8 if arm.depth else 0.0)


def cpu(batch: int, slots: int, arm: Strategy) -> float:
    """Milliseconds of a round that is bound by arithmetic from a few nodes on."""
    verify = 1.2 + 0.12 * (batch * arm.nodes) ** 0.95 + batch * slots / 65536
    return verify + arm.depth * (0.15 + 0.012 * batch * arm.topk) + (0.2 if arm.depth else 0.0)


@dataclass
class World:
    """A machine and a drafter. `quality` may change between rollouts; stalls, bursts and catch-up are noise of the clock."""

    cost: Callable[[int, int, Strategy], float]
    quality: float
    agreement: float = 1.0
    seed: int = 0
    noise: float = 0.04
    stalls: float = 0.02
    bursts: bool = False
    chunk: int = 16
    library: dict = field(default_factory=dict)

    def hits(self, arm: Strategy) -> tuple[np.ndarray, np.ndarray]:
        """2,000 rounds of the arm."""
        key = (arm, self.quality, self.agreement)
        if key not in self.library:
            self.library[key] = drafts(self.seed, 2000, self.quality, self.agreement, arm)
        return self.library[key]

    def accepted(self, arm: Strategy) -> float:
        """Accepted tokens of a round, in the mean."""
        return 0.0 if arm == PLAIN else float((self.hits(arm)[0] >= 0).sum(1).mean())

    def speed(self, batch: int, slots: int, arm: Strategy) -> float:
        """Tokens per second of a live row without any noise."""
        return (1 + self.accepted(arm)) / self.cost(batch, slots, arm) * 1e3

    def best(self, batch: int, slots: int, arms: Sequence[Strategy]) -> Strategy:
        """The fastest arm."""
        return max((PLAIN, *arms), key=lambda arm: self.speed(batch, slots, arm))


def lengths(random: np.random.Generator, count: int, longest: int = 2000) -> np.ndarray:
    """Heavy-tailed answer lengths."""
    return np.clip(random.lognormal(5.3, 0.9, count), 8, longest).astype(int)


@dataclass
class Run:
    """What happened: seconds in all, and the strategy, batch and tokens per second (true, predicted) of each chunk."""

    seconds: float = 0.0
    chunks: list = field(default_factory=list)
    calls: list = field(default_factory=list)


def rollout(world: World, tuner: Tuner, state: dict, answers: np.ndarray, seed: int, seen: set | None = None):
    """Decodes the answers with a decision one chunk late (two chunks in flight); (state, Run)."""
    random, run, seen = np.random.default_rng(seed), Run(), set() if seen is None else seen
    left, done, last, waiting = answers.copy(), np.zeros_like(answers), None, []
    while (left > 0).any():
        live = int((left > 0).sum())
        batch = next(size for size in BATCHES if size >= live)
        slots = next(size for size in SLOTS if size >= min(done[left > 0].max() + 256, SLOTS[-1]))
        state, choice = tuner.choose(state, live, batch, slots)
        run.calls.append(("choose", (live, batch, slots), choice))
        measured = chunk(world, random, choice, left, done, batch, slots)
        seconds = clocked(world, random, measured, run, last, seen)
        last, measured = choice.strategy, measured._replace(seconds=seconds)
        run.seconds += seconds
        run.chunks.append((choice, measured))
        waiting.append(measured)
        if len(waiting) > 1:
            state = tuner.observe(state, waiting[0])
            run.calls.append(("observe", waiting.pop(0), None))
    for measured in waiting:
        state = tuner.observe(state, measured)
        run.calls.append(("observe", measured, None))
    return state, run


def chunk(world, random, choice, left, done, batch, slots) -> Measurement:
    """Runs up to `chunk` rounds on the answers, in place; its seconds are those of a quiet clock."""
    arm, rows = choice.strategy, np.nonzero(left > 0)[0]
    hits, rounds, row_rounds, tokens = np.zeros((max(arm.depth, 1), arm.nodes, max(arm.topk, 1)), int), 0, 0, 0
    while rounds < min(world.chunk, choice.rounds) and len(rows):
        accepted = np.zeros(len(rows), int)
        if arm != PLAIN:
            rank, sibling = world.hits(arm)
            drawn = random.integers(len(rank), size=len(rows))
            hits += table(rank[drawn], sibling[drawn], arm)
            accepted = (rank[drawn] >= 0).sum(1)
        emitted = np.minimum(accepted + 1, left[rows])
        left[rows] -= emitted
        done[rows] += emitted
        rounds, row_rounds, tokens = rounds + 1, row_rounds + len(rows), tokens + int(emitted.sum())
        rows = rows[left[rows] > 0]
    quiet = rounds * world.cost(batch, slots, arm) / 1e3
    return Measurement(
        0, batch, row_rounds / rounds, slots, arm, rounds, row_rounds, tokens, quiet, hits, reason=choice.reason
    )


def clocked(world: World, random, measured: Measurement, run: Run, last: Strategy | None, seen: set) -> float:
    """The chunk's seconds on a real clock: jitter, stalls, first calls, the drafter's catch-up, bursts of other load."""
    seconds = measured.seconds * random.lognormal(0, world.noise)
    cell = (measured.batch, measured.slots, measured.strategy)
    if cell not in seen or random.random() < world.stalls:
        seconds *= random.uniform(1.0, 1.6)
        seen.add(cell)
    if last == PLAIN and measured.strategy != PLAIN:
        seconds += 2 * world.cost(measured.batch, measured.slots, PLAIN) / 1e3
    if world.bursts and int(run.seconds / 4) % 3 == 2:
        seconds *= 2
    return seconds


def oracle(world: World, arms: Sequence[Strategy], allowed: Callable[[int], Sequence[Strategy]] | None = None) -> Tuner:
    """Knows every cost and hit rate."""
    from tlt_jax.tuner.interface import Choice

    def choose(state, live, batch, slots):
        arm = world.best(batch, slots, allowed(batch) if allowed else arms)
        return state, Choice(arm, live * world.speed(batch, slots, arm), "oracle")

    return Tuner(dict, choose, lambda state, seen: state, lambda state: state, lambda batch, fewest_live: arms)


def describe(run: Run) -> dict[str, int]:
    """Chunks of each batch and strategy."""
    counts: dict[str, int] = {}
    for choice, measured in run.chunks:
        key = f"{measured.batch}:{name(choice.strategy)}"
        counts[key] = counts.get(key, 0) + 1
    return counts
