"""How large the project is. To raise a number here is a decision; the commit that does it says why.

The package is to shrink to 31,500 lines, the tests to 30,000.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt_jax.config.knobs import knobs
from tlt_jax.config.schema import Config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
MOST = {
    "lines of the package": 45_600,
    "modules of the package": 205,
    "lines of tests": 40_850,
    "lines of benchmarks": 3_090,
    "words of pages": 34_000,
    "knobs": 133,
}


def counts() -> dict[str, int]:
    """As `wc -l` and `wc -w` count; the changelog, which grows with time, is not counted."""
    files = {name: [*(ROOT / name).rglob("*.py")] for name in ("tlt_jax", "tests", "benchmarks")}
    lines = {
        name: sum(path.read_bytes().count(b"\n") for path in paths) for name, paths in files.items()
    }
    pages = [*PAGES, *(ROOT / "docs").rglob("*.md")]
    return {
        "lines of the package": lines["tlt_jax"],
        "modules of the package": len(files["tlt_jax"]),
        "lines of tests": lines["tests"],
        "lines of benchmarks": lines["benchmarks"],
        "words of pages": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "knobs": len(knobs(Config)),
    }


@pytest.mark.parametrize("what", MOST)
def test_the_project_is_no_larger_than_it_is_meant_to_be(what):
    assert counts()[what] <= MOST[what]
