"""The goodput tuner: predicted accepted tokens over predicted seconds, with explorations that are expected to pay.

The state is a dict; `choose`, `observe` and `update_prior` return a new one. It is saved in checkpoints, and a rollout's
choices can be recomputed from it. All seconds are wall-clock seconds of a chunk on the devices of its group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import LEARNED, MERGED, PLAIN, Strategy, name
from tlt_jax.tuner import acceptance, cost_model
from tlt_jax.tuner.baselines import parse_arms
from tlt_jax.tuner.interface import (
    EXPLORATION_ROUNDS,
    MOST_ROUNDS,
    TRAINING,
    Cell,
    Choice,
    Measurement,
    State,
    Tuner,
    expected_saving,
    swapped,
)

VERSION = 9  # of the state's format
SHARE = 0.006  # exploration budget: this share of all measured seconds ...
DIVIDEND = 0.05  # ... this share of the seconds that speculation saved, and CREDIT
UPDATE = 2 * acceptance.HALF_LIFE  # rounds by which an update of weights ages acceptance evidence
REFIT = 1.1  # growth of the number of measurements after which the cost weights are fitted again
MOST_NODES = 1024  # limit on batch x nodes of a strategy
HYSTERESIS = 0.03  # log speed by which another arm must exceed the incumbent's
CAUTION = 0.5  # standard errors subtracted from the predictions of all arms but the incumbent
HORIZON = 6.0  # chunks for which the gain of an exploration is assumed to last
WORTHWHILE = 0.01  # least expected saving of an exploration, as a share of the time
KNOWN = 0.12  # standard error of log speed above which switching to an arm counts as exploration
CREDIT = 8.0  # initial exploration budget, in plain rounds
FIRST_RUN = 0.5  # log seconds by which the first run of plain decoding may be too long
REST = 6  # choices between two explorations
EXPLORATION_TIMEOUT = 16  # choices after which an exploration without a measurement is abandoned


def goodput(
    strategies: Sequence[Strategy | str],
    node_cost: float = cost_model.NODE,
    learning: Collection[str] = (),
    networks: cost_model.Networks = cost_model.DENSE,
) -> Tuner:
    """A tuner that predicts the tokens per second of every arm; plain decoding is an arm.

    Accepted tokens and seconds are predicted from all measurements so far. Strategies are arms of
    the batches for which batch x nodes is at most MOST_NODES. The incumbent is replaced when
    another arm is predicted to be faster by more than a hysteresis. An arm that may be faster, but
    whose prediction is uncertain, is explored for one chunk when the exploration budget covers the
    expected loss: some plain rounds, and small shares of all time and of the time saved. `node_cost` is
    the prior cost of a node, in units of a round's fixed cost: about 1/10 on a CPU, 1/200 on an
    accelerator. `learning`: drafters that start untrained; their arms are not usable before
    their acceptance was estimated (`update_prior`) or measured. `networks`: of policy and drafter.
    Raises ValueError as `parse_arms` does.
    """
    arms = parse_arms(strategies)
    learn = partial(observe_goodput, arms=arms)

    def usable(state: State, batch: int, fewest_live: int = 1) -> Sequence[Strategy]:
        known = acceptance.drafters(state["evidence"]) | state["estimates"].keys()
        return tuple(
            arm
            for arm in arms
            if arm.nodes * batch <= MOST_NODES
            and (arm.drafter not in learning or arm.drafter in known)
        )

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

        if available == [PLAIN]:  # nothing to predict: chunks of a small policy take milliseconds
            incumbents = {**state["incumbents"], str(batch): name(PLAIN)}
            return {**state, "incumbents": incumbents, "gain": 1.0}, Choice(PLAIN, math.nan, "kept")

        state = refitted(state, node_cost, networks)
        cells = [Cell(batch, slots, arm) for arm in candidates]
        view = Prediction(candidates, *predict(state, cells, networks))
        is_compiled = np.array([arm in available for arm in candidates])
        plain = state["cells"].get(f"{batch}/{slots}/{name(PLAIN)}")
        is_close = view.speed.max() < view.speed[0] + FIRST_RUN
        is_doubtful = bool(plain) and (
            plain["age"] > cost_model.LIFE or (is_close and not plain["warm"])
        )
        state, i, reason = decide(state, view, batch, is_compiled, is_doubtful)
        is_exploring = name(view.arms[i]) != state["incumbents"][str(batch)]
        rounds = EXPLORATION_ROUNDS if is_exploring else MOST_ROUNDS
        predicted = live * math.exp(view.speed[i])
        return state, Choice(view.arms[i], predicted, reason, rounds, is_exploring)

    def speeds(state: State, cells: Sequence[Cell]) -> tuple[np.ndarray, np.ndarray]:
        state = refitted(state, node_cost, networks) if state["cells"] else state
        return predict(state, cells, networks)[:2]

    return Tuner(
        begin,
        choose,
        learn,
        update_prior,
        usable,
        speeds,
        has_fixed_policy=False,
        switched=lambda state, kind: swapped(state, kind, begin_kind()),
        is_disturbed=cost_model.is_disturbed,
    )


def begin() -> State:
    """The initial state.

    clock: rounds so far. funds: exploration budget in seconds, without the credit. gain: predicted
    speed of the best arm over that of plain decoding. chunk: rounds of the last chunk that did not
    explore. incumbents: batch -> arm. trial: the last exploration; open until measured. seen: timed
    measurements. kind, others: see interface.swapped. law: weights of the cost model, and the level and number of
    measurements they are fitted to. evidence, estimates: see acceptance; cells, level, levels, turns: see cost_model.
    """
    return {
        "choices": 0,
        "clock": 0,
        "funds": 0.0,
        "estimates": {},
        **cost_model.begin(),
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


def refitted(state: State, node_cost: float, networks: cost_model.Networks) -> State:
    """The state with cost weights fitted to all measurements but the latest few."""
    law, level = state["law"], state["level"]
    if law and law["level"] == level and state["seen"] <= REFIT * law["seen"]:
        return state
    weights = cost_model.fit_weights(state["cells"], node_cost, networks).tolist()
    return {**state, "law": {"weights": weights, "seen": state["seen"], "level": level}}


def predict(
    state: State, cells: Sequence[Cell], networks: cost_model.Networks
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log tokens per second of one live row in each cell, their standard errors, and log seconds of a round."""
    weights = state["law"]["weights"] if state["law"] else None
    seconds, uncertainty = cost_model.predict(state["cells"], cells, weights, networks)
    accepted, error = np.zeros(len(cells)), np.zeros(len(cells))
    for batch in {cell.batch for cell in cells}:
        here = [i for i, cell in enumerate(cells) if cell.batch == batch]
        arms = list(dict.fromkeys(cells[i].strategy for i in here))
        known = acceptance.estimate(
            state["evidence"], state["clock"], batch, arms, state["estimates"]
        )
        places = [arms.index(cells[i].strategy) for i in here]
        accepted[here], error[here] = (values[places] for values in known)
    return np.log1p(accepted) - seconds, np.hypot(error, uncertainty), seconds


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

    state |= cost_model.learned(state, seen)

    # Without a reliable time the loss of an exploration is unknown: the incumbent's time for its
    # rounds is deducted; nothing for the first run of a program, which happens once.
    if not seen.is_timed:
        is_first = math.isinf(seen.uncertainty)
        charge = 0.0 if is_first else usual * min(1, EXPLORATION_ROUNDS / seen.rounds)
        return {**state, "funds": state["funds"] - charge}

    funds = state["funds"] + seen.seconds * (SHARE + DIVIDEND * max(state["gain"] - 1, 0.0))
    if is_tried:
        funds -= min(max(seen.seconds - usual, 0.0), 4 * usual) + seen.catch_up
    return {
        **state,
        "funds": funds,
        "chunk": state["chunk"] if seen.is_exploring else int(seen.rounds),
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


class Prediction(NamedTuple):
    """Predictions for each arm, the first of which is plain decoding.

    speed[A]: log tokens per second of a live row; error[A]: its standard error; seconds[A]: log
    seconds of a round.
    """

    arms: tuple[Strategy, ...]
    speed: np.ndarray
    error: np.ndarray
    seconds: np.ndarray


def decide(
    state: State, view: Prediction, batch: int, is_compiled: np.ndarray, is_doubtful: bool = False
) -> tuple[State, int, str]:
    """The new state, the index of the arm, and the reason.

    The arm is the best one, or one to explore at a cost that the budget covers, among those with
    compiled programs (`is_compiled`: bool[A]). Plain decoding, with which all are compared, is explored
    when what was measured of it is old or of a first run: `is_doubtful`.
    """
    texts = [name(arm) for arm in view.arms]
    sure_A = np.where(is_compiled, view.speed - CAUTION * view.error, -np.inf)
    incumbent = state["incumbents"].get(str(batch), name(PLAIN))
    i = texts.index(incumbent) if incumbent in texts else 0
    i = i if is_compiled[i] else int(np.argmax(sure_A))

    sure_A[i] = view.speed[i] + HYSTERESIS
    best, trial = int(np.argmax(sure_A)), state["trial"]

    is_waiting = trial and state["choices"] - trial["since"] < (
        EXPLORATION_TIMEOUT if trial["open"] else REST
    )
    tried = i
    if best == i and not is_waiting:
        is_due = is_doubtful and is_compiled[0]
        tried = 0 if is_due else worth_trying(state, view, i, is_compiled)
    j = best if best != i else tried
    reason = "kept" if j == i else "faster" if j == best else f"exploring against {texts[i]}"

    if j != i and (j == tried or view.error[j] > KNOWN):
        trial = {"batch": batch, "arm": texts[j], "speed": float(view.speed[i])}
        trial |= {"since": state["choices"], "open": True}

    state = {**state, "gain": math.exp(view.speed[best] - view.speed[0]), "trial": trial}
    return {**state, "incumbents": {**state["incumbents"], str(batch): texts[best]}}, j, reason


def worth_trying(state: State, view: Prediction, i: int, is_compiled: np.ndarray) -> int:
    """The arm whose exploration has the largest expected net saving over HORIZON chunks.

    i when no exploration has a positive one at a cost within the budget.
    """
    saved_A, lost_A = stakes(view, i)
    cost_A = min(state["chunk"], EXPLORATION_ROUNDS) * np.exp(view.seconds) * lost_A
    gain_A = state["chunk"] * math.exp(view.seconds[i]) * saved_A * HORIZON
    funds = state["funds"] + CREDIT * math.exp(view.seconds[0])

    is_worth_A = is_compiled & (cost_A <= funds) & (saved_A > WORTHWHILE)
    worth_A = np.where(is_worth_A, gain_A - cost_A, -np.inf)
    worth_A[i] = 0.0
    return int(np.argmax(worth_A))


def stakes(view: Prediction, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected relative savings [A] of each arm over arm i, and expected relative losses [A].

    Log speeds are normally distributed. With x the difference of log speeds, arm minus arm i, these
    are E[max(0, 1 - exp(-x))], a share of arm i's time, and E[max(0, 1 - exp(x))], a share of its
    own.
    """
    apart_A = view.speed - view.speed[i]
    return expected_saving(apart_A, view.error), expected_saving(-apart_A, view.error)
