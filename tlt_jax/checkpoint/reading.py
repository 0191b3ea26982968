"""Reads the arrays of a checkpoint in this process alone, and classifies errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

# Codes of the reading library for missing, truncated or changed files. Its other codes (UNAVAILABLE, PERMISSION_DENIED,
# RESOURCE_EXHAUSTED, ...) do not mean that files are damaged.
DATA_LOSS = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
CODE = re.compile(r"([A-Z][A-Z_]{4,}): ")


def read(folder: Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """The items in a folder, with the shardings of these abstract pytrees. No collective. Raises the libraries' errors."""
    handler = ocp.StandardCheckpointHandler()
    try:
        with all_reads_end():
            return {
                name: handler.restore(folder / name, args=ocp.args.StandardRestore(target))
                for name, target in targets.items()
            }
    finally:
        handler.close()


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for its tasks before it closes."""

    def close(self) -> None:
        while tasks := asyncio.all_tasks(self):  # a task may start others
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def all_reads_end() -> Iterator[None]:
    """Context in which orbax waits for all reads, also after one has failed.

    Orbax closes its event loop at the first failure; TensorStore would print a traceback for each
    later read.
    """
    factory, asyncio.new_event_loop = asyncio.new_event_loop, PatientLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = factory


def is_damage(error: BaseException) -> bool:
    """Whether a read error means missing or changed files, by a checksum, an index or a code of data loss.

    False for errors that an intact checkpoint can have: too little memory, an unresponsive file system, another
    process's failure.
    """
    if isinstance(error, ValueError):  # or JSON that cannot be parsed
        code = CODE.match(str(error))
        return code is None or code[1] in DATA_LOSS
    return isinstance(error, (FileNotFoundError, KeyError, AttributeError))  # of an index


def one_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
