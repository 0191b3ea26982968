"""The picture of README.md: the speed of rollouts by drafter, drawn from rows of results/end_to_end.csv.

python -m benchmarks.whole_runs.claim --out docs/rollout_speed.png      needs the benchmarks extra (matplotlib)
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parents[1] / "results" / "end_to_end.csv"
# The experiment and the arm of each bar, and its label.
BARS = (
    ("long answers, adaptive", "tlt", "TLT: adaptive drafter"),
    ("long answers, fixed and n-grams", "fixed", "fixed drafter"),
    ("long answers, fixed and n-grams", "ngram", "n-grams"),
)
COLORS = ("#1f6f8b", "#9aa0a6", "#9aa0a6")


class Speed(NamedTuple):
    """Seconds of plain rollouts over an arm's, in the steps that compile nothing, with the ends of the 95 % interval."""

    label: str
    ratio: str
    low: str
    high: str

    def __str__(self) -> str:
        return f"{self.ratio} ({self.low} to {self.high})"


def speeds() -> list[Speed]:
    """The bars: the newest row of each arm."""
    with RESULTS.open(newline="") as file:
        rows = {(row["experiment"], row["arm"]): row for row in csv.DictReader(file)}
    names = ("quiet_over_plain", "quiet_low", "quiet_high")
    return [
        Speed(label, *(rows[experiment, arm][name] for name in names))
        for experiment, arm, label in BARS
    ]


def caption(found: Sequence[Speed]) -> str:
    """What the picture says, which is stored in the file too."""
    return "Rollout speed over decoding without a drafter: " + "; ".join(
        f"{one.label} {one}" for one in found
    )


def write(path: Path, found: Sequence[Speed]) -> None:
    """Draws the bars, and stores what they say in the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 2.4), layout="constrained")
    for row, (one, color) in enumerate(zip(found, COLORS, strict=True)):
        ratio, low, high = float(one.ratio), float(one.low), float(one.high)
        axes.barh(row, ratio, height=0.6, color=color)
        axes.plot([low, high], [row, row], color="black", linewidth=1.2)
        axes.text(max(ratio, high) + 0.02, row, str(one), va="center")
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(found)), [one.label for one in found])
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 2.0),
        xlabel="rollout speed; 1: without a drafter",
        title=f"Rollouts are {found[0].ratio} times as fast with TLT, once programs are compiled",
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Description": caption(found), "Software": None})
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; writes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    args = parser.parse_args(argv)
    write(args.out, speeds())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
