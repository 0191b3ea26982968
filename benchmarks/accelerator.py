"""What does the engine make of one accelerator: which share of its bandwidth and of its products?

python benchmarks/accelerator.py [--shape 7b] [--minutes 10] [--sections copies,decode,...] [--csv FILE]

Random weights of a Qwen2.5-7B shape in bfloat16, and no files. Every section is a process of its own, and prints each row when
it is measured; what would begin after the minutes are over is left out, and named. `--shape tiny` runs everything on a CPU.

- copies: bytes a second of a copy (read and written), and products of two square matrices.
- decode: rounds of plain decoding, rows half full; the bound is weights and filled cache, read once at the speed of the copy.
- trees: rounds of EAGLE-3 trees over plain rounds of the same engine, also without the drafting; and the accept length at which
  speculation is 2.6 times as fast as plain decoding of one sequence, as in the paper (arXiv 2511.16665) on an H100.
- attention: of tree nodes alone, by XLA and as the engine does it here; the bound is the filled cache, read once.
- update: one accumulation step of the policy update of --update-layers layers; FLOP are those of the model's products and of
  causal attention, without what is computed twice.
- noise: what choosing tokens takes of a plain round: by temperature, and by temperature and top-p.
- graphs (on a GPU): a plain round of one sequence with the loop in a CUDA graph, with a graph a round, and without graphs.
- tests: those that need a device (`pytest -m device`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from result_table import add_csv

SECTIONS = ("copies", "decode", "trees", "attention", "update", "noise", "graphs", "tests")
# By what XLA puts into CUDA graphs; the flag of the first is what a run has.
GRAPHS = {
    "loop in the graph": None,
    "a graph a round": "--xla_gpu_enable_command_buffer=-WHILE",
    "no graphs": "--xla_gpu_enable_command_buffer=",
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("7b", "0.5b", "tiny"), default="7b")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--update-layers", type=int, default=8)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    add_csv(parser)
    args = parser.parse_args(argv)
    if unknown := set(args.sections.split(",")).difference(SECTIONS):
        parser.error(f"--sections {min(unknown)}: the sections are {', '.join(SECTIONS)}")
    return args


def start(args: argparse.Namespace, child: str, flags: str | None = None) -> int:
    """Runs a section in a process of its own, which ends in time; its exit code, or that of `timeout`."""
    left = args.until - time.time()
    command = [sys.executable, __file__, "--shape", args.shape, "--child", child]
    command += ["--until", str(args.until), "--update-layers", str(args.update_layers)]
    command += ["--csv", str(args.csv)] if args.csv else []
    environment = dict(os.environ)
    if flags is not None:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    try:
        return subprocess.run(command, env=environment, timeout=max(left, 1.0)).returncode
    except subprocess.TimeoutExpired:
        return 124


def children(args: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The processes to start, each with its XLA flags."""
    found: list[tuple[str, str | None]] = []
    for section in SECTIONS:
        if section in args.sections.split(","):
            cases = GRAPHS.items() if section == "graphs" else [(section, None)]
            found += [(f"graphs: {case}" if section == "graphs" else section, flag)
                      for case, flag in cases]  # fmt: skip
    return found


def run_tests(left: float) -> int:
    """The tests that need a device; their last line is the result."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            timeout=max(left, 1.0),
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return 124
    print(
        f"\ntests: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr}"
    )
    return done.returncode if done.returncode != 5 else 0  # 5: no test was selected


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 when a section failed, and 0 also when time was over before all were run."""
    args = arguments(argv)
    if args.child:
        import accelerator_sections

        return accelerator_sections.run(args.child, args.shape, args.until, args.update_layers, args.csv)  # fmt: skip
    args.until = time.time() + 60 * args.minutes
    failed, late = [], []
    for child, flags in children(args):
        if time.time() >= args.until:
            late.append(child)
            continue
        code = run_tests(args.until - time.time()) if child == "tests" else start(args, child, flags)  # fmt: skip
        (late if code == 124 else failed if code else []).append(child)
    for names, why in ((failed, "failed"), (late, f"not finished within {args.minutes:g} minutes")):
        if names:
            print(f"\n{why}: {', '.join(names)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
