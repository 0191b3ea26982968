"""Files and directories that are there whole or not at all: written beside their place, then renamed. No JAX."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp"  # suffix of a file that is being written


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` when the block ends well.

    `temporary` is on the same file system; by default it is beside `path`.
    """
    temporary = temporary or path.with_suffix(TEMPORARY)
    yield temporary
    temporary.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes a file of UTF-8 text; what UTF-8 has no bytes for (a lone surrogate) is written as its escape."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_directory(directory: Path, write: Callable[[Path], None], is_owner: bool = True) -> None:
    """Calls `write` with an empty place; what it wrote takes the place of the directory.

    Of several processes that write together only the owner moves it.
    """
    temporary = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
    write(temporary)
    if is_owner:
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
