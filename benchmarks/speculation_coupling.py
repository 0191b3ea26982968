"""How much longer are accepted drafts when the drafter knows the policy's noise, and are its scores right?

python benchmarks/speculation_coupling.py --policy DIR --drafter DIR [--trees 6_4_16,8_2_16] [--section.knob VALUE ...]

Of four rollouts for every strength of the coupling: accept length, with a 95 % interval of the mean ratio to no coupling in the
same rollout; accepted nodes by depth in a round; what the scores promise over what was accepted; the expected calibration
error, the mean of |promised - accepted| over nodes. The first tree at all temperatures and strengths, the others at 1 and the
default strength.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from result_table import ResultTable
from speculation_setup import SEED_T_975, SEEDS, Arm, add_drafters, arguments, label, listed, read

from tlt_jax.config import Config
from tlt_jax.config.schema import Speculation
from tlt_jax.data.dataset import Prompt
from tlt_jax.rollout import bindings
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.spec_decode.tree_drafter import Coupling

STRENGTHS, TEMPERATURES, DEFAULT = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.6, 1.0), 0.75
COLUMNS = (
    "drafter", "strategy", "temperature", "coupling", "sharpness", "accept_length", "over_uncoupled", "margin_95",
    "accepted_by_depth", "promised_over_accepted", "calibration_error",
)  # fmt: skip


def by_depth(results: Sequence[RolloutResult]) -> str:
    """Accepted nodes of each depth per round."""
    drafted = [one for result in results for one in result.measurements if one.strategy != PLAIN]
    rounds = sum(one.row_rounds for one in drafted)
    hits = sum(one.hits.sum(axis=(1, 2)) for one in drafted) / rounds
    return " ".join(f"{each:.2f}" for each in hits)


def cases(
    strategy: str, is_first: bool, sharpness: Sequence[float]
) -> Iterator[tuple[float, float, float]]:
    """Temperature, coupling and sharpness of the rows of a tree; those of a temperature begin without coupling."""
    for temperature in TEMPERATURES if is_first else (1.0,):
        strengths = STRENGTHS if is_first else (0.0, DEFAULT)
        for strength in strengths if temperature else (0.0,):
            for sharp in sharpness if strength == DEFAULT and is_first else (1.0,):
                yield temperature, strength, sharp


def measure(
    table: ResultTable, config: Config, drafter: str, trees: Sequence[str], prompts: Sequence[Prompt],
    sharpness: Sequence[float],
) -> None:  # fmt: skip
    """Adds the rows of a drafter."""
    plain: list[float] = []  # accept lengths without coupling, which come first
    for strategy in trees:
        for temperature, strength, sharp in cases(strategy, strategy == trees[0], sharpness):
            bindings.COUPLING = Coupling(strength, sharp)
            arm = Arm(config, Speculation(drafter, "fixed", [strategy]), 8)
            results = [arm.decode(prompts, temperature, seed) for seed in range(SEEDS)]
            lengths = [result.stats["accept_length"] for result in results]
            plain = plain if strength else lengths
            ratios = np.divide(lengths, plain)
            margin = SEED_T_975 * statistics.stdev(ratios) / math.sqrt(SEEDS)
            nodes, promised, held = sum(result.reliability for result in results)
            error = float(np.abs(promised - held).sum() / nodes.sum())
            table.row(
                label(drafter), strategy, temperature, strength, sharp, statistics.mean(lengths), float(ratios.mean()),
                f"{margin:.3f}", by_depth(results), float(promised.sum() / held.sum()), error,
            )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    add_drafters(parser)
    parser.add_argument("--trees", default="6_4_16,8_2_16,11_2_16,15_1_16")
    parser.add_argument(
        "--sharpness", default="1.0", help="also other sharpnesses, at coupling 0.75"
    )
    args, config, prompts = read(parser, argv)
    table, sharpness = ResultTable(COLUMNS, args.csv), list(map(float, listed(args.sharpness)))
    for drafter in args.drafter:
        measure(table, config, drafter, listed(args.trees), prompts, sharpness)
    return 0


if __name__ == "__main__":
    sys.exit(main())
