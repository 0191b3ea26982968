"""Expected accepted tokens per round of each strategy, estimated from the measurements of all strategies.

Evidence is JSON-able: {batch: {source: {"at": clock in rounds,
"rounds": row rounds, "accepted": {target: mean per row and round}}}}, where source and target are
strategies as text. A verified tree shows what every smaller tree would have accepted, so one
measurement is evidence for all smaller strategies of the same drafter too. Estimates come from
elsewhere, such as held-out answers: {drafter: {"at": clock in rounds, "levels": probabilities that
a draft is accepted to depth 1, 2, ..., each given the depth before}}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name, parse

HALF_LIFE = 512.0  # rounds after which the weight of a measurement is halved
MEMORY = 2048.0  # limit on the weight of one source, in row rounds
WALK = 0.12  # std of the random walk of log(1 + accepted) over one half-life
FARTHEST = 0.5  # limit on the std of that random walk
REPEATS = 2.0  # row rounds per effectively independent sample: rounds of one row are correlated
# Standard errors of difference above which a measurement reduces the weight of earlier ones, and of the drafter's other ones.
CHANGED, OTHERS_CHANGED = 2.0, 4.0
OTHER_TREE = 0.03  # relative error of the estimate for a smaller tree
OTHER_BATCH = 0.1  # relative error of an estimate from another batch size (other answer lengths)
PRIOR = 4.0  # weight of the prior, in row rounds
# The target's token is among the best w children with probability p ** w^-0.9, where p is the best
# child's: within 0.01 of an EAGLE layer's at temperature 1 for w = 1, 2, 4, 8.
WIDTHS = 0.9
HITS = np.exp(-np.geomspace(0.02, 9.0, 48))  # grid of p for the prior
GUESS = (0.6,)  # levels before any measurement; the last holds for all deeper ones
GUESS_ROUNDS = 8.0  # weight of GUESS, in row rounds
SIBLINGS = 0.1  # weight of the prior, relative to the measurements that it was fitted to
# Weight of an estimate, in row rounds: with it the prior's log(1 + accepted) has a standard error
# of 1/8, and p one of (2 * 32)^-0.5, the same. Held-out acceptance is a mean over thousands of
# tokens, but of the previous policy's answers, and without the noise that drafts are coupled with.
ESTIMATED = 32.0


def counterfactual(hits: np.ndarray, strategy: Strategy) -> float:
    """Expected accepted nodes of a smaller tree, given those of a larger one.

    hits[D, N, K]: accepted nodes by depth - 1, rank by score within the tree, and largest sibling
    rank on the path to the node. With the same depth and topk the smaller tree consists of the
    first ranks: the result is exact. With a smaller depth or topk it contains nodes of lower ranks
    instead. Scores are calibrated, so nodes of equal rank have equal acceptance rates: the smaller
    tree's share of a rank's hits estimates its share of that rank's nodes, and the sum of the
    shares of all higher ranks is a node's rank in the smaller tree. Unmeasured ranks count with
    half the rate of the last quarter of the measured ones.
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
    """True when every tree of the source contains one of the target, of the same drafter."""
    return (
        source.drafter == target.drafter
        and source.depth >= target.depth
        and source.topk >= target.topk
        and source.nodes >= target.nodes
    )


def add(
    evidence: Mapping,
    clock: float,
    batch: int,
    source: Strategy,
    row_rounds: float,
    hits: np.ndarray,
    arms: Sequence[Strategy],
) -> dict:
    """The evidence with one measurement, which counts for every arm that the source covers.

    `clock` is in rounds; hits[D, N, K] as in interface.Measurement.
    """
    text, hits = name(source), np.asarray(hits)[:, : max(source.nodes - 1, 1)]
    rows = evidence.get(str(batch), {})
    old = rows.get(text, {"at": clock, "rounds": 0.0, "accepted": {}})
    before = remaining(old, clock)
    if text in old["accepted"]:  # means too far apart for chance: the drafter has changed
        newest, mean = float(hits.sum()) / row_rounds, old["accepted"][text]
        chance = REPEATS * (1 + mean) ** 2 * (1 / row_rounds + 1 / max(before, 1e-9))
        apart = chance / max((newest - mean) ** 2, 1e-12)
        before *= min(CHANGED**2 * apart, 1.0)
        evidence = doubted(evidence, source, min(OTHERS_CHANGED**2 * apart, 1.0))
        rows = evidence.get(str(batch), {})
    after, accepted = before + row_rounds, {}

    for arm in arms:
        if arm != PLAIN and covers(source, arm):
            seen = float(hits.sum()) if arm == source else counterfactual(hits, arm)
            accepted[name(arm)] = (
                before * old["accepted"].get(name(arm), seen / row_rounds) + seen
            ) / after

    entry = {"at": clock, "rounds": min(after, MEMORY), "accepted": accepted}
    return {**evidence, str(batch): {**rows, text: entry}}


def doubted(evidence: Mapping, source: Strategy, weight: float) -> Mapping:
    """The evidence with the weight of all of this drafter reduced, since a tree of it accepts another number than before."""
    if weight == 1:
        return evidence
    return {
        batch: {
            text: {**entry, "rounds": entry["rounds"] * weight}
            if parse(text).drafter == source.drafter
            else entry
            for text, entry in rows.items()
        }
        for batch, rows in evidence.items()
    }


def remaining(entry: Mapping, clock: float) -> float:
    """Weight of an entry at this clock, in row rounds."""
    return entry["rounds"] * 0.5 ** ((clock - entry["at"]) / HALF_LIFE)


def drafters(evidence: Mapping) -> set[str]:
    """The drafters that were measured."""
    return {parse(source).drafter for rows in evidence.values() for source in rows}


def estimated(clock: float, levels: Sequence[float]) -> dict:
    """An estimate of one drafter as of this clock, with the levels clipped to the range of `modelled`.

    Levels that are not finite count as 0. Raises ValueError without a level.
    """
    if not len(levels):
        raise ValueError("an estimate of acceptance has no level: give at least depth 1")
    finite = np.where(np.isfinite(levels), levels, 0.0)
    return {"at": clock, "levels": np.clip(finite, HITS[-1], HITS[0]).tolist()}


def estimate(
    evidence: Mapping,
    clock: float,
    batch: int,
    arms: Sequence[Strategy],
    estimates: Mapping = {},
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens per row and round [A], and the standard error of log(1 + accepted) [A].

    Each drafter's arms are estimated from its own measurements and its own estimate.
    """
    mean_A, error_A = np.zeros((2, len(arms)))
    for drafter in dict.fromkeys(arm.drafter for arm in arms):
        here = [i for i, arm in enumerate(arms) if arm.drafter == drafter]
        if all(arms[i] == PLAIN for i in here):
            continue  # accepts nothing
        of_drafter = {
            where: {text: entry for text, entry in rows.items() if parse(text).drafter == drafter}
            for where, rows in evidence.items()
        }
        mean_A[here], error_A[here] = estimate_of_one(
            of_drafter, clock, batch, [arms[i] for i in here], estimates.get(drafter)
        )
    return mean_A, error_A


def estimate_of_one(
    evidence: Mapping, clock: float, batch: int, arms: Sequence[Strategy], given: Mapping | None
) -> tuple[np.ndarray, np.ndarray]:
    """As `estimate`, for the arms of one drafter, with its evidence and its estimate `given` (None: none).

    The prior is fitted to each arm's own measurements, weighted as of the newest measurement or
    estimate: later rounds make the result less certain, but do not change the prior.
    """
    levels, since = (tuple(given["levels"]), given["at"]) if given else (GUESS, -math.inf)
    position = {name(arm): i for i, arm in enumerate(arms)}
    sums, weights, own, own_weights = ([0.0] * len(arms) for _ in range(4))
    fresh = [since] * len(arms)
    times = [entry["at"] for rows in evidence.values() for entry in rows.values()]
    newest = max(max(times, default=clock), since)

    for where, rows in evidence.items():
        apart = OTHER_BATCH**2 if where != str(batch) else 0.0
        for source, entry in rows.items():
            now, then = (REPEATS / max(remaining(entry, at), 1e-9) for at in (clock, newest))
            for target, mean in entry["accepted"].items():
                i = position.get(target)
                if i is None:
                    continue
                weight = 1 / (now + ((OTHER_TREE**2 if source != target else 0.0) + apart))
                sums[i] += weight * mean
                weights[i] += weight
                fresh[i] = max(fresh[i], entry["at"])

                if source == target:
                    lasting = 1 / (then + apart)
                    own[i] += lasting * mean
                    own_weights[i] += lasting
    sum_A, weight_A, own_A, own_weight_A, fresh_A = np.array(
        [sums, weights, own, own_weights, fresh]
    )

    lasting, trust = (remaining({"rounds": ESTIMATED, "at": since}, at) for at in (newest, clock))
    own_A /= np.maximum(own_weight_A, 1e-12)
    prior_A = prior(arms, own_A, own_weight_A, levels, max(lasting, GUESS_ROUNDS))
    # A prior fitted to measurements of the drafter's other arms gets more weight than a guess.
    trust = max(trust, PRIOR, min(SIBLINGS * own_weight_A.sum(), ESTIMATED))
    mean_A = (sum_A + trust * prior_A) / (weight_A + trust)

    drift_A = np.minimum(WALK * np.sqrt((clock - fresh_A) / HALF_LIFE), FARTHEST)
    error_A = np.sqrt(mean_A / (1 + mean_A) / (weight_A + trust) + drift_A**2)
    return mean_A, np.where([arm != PLAIN for arm in arms], error_A, 0.0)


def prior(
    arms: Sequence[Strategy],
    mean_A: np.ndarray,
    weight_A: np.ndarray,
    levels: tuple[float, ...] = GUESS,
    rounds: float = GUESS_ROUNDS,
) -> np.ndarray:
    """Accepted tokens per row and round [A], with the levels' acceptance rates in fixed proportion.

    The rate of the first level is the one of `rates` that best fits the arms' measured means [A],
    with weights [A], and `levels`, with a weight of `rounds` row rounds.
    """
    model_HA = models(tuple(arms), levels)
    error_H = rounds * (rates(levels) - levels[0]) ** 2
    if weight_A.any():
        error_H += (weight_A * (model_HA - mean_A) ** 2 / (1 + model_HA) ** 2).sum(1)
    return model_HA[np.argmin(error_H)]


@lru_cache(1024)
def models(arms: tuple[Strategy, ...], levels: tuple[float, ...]) -> np.ndarray:
    """What is `modelled` of each arm, [H, A]."""
    return np.stack([modelled(arm, levels) for arm in arms], axis=1)


@lru_cache(1024)
def rates(levels: tuple[float, ...]) -> np.ndarray:
    """The grid of rates of the first level [H]: HITS, and the estimate's own rate."""
    return HITS if levels == GUESS else np.append(HITS, levels[0])


@lru_cache(1024)
def modelled(arm: Strategy, levels: tuple[float, ...] = GUESS) -> np.ndarray:
    """Accepted tokens of a round [H] for each of the `rates` of the first level.

    Rates of deeper levels are powers of it, with the exponents of `levels`; the last exponent holds
    for all deeper ones. The tree has min(topk, (nodes - 1) / depth) children of each accepted node.
    """
    if arm == PLAIN:
        return np.zeros_like(rates(levels))
    width = min(arm.topk, max((arm.nodes - 1) / arm.depth, 1.0))
    level = rates(levels) ** width**-WIDTHS
    every = np.log([*levels, *levels[-1:] * arm.depth][: arm.depth])
    return sum(level ** float(power) for power in np.cumsum(every / every[0]))
