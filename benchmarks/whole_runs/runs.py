"""Run folders of `python -m tlt_jax.train`: reads their RL steps, compares two runs, and prints the tables of several arms.

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

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.results import print_header, print_row
from benchmarks.common.timing import interval, ratio
from tlt_jax import atomic
from tlt_jax.config.schema import METRICS
from tlt_jax.metrics.run import read_scalars

PLAIN = "plain"  # the arm without speculation
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
Pairs = list[tuple[float, float]]  # seconds, plain and an arm's
Columns = Mapping[str, Callable[[str], object]]  # cells of an arm, by name


@dataclass(frozen=True)
class Run:
    """The records of one run: scalars of every step, chunks and answers by step, and the seconds of the process.

    `policy`: a digest of the exported weights, empty when they were not exported.
    """

    steps: Mapping[int, Scalars]
    chunks: Mapping[int, Sequence[dict]]
    answers: Mapping[int, Mapping[int, dict]]
    wall: float
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
    weights, exported = hashlib.sha256(), folder / "hf"
    for path in sorted(exported.glob("*.safetensors")):
        weights.update(path.read_bytes())
    policy = weights.hexdigest() if exported.is_dir() else ""
    chunks = read_lines(folder / "speculation")
    return Run(read_steps(folder), chunks, answers, wall, policy)


def read_steps(folder: Path) -> dict[int, Scalars]:
    """The scalars of every RL step of a run folder, with those of the evaluation after it."""
    lines = read_scalars(folder / METRICS)
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


def pairs(plain: Run, arm: Run, phase: str = "step") -> Pairs:
    """Seconds of a phase in every step, compiling included, plain and the arm's."""
    name = f"timing_s/{phase}"
    return [(plain.steps[step][name], arm.steps[step][name]) for step in plain.steps]


def quiet_pairs(plain: Run, arm: Run) -> Pairs:
    """Seconds of the rollout, plain and the arm's, in the steps in which neither compiled."""
    return [
        pair
        for step, pair in zip(plain.steps, pairs(plain, arm, "rollout"), strict=True)
        if not plain.steps[step]["perf/compiles"] and not arm.steps[step]["perf/compiles"]
    ]


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


# Tables of several arms

ROLLOUT = partial(pairs, phase="rollout")


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
        return 1 / (1 - share + share / ratio(self.pairs(ROLLOUT, arm))[0])


def report(turns: Sequence[Mapping[tuple[str, str], Run]], cache: str, arms: Sequence[str]) -> None:
    """Prints the tables of one kind of cache."""
    found = Compared(turns, cache, arms)
    for title, columns in (
        ("steps", step_columns(found)),
        ("phases, seconds of all steps", phase_columns(found)),
        ("rollout, plain / arm", rollout_columns(found)),
        ("idle time and its use", idle_columns(found)),
        ("accept length by steps", accept_lengths(found)),
    ):
        found.table(title, columns)


def step_columns(found: Compared) -> Columns:
    """Seconds of the steps, and Amdahl's bounds."""
    most = statistics.mean(map(bound, found.plain))
    return {
        "steps, s": found.mean(lambda run: run.seconds),
        "plain / arm": found.over(pairs),
        "by its rollout": found.allowed,
        "at most": lambda arm: most,
        "process, s": found.mean(lambda run: run.wall),
        "plain / arm of the process": found.over(lambda one, other: [(one.wall, other.wall)]),
        "outside steps, s": found.mean(lambda run: run.wall - run.seconds),
    }


def phase_columns(found: Compared) -> Columns:
    """Seconds of the phases."""
    columns = {
        name: found.mean(lambda run, name=name: phases(run)[name])
        for name in phases(found.plain[0])
    }
    return columns | {"sum": found.mean(lambda run: run.seconds)}


def rollout_columns(found: Compared) -> Columns:
    """Speed of the rollouts, their compilations and drafting."""
    compiles = found.mean(lambda run: run.total("perf/compiles"))
    unused = found.mean(padding)
    return {
        "programs compiled": lambda arm: round(compiles(arm)),
        "all steps": found.over(ROLLOUT),
        "second half": found.over(
            lambda one, two: pairs(one, two, "rollout")[len(one.steps) // 2 :]
        ),
        "nothing compiled": found.over(quiet_pairs),
        "such steps": lambda arm: len(found.pairs(quiet_pairs, arm)),
        "accept length": found.mean(accept_length),
        "padding": lambda arm: f"{unused(arm):.0%}",
        "prediction error": found.mean(prediction_error),
    }


def idle_columns(found: Compared) -> Columns:
    """How the idle time of the data groups was used."""
    first = next(iter(found.plain[0].steps.values()))
    groups = sum(name.startswith("group/busy_s@") for name in first)

    shares = {
        name: found.mean(lambda run, name=name: idle(run, groups)[name])
        for name in idle(found.plain[0], groups)
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
