r"""What speculation is worth in whole RL steps: rollout, rewards, evaluation and update, with everything that a user pays for.

python benchmarks/end_to_end.py --work DIR [--drafter DIR] [--arm NAME "--section.knob VALUE ..."] [--turns N] [--steps N]

Every arm is the real command, `python -m tlt_jax.train`, in a process (or --processes, by launch/local.sh) and a run folder
of its own: from the same policy, data and seed for as many steps. Arms take turns: plain, one, another, plain, one, ... In a
turn each arm runs once with an empty folder of compiled programs ("cold") and once with the folder that this filled ("warm").
Arms that are not named are plain, ngram, and with a drafter that drafter under the tuner, and with one tree (7_1_8) only. An
arm is a name and what it changes of the configuration, where {drafter} is the drafter's directory; plain is always there.
Other arguments change the configuration of all arms.

Without --policy a policy is made first, and without --drafter an EAGLE-3 drafter for it, by the product's own commands, in the
folder --work; what is there already is used again. --drafter none leaves its arms out. A model directory with GSM8K:

    python benchmarks/end_to_end.py --work DIR --config configs/gsm8k_smollm2.yaml --policy MODEL_DIR --data GSM8K_DIR \
      --drafter none

Answers have to be the same in all arms, at every step: their texts, lengths and rewards are compared, and the first that
differs ends the benchmark. In float32 programs of different shapes round differently, so that a token may flip where two
candidates are closer than the rounding: --may-differ goes on and says so; figures of steps after that compare other answers.

steps     seconds of all steps (the sum of timing_s/step) and of the process; how often as fast as plain in the same turn, with
          a 95 % interval of the mean over the turns, when there are several; start-up is what the process takes outside steps:
          imports, reading the policy, the last evaluation and checkpoint.
phases    seconds, of all steps; columns add up to the steps. Compiling is taken out of the phase that waits for it.
rollout   programs compiled; how often as fast as plain the rollout is in the steps in which neither arm compiled; accept
          length; the share of row-rounds without a sequence; the median error of the tuner's predictions, |log(predicted /
          measured)|, of chunks whose time was not disturbed.
bound     the plain steps over what is left of them without their rollout: no drafter is worth more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

ROOT = Path(__file__).resolve().parent.parent
PLAIN, NONE, CACHES = "plain", "none", ("cold", "warm")
DRAFTER = "{drafter}"  # in what an arm changes: the drafter's directory
# Two-sided 95 % of Student's t by turns; more turns use the last.
T_975 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
PHASES = {
    "rollout": ("rollout",),
    "reward": ("reward",),
    "update": ("update", "old_log_prob"),
    "eval": ("eval",),
    "other": ("update_weights", "save_checkpoint", "time_drafting", "metrics", "other"),
}
# How the policy of configs/end_to_end.yaml is made: from short lists, which are learned quickly. It is unsure of the longer
# ones that RL asks for, and some answers to them get long.
SHORT = shlex.split(
    '--data.task_args "{min_length: 6, max_length: 10, tail: 0.5}" --rollout.max_new_tokens 64 --train.row_tokens 128'
)
COMPARED = ("completion", "length", "finish", "reward")

Scalars = dict[str, float]


class Failure(Exception):
    """What ends the benchmark: a command that fails, or answers that differ."""


@dataclass(frozen=True)
class Run:
    """What one process left: scalars of every step, chunks by step, and the seconds of the process."""

    steps: Mapping[int, Scalars]
    chunks: Mapping[int, Sequence[dict]]
    answers: Mapping[int, Mapping[int, dict]]
    wall: float

    def total(self, name: str) -> float:
        """The sum over the steps; 0 for a scalar that is not there."""
        return sum(step.get(name, 0.0) for step in self.steps.values())

    @property
    def seconds(self) -> float:
        return self.total("timing_s/step")


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


def read_run(folder: Path, wall: float) -> Run:
    """What a run folder says of its steps."""
    answers = {
        step: {line["uid"]: line for line in lines}
        for step, lines in read_lines(folder / "completions").items()
    }
    return Run(read_steps(folder), read_lines(folder / "speculation"), answers, wall)


def first_difference(ours: Run, theirs: Run) -> str:
    """Where two runs' answers differ first, as text; empty when they are the same."""
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


def quiet_ratio(plain: Run, arm: Run) -> tuple[float, int]:
    """Plain rollout seconds over the arm's in the steps in which neither compiled, and how many these are."""
    steps = [
        step
        for step in plain.steps
        if not plain.steps[step]["perf/compiles"] and not arm.steps[step]["perf/compiles"]
    ]
    ours, theirs = (
        sum(run.steps[step]["timing_s/rollout"] for step in steps) for run in (plain, arm)
    )
    return (ours / theirs if steps else math.nan), len(steps)


def prediction_error(run: Run) -> float:
    """Median |log(predicted / measured tokens per second)| of the chunks that were timed well."""
    errors = [
        abs(math.log(chunk["predicted"] / chunk["measured"]))
        for lines in run.chunks.values()
        for chunk in lines
        if chunk["predicted"] and chunk["tokens"] and chunk["is_timed"]
    ]
    return statistics.median(errors) if errors else math.nan


def accept_length(run: Run) -> float:
    """Tokens of a drafting round of a sequence, over all steps; nan for a run that never drafted."""
    drafted = [
        (chunk["tokens"], chunk["live"] * chunk["rounds"])
        for lines in run.chunks.values()
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


def interval(ratios: Sequence[float]) -> str:
    """The mean, and a 95 % interval of it when there are several."""
    mean = statistics.mean(ratios)
    if len(ratios) < 2:
        return f"{mean:.2f}"
    spread = T_975.get(len(ratios), T_975[max(T_975)])
    spread *= statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{mean:.2f} ({mean - spread:.2f} to {mean + spread:.2f})"


def command(*arguments: str, processes: int = 1) -> float:
    """Runs a command of the product, tlt_jax.train as so many processes; its seconds. Raises Failure with its last lines."""
    begin = time.perf_counter()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started = [sys.executable, "-m", *arguments]
    if processes > 1:
        started = [str(ROOT / "launch" / "local.sh"), str(processes), *arguments[1:]]
    done = subprocess.run(
        started,
        env=os.environ | {"PYTHONPATH": path, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise Failure(f"{shlex.join(arguments)} ended with code {done.returncode}:\n{tail}")
    return time.perf_counter() - begin


def prepare(
    args: argparse.Namespace, arms: Mapping[str, str], shared: Sequence[str]
) -> tuple[str, str]:
    """The directories of policy and drafter; those that are neither given nor there yet are made, in --work.

    No drafter is made that no arm uses.
    """
    given = ["--config", args.config, "--sft.cache", "off", *shared]
    policy, drafter = args.policy, args.drafter
    if not policy:
        policy = str(args.work / "policy")
        if not (args.work / "policy" / "config.json").is_file():
            made = [*given, *SHORT, "--train.rows", "4", "--out", policy]
            say(f"the policy took {command('tlt_jax.train.sft', *made):.0f} s")
    if not drafter and any(DRAFTER in text for text in arms.values()):
        run, drafter = str(args.work / "drafter"), str(args.work / "drafter" / "drafter" / "hf")
        if not Path(drafter).is_dir():
            made = [*given, "--run", run, "--model.path", policy, "--sft.steps", "0"]
            say(f"the drafter took {command('tlt_jax.train.drafter', *made):.0f} s")
    return policy, drafter


def say(text: str) -> None:
    """Tells whoever waits, outside the report."""
    print(text, file=sys.stderr, flush=True)


def take_turn(
    args: argparse.Namespace, shared: Sequence[str], arms: Mapping[str, Sequence[str]], turn: int
) -> dict[tuple[str, str], Run]:
    """The runs of one turn by (cache, arm). Raises Failure when an arm's answers are others than plain's."""
    runs: dict[tuple[str, str], Run] = {}
    for cache in args.caches:
        for arm, changes in arms.items():
            folder = args.work / "runs" / f"{turn}_{cache}_{arm}"
            programs = args.work / "programs" / f"{turn}_{arm}"
            shutil.rmtree(folder, ignore_errors=True)
            if cache == CACHES[0]:
                shutil.rmtree(programs, ignore_errors=True)
            wall = command(
                "tlt_jax.train", "--config", args.config, *shared, *changes, "--run", str(folder),
                "--rollout.compile_cache", str(programs), processes=args.processes,
            )  # fmt: skip
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            shutil.rmtree(folder / "hf", ignore_errors=True)

            runs[cache, arm] = run = read_run(folder, wall)
            say(f"turn {turn}, {cache}, {arm}: steps {run.seconds:.1f} s, process {wall:.1f} s")
            compare(runs[cache, PLAIN], run, f"turn {turn}, {cache}, {arm}", args.may_differ)
    return runs


def compare(plain: Run, run: Run, name: str, may_differ: bool) -> None:
    """Says where the answers are others than plain's. Raises Failure unless they may be."""
    difference = first_difference(plain, run)
    if difference and not may_differ:
        raise Failure(f"{name}: other answers than plain decoding: {difference}")
    if difference:
        print(f"{name}: other answers than plain decoding: {difference}\n", flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a Markdown table."""
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(map(cell, row)) + " |")


def cell(value: object) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.2f}"
    return str(value)


def report(turns: Sequence[Mapping[tuple[str, str], Run]], cache: str, arms: Iterable[str]) -> None:
    """Prints the tables of one kind of cache; seconds are means over the turns."""

    def each(of, arm: str) -> list:
        return [of(turn[cache, arm]) for turn in turns]

    def mean(of, arm: str) -> float:
        return statistics.mean(each(of, arm))

    def ratios(of, arm: str) -> str:
        return interval([of(turn[cache, PLAIN]) / of(turn[cache, arm]) for turn in turns])

    table(
        f"### {cache}: steps",
        ("arm", "steps, s", "plain / arm", "process, s", "plain / arm", "outside steps, s"),
        (
            (arm, mean(lambda run: run.seconds, arm), ratios(lambda run: run.seconds, arm),
             mean(lambda run: run.wall, arm), ratios(lambda run: run.wall, arm),
             mean(lambda run: run.wall - run.seconds, arm))
            for arm in arms
        ),
    )  # fmt: skip

    names = list(phases(turns[0][cache, PLAIN]))
    table(
        f"### {cache}: phases, seconds of all steps",
        ("arm", *names, "sum"),
        (
            (arm, *(mean(lambda run, name=name: phases(run)[name], arm) for name in names),
             mean(lambda run: run.seconds, arm))
            for arm in arms
        ),
    )  # fmt: skip

    rows = []
    for arm in arms:
        quiet = [quiet_ratio(turn[cache, PLAIN], turn[cache, arm]) for turn in turns]
        known = [ratio for ratio, steps in quiet if steps]
        rows.append(
            (arm, round(mean(lambda run: run.total("perf/compiles"), arm)),
             interval(known) if known else "-", sum(steps for _, steps in quiet),
             mean(accept_length, arm), f"{mean(padding, arm):.0%}", mean(prediction_error, arm))
        )  # fmt: skip
    table(
        f"### {cache}: rollout",
        ("arm", "programs compiled", "plain / arm, nothing compiled", "such steps", "accept length",
         "padding", "prediction error"),
        rows,
    )  # fmt: skip

    share = mean(lambda run: phases(run)["update"] / run.seconds, PLAIN)
    print(
        f"\nThe update is {share:.0%} of the plain steps; if their rollout took no time, they would be "
        f"{mean(bound, PLAIN):.2f} times as fast."
    )


def describe(run: Run) -> None:
    """Prints what the answers of the plain run are like."""
    names = ("response_length/p50", "response_length/max", "actor/entropy", "reward/mean")
    print("\nAnswers, by step: " + "; ".join(
        f"{name} {', '.join(f'{step[name]:.3g}' for step in run.steps.values())}" for name in names
    ))  # fmt: skip


def arms_of(args: argparse.Namespace) -> dict[str, str]:
    """What every arm changes of the configuration, by name; plain first."""
    drafted = f"--speculation.drafter {DRAFTER}"
    usual = {
        "ngram": "--speculation.drafter ngram",
        "eagle3": drafted,
        "eagle3_7_1_8": f"{drafted} --speculation.tuner fixed --speculation.strategies [7_1_8]",
    }
    if args.drafter == NONE:
        usual = {name: text for name, text in usual.items() if DRAFTER not in text}
    return {PLAIN: "--speculation.drafter none"} | (dict(args.arm) if args.arm else usual)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own arguments, and those that change the configuration of every arm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of everything it makes")
    parser.add_argument("--config", default=str(ROOT / "configs" / "end_to_end.yaml"))
    parser.add_argument("--policy", default="", help="model directory; empty: made by train.sft")
    parser.add_argument("--drafter", default="", help="EAGLE-3 directory, or none; empty: made")
    parser.add_argument("--data", default="", help="becomes $GSM8K_DIR of the configuration")
    parser.add_argument(
        "--arm", nargs=2, action="append", metavar=("NAME", "CHANGES"), help="may be given again"
    )
    parser.add_argument("--steps", type=int, default=0, help="RL steps; 0: of the configuration")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--caches", default=",".join(CACHES), help="cold, or cold,warm")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="of every run, each with its share of cores and data groups",
    )
    parser.add_argument("--may-differ", action="store_true", help="go on when answers differ")
    args, overrides = parser.parse_known_args(argv)
    args.work, args.caches = args.work.resolve(), args.caches.split(",")
    if tuple(args.caches) not in (CACHES[:1], CACHES):
        parser.error("--caches is cold, or cold,warm: what is warm is what the cold run left")
    return args, overrides


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the report. Exit code 1 for a command that fails and for answers that differ."""
    args, shared = parse(argv)
    if args.data:
        os.environ["GSM8K_DIR"] = str(Path(args.data).resolve())
    try:
        arms = arms_of(args)
        policy, drafter = prepare(args, arms, shared)
        shared = [*shared, "--model.path", policy, "--sft.steps", "0"]
        shared += ["--train.steps", str(args.steps)] if args.steps else []
        changes = {
            arm: shlex.split(text.replace(DRAFTER, shlex.quote(drafter)))
            for arm, text in arms.items()
        }
        turns = [take_turn(args, shared, changes, turn) for turn in range(args.turns)]
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1

    plain = turns[0]["cold", PLAIN]
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {len(plain.steps)} steps, {args.turns} turns"
    )
    if not args.may_differ:
        print("\nAll arms gave the same answers at every step.")
    describe(plain)
    for cache in args.caches:
        report(turns, cache, list(arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
