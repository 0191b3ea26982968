"""BEG-MAB, the bucketed epsilon-greedy bandit of arXiv 2511.16665, section 5.

It models neither costs nor acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name
from tlt_jax.tuner.arms import bucketed, parse_arms, strategies_for
from tlt_jax.tuner.fixed import begin, costs_alone, learn_costs
from tlt_jax.tuner.interface import TRAINING, Choice, Measurement, State, Tuner, swapped

EPSILON, WINDOW = 0.1, 300  # defaults of the paper's reference implementation


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
        switched=switched,
    )


def begin_beg_mab() -> State:
    """The initial state.

    rewards: by "batch/strategy", tokens per second of a row. tried: the "batch/strategy" chosen
    since the last update of weights. choices: their number, from which random numbers derive.
    cells: as in fixed.begin. kind, others: as in interface.swapped.
    """
    return {"choices": 0, "kind": TRAINING, "others": {}, **begin_kind(), **begin()}


def begin_kind() -> State:
    """The part of the initial state that each kind of rollouts has separately."""
    return {"tried": [], "rewards": {}}


def switched(state: State, kind: str) -> State:
    """The state for rollouts of another kind."""
    return swapped(state, kind, begin_kind())


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
