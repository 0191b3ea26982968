r"""Which algorithms learn the quickstart's task, and does speculation change a bit of what they learn?

python benchmarks/algorithms.py --work DIR --csv benchmarks/results/algorithms.csv [--arms grpo,dapo] [--seeds 0,1,2]
    [--steps 60] [--compared-steps 6] [--drafting none,ngram,learned] [--section.knob VALUE ...]
python benchmarks/algorithms.py --csv benchmarks/results/algorithms.csv --picture docs/algorithms_quickstart.png

Every arm trains configs/quickstart.yaml with its knobs (ARMS) and those of all arms (SHARED), from the same start policy of its
seed: the held-out accuracy of each evaluation is a row's `accuracies`. Then each arm runs --compared-steps with its first
seed, without drafting, and with drafts of n-grams and of a learned drafter in every round: `policy` is a digest of the last
weights, and `equal` says whether it is that of the run without.

Rows that the CSV file has are not measured again, so that the command continues where it was stopped; an arm with other knobs
or another number of steps is another row. Without --work nothing is run: the rows are reported, and drawn with --picture
(the benchmarks extra). An arm keeps up with GRPO when its mean is at least GRPO's less GRPO's scatter, the standard deviation
over the seeds. Other arguments change the configuration of all arms.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import results
from benchmarks.common.processes import ROOT
from benchmarks.whole_runs.arms import Failure, command, say
from benchmarks.whole_runs.runs import Run, first_difference, read_run
from tlt_jax.config.schema import NGRAM, NONE
from tlt_jax.metrics.run import open_run

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
GRPO, LEARNED = "grpo", "learned"
# Several optimizer steps on a rollout: with one all ratios are 1, and losses that clip them differently are the same.
SHARED = {"algorithm.minibatches": "4", "eval.every": "10", "eval.samples": "4"}
DAPO = {"algorithm.clip_high": "0.28", "rollout.max_prompts": "64"}
# The knobs of each algorithm; the buffer is the fifth of rollout.max_new_tokens that DAPO takes.
ARMS: Mapping[str, Mapping[str, str]] = {
    GRPO: {},
    "dr_grpo": {"algorithm.advantage": "dr_grpo", "algorithm.aggregation": "dr_grpo"},
    "rloo": {"algorithm.advantage": "rloo"},
    "reinforce_pp": {"algorithm.advantage": "reinforce_pp"},
    "gspo": {
        "algorithm.loss": "gspo",
        "algorithm.aggregation": "sequence_mean",
        "algorithm.clip_low": "0.0003",
        "algorithm.clip_high": "0.0004",
    },
    "cispo": {
        "algorithm.loss": "cispo",
        "algorithm.clip_low": "1.0",
        "algorithm.clip_high": "4.0",
    },
    "dapo": DAPO | {"reward.overlong_buffer": "20"},
    "dapo_filtered": DAPO | {"algorithm.overlong": "filtered"},
    "lora": {"model.lora.rank": "16", "model.lora.alpha": "32", "optim.learning_rate": "0.001"},
}
TREE = "3_1_4"
FORCED = {"speculation.tuner": "fixed"}
DRAFTING: Mapping[str, Mapping[str, str]] = {
    NONE: {"speculation.drafter": NONE},
    NGRAM: FORCED | {"speculation.drafter": NGRAM, "speculation.strategies": f"[{TREE}]"},
    LEARNED: FORCED
    | {
        "speculation.drafter": "adaptive",
        "speculation.strategies": f"[{LEARNED}:{TREE}]",
        "drafter_training.share": "1",
    },
}
COLUMNS = ("arm", "drafting", "seed", "steps", "knobs", "accuracies", "drafted", "policy", "equal", "wall_s")  # fmt: skip


class Trial(NamedTuple):
    """A run to measure. `is_compared`: its policy with those of other draftings, else its accuracy."""

    arm: str
    drafting: str
    seed: int
    steps: int
    is_compared: bool

    @property
    def knobs(self) -> dict[str, str]:
        knobs = SHARED | dict(ARMS[self.arm]) | dict(DRAFTING[self.drafting])
        return knobs | ({"eval.every": "0"} if self.is_compared else {})

    @property
    def text(self) -> str:
        """The knobs in which the arm differs from the others, as a row has them."""
        return shlex.join(flags(ARMS[self.arm]))

    @property
    def key(self) -> tuple[str, ...]:
        """What a row of it has in its first columns."""
        return self.arm, self.drafting, str(self.seed), str(self.steps), self.text

    @property
    def name(self) -> str:
        return f"{self.arm}_{self.drafting}_{self.seed}_{self.steps}"


class Summary(NamedTuple):
    """Held-out accuracies of an arm after the last step, by seed; `least`: GRPO's mean less its scatter, None without it."""

    arm: str
    accuracies: list[float]
    least: float | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def scatter(self) -> float:
        """Standard deviation over the seeds; 0 of one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    @property
    def verdict(self) -> str:
        if self.least is None:
            return "GRPO was not measured"
        return "keeps up with GRPO" if self.mean >= self.least else "below GRPO"

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.scatter:.3f}"


def flags(knobs: Mapping[str, str]) -> list[str]:
    """Knobs as arguments of the training command."""
    return [word for name, value in knobs.items() for word in (f"--{name}", value)]


def trials(args: argparse.Namespace) -> list[Trial]:
    """All runs, those for accuracy first."""
    learning = [
        Trial(arm, NONE, seed, args.steps, False) for seed in args.seeds for arm in args.arms
    ]
    compared = [
        Trial(arm, drafting, args.seeds[0], args.compared_steps, True)
        for arm in args.arms
        for drafting in args.drafting
    ]
    return learning + (compared if args.compared_steps else [])


def rows_of(path: Path | None) -> list[dict[str, str]]:
    """The rows of the CSV file so far."""
    if not path or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def key_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """What `Trial.key` is of the row's run."""
    return tuple(row[name] for name in COLUMNS[:5])


def start_policy(work: Path, seed: int, shared: Sequence[str]) -> Path:
    """The directory of the policy that all runs of a seed start from; made by the supervised warm start when it is missing."""
    place = work / "start" / str(seed)
    if not (place / "config.json").is_file():
        say(f"the start policy of seed {seed} is made")
        given = ["--config", str(QUICKSTART), *shared, "--train.seed", str(seed)]
        made = ["--run", str(work / "start" / f"run_{seed}"), "--out", str(place)]
        command("tlt_jax.train.sft", *given, *made)
    return place


def measured(trial: Trial, work: Path, shared: Sequence[str]) -> Run:
    """The finished run, in a new folder. Raises Failure."""
    folder = work / "runs" / trial.name
    shutil.rmtree(folder, ignore_errors=True)
    start = start_policy(work, trial.seed, shared)
    seconds = command(
        "tlt_jax.train", "--config", str(QUICKSTART), *flags(trial.knobs), *shared,
        "--model.path", str(start), "--sft.steps", "0", "--train.seed", str(trial.seed),
        "--train.steps", str(trial.steps),
        "--run", str(folder), "--rollout.compile_cache", str(work / "programs"), "--checkpoint.every", "0",
    )  # fmt: skip
    return read_run(folder, seconds)


def accuracies(folder: Path) -> str:
    """Held-out accuracies of a run's evaluations, as `step:accuracy` between spaces."""
    scores = open_run(folder).metrics[f"eval/mean@{SHARED['eval.samples']}"]
    return " ".join(f"{step}:{value:.4f}" for step, value in zip(*scores, strict=True))


def measure(args: argparse.Namespace, shared: Sequence[str]) -> None:
    """Runs what the CSV file lacks, and appends it. Raises Failure."""
    table, known = (
        results.ResultTable(COLUMNS, args.csv),
        {key_of(row): row for row in rows_of(args.csv)},
    )
    for number, trial in enumerate(todo := trials(args), start=1):
        if trial.key in known:
            continue
        say(f"{number} of {len(todo)}: {trial.name}")
        run = measured(trial, args.work, shared)
        found = "" if trial.is_compared else accuracies(args.work / "runs" / trial.name)
        equal = compared(trial, run, known, args.work) if trial.is_compared else ""
        drafted = statistics.fmean(
            step.get("speculation/share", 0.0) for step in run.steps.values()
        )
        cells = *trial.key, found, drafted, run.policy[:16], equal, round(run.wall, 1)
        table.row(*cells)
        known[trial.key] = dict(zip(COLUMNS, map(str, cells), strict=True))


def compared(
    trial: Trial, run: Run, known: Mapping[tuple[str, ...], Mapping[str, str]], work: Path
) -> str:
    """Whether the policy is bit for bit that of the run without drafting: yes or no; empty for that run, and without it."""
    plain = trial._replace(drafting=NONE)
    if trial == plain or plain.key not in known:
        return ""
    if known[plain.key]["policy"] == run.policy[:16]:
        return "yes"
    folder = work / "runs" / plain.name
    if folder.is_dir():
        say(
            f"{trial.name}: other than without drafting: {first_difference(read_run(folder, 0.0), run)}"
        )
    return "no"


def latest(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The rows of accuracy of every arm with its newest knobs and most steps; of a repeated seed the last."""
    given = [row for row in rows if row["accuracies"]]
    knobs = {row["arm"]: row["knobs"] for row in given}
    given = [row for row in given if row["knobs"] == knobs[row["arm"]]]
    most = {arm: max(int(row["steps"]) for row in given if row["arm"] == arm) for arm in knobs}
    given = [row for row in given if int(row["steps"]) == most[row["arm"]]]
    return [*{(row["arm"], row["seed"]): row for row in given}.values()]


def summaries(rows: Sequence[Mapping[str, str]]) -> list[Summary]:
    """The accuracies of every arm after its last step."""
    ends: dict[str, list[float]] = {}
    for row in latest(rows):
        ends.setdefault(row["arm"], []).append(curve(row)[-1][1])
    grpo = Summary(GRPO, ends[GRPO], None) if GRPO in ends else None
    least = grpo.mean - grpo.scatter if grpo else None
    return [Summary(arm, values, least) for arm, values in ends.items()]


def curve(row: Mapping[str, str]) -> list[tuple[int, float]]:
    """The step and the accuracy of each evaluation of a row."""
    pairs = (one.split(":") for one in row["accuracies"].split())
    return [(int(step), float(value)) for step, value in pairs]


def report(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints what the rows say, arm by arm."""
    results.print_header(
        ("arm", "seeds", "held-out accuracy", "", "equal with n-grams", "with a learned drafter")
    )
    for one in summaries(rows):
        same = {
            row["drafting"]: row["equal"] for row in rows if row["arm"] == one.arm and row["equal"]
        }
        drafts = [same.get(drafting, "not run") for drafting in (NGRAM, LEARNED)]
        results.print_row([one.arm, str(len(one.accuracies)), str(one), one.verdict, *drafts])


def arguments() -> argparse.ArgumentParser:
    """The benchmark's own arguments."""
    parser, listed = results.arguments(__doc__), results.listed
    add = parser.add_argument
    add("--work", type=Path, help="folder of everything it makes; without it nothing is run")
    add("--arms", type=listed, default=[*ARMS], help=f"of {', '.join(ARMS)}; default: all")
    add("--seeds", type=lambda text: [*map(int, listed(text))], default=[0, 1, 2])
    add("--steps", type=int, default=60, help="RL steps of the runs for accuracy")
    add("--compared-steps", type=int, default=6, help="of the runs that are compared; 0: none is")
    add("--drafting", type=listed, default=[*DRAFTING], help="of the runs that are compared")
    add("--picture", type=Path, help="PNG of the rows; benchmarks extra")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 when a run fails, 2 for arguments that make no sense."""
    parser = arguments()
    args, shared = parser.parse_known_args(argv)
    if unknown := {*args.arms} - {*ARMS} | {*args.drafting} - {*DRAFTING}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join([*ARMS, *DRAFTING])}")
    if args.work:
        try:
            measure(args, shared)
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    rows = rows_of(args.csv)
    report(rows)
    if args.picture:
        from benchmarks.whole_runs import algorithms_picture

        algorithms_picture.write(args.picture, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
