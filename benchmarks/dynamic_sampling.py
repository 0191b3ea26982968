"""What does dynamic sampling cost a rollout: seconds, idle time and tokens, with and without it, plain and drafting?

python benchmarks/dynamic_sampling.py --work DIR [--steps 30] [--turns 2] [--max-prompts 128] [--csv FILE]
    [--section.knob VALUE ...]

Every arm is the real command on the quickstart, in a run folder of its own, from the same warm start, which is made first.
Arms take turns. All train on the same number of prompts in a step; those with dynamic sampling try up to --max-prompts.
Their policies differ after the first step, since they train on other prompts. Seconds are those of the rollout and of the
wait for rewards after it, without compiling; the first 5 steps are left out, in which most programs are compiled.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from benchmarks.common import processes, results
from benchmarks.common.processes import ROOT
from tlt_jax import atomic

DRAFTS = "--speculation.drafter ngram --speculation.tuner threshold".split()
ARMS = {
    "plain": ("--speculation.drafter none".split(), False),
    "plain, dynamic": ("--speculation.drafter none".split(), True),
    "n-grams": (DRAFTS, False),
    "n-grams, dynamic": (DRAFTS, True),
}
SKIPPED = 5  # first steps that are left out
COLUMNS = (
    "arm", "turn", "steps", "rollout_s_per_step", "idle_ratio", "tokens_per_step", "wasted_ratio", "tried_per_step",
    "replaced_ratio", "unused_per_step", "filled_per_step", "zero_variance", "score_wait_s_per_step", "held_out_accuracy",
)  # fmt: skip


def seconds(line: dict[str, float]) -> float:
    """Seconds of a step's rollout and of the wait for rewards after it, without compiling."""
    compiling = line.get("perf/compile_s/rollout", 0.0)
    return line["timing_s/rollout"] - compiling + line["timing_s/reward"]


def figures(lines: list[dict[str, float]]) -> dict[str, float]:
    """The columns of an arm from the metrics of its steps."""
    steps = [line for line in lines if "timing_s/rollout" in line][SKIPPED:]

    def mean(name: str) -> float:
        return float(np.mean([line.get(name, 0.0) for line in steps]))

    rollout = [line["timing_s/rollout"] * line["perf/tokens_per_second"] for line in steps]
    accuracy = [line["eval/mean@1"] for line in lines if "eval/mean@1" in line]
    return {
        "steps": len(steps),
        "rollout_s_per_step": float(np.mean([seconds(line) for line in steps])),
        "idle_ratio": mean("perf/idle_ratio"),
        "tokens_per_step": float(np.mean(rollout)),
        "wasted_ratio": mean("perf/wasted_ratio"),
        "tried_per_step": mean("groups/tried"),
        "replaced_ratio": mean("groups/replaced"),
        "unused_per_step": mean("groups/unused"),
        "filled_per_step": mean("groups/filled"),
        "zero_variance": mean("groups/zero_variance"),
        "score_wait_s_per_step": mean("perf/score_wait_s"),
        "held_out_accuracy": accuracy[-1],
    }


def train(run: Path, *arguments: str) -> list[dict[str, float]]:
    """The metrics of each step of a new run. Ends the benchmark when the command fails."""
    shutil.rmtree(run, ignore_errors=True)
    config = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--run", str(run)]
    done = processes.run(processes.module("tlt_jax.train", *config, *arguments))
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return [json.loads(line) for line in atomic.lines(run / "metrics.jsonl")]


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of everything it makes")
    parser.add_argument("--steps", type=int, default=30, help="RL steps of a run")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--max-prompts", type=int, default=128, help="of a step; it trains on 32")
    args, others = parser.parse_known_args()
    shared = [
        "--train.steps", str(args.steps), "--eval.every", str(args.steps), "--checkpoint.export", "false",
        "--sft.cache", str(args.work / "sft"), "--rollout.compile_cache", str(args.work / "programs"), *others,
    ]  # fmt: skip
    dynamic = ["--rollout.max_prompts", str(args.max_prompts)]
    table = results.ResultTable(COLUMNS, args.csv)
    for turn in range(args.turns):
        for name, (changes, is_dynamic) in ARMS.items():
            run = args.work / f"{turn}_{name.replace(', ', '_')}"
            lines = train(run, *shared, *changes, *(dynamic if is_dynamic else []))
            found = {"arm": name, "turn": turn} | figures(lines)
            table.row(*(found[column] for column in COLUMNS))


if __name__ == "__main__":
    main()
