"""Knows how measurements are shown and stored: Markdown tables, CSV rows that say what they were measured with, arguments."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

import jax

from benchmarks.common.processes import ROOT, run

MEASURED_WITH = ("date", "machine", "python", "jax", "commit", "command")


class ResultTable:
    """A table that is printed row by row; every row is also appended to the CSV file, if one is given.

    Raises ValueError when the file has other columns.
    """

    def __init__(self, columns: Sequence[str], path: Path | None = None):
        self.path, header = path, [*MEASURED_WITH, *columns]
        if path and path.exists():
            with path.open(newline="") as file:
                found = next(csv.reader(file), [])
            if found != header:
                raise ValueError(f"{path} has the columns {found}, not {header}")
        elif path:
            self.append(header)
        print_header(columns)

    def row(self, *cells: object) -> None:
        """Adds a row; numbers with three digits."""
        texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
        print_row(texts)
        if self.path:
            self.append([*measured_with(), *texts])

    def append(self, cells: Sequence[str]) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)


def print_header(columns: Sequence[str]) -> None:
    """Prints the head of a Markdown table."""
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)


def print_row(texts: Sequence[str]) -> None:
    """Prints a row of a Markdown table."""
    print("| " + " | ".join(texts) + " |", flush=True)


def arguments(description: str | None, has_csv: bool = True) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring; with the argument that names the CSV file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if has_csv:
        parser.add_argument(
            "--csv", type=Path, help="also append the rows to this file of results/"
        )
    return parser


def listed(text: str) -> list[str]:
    """The parts between commas; none of ''."""
    return [one for one in text.split(",") if one]


def measured_with() -> list[str]:
    """The values of MEASURED_WITH here and now."""
    git = run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    versions = [platform.python_version(), jax.__version__, git.stdout.strip()]
    return [date.today().isoformat(), machine(), *versions, command()]


def command() -> str:
    """The command that this process was started with."""
    path = Path(sys.argv[0]).resolve()
    if path.is_relative_to(ROOT / "benchmarks"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        return shlex.join(["python", "-m", name, *sys.argv[1:]])
    return shlex.join(["python", *sys.argv])


def versions(*others: str) -> str:
    """Versions, of these packages too, and processors in one line."""
    packages = [f"{name} {metadata.version(name)}" for name in ("jax", *others)]
    return ", ".join([f"Python {platform.python_version()}", *packages, f"{os.cpu_count()} cores"])


def machine() -> str:
    """Processors of this machine, and the kind of accelerator when there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    text = f"{os.cpu_count()} CPU cores, {names[0] if names else platform.machine()}"
    device = jax.devices()[0]
    return text if device.platform == "cpu" else f"{text}, {device.device_kind}"
