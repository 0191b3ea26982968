"""Knows how a benchmark starts a module of this project in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 124  # exit code of a process that ran out of time, as of `timeout`


def environment(**more: str) -> dict[str, str]:
    """Environment in which modules of the project and of the benchmarks are found."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return os.environ | more | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", name, *arguments]


def run(
    command: list[str],
    seconds: float | None = None,
    is_shown: bool = False,
    cwd: Path | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, or kills it after `seconds`; its output is captured unless it is shown."""
    try:
        return subprocess.run(
            command, cwd=cwd, env=environment(**more), timeout=seconds, capture_output=not is_shown, text=True
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, TIMEOUT, "", "")
