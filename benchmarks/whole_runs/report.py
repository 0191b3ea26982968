"""Prints the tables of whole RL steps by arm, for one kind of cache, with means over the turns.

steps     seconds of all steps (the sum of timing_s/step) and of the process; plain / arm in the same turn, with a 95 %
          interval (jackknife over the steps of all turns); "at most": Amdahl's bound if the rollout took no time, and with the
          arm's own gain in the rollout; outside steps: imports, reading the policy, the last evaluation and checkpoint.
phases    seconds of all steps; columns add up to the steps. Compiling is subtracted from the phase that waits for it.
rollout   programs compiled; plain / arm of the rollout, compiling included, in all steps, in their second half, and in the
          steps in which neither arm compiled; accept length; the share of row-rounds without a sequence; the median error of
          the tuner's predictions, |log(predicted / measured)|, of chunks whose time is valid.
idle      the share of the groups' rollout time in which they had nothing to decode; the share of it in which the drafter was
          trained; the share of the training seconds, the merge included, inside it; micro-steps, tokens.
accept length    over the steps, in fifths.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.common.results import print_header, print_row
from benchmarks.common.timing import interval, ratio
from benchmarks.whole_runs import runs
from benchmarks.whole_runs.arms import PLAIN
from benchmarks.whole_runs.runs import Run, accept_length, padding, pairs, quiet_pairs

Pairs = list[tuple[float, float]]
Columns = Mapping[str, Callable[[str], object]]  # cells of an arm, by name


def cell(value: object) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.2f}"
    return str(value)


class Compared:
    """The runs of every arm with one kind of cache in all turns, and the plain ones."""

    def __init__(
        self, turns: Sequence[Mapping[tuple[str, str], Run]], cache: str, arms: Sequence[str]
    ):
        self.cache, self.plain = cache, [turn[cache, PLAIN] for turn in turns]
        self.runs = {arm: [turn[cache, arm] for turn in turns] for arm in arms}

    def table(self, title: str, columns: Columns) -> None:
        """Prints a row for every arm."""
        print(f"\n### {self.cache}: {title}")
        print_header(["arm", *columns])
        for arm in self.runs:
            print_row([arm, *(cell(value(arm)) for value in columns.values())])

    def mean(self, of: Callable[[Run], float]) -> Callable[[str], float]:
        """A column: the mean of a figure over the runs of an arm."""
        return lambda arm: statistics.mean(map(of, self.runs[arm]))

    def pairs(self, of: Callable[[Run, Run], Pairs], arm: str) -> Pairs:
        """Seconds, plain and the arm's, of all turns."""
        both = zip(self.plain, self.runs[arm], strict=True)
        return [pair for one, other in both for pair in of(one, other)]

    def over(self, of: Callable[[Run, Run], Pairs]) -> Callable[[str], str]:
        """A column: plain seconds over the arm's, with the interval."""
        return lambda arm: interval(self.pairs(of, arm))

    def allowed(self, arm: str) -> float:
        """Plain steps over those with this arm's rollout, by Amdahl's law."""
        share = statistics.mean(one.total("timing_s/rollout") / one.seconds for one in self.plain)
        return 1 / (1 - share + share / ratio(self.pairs(rollout, arm))[0])


def rollout(one: Run, other: Run) -> Pairs:
    """Seconds of the rollout in every step."""
    return pairs(one, other, "rollout")


def report(turns: Sequence[Mapping[tuple[str, str], Run]], cache: str, arms: Sequence[str]) -> None:
    """Prints the tables of one kind of cache."""
    found = Compared(turns, cache, arms)
    for title, columns in (
        ("steps", steps(found)),
        ("phases, seconds of all steps", phases(found)),
        ("rollout, plain / arm", rollouts(found)),
        ("idle time and its use", idle(found)),
        ("accept length by steps", accept_lengths(found)),
    ):
        found.table(title, columns)


def steps(found: Compared) -> Columns:
    """Seconds of the steps, and Amdahl's bounds."""
    most = statistics.mean(map(runs.bound, found.plain))
    return {
        "steps, s": found.mean(lambda run: run.seconds),
        "plain / arm": found.over(pairs),
        "by its rollout": found.allowed,
        "at most": lambda arm: most,
        "process, s": found.mean(lambda run: run.wall),
        "plain / arm of the process": found.over(lambda one, other: [(one.wall, other.wall)]),
        "outside steps, s": found.mean(lambda run: run.wall - run.seconds),
    }


def phases(found: Compared) -> Columns:
    """Seconds of the phases."""
    columns = {
        name: found.mean(lambda run, name=name: runs.phases(run)[name])
        for name in runs.phases(found.plain[0])
    }
    return columns | {"sum": found.mean(lambda run: run.seconds)}


def rollouts(found: Compared) -> Columns:
    """Speed of the rollouts, their compilations and drafting."""
    compiles = found.mean(lambda run: run.total("perf/compiles"))
    unused = found.mean(padding)
    return {
        "programs compiled": lambda arm: round(compiles(arm)),
        "all steps": found.over(rollout),
        "second half": found.over(lambda one, two: rollout(one, two)[len(one.steps) // 2 :]),
        "nothing compiled": found.over(quiet_pairs),
        "such steps": lambda arm: len(found.pairs(quiet_pairs, arm)),
        "accept length": found.mean(accept_length),
        "padding": lambda arm: f"{unused(arm):.0%}",
        "prediction error": found.mean(runs.prediction_error),
    }


def idle(found: Compared) -> Columns:
    """How the idle time of the data groups was used."""
    first = next(iter(found.plain[0].steps.values()))
    groups = sum(name.startswith("group/busy_s@") for name in first)

    shares = {
        name: found.mean(lambda run, name=name: runs.idle(run, groups)[name])
        for name in runs.idle(found.plain[0], groups)
    }
    counts = ("micro-steps", "tokens")
    return shares | {name: lambda arm, of=shares[name]: round(of(arm)) for name in counts}


def accept_lengths(found: Compared) -> Columns:
    """Accept length in fifths of the steps."""
    count, all_steps = len(found.plain[0].steps), [*found.plain[0].steps]
    fifths = [all_steps[count * part // 5 : count * (part + 1) // 5] for part in range(5)]
    return {
        f"{part[0]}-{part[-1]}": found.mean(lambda run, part=part: accept_length(run, part))
        for part in fifths
        if part
    }


def describe(run: Run) -> None:
    """Prints lengths, entropy and rewards of the plain run by step."""
    names = [f"response_length/{part}" for part in ("p50", "p75", "max")]
    print("\nAnswers, by step: " + "; ".join(
        f"{name} {', '.join(f'{value:.3g}' for value in run.each(name))}"
        for name in (*names, "actor/entropy", "reward/mean")
    ))  # fmt: skip
