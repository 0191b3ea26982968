r"""What is TLT worth in whole RL steps: rollout, rewards, evaluation, drafter training and update, all that a user pays for?

python benchmarks/end_to_end.py --work DIR [--processes N] [--by-step] [--steps N] [--turns N] [--picture FILE]
    [--arm NAME "--section.knob VALUE ..."] [--section.knob VALUE ...]
python benchmarks/end_to_end.py --work DIR --quick      in minutes, from nothing to tables and DIR/end_to_end.png
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
figures of later steps then compare different answers. benchmarks/whole_runs/report.py explains the tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from benchmarks.common import results
from benchmarks.common.processes import ROOT
from benchmarks.whole_runs.arms import CACHES, PLAIN, Failure, command, say, take_turn
from benchmarks.whole_runs.report import describe, report
from benchmarks.whole_runs.runs import Run

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


def prepare(
    args: argparse.Namespace, arms: Mapping[str, str], shared: Sequence[str]
) -> tuple[str, str]:
    """The directories of policy and drafter; missing ones are made in --work, a drafter only if an arm uses it."""
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
    add("--quick", help="a small policy, plain and tlt, two processes, a picture", **flag)
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
    add("--picture", type=Path, help="PNG of plain and tlt in the first turn; benchmarks extra")
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
    args.picture = args.picture or (args.work / "end_to_end.png" if args.quick else None)
    args.caches = (args.caches or (CACHES[0] if args.quick else ",".join(CACHES))).split(",")


def picture_problem(args: argparse.Namespace, arms: Mapping[str, str]) -> str:
    """Why a requested picture could not be drawn at the end; empty when it can."""
    if not args.picture:
        return ""
    if QUICK not in arms:
        return f"--picture shows plain and {QUICK}: name an arm so"
    if importlib.util.find_spec("matplotlib") is None:
        return "--picture draws with matplotlib: pip install -e '.[benchmarks]'"
    return ""


def show(
    args: argparse.Namespace, turns: Sequence[Mapping[tuple[str, str], Run]], arms: Sequence[str]
) -> None:
    """Prints the report, and draws the picture if it is requested."""
    plain = turns[0][args.caches[-1], PLAIN]
    how = f"{args.processes} processes, {len(plain.steps)} steps, {args.turns} turns"
    print(f"{results.versions()}, {how}{', arms take turns step by step' if args.by_step else ''}")
    if not args.may_differ:
        print("\nAll arms gave the same answers at every step, and the same policy, bit for bit.")
    describe(plain)
    for cache in args.caches:
        report(turns, cache, arms)
    if args.picture:
        from benchmarks.whole_runs import picture

        picture.write(args.picture, plain, turns[0][args.caches[-1], QUICK])
        print(f"\n{args.picture} shows {PLAIN} and {QUICK}, {args.caches[-1]}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the report.

    Exit code 1 for a command that fails and for answers that differ, 2 for a picture that cannot be drawn.
    """
    args, shared = parse(argv)
    if args.data:
        os.environ["GSM8K_DIR"] = str(Path(args.data).resolve())
    arms = arms_of(args)
    if problem := picture_problem(args, arms):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    try:
        policy, drafter = prepare(args, arms, shared)
        shared = [*shared, "--model.path", policy, "--sft.steps", "0"]
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
