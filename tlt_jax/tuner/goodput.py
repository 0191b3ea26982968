"""Which strategy the next chunk uses: tuners as pure functions over a JSON-able state; knows no clock, device or rollout.

State is a dict that `choose`, `observe` and `renew` return anew; it goes into checkpoints, and a rollout's choices can be
replayed from it. All seconds are wall seconds of a chunk on the group's devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name, parse
from tlt_jax.tuner import acceptance, cost_model
from tlt_jax.tuner.arms import affordable, parse_arms
from tlt_jax.tuner.exploration import REST, Outlook, decide
from tlt_jax.tuner.interface import EXPLORATION_ROUNDS, MOST_ROUNDS, Choice, Measurement, State, Tuner

VERSION = 3  # of the states
SHARE = 0.006  # of all seconds that explorations may cost ...
DIVIDEND = 0.05  # ... and of the seconds that speculation saved
CREDIT = 8.0  # plain rounds that explorations may cost before
UPDATE = 2 * acceptance.HALF_LIFE  # rounds that an update of weights ages the hits by
REFIT = 1.1  # times as many measurements make a new law of costs
HOLD = (1, 16)  # choices that an arm, once kept, stands for without being thought over: at first, and at most
SHORT = 4, 0.1  # rounds and seconds below both of which what a chunk takes besides its rounds weighs too much
SURPRISE = 0.15  # of log speed: an arm stands no longer that measures so far from its prediction, in the mean of some chunks
MOST_NODES = 1024  # batch x nodes up to which a strategy is used


def goodput(
    strategies: Sequence[Strategy | str],
    most_nodes: int = MOST_NODES,
    node_cost: float = cost_model.NODE,
    credit: float = CREDIT,
) -> Tuner:
    """Predicted accepted tokens over predicted seconds, both from every measurement so far; plain decoding is an arm.

    Strategies are used where batch x nodes is at most `most_nodes`. The arm in use stays until another is predicted to be
    faster by more than the hysteresis. An arm that may be faster, but is not known well, is tried for a chunk, when what it
    may lose can be paid from the funds: `credit` plain rounds, and small shares of all time and of the time saved. An arm
    that is kept for a batch stands there for some choices, twice as many each time, until it is tried or surprises.
    `node_cost` is what a node costs before anything was measured, in units of a round's fixed part: about 1/10 on a CPU,
    1/200 on an accelerator.
    """
    arms = parse_arms(strategies)
    allowed = {PLAIN, *arms}
    learn = partial(observe_goodput, arms=arms)

    def choose(state: State, live: int, batch: int, slots: int) -> tuple[State, Choice]:
        state, place = {**state, "choices": state["choices"] + 1}, str(batch)
        plan = state["plans"].get(place)
        if plan and plan["left"] > 0 and (arm := parse(plan["arm"])) in allowed and arm.nodes * batch <= most_nodes:
            plans = {**state["plans"], place: {**plan, "left": plan["left"] - 1}}
            return {**state, "plans": plans}, Choice(arm, live * math.exp(plan["speed"]), "kept")
        if not state["cells"]:
            return state, Choice(PLAIN, math.nan, "baseline")
        state = refitted(state, node_cost)
        view = outlook(state, (PLAIN, *affordable(arms, batch, most_nodes)), batch, slots)
        state, i, reason = decide(state, view, batch, credit)
        incumbent = state["incumbents"][str(batch)]
        plans = planned(state, place, incumbent, float(view.speed[view.arms.index(parse(incumbent))]))
        is_exploring = name(view.arms[i]) != incumbent
        rounds = EXPLORATION_ROUNDS if is_exploring else MOST_ROUNDS
        predicted = live * math.exp(view.speed[i])
        return {**state, "plans": plans}, Choice(view.arms[i], predicted, reason, rounds, is_exploring)

    def usable(batch: int, fewest_live: int) -> Sequence[Strategy]:
        return affordable(arms, batch, most_nodes)

    return Tuner(begin, choose, learn, renew_goodput, usable)


def begin() -> State:
    """Nothing known. clock: rounds seen; funds: seconds that explorations may lose; gain: over plain, of the arm in use;
    chunk: rounds of the last chunk; trial: the last one, open until measured; plans: of each batch the arm that stands, its
    log speed, for how many choices (in all and still), and how far it measures off; seen: measurements; law: weights of the
    cost model, and how many measurements it has seen."""
    return {
        "choices": 0,
        "clock": 0,
        "funds": 0.0,
        "gain": 1.0,
        "chunk": 16,
        "evidence": {},
        "cells": {},
        "incumbents": {},
        "trial": None,
        "plans": {},
        "seen": 0,
        "law": None,
    }


def planned(state: State, place: str, arm: str, speed: float) -> State:
    """The plans with the arm in use. It stands for a while unless something is being tried, for longer when it stood before."""
    before, trial = state["plans"].get(place, {}), state["trial"]
    if trial and trial["open"] and state["choices"] - trial["since"] < REST:
        hold, left = HOLD[0], 0
    else:
        hold = left = min(2 * before["hold"], HOLD[1]) if before.get("arm") == arm else HOLD[0]
    return {**state["plans"], place: {"arm": arm, "speed": speed, "hold": hold, "left": left, "drift": 0.0}}


def watched(plans: State, place: str, arm: str, speed: float) -> State:
    """The plans after a chunk of this log speed: one that keeps surprising is gone."""
    plan = plans.get(place)
    if plan is None or plan["arm"] != arm:
        return plans
    drift = plan["drift"] + (speed - plan["speed"] - plan["drift"]) / 4
    if abs(drift) > SURPRISE:
        return {other: plan for other, plan in plans.items() if other != place}
    return {**plans, place: {**plan, "drift": drift}}


def refitted(state: State, node_cost: float) -> State:
    """The state with a law of costs that has seen nearly all measurements."""
    if state["law"] and state["seen"] <= REFIT * state["law"]["seen"]:
        return state
    weights = cost_model.law(state["cells"], node_cost).tolist()
    return {**state, "law": {"weights": weights, "seen": state["seen"]}}


def outlook(state: State, arms: tuple[Strategy, ...], batch: int, slots: int) -> Outlook:
    """Speed of each arm: accepted tokens and the one after them, over seconds."""
    accepted, error = acceptance.estimate(state["evidence"], state["clock"], batch, arms)
    seconds, doubt = cost_model.predict(state["cells"], batch, slots, arms, weights=state["law"]["weights"])
    return Outlook(arms, np.log1p(accepted) - seconds, np.hypot(error, doubt), seconds)


def observe_goodput(state: State, seen: Measurement, arms: tuple[Strategy, ...]) -> State:
    """The state with one measurement more; one whose seconds are doubtful tells what was accepted, and nothing else."""
    if min(seen.rounds, seen.row_rounds, seen.tokens) <= 0:
        return state
    text = name(seen.strategy)
    key = f"{seen.batch}/{seen.slots}/{text}"
    is_short = seen.rounds < SHORT[0] and seen.seconds < SHORT[1]
    is_cold = is_short or seen.is_moved or key not in state["cells"]
    clock = state["clock"] + int(seen.rounds)
    evidence, trial, plans = state["evidence"], state["trial"], state["plans"]
    if seen.strategy != PLAIN:
        evidence = acceptance.add(evidence, clock, seen.batch, seen.strategy, seen.row_rounds, seen.hits, arms)
    is_tried = trial and (trial["batch"], trial["arm"], trial["open"]) == (seen.batch, text, True)
    usual = seen.tokens / seen.row_rounds * seen.rounds / math.exp(trial["speed"]) if is_tried else 0.0
    trial = {**trial, "open": False} if is_tried else trial
    state = {**state, "clock": clock, "evidence": evidence, "trial": trial}
    if not seen.is_timed:  # what an exploration lost is not known; a program's first run, which comes once, is let pass
        charge = 0.0 if math.isinf(seen.doubt) else usual * min(1, EXPLORATION_ROUNDS / seen.rounds)
        return {**state, "funds": state["funds"] - charge}
    per_round = seen.seconds / seen.rounds
    plans = watched(plans, str(seen.batch), text, math.log(seen.tokens / seen.row_rounds / per_round))
    funds = state["funds"] + seen.seconds * (SHARE + DIVIDEND * max(state["gain"] - 1, 0.0))
    if is_tried:
        funds -= min(max(seen.seconds - usual, 0.0), 4 * usual) + seen.catch_up
        plans = {place: {**plan, "left": plan["left"] * (place != str(seen.batch))} for place, plan in plans.items()}
    return {
        **state,
        "funds": funds,
        "chunk": state["chunk"] if seen.is_exploring else int(seen.rounds),
        "cells": cost_model.note(state["cells"], seen.batch, seen.slots, seen.strategy, per_round, is_cold),
        "plans": plans,
        "seen": state["seen"] + 1,
    }


def renew_goodput(state: State) -> State:
    """An update ages what is known of hits as many rounds would; costs stay; an exploration that was not read is forgotten."""
    return {**state, "clock": state["clock"] + UPDATE, "trial": None}
