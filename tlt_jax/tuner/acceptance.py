"""How many drafted tokens a round of any strategy would accept, from rounds of others; knows neither cost nor choice.

Evidence is JSON-able: {batch: {source: {"at": rounds on the clock, "rounds": row rounds, "accepted": {target: mean}}}},
where source and target are strategies as text. One verified tree tells what every smaller tree would have accepted, so
each measurement updates all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name

HALF_LIFE = 512.0  # rounds after which a measurement counts half
MEMORY = 2048.0  # row rounds that one source remembers at most
WALK = 0.12  # log(1 + accepted) may wander this far in a half-life, and by the root of the time; at most:
FARTHEST = 0.5
REPEATS = 2.0  # row rounds that tell as much as an independent one: rounds of a row are alike
OTHER_TREE = 0.03  # relative error of what one tree tells about a smaller one
OTHER_BATCH = 0.1  # relative difference between the rows of two batch sizes (short answers, long answers)
PRIOR = 4.0  # row rounds that the prior counts
WIDTHS = 0.9  # w children are hit with p ** w^-0.9: k = 1, 2, 4, 8 of an EAGLE layer at temperature 1 within 0.01
HITS = np.exp(-np.geomspace(0.02, 9.0, 48))  # grid of the prior's hit rate p of a first child
GUESS = 0.6  # p of a drafter nobody measured
GUESS_ROUNDS = 8.0


def counterfactual(hits: np.ndarray, strategy: Strategy) -> float:
    """Accepted nodes that a smaller tree would have held, expected from those of a larger one.

    hits[D, N, K]: accepted nodes by depth - 1, rank by score in the tree, and largest sibling rank on the way to the node.
    A tree of the same levels and siblings holds the first ranks: exact. One of fewer spends the nodes of the others on
    lower ranks. Scores are calibrated, so nodes of one rank are hit alike, and the share of a rank's hits inside the
    smaller tree is the share of its nodes there; summed, the shares are a node's rank in the smaller tree. Ranks beyond
    the measured ones are given half the rate of the last quarter.
    """
    inside_N = hits[: strategy.depth, :, : strategy.topk].sum((0, 2))
    total_N, budget = hits.sum((0, 2)), strategy.nodes - 1
    if not total_N.any():
        return 0.0
    common = inside_N.sum() / total_N.sum()
    share_N = (inside_N + 2 * common) / (total_N + 2)
    if strategy.depth >= hits.shape[0] and strategy.topk >= hits.shape[2]:
        share_N = np.ones_like(share_N)
    rank_N = np.concatenate([[0.0], np.cumsum(share_N)])
    kept = float((inside_N * np.clip(budget - rank_N[:-1], 0.0, 1.0)).sum())
    tail = max(len(inside_N) // 4, 1)
    missing = max(budget - rank_N[-1], 0.0)
    return kept + 0.5 * missing * float(inside_N[-tail:].sum() / max(share_N[-tail:].sum(), 1e-9))


def covers(source: Strategy, target: Strategy) -> bool:
    """Whether a tree of the source holds one of the target."""
    return source.depth >= target.depth and source.topk >= target.topk and source.nodes >= target.nodes


def add(
    evidence: Mapping, clock: float, batch: int, source: Strategy, row_rounds: float, hits: np.ndarray, arms: Sequence[Strategy]
) -> dict:
    """The evidence with one measurement more, of every arm that the measured trees hold."""
    text, hits = name(source), np.asarray(hits)[:, : max(source.nodes - 1, 1)]
    rows = evidence.get(str(batch), {})
    old = rows.get(text, {"at": clock, "rounds": 0.0, "accepted": {}})
    before = remaining(old, clock)
    after, accepted = before + row_rounds, {}
    for arm in arms:
        if arm != PLAIN and covers(source, arm):
            seen = float(hits.sum()) if arm == source else counterfactual(hits, arm)
            accepted[name(arm)] = (before * old["accepted"].get(name(arm), seen / row_rounds) + seen) / after
    entry = {"at": clock, "rounds": min(after, MEMORY), "accepted": accepted}
    return {**evidence, str(batch): {**rows, text: entry}}


def remaining(entry: Mapping, clock: float) -> float:
    """Row rounds that an entry still counts."""
    return entry["rounds"] * 0.5 ** ((clock - entry["at"]) / HALF_LIFE)


def estimate(evidence: Mapping, clock: float, batch: int, arms: Sequence[Strategy]) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens of a row and round for each arm, and the standard error of log(1 + accepted).

    The prior is fitted to what the arms measured themselves, the newest of it undiscounted: what was long ago is known
    less well, but remains the best guess.
    """
    position = {name(arm): i for i, arm in enumerate(arms)}
    sum_A, weight_A, own_A, own_weight_A = np.zeros((4, len(arms)))
    fresh_A = np.full(len(arms), -np.inf)
    newest = max((entry["at"] for rows in evidence.values() for entry in rows.values()), default=clock)
    for where, rows in evidence.items():
        for source, entry in rows.items():
            for target, mean in entry["accepted"].items():
                i = position.get(target)
                if i is None:
                    continue
                bias = OTHER_TREE**2 * (source != target) + OTHER_BATCH**2 * (where != str(batch))
                weight, lasting = (1 / (REPEATS / max(remaining(entry, at), 1e-9) + bias) for at in (clock, newest))
                sum_A[i] += weight * mean
                weight_A[i] += weight
                fresh_A[i] = max(fresh_A[i], entry["at"])
                if source == target:
                    own_A[i] += lasting * mean
                    own_weight_A[i] += lasting
    prior_A = prior(arms, own_A / np.maximum(own_weight_A, 1e-12), own_weight_A)
    mean_A = (sum_A + PRIOR * prior_A) / (weight_A + PRIOR)
    drift_A = np.minimum(WALK * np.sqrt((clock - fresh_A) / HALF_LIFE), FARTHEST)
    error_A = np.sqrt(mean_A / (1 + mean_A) / (weight_A + PRIOR) + drift_A**2)
    return mean_A, np.array([arm != PLAIN for arm in arms]) * error_A


def prior(arms: Sequence[Strategy], mean_A: np.ndarray, weight_A: np.ndarray) -> np.ndarray:
    """Accepted tokens of each arm when every level accepts alike, with the hit rate that fits the measured arms best."""
    model_HA = np.stack([modelled(arm) for arm in arms], axis=1)
    error_H = (weight_A * (model_HA - mean_A) ** 2 / (1 + model_HA) ** 2).sum(1) + GUESS_ROUNDS * (HITS - GUESS) ** 2
    return model_HA[np.argmin(error_H)]


@lru_cache
def modelled(arm: Strategy) -> np.ndarray:
    """Accepted tokens of a round for each hit rate of the grid: a tree of equally wide levels."""
    if arm == PLAIN:
        return np.zeros_like(HITS)
    width = min(arm.topk, max((arm.nodes - 1) / arm.depth, 1.0))
    level = HITS ** width**-WIDTHS
    return sum(level**depth for depth in range(1, arm.depth + 1))
