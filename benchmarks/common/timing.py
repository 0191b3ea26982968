"""Knows how calls are timed, how calls that are compared take turns, and how certain the ratios of their times are."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from scipy.special import stdtrit

Result = TypeVar("Result")


def clocked(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds of a call until its arrays are ready, and processor seconds of all threads."""
    wall, used = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - used


def interleaved(
    calls: Mapping[str, Callable[[], Result]], turns: int, unmeasured: int = 0
) -> dict[str, list[Result]]:
    """What every call returned in each turn, after the `unmeasured` turns; all take part in a turn."""
    found: dict[str, list[Result]] = {name: [] for name in calls}
    for turn in range(-unmeasured, turns):
        for name, call in calls.items():
            result = call()
            if turn >= 0:
                found[name].append(result)
    return found


def quantile_975(count: int) -> float:
    """The factor of a two-sided 95 % interval of the mean of `count` numbers, by Student's t."""
    return float(stdtrit(count - 1, 0.975))


def lower_end(values: Sequence[float], least: int) -> float:
    """The lower end of a 95 % interval of the mean; nan for fewer than `least` values."""
    if len(values) < least:
        return math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - quantile_975(len(values)) * error


def ratio(seconds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Plain seconds over the arm's, of the sums of the pairs, and half the width of its 95 % interval.

    The interval is Student's, by the jackknife over the pairs; nan for a single pair.
    """
    if not seconds:
        return math.nan, math.nan
    plain, arm = (sum(column) for column in zip(*seconds, strict=True))
    count = len(seconds)
    if count < 2:
        return plain / arm, math.nan
    without = [(plain - one) / (arm - other) for one, other in seconds]
    error = math.sqrt((count - 1) ** 2 / count * statistics.variance(without))
    return plain / arm, quantile_975(count) * error


def interval(seconds: Sequence[tuple[float, float]]) -> str:
    """The ratio as text, with its interval when it has one."""
    value, half = ratio(seconds)
    if math.isnan(half):
        return "-" if math.isnan(value) else f"{value:.2f}"
    return f"{value:.2f} ({value - half:.2f} to {value + half:.2f})"
