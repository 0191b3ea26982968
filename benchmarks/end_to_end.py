r"""What TLT is worth in whole RL steps: rollout, rewards, evaluation, drafter training and update; all that a user pays for.

python benchmarks/end_to_end.py --work DIR [--processes N] [--by-step] [--steps N] [--turns N] [--picture FILE]
    [--arm NAME "--section.knob VALUE ..."] [--section.knob VALUE ...]
python benchmarks/end_to_end.py --work DIR --quick      in minutes, from nothing to tables and DIR/end_to_end.png

Every arm is the real command, `python -m tlt_jax.train`, in a process (or --processes, by launch/local.sh) and a run folder
of its own: from the same policy, data and seed for as many steps. Arms take turns: plain, one, another, plain, one, ... In a
turn each arm runs with an empty folder of compiled programs ("cold"), and then once more with all that the cold runs of the
turn left there ("warm"), as in a run that has gone on for long; --cold-steps makes the cold runs shorter. With --by-step all
arms of a turn are alive together and take turns step by step, one of them running and the others stopped: so processors whose
speed drifts compare, but the memory has to hold all arms at once, and an accelerator's does not, and of several processes
those that are stopped for more than a minute may lose their connection: name few arms then. The arms, unless others are named:

plain         no speculation
fixed         a trained drafter that stays as it is, one tree (3_1_4) for every batch: what a server does
ngram         n-grams by a rule, whenever a group has at most 32 live sequences: TLT-Base
tlt           adaptive, from the trained drafter: n-grams, the drafter, both in one tree, and training in idle time
tlt_new       adaptive, from nothing

An arm is a name and what it changes of the configuration, where {drafter} is the drafter's directory; plain is always there.
Other arguments change the configuration of all arms. Without --policy a policy is made first, and without --drafter an
EAGLE-3 drafter for it, by the product's own commands, in the folder --work; what is there already is used again. --drafter none
leaves its arms out. A model directory with GSM8K:

    python benchmarks/end_to_end.py --work DIR --config configs/gsm8k_smollm2.yaml --policy MODEL_DIR --data GSM8K_DIR \
      --drafter none

All arms have to give the same answers, at every step, and the same policy: texts, lengths and rewards are compared, and the
exported weights by digest; the first that differs ends the benchmark. In float32 programs of different shapes round
differently, so that a token may flip where two candidates are closer than the rounding: --may-differ goes on and says so;
figures of steps after that compare other answers.

steps     seconds of all steps (the sum of timing_s/step) and of the process; how often as fast as plain in the same turn, with
          a 95 % interval (jackknife over the steps of all turns); "at most": what Amdahl's law allows if the rollout took no
          time, and with the arm's own gain in the rollout; outside steps: imports, reading the policy, the last evaluation and
          checkpoint.
phases    seconds, of all steps; columns add up to the steps. Compiling is taken out of the phase that waits for it.
rollout   programs compiled; how often as fast as plain the rollout is, compiling included, in all steps, in their second half,
          and in the steps in which neither arm compiled; accept length; the share of row-rounds without a sequence; the median
          error of the tuner's predictions, |log(predicted / measured)|, of chunks whose time was not disturbed.
idle      the share of the groups' rollout time in which they had nothing to decode; the share of it in which the drafter was
          trained; the share of the seconds of training, the merge included, that lie in it; micro-steps, tokens.
accept length    over the steps, in fifths.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import whole_runs
import yaml
from in_turns import Turns
from whole_runs import Run, accept_length, first_difference, interval, padding, pairs, quiet_pairs

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = [ROOT / "benchmarks" / name for name in ("end_to_end.yaml", "end_to_end_quick.yaml")]
PLAIN, NONE, CACHES = "plain", "none", ("cold", "warm")
QUICK = "tlt"  # the arm of --quick
DRAFTER = "{drafter}"  # in what an arm changes: the drafter's directory
ADAPTIVE = "--speculation.drafter adaptive"
ARMS = {
    "fixed": f"--speculation.drafter {DRAFTER} --speculation.tuner fixed --speculation.strategies [3_1_4]",
    "ngram": "--speculation.drafter ngram --speculation.tuner threshold",
    "tlt": f"{ADAPTIVE} --drafter_training.start {DRAFTER}",
    "tlt_new": ADAPTIVE,
}
# So few steps are over before it would have paid off to measure strategies.
QUICK_TLT = f"{ARMS[QUICK]} --speculation.tuner threshold --speculation.strategies [learned:3_1_4]"
# Of the lists that the policy learns from, most are short, and half of the solutions jump to the answer.
SUPERVISED = {"tail": 1.5, "hasty": 0.5}


class Failure(Exception):
    """What ends the benchmark: a command that fails, or answers that differ."""


def command(*arguments: str) -> float:
    """Runs a command of the product; its seconds. Raises Failure with its last lines."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    check(shlex.join(arguments), done.returncode, done.stdout)
    return time.perf_counter() - begin


def environment() -> dict[str, str]:
    """Of a command of the product."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    # With XLA's own caches JAX knows programs by the path of their folder, which is another in every arm.
    own = {"PYTHON": sys.executable, "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def check(name: str, code: int, output: str) -> None:
    """Raises Failure, with the last lines of the output, for an exit code that is not 0."""
    if code:
        tail = "\n".join(output.splitlines()[-15:])
        raise Failure(f"{name} ended with code {code}:\n{tail}")


def started(arguments: Sequence[str], processes: int, folder: Path) -> Turns:
    """The training command as so many processes, stopped at its first step."""
    start = [sys.executable, "-m", "in_turns", *arguments]
    if processes > 1:
        start = [str(ROOT / "launch" / "local.sh"), str(processes), *arguments]
    return Turns(start, environment() | {"MODULE": "in_turns"}, processes, folder)


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
            say("a policy is made")
            task = yaml.safe_load(Path(args.config).read_text())["data"]["task_args"]
            lists = ["--data.task_args", json.dumps(task | SUPERVISED)]
            place = ["--run", str(args.work), "--out", policy]
            seconds = command("tlt_jax.train.sft", *given, *lists, *place)
            say(f"the policy took {seconds:.0f} s")
    if not drafter and any(DRAFTER in text for text in arms.values()):
        run, drafter = str(args.work / "drafter"), str(args.work / "drafter" / "drafter" / "hf")
        if not Path(drafter).is_dir():
            made = [*given, "--run", run, "--model.path", policy, "--sft.steps", "0"]
            say("a drafter is made")
            say(f"the drafter took {command('tlt_jax.train.drafter', *made):.0f} s")
    return policy, drafter


def say(text: str) -> None:
    """Tells whoever waits, outside the report."""
    print(text, file=sys.stderr, flush=True)


def take_turn(
    args: argparse.Namespace, shared: Sequence[str], arms: Mapping[str, Sequence[str]], turn: int
) -> dict[tuple[str, str], Run]:
    """The runs of one turn by (cache, arm). Raises Failure when an arm's answers or policy are others than plain's."""
    found: dict[tuple[str, str], Run] = {}
    kept = args.work / "programs" / "kept"
    if CACHES[0] in args.caches:
        shutil.rmtree(kept, ignore_errors=True)
    for cache in args.caches:
        folders = {arm: args.work / "runs" / f"{turn}_{cache}_{arm}" for arm in arms}
        programs = {arm: args.work / "programs" / f"of_{arm}" for arm in arms}
        arguments: dict[str, list[str]] = {}
        for arm, changes in arms.items():
            for folder in (folders[arm], programs[arm], stops(folders[arm])):
                shutil.rmtree(folder, ignore_errors=True)
            if cache != CACHES[0]:
                shutil.copytree(kept, programs[arm])
            arguments[arm] = [
                "--config", args.config, *shared, *changes, "--run", str(folders[arm]),
                "--rollout.compile_cache", str(programs[arm]), "--log.texts_every", "1",
            ]  # fmt: skip
            if cache == CACHES[0] and args.cold_steps:
                arguments[arm] += ["--train.steps", str(args.cold_steps)]
        for arm, seconds in walls(arguments, folders, args.processes, args.by_step):
            shutil.rmtree(folders[arm] / "checkpoints", ignore_errors=True)
            if cache == CACHES[0]:  # files of the same name are the same program
                shutil.copytree(programs[arm], kept, dirs_exist_ok=True)
            found[cache, arm] = run = whole_runs.read_run(folders[arm], seconds)
            say(f"turn {turn}, {cache}, {arm}: steps {run.seconds:.1f} s, process {seconds:.1f} s")
            compare(found[cache, PLAIN], run, f"turn {turn}, {cache}, {arm}", args.may_differ)
    return found


def stops(folder: Path) -> Path:
    """Where a run that takes turns says that it has stopped."""
    return folder.with_name(f"{folder.name}.turns")


def walls(
    arguments: Mapping[str, Sequence[str]],
    folders: Mapping[str, Path],
    processes: int,
    by_step: bool,
) -> Iterator[tuple[str, float]]:
    """Arms that have ended, and the seconds that each of them ran; they run one after another, or in turns step by step."""
    together = [list(arguments)] if by_step else [[arm] for arm in arguments]
    for arms in together:
        running: dict[str, Turns] = {}
        try:
            for arm in arms:
                running[arm] = started(arguments[arm], processes, stops(folders[arm]))
            waiting = list(arms)
            while waiting:
                waiting = [arm for arm in waiting if goes_on(arm, running[arm])]
            for arm in arms:
                yield arm, running[arm].seconds
        finally:
            for one in running.values():
                one.end()


def goes_on(arm: str, run: Turns) -> bool:
    """Whether a run goes on after its next turn. Raises Failure when it failed."""
    goes = run.go_on()
    check(arm, run.run.returncode or 0, run.output.read_text(errors="replace"))
    return goes


def compare(plain: Run, run: Run, name: str, may_differ: bool) -> None:
    """Says where the answers or the policy are others than plain's. Raises Failure unless they may be."""
    difference = first_difference(plain, run)
    if difference and not may_differ:
        raise Failure(f"{name}: other than plain decoding: {difference}")
    if difference:
        print(f"{name}: other than plain decoding: {difference}\n", flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a Markdown table."""
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(map(cell, row)) + " |")


def cell(value: object) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.2f}"
    return str(value)


def report(turns: Sequence[Mapping[tuple[str, str], Run]], cache: str, arms: Sequence[str]) -> None:
    """Prints the tables of one kind of cache; seconds are means over the turns."""
    plain = [turn[cache, PLAIN] for turn in turns]
    runs = {arm: [turn[cache, arm] for turn in turns] for arm in arms}
    groups = sum(name.startswith("group/busy_s@") for name in next(iter(plain[0].steps.values())))

    def mean(of: Callable[[Run], float], arm: str) -> float:
        return statistics.mean(map(of, runs[arm]))

    def every(of: Callable[[Run, Run], list], arm: str) -> list[tuple[float, float]]:
        return [
            pair for one, other in zip(plain, runs[arm], strict=True) for pair in of(one, other)
        ]

    def rollout(one: Run, other: Run) -> list[tuple[float, float]]:
        return pairs(one, other, "rollout")

    def second_half(one: Run, other: Run) -> list[tuple[float, float]]:
        return rollout(one, other)[len(one.steps) // 2 :]

    def allowed(arm: str) -> float:
        """Plain steps over those with this arm's rollout: what Amdahl's law makes of its gain."""
        share = statistics.mean(one.total("timing_s/rollout") / one.seconds for one in plain)
        return 1 / (1 - share + share / whole_runs.ratio(every(rollout, arm))[0])

    most = statistics.mean(map(whole_runs.bound, plain))
    table(
        f"### {cache}: steps",
        ("arm", "steps, s", "plain / arm", "by its rollout", "at most", "process, s", "plain / arm", "outside steps, s"),
        (
            (arm, mean(lambda run: run.seconds, arm), interval(every(pairs, arm)), allowed(arm), most,
             mean(lambda run: run.wall, arm),
             interval([(one.wall, other.wall) for one, other in zip(plain, runs[arm], strict=True)]),
             mean(lambda run: run.wall - run.seconds, arm))
            for arm in arms
        ),
    )  # fmt: skip

    names = list(whole_runs.phases(plain[0]))
    table(
        f"### {cache}: phases, seconds of all steps",
        ("arm", *names, "sum"),
        (
            (arm, *(mean(lambda run, name=name: whole_runs.phases(run)[name], arm) for name in names),
             mean(lambda run: run.seconds, arm))
            for arm in arms
        ),
    )  # fmt: skip

    table(
        f"### {cache}: rollout, plain / arm",
        ("arm", "programs compiled", "all steps", "second half", "nothing compiled", "such steps", "accept length",
         "padding", "prediction error"),
        (
            (arm, round(mean(lambda run: run.total("perf/compiles"), arm)),
             interval(every(rollout, arm)), interval(every(second_half, arm)), interval(every(quiet_pairs, arm)),
             len(every(quiet_pairs, arm)), mean(accept_length, arm), f"{mean(padding, arm):.0%}",
             mean(whole_runs.prediction_error, arm))
            for arm in arms
        ),
    )  # fmt: skip

    found = {arm: [whole_runs.idle(run, groups) for run in runs[arm]] for arm in arms}
    table(
        f"### {cache}: idle time and what was done in it",
        ("arm", "nothing to decode", "used", "training inside", "micro-steps", "tokens"),
        (
            (arm, *(statistics.mean(getattr(one, name) for one in each) for name in ("bubbles", "used", "inside")),
             *(round(statistics.mean(getattr(one, name) for one in each)) for name in ("micro_steps", "tokens")))
            for arm, each in found.items()
        ),
    )  # fmt: skip

    steps = [*plain[0].steps]
    fifths = [steps[len(steps) * part // 5 : len(steps) * (part + 1) // 5] for part in range(5)]
    table(
        f"### {cache}: accept length by steps",
        ("arm", *(f"{part[0]}-{part[-1]}" for part in fifths if part)),
        (
            (arm, *(mean(lambda run, part=part: accept_length(run, part), arm) for part in fifths if part))
            for arm in arms
        ),
    )  # fmt: skip


def describe(run: Run) -> None:
    """Prints what the answers of the plain run are like."""
    names = (
        "response_length/p50",
        "response_length/p75",
        "response_length/max",
        "actor/entropy",
        "reward/mean",
    )
    print("\nAnswers, by step: " + "; ".join(
        f"{name} {', '.join(f'{value:.3g}' for value in run.each(name))}" for name in names
    ))  # fmt: skip


def arms_of(args: argparse.Namespace) -> dict[str, str]:
    """What every arm changes of the configuration, by name; plain first."""
    named = dict(args.arm) if args.arm else {QUICK: QUICK_TLT} if args.quick else ARMS
    if args.drafter == NONE:
        named = {name: text for name, text in named.items() if DRAFTER not in text}
    return {PLAIN: "--speculation.drafter none"} | named


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own arguments, and those that change the configuration of every arm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of everything it makes")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small policy, plain and tlt, two processes, a picture",
    )
    parser.add_argument("--config", default="", help="benchmarks/end_to_end.yaml, or its quick one")
    parser.add_argument("--policy", default="", help="model directory; empty: made by train.sft")
    parser.add_argument("--drafter", default="", help="EAGLE-3 directory, or none; empty: made")
    parser.add_argument("--data", default="", help="becomes $GSM8K_DIR of the configuration")
    parser.add_argument(
        "--arm", nargs=2, action="append", metavar=("NAME", "CHANGES"), help="may be given again"
    )
    parser.add_argument("--steps", type=int, default=0, help="RL steps; 0: of the configuration")
    parser.add_argument("--cold-steps", type=int, default=0, help="of the cold runs; 0: as many")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument(
        "--caches",
        default="",
        help="cold, warm (with the programs that cold runs in --work left), or cold,warm (the default)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="of every run, each with its share of cores and data groups: 1, and with --quick 2",
    )
    parser.add_argument(
        "--by-step", action="store_true", help="arms take turns step by step; always with --quick"
    )
    parser.add_argument("--may-differ", action="store_true", help="go on when answers differ")
    parser.add_argument(
        "--picture",
        type=Path,
        help="PNG of plain and tlt in the first turn; see the benchmarks extra",
    )
    args, overrides = parser.parse_known_args(argv)
    args.work = args.work.resolve()
    args.config = args.config or str(CONFIGS[args.quick])
    args.processes = args.processes or 1 + args.quick
    args.by_step = args.by_step or args.quick
    args.picture = args.picture or (args.work / "end_to_end.png" if args.quick else None)
    args.caches = (args.caches or (CACHES[0] if args.quick else ",".join(CACHES))).split(",")
    if tuple(args.caches) not in (CACHES[:1], CACHES[1:], CACHES):
        parser.error("--caches is cold, warm, or cold,warm")
    if args.caches == [CACHES[1]] and not (args.work / "programs" / "kept").is_dir():
        parser.error(f"--caches warm: {args.work} has no programs of a cold run")
    return args, overrides


def picture_problem(args: argparse.Namespace, arms: Mapping[str, str]) -> str:
    """Why no picture could be made at the end; empty when one can, or none is asked for."""
    if not args.picture:
        return ""
    if QUICK not in arms:
        return f"--picture shows plain and {QUICK}: name an arm so"
    if importlib.util.find_spec("matplotlib") is None:
        return "--picture draws with matplotlib: pip install -e '.[benchmarks]'"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the report.

    Exit code 1 for a command that fails and for answers that differ, 2 for a picture that cannot be drawn.
    """
    args, shared = parse(argv)
    if args.data:
        os.environ["GSM8K_DIR"] = str(Path(args.data).resolve())
    arms = arms_of(args)
    problem = picture_problem(args, arms)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        policy, drafter = prepare(args, arms, shared)
        shared = [*shared, "--model.path", policy, "--sft.steps", "0"]
        # A process that is stopped for the others' turns is not lost.
        shared += ["--processes.lost_s", "3600"] if args.by_step else []
        shared += ["--train.steps", str(args.steps)] if args.steps else []
        changes = {
            arm: shlex.split(text.replace(DRAFTER, shlex.quote(drafter)))
            for arm, text in arms.items()
        }
        turns = [take_turn(args, shared, changes, turn) for turn in range(args.turns)]
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1

    plain = turns[0][args.caches[-1], PLAIN]
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {args.processes} processes, {len(plain.steps)} steps, "
        f"{args.turns} turns{', arms taking turns step by step' if args.by_step else ''}"
    )
    if not args.may_differ:
        print(
            "\nAll arms gave the same answers at every step, and the same policy to the last bit."
        )
    describe(plain)
    for cache in args.caches:
        report(turns, cache, list(arms))
    if args.picture:
        import end_to_end_picture  # needs an extra

        drawn = turns[0]
        end_to_end_picture.write(
            args.picture, drawn[args.caches[-1], PLAIN], drawn[args.caches[-1], QUICK]
        )
        print(f"\n{args.picture} shows {PLAIN} and {QUICK}, {args.caches[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
