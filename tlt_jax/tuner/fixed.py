"""Tuners that do not learn: one fixed strategy, or a threshold on the number of live sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import cost_model
from tlt_jax.tuner.arms import bucketed, parse_arms, strategies_for
from tlt_jax.tuner.interface import Cell, Choice, Measurement, State, Tuner, unchanged


def begin() -> State:
    """The initial state: `cells` as in cost_model, from which the planner estimates paybacks."""
    return {"cells": {}}


def learn_costs(state: State, seen: Measurement) -> State:
    """The state with the seconds of one more measurement."""
    return {**state, "cells": cost_model.measured(state["cells"], seen)}


def costs_alone(state: State, cells: Sequence[Cell]) -> tuple[np.ndarray, np.ndarray]:
    """Log rounds per second in each cell, and their standard errors; acceptance is unknown and counts as equal in all cells."""
    seconds, error = cost_model.predict(state["cells"], cells)
    return -seconds, error


def fixed(strategy: Strategy | str) -> Tuner:
    """A tuner that always returns this strategy, which may be plain decoding."""
    arm = (parse_arms([strategy]) or (PLAIN,))[0]

    def choose(state: State, live: int, batch: int, slots: int, *_: Any) -> tuple[State, Choice]:
        return state, Choice(arm, math.nan, "fixed")

    def usable(state: State, batch: int, fewest_live: int) -> Sequence[Strategy]:
        return () if arm == PLAIN else (arm,)

    return Tuner(begin, choose, learn_costs, unchanged, usable, costs_alone, has_fixed_policy=True)


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

    return Tuner(begin, choose, learn_costs, unchanged, usable, costs_alone, has_fixed_policy=True)
