"""The picture of two runs of the same RL steps, with and without TLT; needs the benchmarks extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.timing import ratio
from benchmarks.whole_runs.runs import Run, accept_length, pairs, quiet_pairs, quiet_steps
from tlt_jax.metrics.timeline import COLORS, OTHER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN_COLOR, TLT_COLOR = "#9aa0a6", "#1f6f8b"
LABELS = {
    "prefill": "prefill",
    "decode": "plain decoding",
    "speculate": "speculative decoding",
    "catch_up": "drafter catching up",
    "harvest": "kept for training",
    "train": "drafter training in idle time",
    "wait": "idle",
}


def write(path: Path, plain: Run, tlt: Run) -> None:
    """Writes the PNG: rollout seconds, accept length and rewards of every step, and the timelines of one step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic(
        [["rollout", "accept", "reward"], ["timeline", "timeline", "timeline"]],
        figsize=(12, 6.2),
        layout="constrained",
    )
    rollout_seconds(axes["rollout"], plain, tlt)
    accept_lengths(axes["accept"], tlt)
    rewards(axes["reward"], plain, tlt)
    timelines(axes["timeline"], plain, tlt)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def rollout_seconds(axes: Axes, plain: Run, tlt: Run) -> None:
    """Seconds of the rollout by step; plain over TLT where nothing is compiled, and in all steps."""
    steps = [*plain.steps]
    for run, label, color in ((plain, "without TLT", PLAIN_COLOR), (tlt, "with TLT", TLT_COLOR)):
        axes.plot(steps, run.each("timing_s/rollout"), label=label, color=color, linewidth=2)
    whole, (quiet, half) = ratio(pairs(plain, tlt, "rollout"))[0], ratio(quiet_pairs(plain, tlt))
    title = f"rollout: {whole:.2f} times as fast, compiling included"
    if quiet == quiet:
        title = f"rollout: {quiet:.2f} ± {half:.2f} times as fast,\n{whole:.2f} compiling included"
    axes.set(title=title, xlabel="RL step", ylabel="s")
    axes.set_ylim(bottom=0)
    axes.legend()


def accept_lengths(axes: Axes, tlt: Run) -> None:
    """Tokens of a drafting round of a sequence, by step."""
    steps = [*tlt.steps]
    axes.plot(steps, [accept_length(tlt, [step]) for step in steps], color=TLT_COLOR, linewidth=2)
    axes.set(title="accept length", xlabel="RL step", ylabel="tokens a round")
    axes.set_ylim(bottom=1)


def rewards(axes: Axes, plain: Run, tlt: Run) -> None:
    """Mean rewards by step of both."""
    steps = [*plain.steps]
    ours, theirs = (run.each("reward/mean") for run in (plain, tlt))
    same = "the same to the last bit" if ours == theirs else "not the same"
    axes.plot(steps, ours, color=PLAIN_COLOR, linewidth=6, label="without TLT")
    axes.plot(steps, theirs, color=TLT_COLOR, linewidth=2, label="with TLT")
    axes.set(title=f"reward: {same}", xlabel="RL step", ylabel="mean reward")
    axes.legend()


def timelines(axes: Axes, plain: Run, tlt: Run) -> None:
    """The spans of each data group in one step, plain above, on one axis of seconds."""
    from matplotlib.patches import Patch

    step, lanes, longest = shown_step(plain, tlt), [], 0.0
    for run, label in ((plain, "plain"), (tlt, "TLT")):
        spans = run.traces[step]
        end = max(one["ts"] + one["dur"] for one in spans) / 1e6
        longest = max(longest, end)
        for group in sorted({one["tid"] for one in spans}):
            own = [one for one in spans if one["tid"] == group]
            lanes.append((f"{label}, group {group}", end, own))
    for row, (_, end, spans) in enumerate(lanes):
        axes.barh(row, end, left=0, height=0.8, color=rgb(COLORS["wait"]))
        for kind in {one["name"] for one in spans}:
            bars = [(one["ts"] / 1e6, one["dur"] / 1e6) for one in spans if one["name"] == kind]
            color = rgb(COLORS.get(kind, OTHER))
            axes.broken_barh(bars, (row - 0.4, 0.8), color=color, linewidth=0)
    axes.set_yticks(range(len(lanes)), [name for name, *_ in lanes])
    axes.invert_yaxis()
    axes.set(title=f"the rollout of step {step}", xlabel="s", xlim=(0, longest))
    kinds = {one["name"] for *_, spans in lanes for one in spans} | {"wait"}
    shown = [
        Patch(color=rgb(COLORS[one]), label=text) for one, text in LABELS.items() if one in kinds
    ]
    axes.legend(handles=shown, ncols=len(shown), loc="upper center", bbox_to_anchor=(0.5, -0.18))


def shown_step(plain: Run, tlt: Run) -> int:
    """The step of median gain among those in which neither run compiled and TLT trained; of more, if there are none."""
    quiet = quiet_steps(plain, tlt)
    trained = [step for step in quiet if tlt.steps[step].get("drafter/steps")]
    steps = trained or quiet or [*plain.steps]
    both = dict(zip(plain.steps, pairs(plain, tlt, "rollout"), strict=True))
    gains = {step: both[step][0] / both[step][1] for step in steps}
    return sorted(steps, key=gains.__getitem__)[len(steps) // 2]


def rgb(color: Sequence[int]) -> tuple[float, ...]:
    """Channels of 0 to 255 as matplotlib takes them."""
    return tuple(channel / 255 for channel in color)
