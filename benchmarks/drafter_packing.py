"""How many more sequences a second does the drafter's update learn from, when its rows are packed?

python benchmarks/drafter_packing.py

64 sequences of heavy-tailed length in rows of 512 tokens, an update for each row: one sequence in each, and packed rows.
"""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
from drafter_setup import LONGEST, SMALL, answers, arguments, new_drafter
from result_table import ResultTable

from tlt_jax.data import packing
from tlt_jax.drafter import batch as drafter_batch, update as drafter_update
from tlt_jax.drafter.recipe import Recipe
from tlt_jax.models import transformer

ALONE, PACKED = "a sequence in each row", "packed, first-fit"
COLUMNS = ("rows", "rows_of_512", "filled_share", "sequences_per_s", "gain")


def batch_of(packed: packing.Packed, step: int, recipe: Recipe) -> drafter_batch.Batch:
    """The rows of one accumulation step as a drafter's batch."""
    arrays = {name: getattr(packed, name)[step] for name in ("tokens", "positions", "segments")}
    mask = packed.spread(np.ones(len(packed.spans)))[step] > 0
    return drafter_batch.make_batch(arrays | {"loss_mask": mask}, recipe.mesh)


def main() -> None:
    """The command; prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    args = parser.parse_args()
    recipe, state = new_drafter(SMALL, 4096 // 2)
    policy = transformer.init(SMALL, recipe.mesh, jax.random.key(1), "float32")
    update, examples = drafter_update.program(recipe), answers(args.sequences, 0)
    alone = [packing.pack([example], LONGEST, 1) for example in examples]
    packed = packing.pack(examples, LONGEST, 1)
    rows = {
        ALONE: [batch_of(one, 0, recipe) for one in alone],
        PACKED: [batch_of(packed, row, recipe) for row in range(len(packed.tokens))],
    }
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    state, _ = update(state, policy, rows[PACKED][0])
    for _ in range(3):
        for name, batches in rows.items():
            begin = time.perf_counter()
            for batch in batches:
                state, metrics = update(state, policy, batch)
            jax.block_until_ready(metrics["loss"])
            seconds[name].append(time.perf_counter() - begin)
    fill = {ALONE: float(np.mean([one.fill for one in alone])), PACKED: packed.fill}
    table = ResultTable(COLUMNS, args.csv)
    for name, each in seconds.items():
        gain = statistics.median(a / b for a, b in zip(seconds[ALONE], each, strict=True))
        speed = len(examples) / statistics.median(each)
        table.row(name, len(rows[name]), float(fill[name]), speed, gain)


if __name__ == "__main__":
    main()
