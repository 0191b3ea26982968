"""Reads the RL steps of a run folder of `python -m tlt_jax.train`, and compares two runs of the same steps."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tlt_jax import atomic
from tlt_jax.config.schema import METRICS
from tlt_jax.metrics import scalars_file, timeline

PHASES = {
    "rollout": ("rollout",),
    "reward": ("reward",),
    "drafter": ("drafter",),
    "update": ("update", "old_log_prob"),
    "eval": ("eval",),
    "other": ("update_weights", "save_checkpoint", "metrics", "other"),
}
COMPARED = ("completion", "length", "finish", "reward")

Scalars = dict[str, float]


@dataclass(frozen=True)
class Run:
    """The records of one run: scalars of every step, chunks, answers and traces by step, and the seconds of the process.

    `policy`: a digest of the exported weights, empty when they were not exported.
    """

    steps: Mapping[int, Scalars]
    chunks: Mapping[int, Sequence[dict]]
    answers: Mapping[int, Mapping[int, dict]]
    wall: float
    traces: Mapping[int, Sequence[dict]] = field(default_factory=dict)
    policy: str = ""

    def total(self, name: str) -> float:
        """The sum over the steps; 0 for a missing scalar."""
        return sum(step.get(name, 0.0) for step in self.steps.values())

    def each(self, name: str) -> list[float]:
        """A scalar of every step, nan where it is missing."""
        return [step.get(name, math.nan) for step in self.steps.values()]

    @property
    def seconds(self) -> float:
        return self.total("timing_s/step")


def read_run(folder: Path, wall: float) -> Run:
    """The run of a run folder."""
    answers = {
        step: {line["uid"]: line for line in lines}
        for step, lines in read_lines(folder / "completions").items()
    }
    traces = {
        int(path.stem): rollout_of(json.loads(path.read_text())["traceEvents"])
        for path in sorted((folder / "timeline").glob("*.json"))
    }
    weights, exported = hashlib.sha256(), folder / "hf"
    for path in sorted(exported.glob("*.safetensors")):
        weights.update(path.read_bytes())
    policy = weights.hexdigest() if exported.is_dir() else ""
    chunks = read_lines(folder / "speculation")
    return Run(read_steps(folder), chunks, answers, wall, traces, policy)


def rollout_of(events: Sequence[dict]) -> list[dict]:
    """The events of the data groups in a step's trace; their times begin at 0."""
    found = [one for one in events if (one["ph"], one["pid"]) == ("X", timeline.ROLLOUT)]
    begin = min((one["ts"] for one in found), default=0)
    return [one | {"ts": one["ts"] - begin} for one in found]


def read_steps(folder: Path) -> dict[int, Scalars]:
    """The scalars of every RL step of a run folder, with those of the evaluation after it."""
    lines = scalars_file.read(folder / METRICS)
    return {line["step"]: line for line in lines if "timing_s/step" in line}


def read_lines(folder: Path) -> dict[int, list[dict]]:
    """The lines of every STEP.jsonl in a folder, by step."""
    return {
        int(path.stem): [json.loads(line) for line in atomic.lines(path)]
        for path in sorted(folder.glob("*.jsonl"))
    }


def first_difference(ours: Run, theirs: Run) -> str:
    """The first difference of two runs, in their answers or else their policies, as text; empty when they are equal."""
    if ours.answers.keys() != theirs.answers.keys():
        return f"steps {sorted(ours.answers)} and {sorted(theirs.answers)}"
    for step, answers in ours.answers.items():
        others = theirs.answers[step]
        if answers.keys() != others.keys():
            return f"step {step}: {len(answers)} and {len(others)} answers"
        differ = [uid for uid in answers if is_other(answers[uid], others[uid])]
        if differ:
            name = next(n for n in COMPARED if answers[differ[0]][n] != others[differ[0]][n])
            one, other = (found[differ[0]][name] for found in (answers, others))
            return (
                f"step {step}: {len(differ)} of {len(answers)} answers; the first is uid {differ[0]}, whose {name} "
                f"is {one!r:.200} and {other!r:.200}"
            )
    if ours.policy != theirs.policy:
        digests = f"{ours.policy:.12} and {theirs.policy:.12}"
        return f"the policies after the last step: SHA-256 {digests}"
    return ""


def is_other(ours: Mapping, theirs: Mapping) -> bool:
    return any(ours[name] != theirs[name] for name in COMPARED)


def phases(run: Run) -> dict[str, float]:
    """Seconds by phase over all steps without compiling, seconds of compiling, and the rest as "unaccounted"; they add up."""
    found = {
        name: sum(
            run.total(f"timing_s/{part}") - run.total(f"perf/compile_s/{part}") for part in parts
        )
        for name, parts in PHASES.items()
    }
    whole = run.total("perf/compile_s")
    parts = {name: run.total(f"perf/compile_s/{name}") for name in ("rollout", "update", "eval")}
    found |= {f"compiling, {name}": seconds for name, seconds in parts.items()}
    found["compiling, other"] = whole - sum(parts.values())
    return found | {"unaccounted": run.seconds - sum(found.values())}


def pairs(plain: Run, arm: Run, phase: str = "step") -> list[tuple[float, float]]:
    """Seconds of a phase in every step, compiling included, plain and the arm's."""
    name = f"timing_s/{phase}"
    return [(plain.steps[step][name], arm.steps[step][name]) for step in plain.steps]


def quiet_steps(plain: Run, arm: Run) -> list[int]:
    """The steps in which neither compiled."""
    return [
        step
        for step in plain.steps
        if not plain.steps[step]["perf/compiles"] and not arm.steps[step]["perf/compiles"]
    ]


def quiet_pairs(plain: Run, arm: Run) -> list[tuple[float, float]]:
    """Seconds of the rollout, plain and the arm's, in the steps in which neither compiled."""
    both = pairs(plain, arm, "rollout")
    quiet = set(quiet_steps(plain, arm))
    return [pair for step, pair in zip(plain.steps, both, strict=True) if step in quiet]


def prediction_error(run: Run) -> float:
    """Median |log(predicted / measured tokens per second)| of the chunks that were timed well."""
    errors = [
        abs(math.log(chunk["predicted"] / chunk["measured"]))
        for lines in run.chunks.values()
        for chunk in lines
        if chunk["predicted"] and chunk["tokens"] and chunk["is_timed"]
    ]
    return statistics.median(errors) if errors else math.nan


def accept_length(run: Run, steps: Sequence[int] | None = None) -> float:
    """Tokens of a drafting round of a sequence, over the steps or all; nan when nothing was drafted."""
    drafted = [
        (chunk["tokens"], chunk["live"] * chunk["rounds"])
        for step, lines in run.chunks.items()
        if steps is None or step in steps
        for chunk in lines
        if chunk["strategy"] != "off"
    ]
    rounds = sum(rounds for _, rounds in drafted)
    return sum(tokens for tokens, _ in drafted) / rounds if rounds else math.nan


def padding(run: Run) -> float:
    """Share of the row-rounds of all steps that no live sequence used."""
    steps, rows = run.steps.values(), run.total("perf/row_rounds")
    return sum(step["perf/row_rounds"] * step["perf/padding_ratio"] for step in steps) / rows


def bound(run: Run) -> float:
    """The speedup of the steps if their rollout, compiling included, took no time."""
    return run.seconds / (run.seconds - run.total("timing_s/rollout"))


def idle(run: Run, groups: int) -> dict[str, float]:
    """The use of the bubbles of a run over all steps; shares of nothing are nan.

    "nothing to decode": the bubbles, a share of the groups' rollout time; "used": share of the bubbles in which they
    trained; "training inside": share of the training seconds inside bubbles, where the merge and the wait for a last
    micro-step are outside; "micro-steps" and "tokens" of the training.
    """
    rollout = run.total("timing_s/rollout") * groups
    bubbles = used = 0.0
    for step in run.steps.values():
        share = step.get("idle/ratio", step["perf/idle_ratio"])
        seconds = groups * step["timing_s/rollout"] * share
        bubbles += seconds
        used += seconds * step.get("idle/used_ratio", 0.0)
    outside = run.total("idle/delay_s") + run.total("timing_s/drafter")
    return {
        "nothing to decode": bubbles / rollout,
        "used": used / bubbles if bubbles else math.nan,
        "training inside": used / (used + outside) if used else math.nan,
        "micro-steps": run.total("drafter/steps"),
        "tokens": run.total("drafter/tokens"),
    }
