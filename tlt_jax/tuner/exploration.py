"""The arm for the next chunk: the best known one, or an exploration worth its price; knows no measurement and no model."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name
from tlt_jax.tuner.interface import EXPLORATION_ROUNDS, State

HYSTERESIS = 0.03  # of log speed: a challenger must be predicted to be this much faster
CAUTION = 0.5  # standard errors that a challenger's prediction is lowered by
HORIZON = 6.0  # chunks that an exploration's gain is expected to last
WORTHWHILE = 0.01  # share of the time that an exploration must be expected to save
KNOWN = 0.12  # standard error below which an arm needs no exploration
REST = 6  # choices from one exploration to the next
EXPLORATION_TIMEOUT = 16  # choices after which an exploration that nobody measured is given up


class Outlook(NamedTuple):
    """What `goodput` expects of each arm: log tokens per second of a live row and its standard error, log seconds."""

    arms: tuple[Strategy, ...]
    speed: np.ndarray
    error: np.ndarray
    seconds: np.ndarray


def decide(state: State, view: Outlook, batch: int, credit: float) -> tuple[State, int, str]:
    """The new state, the index of the arm, and why: the best known one, or an exploration that can be paid for."""
    texts = [name(arm) for arm in view.arms]
    incumbent = state["incumbents"].get(str(batch), name(PLAIN))
    i = texts.index(incumbent) if incumbent in texts else 0
    sure_A = view.speed - CAUTION * view.error
    sure_A[i] = view.speed[i] + HYSTERESIS
    best, trial = int(np.argmax(sure_A)), state["trial"]
    is_waiting = trial and state["choices"] - trial["since"] < (EXPLORATION_TIMEOUT if trial["open"] else REST)
    tried = i if best != i or is_waiting else worth_trying(state, view, i, credit)
    j = best if best != i else tried
    reason = "kept" if j == i else "faster" if j == best else f"exploring against {texts[i]}"
    if j != i and (j == tried or view.error[j] > KNOWN):
        trial = {"batch": batch, "arm": texts[j], "speed": float(view.speed[i])}
        trial |= {"since": state["choices"], "open": True}
    state = {**state, "gain": math.exp(view.speed[best] - view.speed[0]), "trial": trial}
    return {**state, "incumbents": {**state["incumbents"], str(batch): texts[best]}}, j, reason


def worth_trying(state: State, view: Outlook, i: int, credit: float) -> int:
    """The arm whose exploration is expected to save most over the horizon; i when none is worth its price or can be paid."""
    saved_A, lost_A = stakes(view, i)
    price_A = min(state["chunk"], EXPLORATION_ROUNDS) * np.exp(view.seconds) * lost_A
    prize_A = state["chunk"] * math.exp(view.seconds[i]) * saved_A * HORIZON
    funds = state["funds"] + credit * math.exp(view.seconds[0])
    worth_A = np.where((price_A <= funds) & (saved_A > WORTHWHILE), prize_A - price_A, -np.inf)
    worth_A[i] = 0.0
    return int(np.argmax(worth_A))


def stakes(view: Outlook, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected share of arm i's time that each arm saves where it is faster, and of its own that it loses where slower.

    Log speeds are normal: these are the mean of max(0, 1 - exp(-x)) and of max(0, 1 - exp(x)), x their difference.
    """
    apart_A, error_A = view.speed - view.speed[i], np.maximum(view.error, 1e-6)

    def share(apart_A: np.ndarray) -> np.ndarray:
        above_A = normal(apart_A / error_A)
        return above_A - np.exp(error_A**2 / 2 - apart_A) * normal(apart_A / error_A - error_A)

    return share(apart_A), share(-apart_A)


def normal(x: np.ndarray) -> np.ndarray:
    """The normal distribution function."""
    return np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in x])
