"""How fast is decoding with a drafter, relative to plain decoding, with a number of live sequences?

python -m benchmarks.speculation.speed --policy DIR --drafter DIR [--drafter ngram] [--live 1,2,4] [--csv FILE]
    [--section.knob VALUE ...]
python -m benchmarks.speculation.speed --policy DIR --drafter DIR --tail    64 answers with a long tail

The first drafter races with every tuner and every strategy alone, the others with the first tuner, or without tuners with
every strategy alone; a turn decodes --waves times as many answers as are live, 8 at least. benchmarks/speculation/race.py
explains turns and columns. The measured answers were those to long problems: --rollout.max_new_tokens 192
--data.task_args "{min_length: 12, max_length: 18, tail: 0.0}".
With --tail a turn is a rollout of 64 answers that starts full and ends with the few long ones; drafters race with tuners alone.
The measured answers: --rollout.max_new_tokens 470 --data.task_args "{min_length: 6, max_length: 30, tail: 2.0}".
One sequence and many trees: --live 1 --tuners '' --alone 3_1_4,7_1_8,...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.common.results import ResultTable, listed
from benchmarks.speculation.arm import arguments, label, read
from benchmarks.speculation.race import COLUMNS, TURNS, race
from tlt_jax.config.schema import NONE, Speculation

TAIL, TAIL_BUCKETS = 64, (1, 2, 4, 8, 16, 32, 64)


def arms_of(args: argparse.Namespace) -> dict[str, Speculation]:
    """What races, by name."""
    texts, tuners, first = listed(args.strategies), listed(args.tuners), args.drafter[0]
    alone = listed(args.alone) if args.alone is not None else [] if args.tail else texts
    arms = {"plain": Speculation(NONE)}
    for drafter in args.drafter:
        for tuner in tuners if drafter == first else tuners[:1]:
            arms[f"{label(drafter)} {tuner}"] = Speculation(drafter, tuner, texts)
    for drafter in args.drafter if not tuners else [first]:
        for text in alone:
            arms[f"{label(drafter)} {text}"] = Speculation(drafter, "fixed", [text])
    return arms


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    drafters = {"action": "append", "required": True}
    parser.add_argument("--drafter", help="directory or ngram; may be given again", **drafters)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--warm-up", type=int, default=2, help="turns that are not timed")
    parser.add_argument(
        "--alone", help="strategies that race without a tuner too; default all, '' for none"
    )
    parser.add_argument("--live", default="1,2,4,8,16,32")
    parser.add_argument("--waves", type=int, default=2, help="answers of a turn per live sequence")
    parser.add_argument("--tail", action="store_true", help=f"{TAIL} answers, all at once")
    args, config, prompts = read(parser, argv)
    table = ResultTable(("sequences" if args.tail else "live", *COLUMNS), args.csv)
    for live in [TAIL] if args.tail else map(int, listed(args.live)):
        each = TAIL if args.tail else max(args.waves * live, 8)
        buckets, turns = TAIL_BUCKETS if args.tail else (), (args.warm_up, args.turns)
        for cells in race(config, arms_of(args), prompts, live, turns, each, buckets):
            table.row(live, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
