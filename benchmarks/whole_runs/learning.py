"""Does a real model learn, and is the curve the same with adaptive drafting? Held-out accuracy by step of two runs.

python -m benchmarks.whole_runs.learning --plain RUN --adaptive RUN [--since STEP] [--csv FILE]

The runs have the same configuration, without a drafter and with `--speculation.drafter adaptive`; they need not be done:

    python -m tlt_jax.train --config configs/word_problems_smollm2_135m.yaml --run RUN --speculation.drafter none

A row is an evaluation of both: right answers, their share with its 95 % interval (Wilson's), seconds of a step of each run (the
median since the evaluation before), and whether this evaluation and all answers of the steps before it are the same in both.
The last lines have the first difference, that of the last weights too once both runs are done, and plain over adaptive seconds
of the steps after --since, and of their rollouts. Seconds mean something only where the runs took turns on a quiet machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import results
from benchmarks.common.timing import interval
from benchmarks.whole_runs.runs import Run, first_difference, pairs, read_run
from tlt_jax.metrics import evaluations
from tlt_jax.metrics.evaluations import Record

COLUMNS = (
    "step", "right", "answers", "accuracy", "low", "high", "plain_step_s", "adaptive_step_s", "equal",
)  # fmt: skip
NORMAL_975 = 1.959964  # the standard normal distribution's quantile of 0.975
Evaluations = Mapping[int, Sequence[Record]]  # by step


def wilson(right: int, count: int) -> tuple[float, float]:
    """The ends of Wilson's 95 % interval of a share: `right` of `count`."""
    share, z = right / count, NORMAL_975 / math.sqrt(count)
    center, half = share + z * z / 2, z * math.sqrt(share * (1 - share) + z * z / 4)
    return (center - half) / (1 + z * z), (center + half) / (1 + z * z)


def read_evaluations(folder: Path) -> Evaluations:
    """The kept answers of a run's evaluations."""
    paths = sorted((folder / evaluations.FOLDER).glob("*.jsonl"))
    return {int(path.stem): evaluations.read(path) for path in paths}


def between(run: Run, first: int, last: int) -> Run:
    """Steps `first` to `last` of a run; its policy only when it ended there."""
    policy = run.policy if max(run.steps, default=0) == last else ""
    steps = {step: found for step, found in run.steps.items() if first <= step <= last}
    answers = {step: found for step, found in run.answers.items() if first <= step <= last}
    return replace(run, steps=steps, answers=answers, policy=policy)


def difference(plain: Run, adaptive: Run, last: int) -> str:
    """The first difference of the answers up to a step, and of the policies that both have after it; "" for none."""
    both = between(plain, 1, last), between(adaptive, 1, last)
    if not all(run.policy for run in both):
        both = replace(both[0], policy=""), replace(both[1], policy="")
    return first_difference(*both)


def seconds(run: Run, first: int, last: int) -> float:
    """The median seconds of steps `first` to `last`; nan without one."""
    found = between(run, first, last).each("timing_s/step")
    return statistics.median(found) if found else math.nan


def compare(folders: tuple[Path, Path], since: int, table: results.ResultTable) -> None:
    """Prints a row for each evaluation of both runs, the first difference and the ratio of their seconds."""
    plain, adaptive = (read_run(folder, math.nan) for folder in folders)
    ours, theirs = map(read_evaluations, folders)
    before = 0
    for step in sorted(ours.keys() & theirs.keys()):
        right, count = sum(one.is_correct for one in ours[step]), len(ours[step])
        is_equal = ours[step] == theirs[step] and not difference(plain, adaptive, step)
        spent = (seconds(run, before + 1, step) for run in (plain, adaptive))
        equal = "yes" if is_equal else "no"
        table.row(step, right, count, right / count, *wilson(right, count), *spent, equal)
        before = step

    last = min(max(run.steps, default=0) for run in (plain, adaptive))
    found = difference(plain, adaptive, last)
    print(f"\nsteps 1 to {last}: {found or 'all answers are equal'}")
    timed = [between(run, since + 1, last) for run in (plain, adaptive)]
    for phase in ("step", "rollout"):
        print(
            f"steps {since + 1} to {last}, {phase}: plain / adaptive {interval(pairs(*timed, phase))}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the comparison of two runs."""
    parser = results.arguments(__doc__)
    parser.add_argument("--plain", type=Path, required=True, help="run folder without a drafter")
    parser.add_argument(
        "--adaptive", type=Path, required=True, help="run folder with an adaptive drafter"
    )
    parser.add_argument("--since", type=int, default=0, help="seconds are of the steps after it")
    args = parser.parse_args(argv)
    compare((args.plain, args.adaptive), args.since, results.ResultTable(COLUMNS, args.csv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
