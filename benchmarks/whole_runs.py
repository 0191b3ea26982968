"""What a run folder of `python -m tlt_jax.train` says of its RL steps, and how two runs of the same steps compare."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.stats import t as students_t
from tensorboardX.proto.event_pb2 import Event

PHASES = {
    "rollout": ("rollout",),
    "reward": ("reward",),
    "drafter": ("drafter",),
    "update": ("update", "old_log_prob"),
    "eval": ("eval",),
    "other": ("update_weights", "save_checkpoint", "time_drafting", "metrics", "other"),
}
COMPARED = ("completion", "length", "finish", "reward")

Scalars = dict[str, float]


@dataclass(frozen=True)
class Run:
    """What one run left: scalars of every step, chunks, answers and traces by step, and the seconds of the process.

    `policy`: a digest of the exported weights, empty when they were not exported.
    """

    steps: Mapping[int, Scalars]
    chunks: Mapping[int, Sequence[dict]]
    answers: Mapping[int, Mapping[int, dict]]
    wall: float
    traces: Mapping[int, Sequence[dict]] = field(default_factory=dict)
    policy: str = ""

    def total(self, name: str) -> float:
        """The sum over the steps; 0 for a scalar that is not there."""
        return sum(step.get(name, 0.0) for step in self.steps.values())

    def each(self, name: str) -> list[float]:
        """A scalar of every step, nan where it is not there."""
        return [step.get(name, math.nan) for step in self.steps.values()]

    @property
    def seconds(self) -> float:
        return self.total("timing_s/step")


def read_run(folder: Path, wall: float) -> Run:
    """What a run folder says of its steps."""
    answers = {
        step: {line["uid"]: line for line in lines}
        for step, lines in read_lines(folder / "completions").items()
    }
    traces = {
        int(path.stem): json.loads(path.read_text())["traceEvents"]
        for path in sorted((folder / "timeline").glob("*.json"))
    }
    weights = hashlib.sha256()
    for path in sorted((folder / "hf").glob("*.safetensors")):
        weights.update(path.read_bytes())
    policy = weights.hexdigest() if (folder / "hf").is_dir() else ""
    chunks = read_lines(folder / "speculation")
    return Run(read_steps(folder), chunks, answers, wall, traces, policy)


def read_steps(folder: Path) -> dict[int, Scalars]:
    """The scalars of every RL step of a run folder; those of the evaluation before it are not among them."""
    steps: dict[int, Scalars] = defaultdict(dict)
    for path in sorted((folder / "tensorboard").iterdir()):
        content, start = path.read_bytes(), 0
        while start + 12 <= len(content):  # 8 bytes of length, checksum, event, checksum
            end = start + 16 + struct.unpack_from("<Q", content, start)[0]
            event = Event.FromString(content[start + 12 : end - 4])
            for value in event.summary.value:
                steps[event.step].setdefault(value.tag, value.simple_value)
            start = end
    return {step: found for step, found in sorted(steps.items()) if "timing_s/step" in found}


def read_lines(folder: Path) -> dict[int, list[dict]]:
    """The lines of every STEP.jsonl in a folder, by step."""
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }


def first_difference(ours: Run, theirs: Run) -> str:
    """Where two runs differ first, in their answers or else their policies, as text; empty when they are the same."""
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
        return (
            f"the policies after the last step: SHA-256 {ours.policy:.12} and {theirs.policy:.12}"
        )
    return ""


def is_other(ours: Mapping, theirs: Mapping) -> bool:
    return any(ours[name] != theirs[name] for name in COMPARED)


def compiling(step: Scalars, phase: str = "") -> float:
    """Seconds that a phase of a step compiled, or all of them."""
    return step.get(f"perf/compile_s/{phase}" if phase else "perf/compile_s", 0.0)


def phases(run: Run) -> dict[str, float]:
    """Seconds by phase over all steps, without compiling; that of each and "unaccounted" complete the steps."""
    found = {
        name: sum(
            step.get(f"timing_s/{part}", 0.0) - compiling(step, part)
            for step in run.steps.values()
            for part in parts
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


def quiet_pairs(plain: Run, arm: Run) -> list[tuple[float, float]]:
    """Seconds of the rollout, plain and the arm's, in the steps in which neither compiled."""
    return [
        (plain.steps[step]["timing_s/rollout"], arm.steps[step]["timing_s/rollout"])
        for step in plain.steps
        if not plain.steps[step]["perf/compiles"] and not arm.steps[step]["perf/compiles"]
    ]


def ratio(seconds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Plain seconds over the arm's, of the sums of the pairs, and half the width of its 95 % interval.

    The interval is Student's, by the jackknife over the pairs; nan for a single one, which has none.
    """
    if not seconds:
        return math.nan, math.nan
    plain, arm = (sum(column) for column in zip(*seconds, strict=True))
    count = len(seconds)
    if count < 2:
        return plain / arm, math.nan
    without = [(plain - one) / (arm - other) for one, other in seconds]
    error = math.sqrt((count - 1) ** 2 / count * statistics.variance(without))
    return plain / arm, float(students_t.ppf(0.975, count - 1)) * error


def interval(seconds: Sequence[tuple[float, float]]) -> str:
    """The ratio as text, with its interval when it has one."""
    value, half = ratio(seconds)
    if math.isnan(half):
        return "-" if math.isnan(value) else f"{value:.2f}"
    return f"{value:.2f} ({value - half:.2f} to {value + half:.2f})"


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
    rows = run.total("perf/row_rounds")
    return (
        sum(step["perf/row_rounds"] * step["perf/padding_ratio"] for step in run.steps.values())
        / rows
    )


def bound(run: Run) -> float:
    """How often as fast the steps would be if their rollout, compiling included, took no time."""
    return run.seconds / (run.seconds - run.total("timing_s/rollout"))


@dataclass(frozen=True)
class Idle:
    """What the bubbles of a run were used for, over all steps.

    `bubbles`: share of the groups' rollout time in which they had nothing to decode; `used`: share of that in which they
    trained; `inside`: share of the seconds that training took which lie in bubbles, the merge and the wait for a last
    micro-step being outside; `micro_steps` and `tokens` learned from.
    """

    bubbles: float
    used: float
    inside: float
    micro_steps: int
    tokens: int


def idle(run: Run, groups: int) -> Idle:
    """What a run's bubbles were used for; shares of nothing are nan."""
    rollout = run.total("timing_s/rollout") * groups
    bubbles = used = 0.0
    for step in run.steps.values():
        share = step.get("idle/ratio", step["perf/idle_ratio"])
        seconds = groups * step["timing_s/rollout"] * share
        bubbles += seconds
        used += seconds * step.get("idle/used_ratio", 0.0)
    outside = run.total("idle/delay_s") + run.total("timing_s/drafter")
    return Idle(
        bubbles / rollout,
        used / bubbles if bubbles else math.nan,
        used / (used + outside) if used else math.nan,
        round(run.total("drafter/steps")),
        round(run.total("drafter/tokens")),
    )
