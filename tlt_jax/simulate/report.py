"""What a simulation says: tables, JSON, a picture, and where the seconds go."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax.errors import ConfigError
from tlt_jax.rollout.recorder import Span
from tlt_jax.simulate.cost_table import ESTIMATE, CostTable

COLUMNS = "step s", "rollout s", "update s", "bubble", "accept", "times plain"
STEP = "seconds", "tokens", "bubble", "compiling", "accept_length", "learned", "decoding_seconds"
PARTS = ("rollout", "update", "drafter", "publish", "reward", "save", "other")


@dataclass
class Step:
    """Seconds of a step by part, and what its rollout was like. `bubble`: idle share of the groups' time in the rollout.

    `decoding_seconds`: by drafter, off: plain. `error`: mean standard error of the log seconds of a round, over the shapes
    that were decoded. `spans`: the timeline of the rollout.
    """

    seconds: dict[str, float]
    tokens: int
    bubble: float
    compiling: float
    accept_length: float
    learned: float
    decoding_seconds: dict[str, float]
    error: float
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


Results = Mapping[str, Sequence[Step]]  # the steps of each arm


def late(steps: Sequence[Step]) -> Sequence[Step]:
    """The second half of the steps."""
    return steps[len(steps) // 2 :]


def table(results: Results) -> str:
    """A line for each arm: the means over all steps, with compiling, and then over the second half."""
    lines = []
    halves = {"all steps, with compiling": list, "the second half of the steps": late}
    for title, chosen in halves.items():
        lines += ["", f"{title}:", f"  {'':<12}" + "".join(f"{name:>13}" for name in COLUMNS)]
        rows = {name: summary(chosen(steps)) for name, steps in results.items()}
        for name, row in rows.items():
            cells = (
                f"{row['step']:.2f}", f"{row['rollout']:.2f}", f"{row['update']:.2f}", f"{row['bubble']:.0%}",
                f"{row['accept_length']:.2f}" if row["accept_length"] else "-",
                f"{rows['plain']['step'] / row['step']:.2f}" if "plain" in rows else "-",
            )  # fmt: skip
            lines.append(f"  {name:<12}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines[1:])


def by_groups(found: Mapping[int, Results]) -> str:
    """A line for each number of data groups: seconds of a step of every arm and gain over plain, of the second half."""
    names = list(next(iter(found.values())))
    lines = ["  groups" + "".join(f"{name + ' s':>14}{'gain':>7}" for name in names)]
    for groups, results in found.items():
        rows = late_seconds(results)
        gains = [f"{rows['plain'] / row:.2f}" if "plain" in rows else "-" for row in rows.values()]
        cells = zip(rows.values(), gains, strict=True)
        lines.append(f"{groups:>8}" + "".join(f"{row:>14.2f}{gain:>7}" for row, gain in cells))
    return "\n".join(lines)


def late_seconds(results: Results) -> dict[str, float]:
    """Mean seconds of a step of the second half, by arm."""
    return {name: summary(late(steps))["step"] for name, steps in results.items()}


def draw(path: Path, found: Mapping[int, Results]) -> None:
    """Writes a picture: seconds of a step by data groups and, with the arm `plain`, the gain over it; a line for each arm."""
    rows = [late_seconds(results) for results in found.values()]
    panels = {"seconds of a step (simulated)": rows}
    if "plain" in rows[0]:
        gains = [{name: row["plain"] / seconds for name, seconds in row.items()} for row in rows]
        panels["gain over plain decoding (simulated)"] = gains
    figure = drawing(path)(figsize=(5.6 * len(panels), 3.6), layout="constrained")
    for axes, (title, values) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):  # fmt: skip
        for name in rows[0]:
            axes.plot([str(groups) for groups in found], [row[name] for row in values], "o-", label=name)  # fmt: skip
        axes.set(title=title, xlabel="data groups", ylim=(0, None))
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def drawing(path: Path | str) -> type:
    """matplotlib's Figure. Raises ConfigError when it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot {path} needs matplotlib: pip install matplotlib, or leave it out"
        ) from error
    return Figure


def summary(steps: Sequence[Step]) -> dict[str, float]:
    """Means over steps: seconds by part, bubble, seconds of waiting for compilations; accept length of those that drafted."""
    rows = [{part: one.seconds.get(part, 0.0) for part in PARTS} for one in steps]
    for row, one in zip(rows, steps, strict=True):
        row |= {"step": one.total, "bubble": one.bubble, "compiling": one.compiling}
        row |= {"accept_length": one.accept_length, "round_error": one.error, "tokens": one.tokens}
    means = {name: [row[name] for row in rows] for name in rows[0]}
    means["accept_length"] = [one for one in means["accept_length"] if one] or [0.0]
    return {name: float(np.mean(values)) for name, values in means.items()}


def as_json(found: Mapping[int, Results], facts: Mapping[str, Any]) -> str:
    """All of it, as JSON: `facts` about the inputs, the means of each arm and its steps; of several groups by their number."""
    runs = {
        groups: {
            name: {
                "mean": summary(steps),
                "second_half": summary(late(steps)),
                "steps": [{key: vars(one)[key] for key in STEP} for one in steps],
            }
            for name, steps in results.items()
        }
        for groups, results in found.items()
    }
    several = len(runs) > 1
    whole = {"values": runs} if several else {"arms": next(iter(runs.values()))}
    inputs = dict(facts) | ({} if several else {"groups": next(iter(runs))})
    return json.dumps({"inputs": inputs} | whole, indent=1) + "\n"


def explained(results: Results, costs: CostTable) -> str:
    """Where the seconds of the second half go, by arm, what the largest part rests on, and what a change of it would give."""
    lines = ["where the seconds of a step go (second half of the steps):"]
    for name, steps in results.items():
        found = summary(late(steps))
        whole = found["step"]
        parts = sorted(((found[part], part) for part in PARTS if found[part]), reverse=True)
        text = ", ".join(f"{part} {seconds / whole:.0%}" for seconds, part in parts)
        idle = f"groups wait for the longest answers {found['bubble']:.0%} of the rollout"
        lines.append(f"  {name}: {text}; {idle}")
        kinds: Counter[str] = Counter()
        for one in late(steps):
            kinds.update(one.decoding_seconds)
        all_kinds = kinds.total() or 1.0
        drafting = ", ".join(f"{kind} {each / all_kinds:.0%}" for kind, each in kinds.most_common())
        error = f"rounds are off by about {found['round_error']:.0%} (one standard error)"
        lines.append(f"    decoding: {drafting}; {error}")
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
