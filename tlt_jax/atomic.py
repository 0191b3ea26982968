"""Atomic writes of files and directories: written beside the target, then renamed. No JAX."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp"  # suffix of a file that is being written


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Context with a path to write to, which replaces `path` when the block ends without an error.

    `temporary` must be on the same file system; by default it is beside `path`.
    """
    temporary = temporary or path.with_suffix(TEMPORARY)
    yield temporary
    temporary.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically.

    Characters that UTF-8 cannot encode (lone surrogates) become backslash escapes.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_directory(directory: Path, write: Callable[[Path], None], is_owner: bool = True) -> None:
    """Calls `write` with a temporary path beside the directory, which then replaces the directory.

    Of several processes that write together only the one with `is_owner` renames it.
    """
    temporary = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
    write(temporary)
    if is_owner:
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
