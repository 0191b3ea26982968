"""What a simulation says: a table, JSON, where the seconds go, and a sweep over the number of data groups. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tlt_jax.simulate.cost_table import ESTIMATE, CostTable
from tlt_jax.simulate.off_policy import OffPolicy

COLUMNS = "step s", "rollout s", "update s", "bubble", "accept", "times plain"
# Where an arm is off-policy: age of its tokens in updates, share of tokens older than 0, groups that roll out + that train.
OFF_POLICY = "mean age", "most age", "older", "groups"
PARTS = ("rollout", "update", "drafter", "publish", "reward", "save", "other")


class Step(Protocol):
    """run.Step."""

    seconds: Mapping[str, float]
    tokens: int
    bubble: float
    compiling: float
    accept_length: float
    learned: float
    strategies: Mapping[str, float]
    error: float
    off_policy: OffPolicy
    split: str
    recomputing: float

    @property
    def total(self) -> float: ...


Results = Mapping[str, Sequence[Step]]  # the steps of each arm


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def late(steps: Sequence[Step]) -> Sequence[Step]:
    """The second half of the steps."""
    return steps[len(steps) // 2 :]


def table(results: Results) -> str:
    """A line for each arm: the means over all steps, with compiling, and then over the second half.

    With the columns OFF_POLICY where an arm is off-policy.
    """
    lines, columns = [], COLUMNS
    if any(one.off_policy.most or one.split for steps in results.values() for one in steps):
        columns = (*COLUMNS, *OFF_POLICY)
    for title, chosen in (
        ("all steps, with compiling", list),
        ("the second half of the steps", late),
    ):
        lines.append(f"{title}:")
        lines.append(f"  {'':<12}" + "".join(f"{name:>13}" for name in columns))
        rows = {name: summary(chosen(steps)) for name, steps in results.items()}
        for name, row in rows.items():
            gain = f"{rows['plain']['step'] / row['step']:.2f}" if "plain" in rows else "-"
            cells = (
                f"{row['step']:.2f}", f"{row['rollout']:.2f}", f"{row['update']:.2f}", f"{row['bubble']:.0%}",
                f"{row['accept_length']:.2f}" if row["accept_length"] else "-", gain,
            )  # fmt: skip
            if columns != COLUMNS:
                ages = f"{row['age']:.2f}", f"{row['most_age']:.0f}", f"{row['older']:.0%}"
                cells = (*cells, *ages, results[name][-1].split or "all")
            lines.append(f"  {name:<12}" + "".join(f"{cell:>13}" for cell in cells))
        lines.append("")
    return "\n".join(lines[:-1])


def summary(steps: Sequence[Step]) -> dict[str, float]:
    """Means over steps: seconds by part, bubble, seconds of waiting for compilations; accept length of those that drafted.

    `most_age` is the largest of all steps.
    """
    drafted = [one.accept_length for one in steps if one.accept_length]
    parts = {part: mean([one.seconds.get(part, 0.0) for one in steps]) for part in PARTS}
    return parts | {
        "step": mean([one.total for one in steps]),
        "bubble": mean([one.bubble for one in steps]),
        "compiling": mean([one.compiling for one in steps]),
        "accept_length": mean(drafted),
        "round_error": mean([one.error for one in steps]),
        "tokens": mean([one.tokens for one in steps]),
        "age": mean([one.off_policy.mean for one in steps]),
        "most_age": max((one.off_policy.most for one in steps), default=0),
        "older": mean([one.off_policy.older for one in steps]),
        "recomputing": mean([one.recomputing for one in steps]),
    }


def as_json(found: Mapping[str, Results], facts: Mapping[str, Any]) -> str:
    """All of it, as JSON: `facts` about the inputs, and the arms by value of a sweep; "": those of the only run."""
    runs = {value: arms_of(results) for value, results in found.items()}
    whole = {"arms": runs[""]} if "" in runs else {"values": runs}
    return json.dumps({"inputs": dict(facts)} | whole, indent=1) + "\n"


def arms_of(results: Results) -> dict[str, Any]:
    """The means of each arm, and its steps."""
    return {
        name: {
            "mean": summary(steps),
            "second_half": summary(late(steps)),
            "split": steps[-1].split if steps else "",
            "steps": [
                {
                    "seconds": dict(one.seconds), "tokens": one.tokens, "bubble": one.bubble,
                    "compiling": one.compiling, "accept_length": one.accept_length,
                    "learned": one.learned, "decoding_seconds": dict(one.strategies),
                    "off_policy": one.off_policy._asdict(), "recomputing": one.recomputing,
                }
                for one in steps
            ],
        }
        for name, steps in results.items()
    }  # fmt: skip


def explained(results: Results, costs: CostTable) -> str:
    """Where the seconds of the second half go, by arm, what the largest part rests on, and what a change of it would give."""
    lines = ["where the seconds of a step go (second half of the steps):"]
    for name, steps in results.items():
        found = summary(late(steps))
        whole = found["step"]
        parts = sorted(((found[part], part) for part in PARTS if found[part]), reverse=True)
        text = ", ".join(f"{part} {seconds / whole:.0%}" for seconds, part in parts)
        idle = "wait for the longest answers {:.0%} of the rollout"
        if steps[-1].split:
            idle = "that roll out or train are idle {:.0%} of the step"
        lines.append(f"  {name}: {text}; groups {idle.format(found['bubble'])}")
        kinds = decoding_shares(late(steps)).items()
        drafting = ", ".join(f"{kind} {share:.0%}" for kind, share in kinds)
        error = f"rounds are off by about {found['round_error']:.0%} (one standard error)"
        lines.append(f"    decoding: {drafting}; {error}")
        if not steps[
            -1
        ].split:  # else parts overlap: a shorter one does not shorten the step as much
            lines += [f"    {line}" for line in changes(found)]
    lines.append("the seconds rest on:")
    lines.append(f"  round: {costs.sources('round') or ESTIMATE}")
    for program in ("update", "drafter_update", "micro_step", "publish", "compile"):
        if sources := costs.sources(program):
            error = min(costs.error(program), 9.0)
            lines.append(f"  {program}: {sources}, off by about {error:.0%} (one standard error)")
    return "\n".join(lines)


def changes(found: Mapping[str, float]) -> list[str]:
    """The step's seconds if one part of it took less, the largest gain first."""
    whole = found["step"]
    ideas = {
        "no bubble in the rollout": found["rollout"] * found["bubble"],
        "rounds 10 % faster": 0.1 * found["rollout"],
        "updates 10 % faster": 0.1 * found["update"],
        "no training of the drafter in the update": found["drafter"],
    }
    ordered = sorted(ideas.items(), key=lambda one: -one[1])
    return [
        f"{name}: {whole / (whole - saved):.2f} times as fast"
        for name, saved in ordered
        if saved > 0.001 * whole
    ]


def decoding_shares(steps: Sequence[Step]) -> dict[str, float]:
    """Shares of decoding seconds by drafter, off: plain."""
    seconds: dict[str, float] = {}
    for one in steps:
        for kind, taken in one.strategies.items():
            seconds[kind] = seconds.get(kind, 0.0) + taken
    whole = sum(seconds.values()) or 1.0
    return {kind: taken / whole for kind, taken in sorted(seconds.items(), key=lambda one: -one[1])}


def sweep(knob: str, found: Mapping[str, Results]) -> str:
    """Seconds of a step and gain over plain decoding by values of a knob, over the second half of the steps."""
    names = list(next(iter(found.values())))
    width = max(8, len(knob), *map(len, found))
    columns = "".join(f"{name + ' s':>{max(14, len(name) + 4)}}{'gain':>7}" for name in names)
    lines = [f"{knob:>{width}}" + columns]
    for value, results in found.items():
        rows, gains = late_seconds(results), gains_of(results)
        cells = (
            f"{rows[name]:>{max(14, len(name) + 4)}.2f}"
            + (f"{gains[name]:>7.2f}" if gains else f"{'-':>7}")
            for name in names
        )
        lines.append(f"{value:>{width}}" + "".join(cells))
    return "\n".join(lines)


def late_seconds(results: Results) -> dict[str, float]:
    """Mean seconds of a step of the second half, by arm."""
    return {name: summary(late(steps))["step"] for name, steps in results.items()}


def gains_of(results: Results) -> dict[str, float]:
    """Times plain decoding that each arm is as fast; nothing without the arm `plain`."""
    rows = late_seconds(results)
    return {name: rows["plain"] / row for name, row in rows.items()} if "plain" in rows else {}
