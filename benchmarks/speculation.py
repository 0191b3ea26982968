"""What drafting is worth on a trained policy: accept lengths by coupling, and tokens per second over plain decoding.

python benchmarks/speculation.py --config FILE --policy DIR --drafter DIR [--drafter ngram] [--parts coupling,speed]

The policy and its drafters are made before, for example with

    python -m tlt_jax.train.sft --config FILE --out DIR
    python -m tlt_jax.train.drafter --config FILE --model.path DIR --sft.steps 0 --run RUN     # writes RUN/drafter/hf

All answers are to the configuration's evaluation prompts, as long as the policy makes them.

coupling: the accept length of one strategy for every strength of the coupling with the policy's noise, by temperature; what
the scores promise (accepted nodes per round) over what came of it, and the largest gap in the reliability table.
speed: tokens per second at temperature 1 with so many live sequences, over plain decoding in the same turn: the arms take
turns in one process after an untimed run of each (which compiles); a cell is the median of the repeats, with the lower end of
a 95 % interval of their mean.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from tlt_jax import config as configuration, data, drafters, mesh as meshes
from tlt_jax.config import Config, Speculation
from tlt_jax.data import Prompt
from tlt_jax.engine import GENERATE_STREAM, Engine, RolloutResult
from tlt_jax.models import hf
from tlt_jax.spec_decode.chunk import BINS
from tlt_jax.spec_decode.sampling import Sampling
from tlt_jax.spec_decode.tree import PLAIN
from tlt_jax.spec_decode.tuner import Measurement

STRENGTHS, TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.6, 1.0)
T_975 = 2.1  # two-sided 95 % of Student's t, for about 15 repeats


class Arm:
    """An engine with its weights on one CPU device."""

    def __init__(self, config: Config, settings: Speculation):
        self.config = replace(config, speculation=settings)
        model, mesh = hf.read_config(config.model.path), meshes.make_mesh(1, 1)
        drafter, params = drafters.load(self.config, model, mesh)
        tokenizer = data.tokenizer(config)
        self.engine = Engine(self.config, model, mesh, data.stop_ids(config, tokenizer), drafter)
        self.weights = self.engine.publish(hf.load(config.model.path, model, mesh, config.model.param_dtype), params)

    def decode(self, prompts: Sequence[Prompt], temperature: float, step: int) -> RolloutResult:
        """One answer to each prompt."""
        limit = self.config.rollout.max_new_tokens
        return self.engine.rollout(
            self.weights, prompts, 1, Sampling(temperature), limit, stream=GENERATE_STREAM, step=step
        )


def coupling(config: Config, drafter: str, strategy: str, prompts: Sequence[Prompt], sharpness: float) -> None:
    """Prints the table of accept lengths by temperature and strength."""
    print("| drafter | temperature | coupling | accept length | promised / accepted | largest gap |\n" + "|---" * 6 + "|")
    for temperature in TEMPERATURES:
        for strength in STRENGTHS if temperature else (0.0,):
            settings = Speculation(drafter, "fixed", [strategy], coupling=strength, sharpness=sharpness)
            result = Arm(config, settings).decode(prompts, temperature, 0)
            nodes, held = result.reliability
            middles = (np.arange(BINS) + 0.5) / BINS
            rates = held / np.maximum(nodes, 1)
            gap = max(np.abs(rates - middles)[nodes >= 100], default=math.nan)
            promised = float(nodes @ middles) / max(int(held.sum()), 1)
            print(f"| {Path(drafter).name} | {temperature} | {strength} | {result.stats['accept_length']:.3f} | "
                  f"{promised:.2f} | {gap:.2f} |", flush=True)  # fmt: skip


def speed(config: Config, arms: dict[str, Speculation], prompts: Sequence[Prompt], live: int, repeats: int) -> None:
    """Prints a row for each arm: its speed over that of plain decoding with `live` sequences at once."""
    config = replace(config, rollout=replace(config.rollout, prompts=live, slots=live, batch_buckets=[live]))
    engines = {name: Arm(config, settings) for name, settings in arms.items()}
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    drafted: dict[str, list[Measurement]] = {name: [] for name in arms}
    for turn in range(-1, repeats):
        chosen = [prompts[(max(turn, 0) * live + i) % len(prompts)] for i in range(live)]
        for name, arm in engines.items():
            result = arm.decode(chosen, 1.0, max(turn, 0))
            seconds = result.stats["seconds"] - result.stats["compile_seconds"]
            if turn >= 0:
                speeds[name].append(result.stats["tokens"] / seconds)
                drafted[name] += [one for one in result.measurements if one.strategy != PLAIN]
    for name in arms:
        ratios = [mine / plain for mine, plain in zip(speeds[name], speeds["plain"], strict=True)]
        low = statistics.mean(ratios) - T_975 * (statistics.stdev(ratios) if repeats > 1 else 0) / math.sqrt(repeats)
        accept = sum(one.tokens for one in drafted[name]) / max(sum(one.row_rounds for one in drafted[name]), 1)
        print(f"| {live} | {name} | {statistics.median(speeds[name]):.0f} | **{statistics.median(ratios):.2f}** | {low:.2f} | "
              f"{accept:.2f} |", flush=True)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the tables as they fill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--drafter", action="append", required=True, help="directory or ngram; may be given again")
    parser.add_argument("--strategies", default="2_2_4,3_1_4,4_2_8,6_4_16")
    parser.add_argument("--sharpness", type=float, default=1.0)
    parser.add_argument("--live", default="1,2,4,8,16,32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--parts", default="coupling,speed")
    args = parser.parse_args(argv)
    given = ["--config", args.config, "--model.path", args.policy, "--mesh.data", "1", "--mesh.fake_devices", "0"]
    config = configuration.parse([*given, "--data.eval_size", str(args.prompts)])
    prompts = data.load(config, data.tokenizer(config)).eval_prompts()
    strategies = args.strategies.split(",")
    print(f"Python {platform.python_version()}, jax {jax.__version__}, {os.cpu_count()} cores")
    if "coupling" in args.parts:
        for drafter in args.drafter:
            coupling(config, drafter, strategies[-1], prompts, args.sharpness)
    if "speed" in args.parts:
        arms = {"plain": Speculation()}
        for drafter in args.drafter:
            name = Path(drafter).parent.parent.name if drafter != drafters.NGRAM else drafter
            arms |= {f"{name} {one}": Speculation(drafter, "fixed", [one], sharpness=args.sharpness) for one in strategies}
            arms[f"{name} goodput"] = Speculation(drafter, "goodput", strategies, sharpness=args.sharpness)
        print("| live | arm | tokens/s | over plain | lower 95 % | accept length |\n" + "|---" * 6 + "|")
        for live in args.live.split(","):
            speed(config, arms, prompts, int(live), args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
