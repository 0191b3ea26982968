"""What do states for a drafter's loss cost: capturing them in the rollout, harvesting them, and prefilling them again?

OMP_WAIT_POLICY=PASSIVE python -m benchmarks.drafter.harvest [--batches 16] [--turns 21] [--csv FILE]

All is timed on one CPU device, for a policy of D512 L12 V8192 in float32 and the features of EAGLE-3 (three hidden states).
Capturing: a chunk of plain rounds, and one of drafting rounds, of an engine that captures states, relative to the same chunk
of one that does not; the chunks take turns, each on its own state. Prefill: the policy's forward over whole texts with their
states, keys and values thrown away, for each token. Seconds are processor seconds of all threads, which other work disturbs
less. Medians of the turns; the interval of a ratio is its middle half.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import results
from benchmarks.common.engines import FullRows, model_of, random_engine, sizes
from benchmarks.common.timing import clocked, interleaved
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import architecture, transformer
from tlt_jax.rollout.scheduler.harvest import Harvest
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name

MIDDLE = sizes(512, 12, 8, 2, 1408, 8192, positions=2048)
SLOTS, ROUNDS, WINDOW = 512, 4, 256
DRAFTING = Strategy(3, 1, 4)
COLUMNS = (
    "what", "rows", "ratio_with_states", "ratio_low", "ratio_high", "processor_ms", "processor_us_per_token",
)  # fmt: skip


def work(call: Callable[[], Any]) -> Callable[[], float]:
    """A call's processor seconds."""
    return lambda: clocked(call)[1]


def captured(chunks: Sequence[FullRows], strategy: Strategy, turns: int) -> list[object]:
    """A row: chunks without and with states."""
    calls = {text: work(chunk) for text, chunk in zip(("without", "with"), chunks, strict=True)}
    spent = interleaved(calls, turns, unmeasured=2)
    ratios = [b / a for a, b in zip(spent["without"], spent["with"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    second, batch = statistics.median(spent["without"]), chunks[0].shape.batch
    text = "plain rounds" if strategy == PLAIN else f"rounds of {name(strategy)}"
    figures = middle, low, high, 1e3 * second, 1e6 * second / (batch * ROUNDS)
    return [
        f"{ROUNDS} {text}, states kept over not kept",
        batch,
        *(f"{one:.4g}" for one in figures),
    ]


def prefilled(turns: int, model: architecture.ModelConfig, params: Any, batch: int) -> list[object]:
    """A row: the prefill of as many texts as a window is long."""
    states = partial(transformer.prefill, config=model, captures_states=True)
    tokens = jnp.zeros((min(batch, 4), WINDOW), jnp.int32)
    lengths = jnp.full(len(tokens), WINDOW, jnp.int32)
    run = jax.jit(lambda params: states(params, tokens=tokens, lengths=lengths).states)
    calls = interleaved({"": work(lambda: run(params))}, turns, unmeasured=1)
    spent, text = statistics.median(calls[""]), f"{len(tokens)} x {WINDOW} tokens"
    what = f"prefill of {text} that makes states again"
    return [what, len(tokens), "", "", "", 1e3 * spent, 1e6 * spent / tokens.size]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = results.arguments(__doc__)
    parser.add_argument("--batches", default="16")
    parser.add_argument("--turns", type=int, default=21)
    args = parser.parse_args(argv)
    model, mesh = model_of(MIDDLE), meshes.make_mesh(1, 1)
    table = results.ResultTable(COLUMNS, args.csv)
    for batch in map(int, results.listed(args.batches)):
        sides = [
            random_engine(model, mesh, batch, kind="eagle3", captures_states=captures)
            for captures in (False, True)
        ]
        for strategy in (PLAIN, DRAFTING):
            chunks = [FullRows(*side, batch, SLOTS, ROUNDS, strategy) for side in sides]
            table.row(*captured(chunks, strategy, args.turns))
            states, rest = (sum(leaf.nbytes for leaf in jax.tree.leaves(one)) / 2**20
                            for one in (chunks[1].state.cache.states, chunks[0].state))  # fmt: skip
            print(f"states {states:.2f} MiB, the rest {rest:.2f} MiB", file=sys.stderr)
        engine, weights = sides[1]
        table.row(*prefilled(args.turns, model, weights.target, batch))
        copy = engine.programs.get(Harvest(chunks[1].shape, 4, WINDOW))
        places = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
        call = work(lambda: copy(chunks[1].state, *places))  # noqa: B023
        spent = statistics.median(call() for _ in range(args.turns))
        what = f"copy of 4 x {WINDOW} states, with features"
        table.row(what, 4, "", "", "", 1e3 * spent, 1e6 * spent / (4 * WINDOW))
    return 0


if __name__ == "__main__":
    sys.exit(main())
