"""What does drafting cost, over a plain round of the policy, for every kind of drafter?

OMP_WAIT_POLICY=PASSIVE python -m benchmarks.drafter.costs [--shapes smollm2,end_to_end] [--live 1,4,8,32] [--strategy 7_1_8]
    [--turns 15] [--csv FILE]

Random weights, float32, one device: SmolLM2-135M's shape with a draft vocabulary of 32,000, and that of end_to_end.yaml's
policy, which has 16 tokens. Drafting is timed alone: the drafter's extension by the last round's tokens, the draft and the
choice of the tree; rows are half full, and a plain round is timed on the same rows. All programs take turns. Seconds are
processor seconds of all threads, which other work disturbs less. A cost is the median over the turns of the ratio to the plain
round of the same turn; `over_first` that to the first kind; the intervals are their middle halves.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.common import results
from benchmarks.common.engines import FullRows, model_of, random_engine, sizes
from benchmarks.common.timing import clocked, interleaved
from benchmarks.device.setup import SMALL
from tlt_jax.distributed import mesh as meshes
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import DraftOnly, StateShape
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.strategy import parse

SHAPES = {  # sizes, and draft vocabulary
    "smollm2": (SMALL, 32_000), "end_to_end": (sizes(256, 12, 4, 2, 768, 16), None),
}  # fmt: skip
KINDS = ("eagle3", "dflash", "dspark")
SLOTS, ROUNDS, PLAIN = 512, 4, "plain round"
COLUMNS = (
    "shape", "live", "strategy", "what", "processor_ms", "over_plain", "over_plain_low", "over_plain_high", "over_first",
    "over_first_low", "over_first_high",
)  # fmt: skip


class Drafting:
    """Drafting alone for rows that are half full, called again and again on its own state."""

    def __init__(self, engine: Engine, weights: Weights, batch: int, text: str):
        shapes, shape = engine.programs.shapes[0], StateShape(0, batch, SLOTS)
        strategy = parse(text)
        self.weights, self.half = weights, jnp.full(batch, SLOTS // 2, jnp.int32)
        self.program = engine.programs.get(DraftOnly(shape, ROUNDS, strategy, 1.0))
        spec = shapes.known(shape), shapes.drafter_of(strategy).host_context(batch)
        self.known, self.host = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), spec
        )

    def __call__(self) -> jax.Array:
        """Drafts for all rounds."""
        # The program consumes what it is given, also what two leaves share.
        drafter = self.known.drafter.replace(built=jnp.copy(self.half))
        known = self.known.replace(lengths=jnp.copy(self.half), drafter=drafter)
        self.known = self.program(known, self.weights, self.host)
        return self.known.lengths


def work(call: Callable[[], jax.Array]) -> float:
    """Processor seconds of a round of this call."""
    return clocked(call)[1] / ROUNDS


def middle_half(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the ends of the middle half."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = results.arguments(__doc__)
    parser.add_argument("--shapes", default="smollm2,end_to_end")
    parser.add_argument("--live", default="1,4,8,32")
    parser.add_argument("--strategy", default="7_1_8")
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args(argv)
    table, mesh = results.ResultTable(COLUMNS, args.csv), meshes.make_mesh(1, 1)
    for shape in results.listed(args.shapes):
        init, vocab = SHAPES[shape]
        make = partial(random_engine, model_of(init), mesh, draft_vocab=vocab)
        for live in map(int, results.listed(args.live)):
            calls = {PLAIN: FullRows(*make(live), live, SLOTS, ROUNDS)}
            for kind in KINDS:
                engine = make(live, kind=kind, strategies=[args.strategy])
                calls[kind] = Drafting(*engine, live, args.strategy)
            turns = {name: partial(work, call) for name, call in calls.items()}
            spent = interleaved(turns, args.turns, unmeasured=2)
            for name, seconds in spent.items():
                cells = [1e3 * statistics.median(seconds)]
                for base in (PLAIN, KINDS[0]):
                    pairs = zip(seconds, spent[base], strict=True)
                    cells += middle_half([one / other for one, other in pairs])
                table.row(shape, live, args.strategy, name, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
