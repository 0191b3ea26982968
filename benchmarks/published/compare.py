"""Published numbers and what the simulator says for the same inputs.

python -m benchmarks.published.compare [--quick] [--costs FILE]

Two minutes on two cores; --quick leaves out the runs of many groups. --costs writes the table of published rounds that ships as
tlt_jax/simulate/costs/tlt_h100x4_qwen2.5_32b.csv, and compares nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published import cases, engines
from tlt_jax.simulate.cost_table import text_of


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="only what takes less than a second")
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="writes the table of published rounds"
    )
    given = parser.parse_args(words)
    if given.costs:
        table = engines.literature()
        given.costs.write_text(text_of(table.rows, table.facts), encoding="utf-8")
        print(f"{given.costs}: {len(table.rows)} rows")
        return
    group = ""
    for case in cases.every():
        if given.quick and case.is_long:
            continue
        if case.group != group:
            group = case.group
            print(f"{group:<52}{'published':>10}{'simulated':>11}{'off':>7}")
        found = case.simulated()
        missed = "  missed" if abs(case.error()) > cases.TOLERANCE else ""
        print(
            f"  {case.name:<50}{case.published:>10.4g}{found:>11.4g}{case.error():>+7.0%}{missed}",
            flush=True,
        )


if __name__ == "__main__":
    main()
