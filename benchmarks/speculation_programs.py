"""What do the compiled chunks of the paper's strategies take: with a strategy for every batch size, and bucketed by batch?

python benchmarks/speculation_programs.py --policy DIR --drafter DIR [--section.knob VALUE ...]

All temporaries (a captured graph keeps its own), the largest (XLA takes them for a run), and code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from result_table import ResultTable
from speculation_setup import Arm, arguments, read

from tlt_jax.config.schema import Speculation
from tlt_jax.rollout.executables.programs import Decode, StateShape
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.tuner.arms import PAPER_ARMS, bucketed, parse_arms, strategies_for

BUCKETS = (1, 2, 4, 8, 16, 32)
COLUMNS = ("pool", "programs", "compile_s", "temporaries_mib", "largest_mib", "code_mib")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--drafter", required=True, help="directory")
    parser.add_argument("--batches", default=",".join(map(str, BUCKETS)))
    args, config, _ = read(parser, argv)
    arms, buckets = parse_arms(PAPER_ARMS), tuple(map(int, args.batches.split(",")))
    arm = Arm(config, Speculation(args.drafter, "fixed", list(PAPER_ARMS)), buckets[-1], buckets)
    rules, slots = DecodingParams(Sampling(1.0)), arm.longest_cache()
    for batch in buckets:
        for one in (PLAIN, *arms):
            shape = StateShape(0, batch, slots)
            arm.engine.programs.get(Decode(shape, config.rollout.chunk, one, rules))
    every, usual = arm.engine.programs.compiles, bucketed(arms)
    few = [
        one
        for one in every
        if one.program.strategy in (PLAIN, *strategies_for(usual, one.program.state.batch))
    ]
    table = ResultTable(COLUMNS, args.csv)
    for name, compiled in (("every strategy for every batch", every), ("bucketed", few)):
        temporary = [one.temporary / 2**20 for one in compiled]
        code = sum(one.code for one in compiled) / 2**20
        seconds = round(sum(one.seconds for one in compiled))
        table.row(name, len(compiled), seconds, sum(temporary), max(temporary), code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
