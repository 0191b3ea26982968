"""Tokens per second against live rows while a batch drains to one row: plain decoding, drafting always, and the tuner.

python -m benchmarks.speculation.drain --policy DIR --data GSM8K_DIR [--drafter DIR] [--groups N] [--csv FILE] [--picture PNG]

All answers start together, with limits at which the live rows halve, and none stops before. Arms take turns: `plain`;
`drafted`, --strategy in every round; `tuned`, the default tuner; these draft with n-grams, or with --drafter. What pays in
a long run is compiled in turns that do not count: they end with a turn of all arms in which nothing was being compiled, or
after --warm-up of them. A row of the table is a range of live rows, up to `live`:
tokens per second with all seconds of an arm, also of catching up, moving rows and explorations; `tuned_over_best`: the
median over the turns of tuned over the faster of the others (aim 0.97), and its least; `others`: the most of the processors
that other work took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import results
from benchmarks.common.processes import ROOT
from benchmarks.common.results import ResultTable
from benchmarks.speculation.speed import Arm
from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import NGRAM, NONE, Speculation
from tlt_jax.data import dataset as datasets, prompt_format
from tlt_jax.distributed import process
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.rollout.recorder import Emitted, Poll, Retired, RolloutResult
from tlt_jax.rollout.request import doubling
from tlt_jax.spec_decode.decode_state import RUNNING
from tlt_jax.spec_decode.interface import Sampling

CONFIG = ROOT / "benchmarks" / "device" / "smollm2.yaml"
COLUMNS = (
    "groups", "live", "plain_tokens_per_s", "drafted_tokens_per_s", "tuned_tokens_per_s", "tuned_over_best", "least", "others",
)  # fmt: skip
LONG_RUN = 1000  # rollouts for which a program has to pay
ARMS = "plain", "drafted", "tuned"
Speeds = dict[int, float]  # tokens per second by range of live rows


def limits(rows: int, longest: int) -> list[int]:
    """Tokens of each answer: the live rows halve in steps of equal length, and the last one ends at `longest`."""
    halvings = [2**power for power in range(rows.bit_length() - 1, -1, -1)]
    ends = np.linspace(longest / len(halvings), longest, len(halvings)).astype(int)
    kept = zip(ends, halvings, [*halvings[1:], 0], strict=True)
    return [int(end) for end, before, after in kept for _ in range(before - after)]


def drained(
    arm: Arm, prompts: Sequence[np.ndarray], most: Sequence[int], step: int
) -> tuple[Speeds, RolloutResult]:
    """A rollout, and its tokens per second by the live rows with which its chunks began, in powers of two."""
    polls: list[tuple[float, int, int]] = []  # second, new tokens, ended answers

    def listen(poll: Poll) -> None:
        news = [event for event in poll.events if isinstance(event, Emitted)]
        if any(isinstance(event, Retired) and event.kind == "decode" for event in poll.events):
            ended = sum(event.finish != RUNNING for event in news)
            polls.append((time.perf_counter(), sum(len(one.tokens) for one in news), ended))

    given = {"stream": GENERATE_STREAM, "step": step, "eos_ids": (), "rollouts_left": LONG_RUN}
    request = arm.engine.request(prompts, 1, Sampling(), most, **given)
    result, arm.tuner = arm.engine.run(request, arm.weights, arm.tuner, listeners=[listen])
    tokens, seconds, live, before = Counter(), Counter(), len(prompts), polls[0][0]
    for now, count, ended in polls:
        where = 1 << (max(live, 1) - 1).bit_length()
        if now > before:  # the first chunk began with the prefill
            tokens[where] += count
            seconds[where] += now - before
        live, before = live - ended, now
    return {where: tokens[where] / seconds[where] for where in tokens if seconds[where]}, result


def draw(path: Path, rows: Sequence[Sequence]) -> None:
    """Draws the arms' speeds against the live rows, from rows of COLUMNS."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    _, live, *speeds = list(zip(*rows, strict=True))[:5]
    for name, arm in zip(ARMS, speeds, strict=True):
        axes.plot(live, arm, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="live rows", ylabel="tokens per second")
    axes.invert_xaxis()
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """The benchmark's own arguments, and the configuration that the others change."""
    parser = results.arguments(__doc__)
    texts = {"config": CONFIG, "policy": None, "data": None, "drafter": NGRAM, "strategy": "3_1_4"}
    numbers = {"rows": 64, "longest": 224, "groups": 1, "turns": 5, "warm-up": 8}
    for name, default in (texts | numbers).items():
        kind = int if name in numbers else str
        parser.add_argument(f"--{name}", type=kind, default=default, required=default is None)
    parser.add_argument("--picture", type=Path)
    args, overrides = parser.parse_known_args(argv)
    os.environ["GSM8K_DIR"] = str(Path(args.data).resolve())
    given = {
        "config": args.config, "model.path": args.policy, "mesh.data": args.groups, "mesh.fake_devices": args.groups,
        "rollout.prompts": args.rows, "rollout.max_new_tokens": args.longest, "rollout.chunk": 16,
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    config = configuration.parse([*words, *overrides])
    process.set_environment(config)
    return args, config


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table."""
    args, config = parse(argv)
    print(results.versions())
    split = datasets.load(config, prompt_format.tokenizer_of(config)).part()
    prompts = [one.tokens for one in split][: args.rows]
    always = Speculation(args.drafter, "fixed", [args.strategy])
    settings = Speculation(NONE), always, Speculation(args.drafter)
    capacity, most = -(-args.rows // args.groups), limits(args.rows, args.longest)
    buckets = doubling(1, capacity)
    arms = {
        name: Arm(config, one, capacity, buckets) for name, one in zip(ARMS, settings, strict=True)
    }
    turns: dict[str, list[Speeds]] = {name: [] for name in arms}
    others = 0.0
    step = first = 0
    while not first or step < first + args.turns:
        is_settled = True
        for name, arm in arms.items():
            speeds, result = drained(arm, prompts, most, step)
            seconds, made = result.stats["seconds"], result.stats["compiles"]
            print(f"turn {step} {name}: {seconds:.1f} s, {made} programs", file=sys.stderr, flush=True)  # fmt: skip
            is_settled &= all(one.is_timed for one in result.measurements)
            if first:
                turns[name].append(speeds)
                others = max(others, *(one.taken for one in result.measurements))
        step += 1
        if not first and (is_settled or step == args.warm_up):
            first = step
            print("settled" if is_settled else "not settled", file=sys.stderr, flush=True)
    table, rows = ResultTable(COLUMNS, args.csv), []
    for live in doubling(1, args.rows)[::-1]:
        known = [[one[live] for one in turns[name] if live in one] for name in ARMS]
        if ratios := [tuned / max(rest) for *rest, tuned in zip(*known, strict=False)]:
            speeds = [float(statistics.median(one)) for one in known]
            rows.append(
                (args.groups, live, *speeds, statistics.median(ratios), min(ratios), others)
            )
            table.row(*rows[-1])
    if args.picture:
        draw(args.picture, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
