"""Counts of compiled rounds as CSV: what is written is read back, and damage is refused by name."""

from __future__ import annotations

import pytest

from tlt_jax.distributed import round_counts
from tlt_jax.distributed.round_counts import RoundCounts
from tlt_jax.errors import DataError

COUNTS = [
    RoundCounts("h200", 2, 8, 4096, "off", 1.5e10, 1.25e11, 519),
    RoundCounts("h200", 2, 8, 4096, "learned:4_2_8", 4.25e10, 1.0625e12, 0),
]


def test_counts_that_are_written_are_read_back(tmp_path):
    round_counts.write(tmp_path / "counts.csv", COUNTS)
    assert round_counts.read(tmp_path / "counts.csv") == COUNTS


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "moved",
            "bytes",
            "no counts of rounds: write them with python -m tlt_jax.plan --counts FILE",
        ),
        ("1.5e+10", "many", "line 1: moved 'many': give a number above 0"),
        ("1.5e+10", "nan", "line 1: moved 'nan'"),
        ("519", "5.5", "line 1: kernels '5.5'"),
        (",8,", ",0,", "line 1: rows '0'"),
    ],
)
def test_a_damaged_file_is_refused_by_name_in_one_line(tmp_path, old, new, message):
    path = tmp_path / "counts.csv"
    round_counts.write(path, COUNTS)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        round_counts.read(path)
    assert "counts.csv" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no counts of rounds can be read there"):
        round_counts.read(tmp_path / "nothing.csv")
