"""The picture of docs/algorithms.md: held-out accuracy of every algorithm; needs the benchmarks extra (matplotlib)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.whole_runs.algorithms import GRPO, Summary, curve, latest, summaries

COLORS = ("#1f6f8b", "#e07a5f", "#81b29a", "#f2b134", "#6d597a", "#3d405b", "#b56576", "#2a9d8f", "#9aa0a6")  # fmt: skip


def caption(found: Sequence[Summary]) -> str:
    """What the picture says, which is stored in the file too."""
    return (
        "Held-out accuracy of the quickstart's task, mean and scatter of the seeds: "
        + "; ".join(f"{one.arm} {one}" for one in found)
    )


def means(rows: Sequence[Mapping[str, str]]) -> dict[str, list[tuple[int, float]]]:
    """The mean accuracy over the seeds after each evaluated step, by arm."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in latest(rows):
        for step, value in curve(row):
            found[row["arm"]][step].append(value)
    return {
        arm: [(step, statistics.fmean(values)) for step, values in sorted(steps.items())]
        for arm, steps in found.items()
    }


def write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Draws the curves, and the accuracies at their ends with GRPO's scatter; stores what they say in the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found, curves = summaries(rows), means(rows)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=(3, 2)
    )
    for row, one in enumerate(found):
        color = COLORS[row % len(COLORS)]
        left.plot(*zip(*curves[one.arm], strict=True), color=color, label=one.arm, linewidth=1.5)
        right.plot(one.accuracies, [row] * len(one.accuracies), "o", color=color, alpha=0.5)
        right.plot([one.mean], [row], "|", color="black", markersize=14, markeredgewidth=1.5)
        if one.arm == GRPO:
            ends = one.mean - one.scatter, one.mean + one.scatter
            right.axvspan(*ends, color="#9aa0a6", alpha=0.3, linewidth=0)
    left.set(xlabel="RL steps", ylabel="held-out accuracy", title="mean of the seeds")
    left.legend(fontsize=8, frameon=False, ncols=2)
    right.set_yticks(range(len(found)), [one.arm for one in found])
    right.invert_yaxis()
    right.set(xlabel="held-out accuracy", title="after the last step; grey: GRPO's scatter")
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Description": caption(found), "Software": None})
    pyplot.close(figure)
