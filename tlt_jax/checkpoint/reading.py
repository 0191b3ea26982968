"""Reading the arrays of a checkpoint in this process alone, and what an error of it says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

# What the reading library calls files that are missing, cut or changed. Its other codes (UNAVAILABLE, PERMISSION_DENIED,
# RESOURCE_EXHAUSTED, ...) say nothing about the files.
DATA_LOSS = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
CODE = re.compile(r"([A-Z][A-Z_]{4,}): ")


def read(folder: Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """The items in a folder, with the shardings of these abstract pytrees; no collective. Raises whatever the libraries do."""
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
    """An event loop whose tasks end before it closes."""

    def close(self) -> None:
        while tasks := asyncio.all_tasks(self):  # a task may start others
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def all_reads_end() -> Iterator[None]:
    """Context in which orbax waits for all reads, though one has failed.

    It closes its event loop at the first failure; the reads that end later would find it closed, and
    TensorStore print a traceback for each.
    """
    factory, asyncio.new_event_loop = asyncio.new_event_loop, PatientLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = factory


def is_damage(error: BaseException) -> bool:
    """Whether an error of reading says that files are missing or changed, by a checksum, an index or a code of data loss.

    False for what may happen to a whole checkpoint: too little memory, a file system that does not answer, another
    process's failure.
    """
    if isinstance(error, ValueError):  # also JSON that cannot be parsed
        code = CODE.match(str(error))
        return code is None or code[1] in DATA_LOSS
    return isinstance(error, (FileNotFoundError, KeyError, AttributeError))  # of an index


def one_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
