"""How fast is decoding with a drafter, over plain decoding, with so many live sequences?

python benchmarks/speculation_speed.py --policy DIR --drafter DIR [--drafter ngram] [--live 1,2,4] [--section.knob VALUE ...]

The first drafter races with every tuner and every strategy alone, the others with the first tuner; a turn decodes --waves times
as many answers as are live, 8 at least. What a turn and the columns are is said in speculation_race.py. The measured answers
were those to long problems: --rollout.max_new_tokens 192 --data.task_args "{min_length: 12, max_length: 18, tail: 0.0}".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from result_table import ResultTable
from speculation_race import COLUMNS, add_tuners, add_turns, race, tuned
from speculation_setup import add_drafters, arguments, label, listed, read

from tlt_jax.config.schema import NONE, Speculation


def arms_of(args: argparse.Namespace) -> dict[str, Speculation | str]:
    """What races, by name."""
    texts, tuners, (first, *others) = listed(args.strategies), listed(args.tuners), args.drafter
    alone = texts if args.alone is None else listed(args.alone)
    arms = {"plain": Speculation(NONE)} | tuned(first, tuners, texts)
    arms |= {f"{label(first)} {text}": Speculation(first, "fixed", [text]) for text in alone}
    for other in others:
        arms |= tuned(other, tuners[:1], texts)
    return arms | ({"tunix": args.peer} if args.peer else {})


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    add_drafters(parser)
    add_tuners(parser)
    add_turns(parser)
    parser.add_argument(
        "--alone",
        help="strategies that race without a tuner too; all of them unless given, '' for none",
    )
    parser.add_argument("--live", default="1,2,4,8,16,32")
    parser.add_argument(
        "--waves", type=int, default=2, help="answers of a turn for each that is live"
    )
    args, config, prompts = read(parser, argv)
    table = ResultTable(("live", *COLUMNS), args.csv)
    for live in map(int, listed(args.live)):
        each = max(args.waves * live, 8)
        for cells in race(config, arms_of(args), prompts, live, (args.warm_up, args.turns), each):
            table.row(live, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
