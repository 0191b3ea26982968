"""Which shape of a draft tree is fastest with one live sequence?

python benchmarks/speculation_trees.py --policy DIR --drafter DIR [--turns N] [--section.knob VALUE ...]

Every tree of 3 to 15 levels, 1 to 4 children of a node and up to 32 nodes; how they race is said in speculation_race.py. An
answer is alone from its first token to its last, so the figures are of whole answers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from result_table import ResultTable
from speculation_race import add_turns, race
from speculation_setup import arguments, read

from tlt_jax.config.schema import NONE, Speculation

TREES = [
    f"{d}_{k}_{n}"
    for d in (3, 5, 7, 11, 15)
    for k in (1, 2, 4)
    for n in ((d + 1,) if k == 1 else (8, 16, 32))
    if d < n <= k + (d - 1) * k**2 + 1
]
COLUMNS = ("strategy", "tokens_per_s", "over_plain", "lower_95", "accept_length")
EACH = 8  # answers of a turn


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--drafter", required=True, help="directory or ngram")
    parser.add_argument("--trees", default=",".join(TREES))
    add_turns(parser)
    args, config, prompts = read(parser, argv)
    arms = {"plain": Speculation(NONE)}
    arms |= {text: Speculation(args.drafter, "fixed", [text]) for text in args.trees.split(",")}
    table = ResultTable(COLUMNS, args.csv)
    for cells in race(config, arms, prompts, 1, (args.warm_up, args.turns), EACH):
        table.row(cells[0], *cells[4:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
