"""How fast is a rollout of 64 answers that starts full and ends with the few long ones?

python benchmarks/speculation_tail.py --policy DIR --drafter DIR [--drafter ngram] [--section.knob VALUE ...]

Every drafter races with the tuners: the first with all, the others with the first of them. What a turn and the columns are is
said in speculation_race.py. The measured answers had a long tail:
--rollout.max_new_tokens 470 --data.task_args "{min_length: 6, max_length: 30, tail: 2.0}".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from result_table import ResultTable
from speculation_race import COLUMNS, add_tuners, add_turns, race, tuned
from speculation_setup import add_drafters, arguments, listed, read

from tlt_jax.config.schema import NONE, Speculation

SEQUENCES, BUCKETS = 64, (1, 2, 4, 8, 16, 32, 64)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table."""
    parser = arguments(__doc__)
    add_drafters(parser)
    add_tuners(parser)
    add_turns(parser)
    args, config, prompts = read(parser, argv)
    texts, tuners = listed(args.strategies), listed(args.tuners)
    arms: dict[str, Speculation | str] = {"plain": Speculation(NONE)}
    for drafter in args.drafter:
        arms |= tuned(drafter, tuners if drafter == args.drafter[0] else tuners[:1], texts)
    arms |= {"tunix": args.peer} if args.peer else {}
    table, turns = ResultTable(("sequences", *COLUMNS), args.csv), (args.warm_up, args.turns)
    for cells in race(config, arms, prompts, SEQUENCES, turns, SEQUENCES, BUCKETS):
        table.row(SEQUENCES, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
