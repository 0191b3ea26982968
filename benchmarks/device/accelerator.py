"""What share of its bandwidth and of its FLOP/s does the engine reach on one accelerator?

python benchmarks/accelerator.py [--shape 7b] [--minutes 10] [--sections copies,decode,...] [--csv FILE]

Random weights of a Qwen2.5-7B shape in bfloat16, and no files. Every section is a process and prints each row when it is
measured. Sections that would start after the time limit are left out and named. `--shape tiny` runs everything on a CPU.

- copies: bytes a second of a copy (read and written) and of reading alone, and FLOP/s of the product of two square matrices.
- decode: rounds of plain decoding, rows half full; the bound reads weights and filled cache once at the speed of the copy.
- small: decode and trees of SmolLM2-135M's shape, whose rounds are bound by the number of kernels.
- trees: rounds of EAGLE-3 trees relative to plain rounds of the same engine, also without drafting; and the accept length at
  which speculation is 2.6 times as fast as plain decoding of one sequence, as in the paper (arXiv 2511.16665) on an H100.
- attention: of tree nodes alone, by XLA and as the engine computes it here; the bound reads the filled cache once.
- update: one accumulation step of the policy update of --update-layers layers; FLOP are those of the model's products and of
  causal attention; recomputation is not counted.
- noise: share of sampling in a plain round: by temperature, and by temperature and top-p; and top-k and top-p alone, by XLA and
  as the engine computes them here; the bound reads the logits once.
- graphs (on a GPU): a plain round of one sequence with the loop in a CUDA graph, with a graph a round, and without graphs.
- job: a few RL steps with drafters and without, of the model in MODEL_DIR (for example SmolLM2-135M-Instruct) on the GSM8K
  files in GSM8K_DIR; share: how many times as fast as without.
- tune (on a GPU with Triton): milliseconds of the sizes that the attention kernel may have, at most 3 minutes; every result is
  compared with XLA's. Prints the fastest beside the rule's. Not run unless named.
- tests: those that need a device (`pytest -m device`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from benchmarks.common import processes, results
from benchmarks.common.processes import ROOT, TIMEOUT

SECTIONS = (
    "copies", "decode", "small", "trees", "attention", "update", "noise", "graphs", "job", "tune", "tests",
)  # fmt: skip
DEFAULT = tuple(one for one in SECTIONS if one != "tune")
NO_TEST = 5  # exit code of pytest when no test was selected
# What XLA puts into CUDA graphs, by case; a run has the flags of the first.
GRAPHS = {
    "loop in the graph": "",
    "a graph a round": "--xla_gpu_enable_command_buffer=-WHILE",
    "no graphs": "--xla_gpu_enable_command_buffer=",
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = results.arguments(__doc__)
    parser.add_argument("--shape", choices=("7b", "0.5b", "smollm2", "tiny"), default="7b")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sections", default=",".join(DEFAULT))
    parser.add_argument("--update-layers", type=int, default=8)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.sections.split(",")).difference(SECTIONS):
        parser.error(f"--sections {min(unknown)}: the sections are {', '.join(SECTIONS)}")
    return args


def run_section(args: argparse.Namespace, child: str) -> int:
    """Runs a section in a process until the time limit; its exit code."""
    given = ["--shape", args.shape, "--child", child, "--until", str(args.until)]
    given += ["--update-layers", str(args.update_layers)]
    given += ["--csv", str(args.csv)] if args.csv else []
    flags = GRAPHS.get(child.removeprefix("graphs: "), "")
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()} if flags else {}
    command = processes.module("benchmarks.device.accelerator", *given)
    left = max(args.until - time.time(), 1.0)
    return processes.run(command, left, is_shown=True, **flags).returncode


def run_tests(args: argparse.Namespace) -> int:
    """Runs the tests that need a device and prints their last line; 0 also when there is none."""
    command = processes.module("pytest", "-q", "-m", "device", "-p", "no:cacheprovider")
    done = processes.run(command, max(args.until - time.time(), 1.0), cwd=ROOT)
    if done.returncode != TIMEOUT:
        lines = done.stdout.strip().splitlines()
        print(f"\ntests: {lines[-1] if lines else done.stderr}")
    return 0 if done.returncode == NO_TEST else done.returncode


def children(args: argparse.Namespace) -> list[str]:
    """The processes to start."""
    chosen = [one for one in SECTIONS if one in args.sections.split(",")]
    found: list[str] = []
    for section in chosen:
        found += [f"graphs: {case}" for case in GRAPHS] if section == "graphs" else [section]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 when a section failed, 0 also when the time was over before all were run."""
    args = arguments(argv)
    if args.child:
        from benchmarks.device import sections

        return sections.run(args.child, args.shape, args.until, args.update_layers, args.csv)
    args.until = time.time() + 60 * args.minutes
    failed, late = [], []
    for child in children(args):
        if time.time() >= args.until:
            late.append(child)
            continue
        code = run_tests(args) if child == "tests" else run_section(args, child)
        (late if code == TIMEOUT else failed if code else []).append(child)
    for names, why in ((failed, "failed"), (late, f"not finished within {args.minutes:g} minutes")):
        if names:
            print(f"\n{why}: {', '.join(names)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
