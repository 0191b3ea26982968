"""Prints what whole RL steps took by arm: the tables of one kind of cache, with means over the turns.

steps     seconds of all steps (the sum of timing_s/step) and of the process; how often as fast as plain in the same turn, with
          a 95 % interval (jackknife over the steps of all turns); "at most": what Amdahl's law allows if the rollout took no
          time, and with the arm's own gain in the rollout; outside steps: imports, reading the policy, the last evaluation and
          checkpoint.
phases    seconds, of all steps; columns add up to the steps. Compiling is taken out of the phase that waits for it.
rollout   programs compiled; how often as fast as plain the rollout is, compiling included, in all steps, in their second half,
          and in the steps in which neither arm compiled; accept length; the share of row-rounds without a sequence; the median
          error of the tuner's predictions, |log(predicted / measured)|, of chunks whose time was not disturbed.
idle      the share of the groups' rollout time in which they had nothing to decode; the share of it in which the drafter was
          trained; the share of the seconds of training, the merge included, that lie in it; micro-steps, tokens.
accept length    over the steps, in fifths.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import whole_runs
from end_to_end_turns import PLAIN
from whole_runs import Run, accept_length, interval, padding, pairs, quiet_pairs

Pairs = list[tuple[float, float]]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a Markdown table."""
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(map(cell, row)) + " |")


def cell(value: object) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.2f}"
    return str(value)


class Compared:
    """The runs of every arm in all turns, beside the plain ones."""

    def __init__(
        self, turns: Sequence[Mapping[tuple[str, str], Run]], cache: str, arms: Sequence[str]
    ):
        self.plain = [turn[cache, PLAIN] for turn in turns]
        self.runs = {arm: [turn[cache, arm] for turn in turns] for arm in arms}

    def mean(self, of: Callable[[Run], float], arm: str) -> float:
        """A figure of the arm's runs."""
        return statistics.mean(map(of, self.runs[arm]))

    def pairs(self, of: Callable[[Run, Run], Pairs], arm: str) -> Pairs:
        """Seconds, plain and the arm's, of all turns."""
        both = zip(self.plain, self.runs[arm], strict=True)
        return [pair for one, other in both for pair in of(one, other)]

    def allowed(self, arm: str) -> float:
        """Plain steps over those with this arm's rollout: what Amdahl's law makes of its gain."""
        share = statistics.mean(one.total("timing_s/rollout") / one.seconds for one in self.plain)
        return 1 / (1 - share + share / whole_runs.ratio(self.pairs(rollout, arm))[0])


def rollout(one: Run, other: Run) -> Pairs:
    """Seconds of the rollout in every step."""
    return pairs(one, other, "rollout")


def second_half(one: Run, other: Run) -> Pairs:
    """Seconds of the rollout in the steps of the second half."""
    return rollout(one, other)[len(one.steps) // 2 :]


def walls(one: Run, other: Run) -> Pairs:
    """Seconds of the processes."""
    return [(one.wall, other.wall)]


def report(turns: Sequence[Mapping[tuple[str, str], Run]], cache: str, arms: Sequence[str]) -> None:
    """Prints the tables of one kind of cache."""
    found = Compared(turns, cache, arms)
    for show in (steps, phases, rollouts, idle, accept_lengths):
        show(found, cache)


def steps(found: Compared, cache: str) -> None:
    """Prints what the steps took, and what Amdahl's law allows."""
    most = statistics.mean(map(whole_runs.bound, found.plain))
    table(
        f"### {cache}: steps",
        ("arm", "steps, s", "plain / arm", "by its rollout", "at most", "process, s", "plain / arm", "outside steps, s"),
        (
            (arm, found.mean(lambda run: run.seconds, arm), interval(found.pairs(pairs, arm)), found.allowed(arm), most,
             found.mean(lambda run: run.wall, arm), interval(found.pairs(walls, arm)),
             found.mean(lambda run: run.wall - run.seconds, arm))
            for arm in found.runs
        ),
    )  # fmt: skip


def phases(found: Compared, cache: str) -> None:
    """Prints the seconds of the phases."""
    names = list(whole_runs.phases(found.plain[0]))
    table(
        f"### {cache}: phases, seconds of all steps",
        ("arm", *names, "sum"),
        (
            (arm, *(found.mean(lambda run, name=name: whole_runs.phases(run)[name], arm) for name in names),
             found.mean(lambda run: run.seconds, arm))
            for arm in found.runs
        ),
    )  # fmt: skip


def rollouts(found: Compared, cache: str) -> None:
    """Prints how fast the rollouts are, and what they compiled and drafted."""
    table(
        f"### {cache}: rollout, plain / arm",
        ("arm", "programs compiled", "all steps", "second half", "nothing compiled", "such steps", "accept length",
         "padding", "prediction error"),
        (
            (arm, round(found.mean(lambda run: run.total("perf/compiles"), arm)),
             interval(found.pairs(rollout, arm)), interval(found.pairs(second_half, arm)),
             interval(found.pairs(quiet_pairs, arm)), len(found.pairs(quiet_pairs, arm)),
             found.mean(accept_length, arm), f"{found.mean(padding, arm):.0%}",
             found.mean(whole_runs.prediction_error, arm))
            for arm in found.runs
        ),
    )  # fmt: skip


def idle(found: Compared, cache: str) -> None:
    """Prints what the idle time of the data groups was used for."""
    groups = sum(
        name.startswith("group/busy_s@") for name in next(iter(found.plain[0].steps.values()))
    )
    each = {arm: [whole_runs.idle(run, groups) for run in runs] for arm, runs in found.runs.items()}
    table(
        f"### {cache}: idle time and what was done in it",
        ("arm", "nothing to decode", "used", "training inside", "micro-steps", "tokens"),
        (
            (arm, *(statistics.mean(getattr(one, name) for one in all_turns) for name in ("bubbles", "used", "inside")),
             *(round(statistics.mean(getattr(one, name) for one in all_turns)) for name in ("micro_steps", "tokens")))
            for arm, all_turns in each.items()
        ),
    )  # fmt: skip


def accept_lengths(found: Compared, cache: str) -> None:
    """Prints the accept length over the steps."""
    count, all_steps = len(found.plain[0].steps), [*found.plain[0].steps]
    fifths = [all_steps[count * part // 5 : count * (part + 1) // 5] for part in range(5)]
    fifths = [part for part in fifths if part]
    table(
        f"### {cache}: accept length by steps",
        ("arm", *(f"{part[0]}-{part[-1]}" for part in fifths)),
        (
            (arm, *(found.mean(lambda run, part=part: accept_length(run, part), arm) for part in fifths))
            for arm in found.runs
        ),
    )  # fmt: skip


def describe(run: Run) -> None:
    """Prints what the answers of the plain run are like."""
    names = (
        "response_length/p50",
        "response_length/p75",
        "response_length/max",
        "actor/entropy",
        "reward/mean",
    )
    print("\nAnswers, by step: " + "; ".join(
        f"{name} {', '.join(f'{value:.3g}' for value in run.each(name))}" for name in names
    ))  # fmt: skip
