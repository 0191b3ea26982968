"""The arms of a tuner, and the tuners that goodput is compared with: fixed, threshold, and the bandit of TLT's paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, check, name, parse
from tlt_jax.tuner import cost_model
from tlt_jax.tuner.interface import (
    TRAINING,
    Cell,
    Choice,
    Measurement,
    State,
    Tuner,
    swapped,
    unchanged,
)

# Of the reference implementation of arXiv 2511.16665: the smallest batch of each arm, and BEG-MAB's defaults.
THRESHOLDS = (1, 2, 5, 21)
EPSILON, WINDOW = 0.1, 300


def parse_arms(strategies: Sequence[Strategy | str]) -> tuple[Strategy, ...]:
    """The strategies, parsed, without duplicates, in the given order, without plain decoding.

    Plain decoding is always an arm. Raises ValueError for an empty list or an impossible tree.
    """
    if not strategies:
        raise ValueError("no strategies: give at least one, as in 3_1_4")

    parsed = [parse(one) if isinstance(one, str) else one for one in strategies]
    for one in parsed:
        if one != PLAIN:
            check(one)

    return tuple(dict.fromkeys(one for one in parsed if one != PLAIN))


def bucketed(strategies: Sequence[Strategy]) -> dict[int, tuple[Strategy, ...]]:
    """Smallest batch -> strategies of that bucket; more nodes for smaller batches.

    The bucketing of BEG-MAB (arXiv 2511.16665, section 5): one bucket per node count. The smallest
    batches are the paper's, or powers of two for more than four buckets.
    """
    groups = sorted({one.nodes for one in strategies}, reverse=True)
    starts = THRESHOLDS if len(groups) <= len(THRESHOLDS) else [2**i for i in range(len(groups))]
    return {
        start: tuple(one for one in strategies if one.nodes == nodes)
        for start, nodes in zip(starts, groups, strict=False)
    }


def strategies_for(buckets: dict[int, tuple[Strategy, ...]], batch: int) -> tuple[Strategy, ...]:
    """The strategies of the bucket that contains `batch`.

    Batches below the first bucket use the first bucket.
    """
    return buckets[max((start for start in buckets if start <= batch), default=min(buckets))]


def begin() -> State:
    """The initial state: that of cost_model, from which the planner estimates paybacks."""
    return cost_model.begin()


def learn_costs(state: State, seen: Measurement) -> State:
    """The state with the seconds of one more measurement."""
    return {**state, **cost_model.learned(state, seen)}


def costs_alone(
    state: State, cells: Sequence[Cell], networks: cost_model.Networks = cost_model.DENSE
) -> tuple[np.ndarray, np.ndarray]:
    """Log rounds per second in each cell, and their standard errors; acceptance is unknown and counts as equal in all cells."""
    seconds, error = cost_model.predict(state["cells"], cells, networks=networks)
    return -seconds, error


def unlearned(
    choose: Callable[..., tuple[State, Choice]],
    usable: Callable[[State, int, int], Sequence[Strategy]],
) -> Tuner:
    """A tuner whose choices depend on nothing that was measured; it learns costs for the planner alone."""
    return Tuner(
        begin, choose, learn_costs, unchanged, usable, costs_alone, has_fixed_policy=True,
        is_disturbed=cost_model.is_disturbed,
    )  # fmt: skip


def fixed(strategy: Strategy | str) -> Tuner:
    """A tuner that always returns this strategy, which may be plain decoding."""
    arm = (parse_arms([strategy]) or (PLAIN,))[0]

    def choose(state: State, live: int, batch: int, slots: int, *_: Any) -> tuple[State, Choice]:
        return state, Choice(arm, math.nan, "fixed")

    def usable(state: State, batch: int, fewest_live: int) -> Sequence[Strategy]:
        return () if arm == PLAIN else (arm,)

    return unlearned(choose, usable)


def threshold(strategies: Sequence[Strategy | str], limit: int) -> Tuner:
    """Speculation when at most `limit` sequences are live (arXiv 2511.16665, section 5).

    Its strategy is the first of the batch's bucket.
    """
    buckets = bucketed(parse_arms(strategies))

    def choose(state: State, live: int, batch: int, slots: int, *_: Any) -> tuple[State, Choice]:
        if live > limit:
            return state, Choice(PLAIN, math.nan, f"more than {limit} live")
        return state, Choice(strategies_for(buckets, batch)[0], math.nan, f"at most {limit} live")

    def usable(state: State, batch: int, fewest_live: int) -> Sequence[Strategy]:
        return strategies_for(buckets, batch)[:1] if fewest_live <= limit else ()

    return unlearned(choose, usable)


def beg_mab(
    strategies: Sequence[Strategy | str], epsilon: float = EPSILON, window: int = WINDOW
) -> Tuner:
    """The paper's bandit, with plain decoding as an additional arm of every bucket.

    The reward is tokens per second of one live row. The value of an arm is the median of its last
    `window` rewards at this batch size. Each arm is chosen once before values decide; unlike in
    the reference implementation its first reward counts. `epsilon`: probability of a uniformly
    random arm.
    """
    buckets = bucketed(parse_arms(strategies))

    def choose(state: State, live: int, batch: int, slots: int, *_: Any) -> tuple[State, Choice]:
        arms = (PLAIN, *strategies_for(buckets, batch))
        keys = [f"{batch}/{name(arm)}" for arm in arms]
        worths = [
            median(state["rewards"][key]) if key in state["rewards"] else None for key in keys
        ]
        fresh = [i for i, key in enumerate(keys) if worths[i] is None and key not in state["tried"]]
        known = [i for i, worth in enumerate(worths) if worth is not None]

        random = np.random.default_rng([0, state["choices"]])
        if fresh:
            i, reason = fresh[0], "never tried"
        elif not known or random.random() < epsilon:
            i, reason = int(random.integers(len(arms))), "epsilon"
        else:
            i, reason = max(known, key=lambda one: worths[one]), "best median"

        tried = list(dict.fromkeys([*state["tried"], keys[i]]))
        predicted = math.nan if worths[i] is None else worths[i] * live
        return {**state, "choices": state["choices"] + 1, "tried": tried}, Choice(
            arms[i], predicted, reason
        )

    def update_prior(state: State, *_: Any) -> State:
        return {**state, "tried": []}  # arms without a reward are chosen again

    def usable(state: State, batch: int, fewest_live: int) -> Sequence[Strategy]:
        return strategies_for(buckets, batch)

    observe = partial(observe_beg_mab, window=window)
    return Tuner(
        begin_beg_mab,
        choose,
        observe,
        update_prior,
        usable,
        costs_alone,
        has_fixed_policy=True,
        switched=lambda state, kind: swapped(state, kind, begin_kind()),
        is_disturbed=cost_model.is_disturbed,
    )


def begin_beg_mab() -> State:
    """The initial state.

    rewards: by "batch/strategy", tokens per second of a row. tried: the "batch/strategy" chosen
    since the last update of weights. choices: their number, from which random numbers derive.
    cells, level, levels, turns: as in `begin`. kind, others: as in interface.swapped.
    """
    return {"choices": 0, "kind": TRAINING, "others": {}, **begin_kind(), **begin()}


def begin_kind() -> State:
    """The part of the initial state that each kind of rollouts has separately."""
    return {"tried": [], "rewards": {}}


def observe_beg_mab(state: State, seen: Measurement, window: int) -> State:
    """The state with the reward of one measurement.

    Without a reliable time there is no reward, and the arm counts as not yet tried.
    """
    if min(seen.rounds, seen.row_rounds) <= 0:
        return state

    state = learn_costs(state, seen)
    key = f"{seen.batch}/{name(seen.strategy)}"
    if not seen.is_timed:
        return {**state, "tried": [other for other in state["tried"] if other != key]}

    reward = float(seen.tokens / seen.row_rounds * seen.rounds / seen.seconds)
    rewards = [*state["rewards"].get(key, []), reward][-window:]
    return {**state, "rewards": {**state["rewards"], key: rewards}}
