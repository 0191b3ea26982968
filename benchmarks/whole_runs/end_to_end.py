r"""What is TLT worth in whole RL steps: rollout, rewards, evaluation, drafter training and update, all that a user pays for?

python benchmarks/end_to_end.py --work DIR [--processes N] [--by-step] [--steps N] [--turns N]
    [--arm NAME "--section.knob VALUE ..."] [--section.knob VALUE ...]
python benchmarks/end_to_end.py --work DIR --quick      in minutes, from nothing to tables
python benchmarks/end_to_end.py --work DIR --quickstart [--steps 60]    the quickstart plain, with n-grams, adaptive; 3 turns

Every arm is the real command, `python -m tlt_jax.train`, in a process (or --processes, by launch/local.sh) and a run folder
of its own: the same policy, data, seed and number of steps. Arms take turns: plain, one, another, plain, one, ... In a turn
each arm runs with an empty compile cache ("cold"), and then again with all that the cold runs of the turn compiled ("warm"),
as in a run that has trained for long; --cold-steps makes the cold runs shorter. With --by-step all arms of a turn are alive
together and take turns step by step: one runs and the others are stopped. So arms compare on processors whose speed drifts,
but memory has to hold all arms at once, which an accelerator's does not, and processes of a run that are stopped for more
than a minute may lose their connection: name few arms then. The arms, unless others are named:

plain         no speculation
fixed         a trained drafter without further training, one tree (3_1_4) for every batch: what a server does
ngram         n-grams by a fixed policy, whenever a group has at most 32 live sequences: TLT-Base
tlt           adaptive, from the trained drafter: n-grams, the drafter, both in one tree, and training in idle time
tlt_new       adaptive, from nothing

An arm is a name and its changes to the configuration, where {drafter} is the drafter's directory; plain is always included.
Other arguments change the configuration of all arms. Without --policy a policy is made first, and without --drafter an
EAGLE-3 drafter for it, by the product's own commands, in the folder --work; what exists there is reused. --drafter none
leaves its arms out. A model directory with GSM8K:

    python benchmarks/end_to_end.py --work DIR --config configs/gsm8k_smollm2_135m.yaml --policy MODEL_DIR --data GSM8K_DIR \
      --data.train '$GSM8K_DIR/train.jsonl' --data.eval '$GSM8K_DIR/test.jsonl' --drafter none

All arms have to give the same answers at every step, and the same policy: texts, lengths and rewards are compared, and the
digest of the exported weights; the first difference ends the benchmark. In float32 programs of different shapes round
differently, so a token may flip where two candidates are closer than the rounding: --may-differ reports that and continues;
figures of later steps then compare different answers. benchmarks/whole_runs/runs.py explains the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from benchmarks.common import processes, results
from benchmarks.common.processes import ROOT
from benchmarks.whole_runs.in_turns import Turns
from benchmarks.whole_runs.runs import PLAIN, Run, describe, first_difference, read_run, report

CACHES = "cold", "warm"
IN_TURNS = "benchmarks.whole_runs.in_turns"
# With XLA's own caches JAX identifies programs by the path of their folder, which differs between arms.
VARIABLES = {"PYTHON": sys.executable, "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}
CONFIGS = [ROOT / "benchmarks" / name for name in ("end_to_end.yaml", "end_to_end_quick.yaml")]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
NONE = "none"
QUICK = "tlt"  # the arm of --quick
DRAFTER = "{drafter}"  # in the changes of an arm: the drafter's directory
ADAPTIVE = "--speculation.drafter adaptive"
ARMS = {
    "fixed": f"--speculation.drafter {DRAFTER} --speculation.tuner fixed --speculation.strategies [3_1_4]",
    "ngram": "--speculation.drafter ngram --speculation.tuner threshold",
    "tlt": f"{ADAPTIVE} --drafter_training.start {DRAFTER}",
    "tlt_new": ADAPTIVE,
}
QUICKSTART_ARMS = {"ngram": "--speculation.drafter ngram", "adaptive": ADAPTIVE}
# So few steps are over before measuring strategies would have paid off.
QUICK_TLT = f"{ARMS[QUICK]} --speculation.tuner threshold --speculation.strategies [learned:3_1_4]"
# Most lists that the policy learns from are short, and half of the solutions jump to the answer.
SUPERVISED = {"tail": 1.5, "hasty": 0.5}


class Failure(Exception):
    """Ends the benchmark: a command that fails, or answers that differ."""


def command(*arguments: str) -> float:
    """Runs a module of the product; its seconds. Raises Failure with its last lines."""
    begin = time.perf_counter()
    done = processes.run(processes.module(*arguments), **VARIABLES)
    check(shlex.join(arguments), done.returncode, done.stdout + done.stderr)
    return time.perf_counter() - begin


def check(name: str, code: int, output: str) -> None:
    """Raises Failure, with the last lines of the output, for an exit code that is not 0."""
    if code:
        tail = "\n".join(output.splitlines()[-15:])
        raise Failure(f"{name} ended with code {code}:\n{tail}")


def started(arguments: Sequence[str], count: int, folder: Path) -> Turns:
    """The training command as `count` processes, stopped before its first step."""
    start = processes.module(IN_TURNS, *arguments)
    if count > 1:
        start = [str(ROOT / "launch" / "local.sh"), str(count), *arguments]
    return Turns(start, processes.environment(MODULE=IN_TURNS, **VARIABLES), count, folder)


def say(text: str) -> None:
    """Reports progress on stderr, outside the report."""
    print(text, file=sys.stderr, flush=True)


def take_turn(
    args: argparse.Namespace, shared: Sequence[str], arms: Mapping[str, Sequence[str]], turn: int
) -> dict[tuple[str, str], Run]:
    """The runs of one turn by (cache, arm). Raises Failure when an arm's answers or policy differ from plain's."""
    found: dict[tuple[str, str], Run] = {}
    kept = args.work / "programs" / "kept"
    if CACHES[0] in args.caches:
        shutil.rmtree(kept, ignore_errors=True)
    for cache in args.caches:
        is_cold = cache == CACHES[0]
        folders = {arm: args.work / "runs" / f"{turn}_{cache}_{arm}" for arm in arms}
        programs = {arm: args.work / "programs" / f"of_{arm}" for arm in arms}
        arguments: dict[str, list[str]] = {}
        for arm, changes in arms.items():
            for folder in (folders[arm], programs[arm], stops(folders[arm])):
                shutil.rmtree(folder, ignore_errors=True)
            if not is_cold:
                shutil.copytree(kept, programs[arm])
            arguments[arm] = [
                "--config", args.config, *shared, *changes, "--run", str(folders[arm]),
                "--rollout.compile_cache", str(programs[arm]),
            ]  # fmt: skip
            if is_cold and args.cold_steps:
                arguments[arm] += ["--train.steps", str(args.cold_steps)]
        for arm, seconds in walls(arguments, folders, args.processes, args.by_step):
            name = f"turn {turn}, {cache}, {arm}"
            shutil.rmtree(folders[arm] / "checkpoints", ignore_errors=True)
            if is_cold:  # files of the same name are the same program
                shutil.copytree(programs[arm], kept, dirs_exist_ok=True)
            found[cache, arm] = run = read_run(folders[arm], seconds)
            say(f"{name}: steps {run.seconds:.1f} s, process {seconds:.1f} s")
            compare(found[cache, PLAIN], run, name, args.may_differ)
    return found


def stops(folder: Path) -> Path:
    """Where the processes of a run report that they have stopped."""
    return folder.with_name(f"{folder.name}.turns")


def walls(
    arguments: Mapping[str, Sequence[str]], folders: Mapping[str, Path], count: int, by_step: bool
) -> Iterator[tuple[str, float]]:
    """Arms that have ended and the seconds that each ran; they run one after another, or in turns step by step."""
    together = [list(arguments)] if by_step else [[arm] for arm in arguments]
    for arms in together:
        running: dict[str, Turns] = {}
        try:
            for arm in arms:
                running[arm] = started(arguments[arm], count, stops(folders[arm]))
            waiting = list(arms)
            while waiting:
                waiting = [arm for arm in waiting if goes_on(arm, running[arm])]
            for arm in arms:
                yield arm, running[arm].seconds
        finally:
            for one in running.values():
                one.end()


def goes_on(arm: str, run: Turns) -> bool:
    """Whether a run continues after its next turn. Raises Failure when it failed."""
    goes = run.go_on()
    check(arm, run.run.returncode or 0, run.output.read_text(errors="replace"))
    return goes


def compare(plain: Run, run: Run, name: str, may_differ: bool) -> None:
    """Reports where answers or policy differ from plain's. Raises Failure unless they may."""
    difference = first_difference(plain, run)
    if difference and not may_differ:
        raise Failure(f"{name}: other than plain decoding: {difference}")
    if difference:
        print(f"{name}: other than plain decoding: {difference}\n", flush=True)


def prepare(
    args: argparse.Namespace, arms: Mapping[str, str], shared: Sequence[str]
) -> tuple[str, str]:
    """The directories of policy and drafter; missing ones are made in --work, a drafter only if an arm uses it."""
    given = [
        "--config",
        args.config,
        "--sft.cache",
        "off",
        "--drafter_training.shelf",
        "off",
        *shared,
    ]
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


def arms_of(args: argparse.Namespace) -> dict[str, str]:
    """The changes of every arm to the configuration, by name; plain first."""
    usual = {QUICK: QUICK_TLT} if args.quick else QUICKSTART_ARMS if args.quickstart else ARMS
    named = dict(args.arm) if args.arm else usual
    if args.drafter == NONE:
        named = {name: text for name, text in named.items() if DRAFTER not in text}
    return {PLAIN: "--speculation.drafter none"} | named


def arguments() -> argparse.ArgumentParser:
    """The benchmark's own arguments."""
    parser = results.arguments(__doc__, has_csv=False)
    add, flag = parser.add_argument, {"action": "store_true"}
    add("--work", type=Path, required=True, help="folder of everything it makes")
    add("--quick", help="a small policy, plain and tlt, two processes", **flag)
    add("--quickstart", help="configs/quickstart.yaml, runs of 30 steps, three arms", **flag)
    add("--config", default="", help="default benchmarks/end_to_end.yaml, or its quick one")
    add("--policy", default="", help="model directory; default: made by train.sft")
    add("--drafter", default="", help="EAGLE-3 directory, or none; default: made")
    add("--data", default="", help="becomes $GSM8K_DIR of the configuration")
    add("--arm", nargs=2, action="append", metavar=("NAME", "CHANGES"), help="may be given again")
    add("--steps", type=int, default=0, help="RL steps; 0: of the configuration")
    add("--cold-steps", type=int, default=0, help="of the cold runs; 0: as many")
    add("--turns", type=int, default=0, help="default 1, with --quickstart 3")
    add("--caches", default="", help="cold, warm (with what cold runs in --work compiled), or both")
    add("--processes", type=int, default=0, help="of every run; default 1, with --quick 2")
    add("--by-step", help="arms take turns step by step; always with --quick", **flag)
    add("--may-differ", help="continue when answers differ", **flag)
    return parser


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own arguments, and those that change the configuration of every arm."""
    parser = arguments()
    args, overrides = parser.parse_known_args(argv)
    set_defaults(args)
    if tuple(args.caches) not in (CACHES[:1], CACHES[1:], CACHES):
        parser.error("--caches is cold, warm, or cold,warm")
    if args.caches == [CACHES[1]] and not (args.work / "programs" / "kept").is_dir():
        parser.error(f"--caches warm: {args.work} has no programs of a cold run")
    return args, overrides


def set_defaults(args: argparse.Namespace) -> None:
    """Sets the arguments that were not given; --quick and --quickstart have other defaults."""
    args.work = args.work.resolve()
    args.turns = args.turns or (3 if args.quickstart else 1)
    if args.quickstart:
        args.config, args.drafter, args.may_differ = str(QUICKSTART), NONE, True
        args.steps = args.steps or 30
    args.config = args.config or str(CONFIGS[args.quick])
    args.processes = args.processes or 1 + args.quick
    args.by_step = args.by_step or args.quick
    args.caches = (args.caches or (CACHES[0] if args.quick else ",".join(CACHES))).split(",")


def show(
    args: argparse.Namespace, turns: Sequence[Mapping[tuple[str, str], Run]], arms: Sequence[str]
) -> None:
    """Prints the report."""
    plain = turns[0][args.caches[-1], PLAIN]
    how = f"{args.processes} processes, {len(plain.steps)} steps, {args.turns} turns"
    print(f"{results.versions()}, {how}{', arms take turns step by step' if args.by_step else ''}")
    if not args.may_differ:
        print("\nAll arms gave the same answers at every step, and the same policy, bit for bit.")
    describe(plain)
    for cache in args.caches:
        report(turns, cache, arms)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the report. Exit code 1 for a command that fails and for answers that differ."""
    args, shared = parse(argv)
    if args.data:
        os.environ["GSM8K_DIR"] = str(Path(args.data).resolve())
    arms = arms_of(args)
    try:
        policy, drafter = prepare(args, arms, shared)
        shared = [*shared, "--model.path", policy, "--sft.steps", "0"]
        shared += ["--drafter_training.shelf", "off"]  # arms begin with what they name
        # A process that is stopped during the others' turns is not lost.
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
    show(args, turns, list(arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
