"""Scores answers of a policy in a loop, as a collapsed step has them, by the rewards math and format in scoring processes.

python -m benchmarks.rewards --answers 512 --csv FILE
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common.results import ResultTable, arguments
from tlt_jax.config import Config
from tlt_jax.rewards import Scorer

# What a policy repeats, and formulas that SymPy would compute for long.
LOOPS = {
    "boxes": "\\boxed{" * 12_000,
    "brackets": "\\boxed{" + "(" * 2000,
    "closed brackets": "\\boxed{" + "(" * 2000 + ")" * 2000 + "}",
    "braces": "{" * 30_000,
    "a tower": "\\boxed{2^{10^{9}}}",
    "a root of a tower": "\\boxed{\\sqrt[2^{10^9}]{2}}",
    "an interval of towers": "\\boxed{(2^{10^9},3^{10^9})}",
    "nines": "\\boxed{9^{9^{9}}}",
    "a factorial": "\\boxed{1000000!}",
    "factorials": "\\boxed{9!!!!!!}",
    "a binomial": "\\boxed{\\binom{10^8}{5000000}}",
    "a sum": "\\boxed{\\sum_{i=1}^{10^9} i^i}",
    "a product": "\\boxed{\\prod_{i=1}^{10^9} i}",
    "digits": "\\boxed{" + "9" * 30_000 + "}",
    "an exponent": "\\boxed{1e999999999}",
    "terms": "\\boxed{" + "1+" * 15_000 + "1}",
    "powers": "\\boxed{" + "x^" * 15_000 + "x}",
    "bars": "\\boxed{" + "|x" * 100 + "}",
    "indices": "\\boxed{" + "x_" * 20 + "x}",
    "signs": "\\boxed{" + "-" * 200 + "1}",
    "fractions": "#### " + "1/" * 15_000,
    "numbers": "1,234," * 6000,
    "marks": "#### " * 6000,
    "formulas": "\\(" * 15_000,
    "thoughts": "<think>" * 5000,
    "words": "the answer is " * 3000,
}


def processor_s(scorer: Scorer) -> float:
    """Processor seconds of the scoring processes that live."""
    stats = [Path(f"/proc/{one.process.pid}/stat").read_text() for one in scorer._workers]
    ticks = (sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats)
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def measure(count: int, workers: int) -> tuple[float, float, int]:
    """Seconds and processor seconds of `workers` processes for this many answers, each in a text of its own; failures."""
    config = Config()
    terms = {"math": 1.0, "format": 0.1}
    config = replace(config, reward=replace(config.reward, terms=terms, workers=workers))
    kinds = list(LOOPS.values())
    with Scorer(config) as scorer:
        while not all(one.is_ready for one in scorer._workers):  # a spare one, too
            time.sleep(0.1)
        start, before = time.monotonic(), processor_s(scorer)
        for uid in range(count):
            text = f"Attempt {uid}. {kinds[uid % len(kinds)]}"
            scorer.submit(uid, "What is 3 + 4?", text, {"answer": "7"})
        scores = scorer.collect()
        taken, used = time.monotonic() - start, processor_s(scorer) - before
    return taken, used, sum(score.failure is not None for score in scores.values())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    columns = ["answers", "kinds", "workers", "seconds", "processor_s", "failures"]
    table = ResultTable(columns, args.csv)
    found = measure(args.answers, args.workers)
    table.row(args.answers, min(args.answers, len(LOOPS)), args.workers, *found)


if __name__ == "__main__":
    main()
