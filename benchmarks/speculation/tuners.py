"""Which tuner chooses best, on chunks recorded from rollouts of 64 answers in 32 rows?

python -m benchmarks.speculation.tuners --policy DIR --drafter DIR [--tuners goodput,threshold] [--csv FILE]
    [--section.knob VALUE ...]

Each chunk of a plain rollout is replaced by a recorded chunk of the chosen strategy in that batch, ten times over: speed
relative to plain decoding, and to an oracle that takes the best strategy of every batch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.common.results import ResultTable, listed
from benchmarks.speculation.arm import Arm, arguments, read
from tlt_jax.config import Config
from tlt_jax.config.schema import Speculation
from tlt_jax.data.dataset import Prompt
from tlt_jax.distributed import mesh as meshes
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import make
from tlt_jax.tuner.arms import parse_arms
from tlt_jax.tuner.interface import Measurement, Tuner

ROWS, BUCKETS = 32, (1, 2, 4, 8, 16, 32)
SEEDS = 4  # recorded rollouts of every strategy
REPLAYS = 10  # of every recorded rollout
COLUMNS = ("tuner", "over_plain", "of_best_strategy_for_every_batch")

Chunks = Mapping[tuple[int, Strategy], Sequence[Measurement]]


def record(
    config: Config, drafter: str, texts: Sequence[str], prompts: Sequence[Prompt]
) -> tuple[Chunks, list[list[Measurement]]]:
    """Chunks by batch and strategy, and those of the plain rollouts for whose batch every strategy has chunks."""
    chunks: dict[tuple[int, Strategy], list[Measurement]] = {}
    places: list[list[Measurement]] = []
    for text in ("off", *texts):
        arm = Arm(config, Speculation(drafter, "fixed", [text]), ROWS, BUCKETS)
        for seed in range(-1, SEEDS):
            found = arm.decode(prompts, step=max(seed, 0)).measurements
            if seed >= 0:  # the first one compiled
                places += [found] if text == "off" else []
                for one in found:
                    if one.is_timed:
                        chunks.setdefault((one.batch, one.strategy), []).append(one)
    arms = (PLAIN, *parse_arms(texts))
    known = {
        one.batch
        for found in places
        for one in found
        if all((one.batch, arm) in chunks for arm in arms)
    }
    return chunks, [[one for one in found if one.batch in known] for found in places]


def replay(
    tuner: Tuner, chunks: Chunks, places: Sequence[Sequence[Measurement]], arms: Sequence[Strategy]
) -> tuple[float, float]:
    """Speed relative to plain decoding, and to the best strategy of every batch."""
    speeds = {
        key: 1 / statistics.mean(one.seconds / one.tokens for one in found)
        for key, found in chunks.items()
    }  # as drawn
    state, random, plain, spent, least = tuner.init(), np.random.default_rng(0), 0.0, 0.0, 0.0
    for number, place in (
        pair for _ in range(REPLAYS) for found in places for pair in enumerate(found)
    ):
        state = tuner.update_prior(state) if number == 0 else state
        state, choice = tuner.choose(state, round(place.live), place.batch, place.slots)
        options = chunks[place.batch, choice.strategy]
        drawn = options[random.integers(len(options))]
        state = tuner.observe(state, drawn._replace(slots=place.slots))
        plain += place.tokens / speeds[place.batch, PLAIN]
        spent += place.tokens * drawn.seconds / drawn.tokens
        least += place.tokens / max(speeds[place.batch, arm] for arm in (PLAIN, *arms))
    return plain / spent, least / spent


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    parser.add_argument("--drafter", required=True, help="directory or ngram")
    args, config, prompts = read(parser, argv)
    texts, tuners = listed(args.strategies), listed(args.tuners)
    chunks, places = record(config, args.drafter, texts, prompts)
    table, is_cpu = ResultTable(COLUMNS, args.csv), meshes.is_cpu(meshes.make_mesh(1, 1))
    for name in (*tuners, *texts):
        rule, choices = (name, texts) if name in tuners else ("fixed", [name])
        settings = Speculation(args.drafter, rule, list(choices))
        tuner = make.make_tuner(settings, parse_arms(choices), is_cpu)
        table.row(name, *replay(tuner, chunks, places, parse_arms(texts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
