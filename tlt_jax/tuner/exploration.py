"""The arm of the next chunk: exploitation, or an exploration whose expected gain exceeds its cost.

Knows neither measurements nor the models that predict from them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name
from tlt_jax.tuner.interface import EXPLORATION_ROUNDS, State

HYSTERESIS = 0.03  # log speed by which another arm must exceed the incumbent's
CAUTION = 0.5  # standard errors subtracted from the predictions of all arms but the incumbent
HORIZON = 6.0  # chunks for which the gain of an exploration is assumed to last
WORTHWHILE = 0.01  # least expected saving of an exploration, as a share of the time
KNOWN = 0.12  # standard error of log speed above which switching to an arm counts as exploration
CREDIT = 8.0  # initial exploration budget, in plain rounds
REST = 6  # choices between two explorations
EXPLORATION_TIMEOUT = 16  # choices after which an exploration without a measurement is abandoned


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
    state: State, view: Prediction, batch: int, is_compiled: np.ndarray
) -> tuple[State, int, str]:
    """The new state, the index of the arm, and the reason.

    The arm is the best one, or one to explore at a cost that the budget covers, among those with
    compiled programs (`is_compiled`: bool[A]).
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
    tried = i if best != i or is_waiting else worth_trying(state, view, i, is_compiled)
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


def expected_saving(apart: np.ndarray, error: np.ndarray) -> np.ndarray:
    """E[max(0, 1 - exp(-x))] for x normal with mean `apart` and standard deviation `error`."""
    error = np.maximum(error, 1e-6)
    above = normal(apart / error)
    return above - np.exp(error**2 / 2 - apart) * normal(apart / error - error)


def normal(x: np.ndarray) -> np.ndarray:
    """The cumulative distribution function of the standard normal distribution."""
    return np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in x])
