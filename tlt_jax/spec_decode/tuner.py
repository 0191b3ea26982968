"""Which strategy the next chunk uses: tuners as pure functions over a JSON-able state; knows no clock, device or rollout.

State is a dict that `choose`, `observe` and `renew` return anew; it goes into checkpoints, and a rollout's choices can be
replayed from it. All seconds are wall seconds of a chunk on the group's devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tlt_jax.spec_decode import acceptance, costs
from tlt_jax.spec_decode.strategies import (
    affordable,
    bucketed,
    name,
    pool,
    strategies_for,
)
from tlt_jax.spec_decode.tree import PLAIN, Strategy

State = dict[str, Any]
EPSILON, WINDOW, LIMIT = 0.1, 300, 32  # of the reference system
HYSTERESIS = 0.03  # of log speed: a challenger must be predicted to be this much faster
CAUTION = 0.5  # standard errors that a challenger's prediction is lowered by
HORIZON = 6.0  # chunks that a trial's gain is expected to last
SHARE = 0.01  # of all seconds that trials may cost ...
WORTHWHILE = 0.01  # share of the time that a trial must be expected to save
KNOWN = 0.12  # standard error below which an arm needs no trial
DIVIDEND = 0.05  # ... and of the seconds that speculation saved
CREDIT = 8.0  # plain rounds that trials may cost before
UPDATE = 2 * acceptance.HALF_LIFE  # rounds that an update of weights ages the hits by
REST = 6  # choices from one trial to the next
PATIENCE = 16  # choices after which a trial that nobody measured is given up


class Measurement(NamedTuple):
    """A chunk that was read. `batch` rows were compiled, `live` decoded (mean); `row_rounds` sums live rows over rounds.

    hits[D, N, K] counts accepted nodes by depth - 1, rank by score in the tree, and largest sibling rank on the way.
    `number` counts the programs of the group; `predicted` (tokens per second) and `reason` are of the choice.
    """

    group: int
    batch: int
    live: float
    slots: int
    strategy: Strategy
    rounds: int
    row_rounds: float
    tokens: int
    seconds: float
    hits: np.ndarray
    number: int = 0
    predicted: float = math.nan
    reason: str = ""


class Choice(NamedTuple):
    """A strategy, the tokens per second that the tuner expects of it (nan: it does not know), and why."""

    strategy: Strategy
    predicted: float
    reason: str


class Tuner(NamedTuple):
    """init() -> state; choose(state, live, batch, slots) -> (state, Choice); observe(state, Measurement) -> state;
    renew(state) -> state after the policy's or the drafter's weights changed."""

    init: Callable[[], State]
    choose: Callable[[State, int, int, int], tuple[State, Choice]]
    observe: Callable[[State, Measurement], State]
    renew: Callable[[State], State]


def unchanged(state: State, *_: Any) -> State:
    """What a tuner learns that learns nothing."""
    return state


def fixed(strategy: Strategy | str) -> Tuner:
    """Always the one strategy (plain decoding too)."""
    arm = (pool([strategy]) or (PLAIN,))[0]
    return Tuner(dict, lambda state, live, batch, slots: (state, Choice(arm, math.nan, "fixed")), unchanged, unchanged)


def threshold(
    strategies: Sequence[Strategy | str], limit: int = LIMIT, thresholds: Sequence[int] | None = None
) -> Tuner:
    """The paper's switch [b10]: speculation when at most `limit` sequences are live, the first strategy of the bucket."""
    buckets = bucketed(pool(strategies), thresholds)

    def choose(state: State, live: int, batch: int, slots: int) -> tuple[State, Choice]:
        if live > limit:
            return state, Choice(PLAIN, math.nan, f"more than {limit} live")
        return state, Choice(strategies_for(buckets, batch)[0], math.nan, f"at most {limit} live")

    return Tuner(dict, choose, unchanged, unchanged)


def beg_mab(
    strategies: Sequence[Strategy | str],
    thresholds: Sequence[int] | None = None,
    epsilon: float = EPSILON,
    window: int = WINDOW,
    seed: int = 0,
) -> Tuner:
    """The paper's bucketed epsilon-greedy bandit [b11], with plain decoding as an arm of every bucket.

    A reward is tokens per second of one live row; an arm's worth is the median of its last `window` rewards in the batch.
    Every arm is tried once before any is judged, and a first pull counts as measured.
    """
    buckets = bucketed(pool(strategies), thresholds)

    def choose(state: State, live: int, batch: int, slots: int) -> tuple[State, Choice]:
        arms = (PLAIN, *strategies_for(buckets, batch))
        keys = [f"{batch}/{name(arm)}" for arm in arms]
        worths = [median(state["rewards"][key]) if key in state["rewards"] else None for key in keys]
        fresh = [i for i, key in enumerate(keys) if worths[i] is None and key not in state["tried"]]
        known = [i for i, worth in enumerate(worths) if worth is not None]
        random = np.random.default_rng([seed, state["choices"]])
        if fresh:
            i, reason = fresh[0], "never tried"
        elif not known or random.random() < epsilon:
            i, reason = int(random.integers(len(arms))), "epsilon"
        else:
            i, reason = max(known, key=lambda one: worths[one]), "best median"
        tried = list(dict.fromkeys([*state["tried"], keys[i]]))
        predicted = math.nan if worths[i] is None else worths[i] * live
        return {**state, "choices": state["choices"] + 1, "tried": tried}, Choice(arms[i], predicted, reason)

    def renew(state: State) -> State:
        return {**state, "tried": []}  # a pull that was never read is taken again

    return Tuner(begin_beg_mab, choose, partial(observe_beg_mab, window=window), renew)


def begin_beg_mab() -> State:
    """Nothing known. rewards: of each batch and arm; tried: those that were chosen since the last update."""
    return {"choices": 0, "tried": [], "rewards": {}}


def observe_beg_mab(state: State, seen: Measurement, window: int) -> State:
    """The state with one reward more."""
    if min(seen.rounds, seen.row_rounds, seen.seconds) <= 0:
        return state
    key = f"{seen.batch}/{name(seen.strategy)}"
    reward = float(seen.tokens / seen.row_rounds * seen.rounds / seen.seconds)
    rewards = [*state["rewards"].get(key, []), reward][-window:]
    return {**state, "rewards": {**state["rewards"], key: rewards}}


class Outlook(NamedTuple):
    """What `goodput` expects of each arm: log tokens per second of a live row and its standard error, log seconds."""

    arms: tuple[Strategy, ...]
    speed: np.ndarray
    error: np.ndarray
    seconds: np.ndarray


def goodput(
    strategies: Sequence[Strategy | str], most_nodes: int = 1024, node_cost: float = costs.NODE, credit: float = CREDIT
) -> Tuner:
    """Predicted accepted tokens over predicted seconds, both from every measurement so far; plain decoding is an arm.

    Strategies are used where batch x nodes is at most `most_nodes`. The arm in use stays until another is predicted to be
    faster by more than the hysteresis. An arm that may be faster, but is not known well, is tried for a chunk, when what it
    may lose can be paid from the funds: `credit` plain rounds, and small shares of all time and of the time saved.
    `node_cost` is what a node costs before anything was measured, in units of a round's fixed part: about 1/10 on a CPU,
    1/200 on an accelerator.
    """
    arms = pool(strategies)
    learn = partial(observe_goodput, arms=arms)

    def choose(state: State, live: int, batch: int, slots: int) -> tuple[State, Choice]:
        state = {**state, "choices": state["choices"] + 1}
        view = outlook(state, (PLAIN, *affordable(arms, batch, most_nodes)), batch, slots, node_cost)
        if not state["cells"]:
            return state, Choice(PLAIN, math.nan, "baseline")
        state, i, reason = decide(state, view, batch, credit)
        return state, Choice(view.arms[i], live * math.exp(view.speed[i]), reason)

    return Tuner(begin, choose, learn, renew_goodput)


def begin() -> State:
    """Nothing known. clock: rounds seen; funds: seconds that trials may lose; gain: over plain, of the arm in use;
    chunk: rounds of the last chunk; last: strategy of each group; trial: the last one, open until measured."""
    return {
        "choices": 0,
        "clock": 0,
        "funds": 0.0,
        "gain": 1.0,
        "chunk": 16,
        "evidence": {},
        "cells": {},
        "incumbents": {},
        "last": {},
        "trial": None,
    }


def outlook(state: State, arms: tuple[Strategy, ...], batch: int, slots: int, node_cost: float = costs.NODE) -> Outlook:
    """Speed of each arm: accepted tokens and the one after them, over seconds."""
    accepted, error = acceptance.estimate(state["evidence"], state["clock"], batch, arms)
    seconds, doubt = costs.predict(state["cells"], batch, slots, arms, node_cost)
    return Outlook(arms, np.log1p(accepted) - seconds, np.hypot(error, doubt), seconds)


def decide(state: State, view: Outlook, batch: int, credit: float) -> tuple[State, int, str]:
    """The new state, the index of the arm, and why: the best known one, or a trial that can be paid for."""
    texts = [name(arm) for arm in view.arms]
    held = state["incumbents"].get(str(batch), name(PLAIN))
    i = texts.index(held) if held in texts else 0
    sure_A = view.speed - CAUTION * view.error
    sure_A[i] = view.speed[i] + HYSTERESIS
    best, trial = int(np.argmax(sure_A)), state["trial"]
    is_waiting = trial and state["choices"] - trial["since"] < (PATIENCE if trial["open"] else REST)
    tried = i if best != i or is_waiting else worth_trying(state, view, i, credit)
    j = best if best != i else tried
    reason = "kept" if j == i else "faster" if j == best else f"trial against {texts[i]}"
    if j != i and (j == tried or view.error[j] > KNOWN):
        trial = {"batch": batch, "arm": texts[j], "speed": float(view.speed[i])}
        trial |= {"since": state["choices"], "open": True}
    state = {**state, "gain": math.exp(view.speed[best] - view.speed[0]), "trial": trial}
    return {**state, "incumbents": {**state["incumbents"], str(batch): texts[best]}}, j, reason


def worth_trying(state: State, view: Outlook, i: int, credit: float) -> int:
    """The arm whose trial is expected to save most over the horizon; i when none is worth its price or can be paid."""
    saved_A, lost_A = stakes(view, i)
    price_A = state["chunk"] * np.exp(view.seconds) * lost_A
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


def observe_goodput(state: State, seen: Measurement, arms: tuple[Strategy, ...]) -> State:
    """The state with one measurement more."""
    if min(seen.rounds, seen.row_rounds, seen.seconds) <= 0:
        return state
    text, per_round = name(seen.strategy), seen.seconds / seen.rounds
    key = f"{seen.batch}/{seen.slots}/{text}"
    switched_on = state["last"].get(str(seen.group)) == name(PLAIN) and seen.strategy != PLAIN
    is_cold = switched_on or key not in state["cells"]
    clock = state["clock"] + int(seen.rounds)
    evidence, trial = state["evidence"], state["trial"]
    funds = state["funds"] + seen.seconds * (SHARE + DIVIDEND * max(state["gain"] - 1, 0.0))
    if seen.strategy != PLAIN:
        evidence = acceptance.learn(evidence, clock, seen.batch, seen.strategy, seen.row_rounds, seen.hits, arms)
    if trial and (trial["batch"], trial["arm"], trial["open"]) == (seen.batch, text, True):
        usual = seen.tokens / seen.row_rounds * seen.rounds / math.exp(trial["speed"])
        funds -= min(max(seen.seconds - usual, 0.0), 4 * usual)
        trial = {**trial, "open": False}
    return {
        **state,
        "clock": clock,
        "funds": funds,
        "chunk": int(seen.rounds),
        "evidence": evidence,
        "cells": costs.note(state["cells"], seen.batch, seen.slots, seen.strategy, per_round, is_cold),
        "last": {**state["last"], str(seen.group): text},
        "trial": trial,
    }


def renew_goodput(state: State) -> State:
    """An update ages what is known of hits as many rounds would; costs stay; a trial that was not read is forgotten."""
    return {**state, "clock": state["clock"] + UPDATE, "trial": None}
