"""Seconds of a decoding round by batch, cache slots and strategy: measured, or predicted.

A cell is one compiled round, "batch/slots/strategy"; its samples are seconds per round. Other work on the machine makes
rounds slower: cells are measured apart for each level of it, see `learned`. A prediction has two parts:
seconds = a + b nodes + c levels + d drafted nodes + e cache slots (+ f touched experts), with weights >= 0 fitted to all
cells (verification costs by the nodes of all rows, so plain rounds of large batches are evidence on trees at small ones;
levels and experts: see Networks); and a cell's residual: its own where it was measured, else the mean residual of cells of
the same batch or strategy. Letters: C cells, A arms, F terms, X columns that describe a cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import DRAFTERS, Strategy, name, parse
from tlt_jax.tuner.interface import Cell, Measurement

SHORT = 4, 0.1  # rounds and seconds below both of which a chunk's fixed overhead distorts its time
SAMPLES = 9  # the latest samples of a cell that are stored; its cost is their median
KEPT = 2  # of them stay when a cell is measured again after a long time
CELLS = 96  # the latest cells that are stored
# Prior weights of the terms, in units of a round's fixed cost: the round itself, a node, a draft
# level, a drafted node, a cache slot of a row, all experts. nan: `node`, NODE by default. By simulate/estimate.py the
# experts of Qwen3-30B-A3B take 7 fixed costs on an H200, 9 on an H100, 17 on a v5e.
UNITS = np.array([1.0, math.nan, 0.06, 1 / 400, 1 / 131072, 10.0])
NODE = 1 / 32  # between a CPU (1/10) and a memory-bound accelerator (1/300)
RIDGE = 0.02  # strength of the prior weights, relative to one cell
# Standard deviations of log seconds: one warm sample, one cold sample, the least of a warm cell.
WARM_NOISE, COLD_NOISE, FLOOR_NOISE = 0.08, 0.2, 0.01
# Standard deviation that age adds: AGEING after LIFE measurements of other cells of the batch; at most OLD.
AGEING, LIFE, OLD = 0.1, 64, 0.2
# Weight of WARM_NOISE in the measured deviation of warm samples, in samples; and the most that one of them counts.
USUAL, MOST = 8.0, 0.7
LEVELS = 4  # of other work: more would need more measurements, fewer would compare rounds of twice the seconds
RECENT = 0.99  # share of the earlier turns of a level that a measurement leaves
FAR = 0.3  # log error of the linear part above which a cell is an outlier and gets less weight
# Standard deviations of a cell's log seconds around the linear part: with and without cells of its batch or strategy.
ALIKE, ALONE = 0.2, 0.25
TERMS, IDENTITY = slice(0, -3), slice(-3, None)  # columns that describe a cell


class Networks(NamedTuple):
    """What the cost of a round depends on besides its cell: how the drafter drafts, and how the policy reads its weights.

    `one_pass`: layers and nodes of a row of the one pass of a block drafter, whatever a strategy's depth; None: a pass for
    each level. A layer counts as a level of a drafter of one layer: both read their weights once. For the 7B shapes of an
    H200 such a level is 0.75 GB with its part of the head, a block of two layers 1.2 GB, of five 3.3 GB.
    `experts` of an MLP, of which each token chooses `chosen`; 0: a dense policy, whose rounds have no such term.
    """

    one_pass: tuple[int, int] | None = None
    experts: int = 0
    chosen: int = 0

    def touched(self, tokens: int) -> float:
        """The expected share of the experts that so many tokens choose, if each token chose by itself.

        Tokens of a tree choose alike and touch fewer: a term whose weight is learned, and not what is read.
        """
        return 1 - (1 - self.chosen / self.experts) ** tokens


DENSE = Networks()


def note(
    cells: Mapping, batch: int, slots: int, strategy: Strategy, seconds: float, is_cold: bool
) -> dict:
    """The cells with one more sample, in seconds per round.

    A cold sample may include a compilation or copying of rows, or have too few rounds. The age of
    the batch's other cells grows by one, since the speed of a machine changes over time; of a cell older
    than LIFE only the last KEPT samples stay, so that a disturbed one does not stand alone.
    """
    key, here = f"{batch}/{slots}/{name(strategy)}", f"{batch}/"

    cell = cells.get(key, {"warm": [], "cold": [], "age": 0})
    kind = "cold" if is_cold else "warm"
    found = [*(cell[kind] if cell["age"] <= LIFE else cell[kind][-KEPT:]), seconds][-SAMPLES:]
    age = cell["age"] if is_cold and cell["warm"] else 0

    rest = {other: value for other, value in cells.items() if other != key}
    kept = list(rest.items())[max(len(rest) + 1 - CELLS, 0) :]
    aged = {
        other: {**value, "age": value["age"] + 1} if other.startswith(here) else value
        for other, value in kept
    }
    return {**aged, key: {**cell, kind: found, "age": age}}


def measured(cells: Mapping, seen: Measurement) -> dict:
    """The cells with the seconds of a measurement, if they are reliable."""
    if min(seen.rounds, seen.row_rounds, seen.tokens) <= 0 or not seen.is_timed:
        return dict(cells)
    key = f"{seen.batch}/{seen.slots}/{name(seen.strategy)}"
    is_short = seen.rounds < SHORT[0] and seen.seconds < SHORT[1]
    is_cold = is_short or seen.is_moved or seen.catch_up > 0 or key not in cells
    per_round = (seen.seconds + seen.catch_up) / seen.rounds
    return note(cells, seen.batch, seen.slots, seen.strategy, per_round, is_cold)


def begin() -> dict:
    """The initial costs.

    cells: those of the current `level` of other work on the machine, in 1/LEVELS of its processors; levels: level -> cells of
    the others. turns: level -> number of measurements, of which each forgets a little of the earlier ones.
    """
    return {"cells": {}, "level": 0, "levels": {}, "turns": {}}


def learned(costs: Mapping, seen: Measurement) -> dict:
    """The costs (the entries of `begin`) with the seconds of a measurement, at its level of other work."""
    if not seen.rounds:
        return {name: costs[name] for name in begin()}
    level, turns = round(LEVELS * seen.taken), costs["turns"]
    turns = {one: RECENT * count for one, count in turns.items()}
    turns[str(level)] = turns.get(str(level), 0.0) + 1
    costs = at_level({name: costs[name] for name in begin()}, level)
    return costs | {"cells": measured(costs["cells"], seen), "turns": turns}


def at_level(costs: Mapping, level: int) -> dict:
    """The costs at another level of other work: comparisons between levels would take load for a cost.

    A new level begins with the cells of the last one, slower by the processors that are left, so that comparisons stay as
    they were; but these are old: the next measurement replaces them.
    """
    if level == costs["level"]:
        return dict(costs)
    levels = {**costs["levels"], str(costs["level"]): costs["cells"]}
    cells = levels.pop(str(level), None)
    if cells is None:
        slower = left(costs["level"]) / left(level)
        scaled = {
            key: {kind: [slower * one for one in cell[kind]] for kind in ("warm", "cold")}
            for key, cell in costs["cells"].items()
        }
        cells = {key: {**cell, "age": LIFE + 1} for key, cell in scaled.items()}
    return {**costs, "cells": cells, "level": level, "levels": levels}


def left(level: int) -> float:
    """The share of the processors that this level of other work leaves."""
    return 1 - min(level, LEVELS - 0.5) / LEVELS


def is_disturbed(costs: Mapping) -> bool:
    """Whether other work takes more of the machine than in most of the latest turns."""
    turns = costs["turns"]
    return costs["level"] > int(max(turns, key=turns.get, default=0))


def settled(cell: Mapping, noise: float = WARM_NOISE) -> tuple[float, float]:
    """Log seconds of a cell and their standard error, where a warm sample's has the standard deviation `noise`.

    The median of the warm samples, but no more than WARM_NOISE above their lower tercile, since other work only makes rounds
    slower; without warm ones the least cold sample.
    """
    warm, cold, aged = cell["warm"], cell["cold"], min(AGEING * math.sqrt(cell["age"] / LIFE), OLD)
    if warm:
        logs = sorted(map(math.log, warm))
        middle, low = (logs[(len(logs) - 1) // part] for part in (2, 3))
        found = min(middle, low + WARM_NOISE)
        return found, math.hypot(noise / math.sqrt(len(warm)), FLOOR_NOISE, aged)
    return math.log(min(cold)), math.hypot(max(COLD_NOISE, noise) / math.sqrt(len(cold)), aged)


def deviation(cells: Mapping) -> float:
    """The standard deviation of a warm sample's log seconds in its cell: WARM_NOISE, or more where the samples show it."""
    squares, count = USUAL * WARM_NOISE**2, USUAL
    for cell in cells.values():
        if len(cell["warm"]) > 1:
            low = settled(cell)[0]
            squares += sum(min(math.log(one) - low, MOST) ** 2 for one in cell["warm"])
            count += len(cell["warm"]) - 1
    return max(math.sqrt(squares / count), WARM_NOISE)


@lru_cache(1024)
def described(
    batch: int, slots: int, arm: Strategy, networks: Networks = DENSE
) -> tuple[float, ...]:
    """The columns of a cell: terms of the linear part, and identity."""
    levels, drafter = arm.drafted_levels, ("", *DRAFTERS).index(arm.drafter)
    levels, nodes = networks.one_pass if levels and networks.one_pass else (levels, arm.topk)
    terms = (1.0, batch * arm.nodes, levels, batch * levels * nodes, batch * slots)
    terms += (networks.touched(batch * arm.nodes),) if networks.experts else ()
    which = (drafter << 48) + (arm.depth << 40) + (arm.topk << 20) + arm.nodes
    return (*terms, batch, slots, which)


@lru_cache(1024)
def row(key: str, networks: Networks) -> tuple[float, ...]:
    """The columns of the cell with this key."""
    batch, slots, text = key.split("/")
    return described(int(batch), int(slots), parse(text), networks)


def known(cells: Mapping, networks: Networks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cells' columns [C, X], log seconds [C], and standard errors of these [C]."""
    noise = deviation(cells)
    log_C, noise_C = np.array([settled(cell, noise) for cell in cells.values()]).T
    return np.array([row(key, networks) for key in cells], float), log_C, noise_C


def units_of(node: float, networks: Networks) -> np.ndarray:
    """The prior weights UNITS of the terms that these networks have, with this cost of a node."""
    return np.where(np.isnan(UNITS), node, UNITS)[: None if networks.experts else -1]


def prior_rounds(cell: Cell, node: float = NODE, networks: Networks = DENSE) -> float:
    """The expected cost of a round of this cell before any measurement, in fixed costs of a round."""
    terms = described(*cell, networks)[TERMS]
    return float(np.array(terms) @ units_of(node, networks))


def fit_weights(cells: Mapping, node: float = NODE, networks: Networks = DENSE) -> np.ndarray:
    """Weights [F] of the terms, in seconds, fitted to the cells."""
    cell_CX, log_C, noise_C = known(cells, networks)
    return fit(cell_CX[:, TERMS], np.exp(log_C), noise_C, units_of(node, networks))


def predict(
    cells: Mapping,
    targets: Sequence[Cell],
    weights: Sequence[float] | None = None,
    networks: Networks = DENSE,
) -> tuple[np.ndarray, np.ndarray]:
    """Log seconds of a round of each target [A], and their standard errors [A].

    `weights`: the result of `fit_weights` for nearly the same cells; None: fitted here. Without cells the
    result is the prior, up to one unknown common factor: the errors are infinite.
    """
    target_AX = np.array([described(*target, networks) for target in targets], float)
    units = units_of(NODE, networks)
    if not cells:
        return np.log(target_AX[:, TERMS] @ units), np.full(len(targets), math.inf)

    cell_CX, log_C, noise_C = known(cells, networks)
    if weights is None:
        weights = fit(cell_CX[:, TERMS], np.exp(log_C), noise_C, units)

    rest_C = log_C - np.log(cell_CX[:, TERMS] @ weights)
    few_C = np.array([max(len(cell["warm"]) * 2, len(cell["cold"])) for cell in cells.values()])
    excess_C = np.maximum(np.abs(rest_C) - 3 * ALIKE, 0.0) / few_C**2  # with few samples: a stall
    rest_A, error_A = residual(cell_CX, target_AX, rest_C, noise_C**2 + excess_C**2)
    return np.log(target_AX[:, TERMS] @ weights) + rest_A, error_A


def residual(
    cell_CX: np.ndarray, target_AX: np.ndarray, rest_C: np.ndarray, noise_C: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Residuals of the targets over the linear part [A], in log seconds, and their standard errors [A].

    Estimated from the residuals `rest_C` of the cells, with variances `noise_C`: the precision-weighted mean over cells of
    the same batch or strategy, combined with the target's own cell by precision.
    """
    same = cell_CX[None, :, IDENTITY] == target_AX[:, None, IDENTITY]  # [A, C, identity]
    is_alike = same[..., 0] | same[..., -1]
    weight_AC = is_alike / (ALIKE**2 + noise_C)
    alike_A = weight_AC.sum(1)
    mean_A = weight_AC @ rest_C / (alike_A + 1 / ALIKE**2)
    spread_A = np.where(is_alike.any(1), ALIKE, ALONE) ** 2
    own_AC = same.all(-1) / noise_C
    own_A = own_AC.sum(1)
    found_A = mean_A + (own_AC @ rest_C - own_A * mean_A) / (own_A + 1 / spread_A)
    return found_A, (own_A + 1 / spread_A) ** -0.5


def fit(
    terms_CF: np.ndarray, seconds_C: np.ndarray, noise_C: np.ndarray, units: np.ndarray
) -> np.ndarray:
    """Non-negative weights of the terms, by ridge regression on relative errors.

    Iteratively reweighted against outliers; the ridge pulls towards the prior weights `units`,
    scaled by the median ratio of measured to predicted seconds.
    """
    is_sure_C = noise_C <= max(noise_C.min(), WARM_NOISE)
    scaled = units * float(np.median((seconds_C / (terms_CF @ units))[is_sure_C]))

    relative_CF = terms_CF * scaled / seconds_C[:, None]
    trust_C, weights = np.minimum(WARM_NOISE / noise_C, 1.0) ** 2, np.ones(len(units))
    # A cell with one cold sample loses its weight faster as its error grows.
    power_C = np.where(noise_C < COLD_NOISE, 1.0, 3.0)

    for _ in range(3):
        error_C = np.abs(np.log(np.maximum(relative_CF @ weights, 1e-6)))
        weighted_CF = relative_CF * (trust_C / np.maximum(error_C / FAR, 1.0) ** power_C)[:, None]
        square_FF = weighted_CF.T @ relative_CF + RIDGE * np.eye(len(units))
        weights = non_negative(square_FF, weighted_CF.sum(0) + RIDGE)
    return np.maximum(weights, 1e-6) * scaled


def non_negative(square_FF: np.ndarray, target_F: np.ndarray) -> np.ndarray:
    """Solution of the normal equations; negative weights are removed repeatedly."""
    kept_F = np.ones(len(target_F), bool)
    while True:
        weights_F = np.zeros(len(target_F))
        weights_F[kept_F] = np.linalg.solve(square_FF[np.ix_(kept_F, kept_F)], target_F[kept_F])
        if (weights_F >= 0).all():
            return weights_F
        kept_F &= weights_F > 0
