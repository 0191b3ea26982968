"""Knows how a table of measurements is shown and kept: Markdown rows as they come, and rows of a CSV file.

A row of a file begins with what it was measured with; the files are described in README.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import jax

MEASURED_WITH = ("date", "machine", "python", "jax", "commit", "command")


class ResultTable:
    """A table that fills row by row; every row is printed, and appended to the CSV file when there is one."""

    def __init__(self, columns: Sequence[str], path: Path | None = None):
        self.path, header = path, [*MEASURED_WITH, *columns]
        if path and path.exists():
            with path.open(newline="") as file:
                found = next(csv.reader(file), [])
            if found != header:
                raise ValueError(f"{path} has the columns {found}, not {header}")
        elif path:
            self.append(header)
        print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)

    def row(self, *cells: object) -> None:
        """Adds a row; numbers with three digits."""
        texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
        print("| " + " | ".join(texts) + " |", flush=True)
        if self.path:
            self.append([*measured_with(), *texts])

    def append(self, cells: Sequence[str]) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)


def add_csv(parser: argparse.ArgumentParser) -> None:
    """The argument that names the CSV file."""
    parser.add_argument("--csv", type=Path, help="also append the rows to this file of results/")


def measured_with() -> list[str]:
    """What is measured here and now, in the order of MEASURED_WITH."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    command = shlex.join(["python", *sys.argv])
    return [date.today().isoformat(), machine(), platform.python_version(), jax.__version__, commit, command]  # fmt: skip


def machine() -> str:
    """Processors of this machine, and the kind of accelerator when there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    text = f"{os.cpu_count()} CPU cores, {names[0] if names else platform.machine()}"
    device = jax.devices()[0]
    return text if device.platform == "cpu" else f"{text}, {device.device_kind}"
