"""The goodput tuner: predicted accepted tokens over predicted seconds.

Knows no clock, device or rollout. The state is a dict; `choose`, `observe` and `update_prior` return a
new one. It is saved in checkpoints, and a rollout's choices can be recomputed from it. All seconds
are wall-clock seconds of a chunk on the devices of its group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from tlt_jax.spec_decode.strategy import LEARNED, MERGED, PLAIN, Strategy, name
from tlt_jax.tuner import acceptance, cost_model
from tlt_jax.tuner.arms import affordable, parse_arms
from tlt_jax.tuner.exploration import Prediction, decide
from tlt_jax.tuner.interface import (
    EXPLORATION_ROUNDS,
    MOST_ROUNDS,
    TRAINING,
    Cell,
    Choice,
    Measurement,
    State,
    Tuner,
    swapped,
)

VERSION = 8  # of the state's format
SHARE = 0.006  # exploration budget: this share of all measured seconds ...
DIVIDEND = 0.05  # ... this share of the seconds that speculation saved, and exploration.CREDIT
UPDATE = 2 * acceptance.HALF_LIFE  # rounds by which an update of weights ages acceptance evidence
REFIT = 1.1  # growth of the number of measurements after which the cost weights are fitted again
MOST_NODES = 1024  # limit on batch x nodes of a strategy


def goodput(
    strategies: Sequence[Strategy | str],
    node_cost: float = cost_model.NODE,
    learning: Collection[str] = (),
    one_pass: cost_model.OnePass | None = None,
) -> Tuner:
    """A tuner that predicts the tokens per second of every arm; plain decoding is an arm.

    Accepted tokens and seconds are predicted from all measurements so far. Strategies are arms of
    the batches for which batch x nodes is at most MOST_NODES. The incumbent is replaced when
    another arm is predicted to be faster by more than a hysteresis. An arm that may be faster, but
    whose prediction is uncertain, is explored for one chunk when the exploration budget covers the
    expected loss: some plain rounds, and small shares of all time and of the time saved. `node_cost` is
    the prior cost of a node, in units of a round's fixed cost: about 1/10 on a CPU, 1/200 on an
    accelerator. `learning`: drafters that start untrained; their arms are not usable before
    their acceptance was estimated (`update_prior`) or measured. `one_pass`: the draft of a learned
    drafter that does not run once a level. Raises ValueError as arms.parse_arms does.
    """
    arms = parse_arms(strategies)
    learn = partial(observe_goodput, arms=arms)

    def usable(state: State, batch: int, fewest_live: int = 1) -> Sequence[Strategy]:
        known = acceptance.drafters(state["evidence"]) | state["estimates"].keys()
        few = affordable(arms, batch, MOST_NODES)
        return tuple(arm for arm in few if arm.drafter not in learning or arm.drafter in known)

    def choose(
        state: State, live: int, batch: int, slots: int, compiled: Sequence[Strategy] = ()
    ) -> tuple[State, Choice]:
        state = {**state, "choices": state["choices"] + 1}
        candidates = (PLAIN, *usable(state, batch))
        available = [arm for arm in candidates if not compiled or arm in compiled]
        if not state["cells"]:
            return state, Choice(
                PLAIN if PLAIN in available else available[0], math.nan, "baseline"
            )

        state = refitted(state, node_cost, one_pass)
        view = predict(state, candidates, batch, slots, one_pass)
        is_compiled = np.array([arm in available for arm in candidates])
        state, i, reason = decide(state, view, batch, is_compiled)
        is_exploring = name(view.arms[i]) != state["incumbents"][str(batch)]
        rounds = EXPLORATION_ROUNDS if is_exploring else MOST_ROUNDS
        predicted = live * math.exp(view.speed[i])
        return state, Choice(view.arms[i], predicted, reason, rounds, is_exploring)

    def speeds(state: State, cells: Sequence[Cell]) -> tuple[np.ndarray, np.ndarray]:
        state = refitted(state, node_cost, one_pass) if state["cells"] else state
        return predict_cells(state, cells, one_pass)

    return Tuner(
        begin,
        choose,
        learn,
        update_prior,
        usable,
        speeds,
        has_fixed_policy=False,
        switched=switched,
    )


def begin() -> State:
    """The initial state.

    clock: rounds so far. funds: exploration budget in seconds, without the credit. gain: predicted
    speed of the best arm over that of plain decoding. chunk: rounds of the last chunk that did not
    explore. incumbents: batch -> arm. trial: the last exploration; open until measured. seen: timed
    measurements. kind, others: see interface.swapped. law: weights of the cost model, and the number of measurements they
    are fitted to. evidence, estimates, cells: see acceptance, cost_model.
    """
    return {
        "choices": 0,
        "clock": 0,
        "funds": 0.0,
        "estimates": {},
        "cells": {},
        "seen": 0,
        "law": None,
        "kind": TRAINING,
        "others": {},
        **begin_kind(),
    }


def begin_kind() -> State:
    """The part of the initial state that each kind of rollouts has separately."""
    return {
        "gain": 1.0,
        "chunk": 16,
        "evidence": {},
        "incumbents": {},
        "trial": None,
    }


def switched(state: State, kind: str) -> State:
    """The state for rollouts of another kind, whose acceptance evidence is separate."""
    return swapped(state, kind, begin_kind())


def refitted(state: State, node_cost: float, one_pass: cost_model.OnePass | None) -> State:
    """The state with cost weights fitted to all measurements but the latest few."""
    if state["law"] and state["seen"] <= REFIT * state["law"]["seen"]:
        return state
    weights = cost_model.fit_weights(state["cells"], node_cost, one_pass).tolist()
    return {**state, "law": {"weights": weights, "seen": state["seen"]}}


def predict(
    state: State,
    arms: tuple[Strategy, ...],
    batch: int,
    slots: int,
    one_pass: cost_model.OnePass | None,
) -> Prediction:
    """Predictions for the arms: (accepted tokens + 1) / seconds per row, as logs."""
    accepted, error = acceptance.estimate(
        state["evidence"], state["clock"], batch, arms, state["estimates"]
    )
    targets = [Cell(batch, slots, arm) for arm in arms]
    weights = state["law"]["weights"]
    seconds, uncertainty = cost_model.predict(state["cells"], targets, weights, one_pass)
    return Prediction(arms, np.log1p(accepted) - seconds, np.hypot(error, uncertainty), seconds)


def predict_cells(
    state: State, cells: Sequence[Cell], one_pass: cost_model.OnePass | None
) -> tuple[np.ndarray, np.ndarray]:
    """Log tokens per second of one live row in each cell, and their standard errors."""
    weights = state["law"]["weights"] if state["law"] else None
    seconds, uncertainty = cost_model.predict(state["cells"], cells, weights, one_pass)
    accepted, error = np.zeros(len(cells)), np.zeros(len(cells))
    for batch in {cell.batch for cell in cells}:
        here = [i for i, cell in enumerate(cells) if cell.batch == batch]
        arms = list(dict.fromkeys(cells[i].strategy for i in here))
        known = acceptance.estimate(
            state["evidence"], state["clock"], batch, arms, state["estimates"]
        )
        places = [arms.index(cells[i].strategy) for i in here]
        accepted[here], error[here] = (values[places] for values in known)
    return np.log1p(accepted) - seconds, np.hypot(error, uncertainty)


def observe_goodput(state: State, seen: Measurement, arms: tuple[Strategy, ...]) -> State:
    """The state with one more measurement.

    Without a reliable time it counts only as evidence of acceptance.
    """
    if min(seen.rounds, seen.row_rounds, seen.tokens) <= 0:
        return state

    text = name(seen.strategy)
    clock = state["clock"] + int(seen.rounds)
    evidence, trial = state["evidence"], state["trial"]
    if seen.strategy != PLAIN:
        evidence = acceptance.add(
            evidence, clock, seen.batch, seen.strategy, seen.row_rounds, seen.hits, arms
        )

    is_tried = trial and (trial["batch"], trial["arm"], trial["open"]) == (seen.batch, text, True)
    usual = (
        seen.tokens / seen.row_rounds * seen.rounds / math.exp(trial["speed"]) if is_tried else 0.0
    )
    trial = {**trial, "open": False} if is_tried else trial
    state = {**state, "clock": clock, "evidence": evidence, "trial": trial}

    # Without a reliable time the loss of an exploration is unknown: the incumbent's time for its
    # rounds is deducted; nothing for the first run of a program, which happens once.
    if not seen.is_timed:
        charge = (
            0.0
            if math.isinf(seen.uncertainty)
            else usual * min(1, EXPLORATION_ROUNDS / seen.rounds)
        )

        return {**state, "funds": state["funds"] - charge}

    funds = state["funds"] + seen.seconds * (SHARE + DIVIDEND * max(state["gain"] - 1, 0.0))
    if is_tried:
        funds -= min(max(seen.seconds - usual, 0.0), 4 * usual) + seen.catch_up
    return {
        **state,
        "funds": funds,
        "chunk": state["chunk"] if seen.is_exploring else int(seen.rounds),
        "cells": cost_model.measured(state["cells"], seen),
        "seen": state["seen"] + 1,
    }


def update_prior(state: State, estimated: Mapping[str, Sequence[float]] = {}) -> State:
    """The state after an update of weights, and with the estimated acceptance of these drafters.

    Acceptance evidence and earlier estimates age by UPDATE rounds, costs stay, an open exploration
    is dropped. Merged trees hold the learned drafter's best candidates, and accept about as much as
    its own trees or more: without an estimate of their own they get its estimate. Raises ValueError
    for an estimate without a level.
    """
    clock, estimates = state["clock"] + UPDATE, dict(state["estimates"])
    if LEARNED in estimated:
        estimated = {MERGED: estimated[LEARNED], **estimated}
    for drafter, levels in estimated.items():
        estimates[drafter] = acceptance.estimated(clock, levels)
    return {
        **state,
        "clock": clock,
        "estimates": estimates,
        "trial": None,
        "others": {kind: {**own, "trial": None} for kind, own in state["others"].items()},
    }
