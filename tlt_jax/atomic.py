"""Atomic writes of files and directories: written beside the target, then renamed. No JAX."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Suffixes of a file and of a directory that are being written; what a killed process left has them too.
TEMPORARY, PARTIAL = ".tmp", ".partial"
MADE_FROM = "made_from.json"  # in a directory: what it was made from


def unique(path: Path, suffix: str) -> Path:
    """A name beside the path that no other process has: of this host, and random, since in containers every process id is 1."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{secrets.token_hex(4)}{suffix}")


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Context with a path to write to, which replaces `path` when the block ends without an error, and else is removed.

    `temporary` must be on the same file system; by default it is beside `path`.
    """
    temporary = temporary or unique(path, TEMPORARY)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically.

    Characters that UTF-8 cannot encode (lone surrogates) become backslash escapes.
    """
    content = text.encode("utf-8", errors="backslashreplace")
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        error.needed = len(content)  # bytes, for who says why it failed
        raise


def write_directory(
    directory: Path,
    write: Callable[[Path], None],
    is_owner: bool = True,
    made_from: Mapping[str, Any] | None = None,
) -> None:
    """Calls `write` with a temporary path beside the directory, which then replaces the directory.

    Of several processes that take part only the one with `is_owner` writes and renames. `made_from`: kept
    in the directory, see `is_made_from`.
    """
    temporary = unique(directory, PARTIAL)
    try:
        write(temporary)
        if is_owner:
            if made_from is not None:
                (temporary / MADE_FROM).write_text(json.dumps(made_from, indent=1))
            shutil.rmtree(directory, ignore_errors=True)
            temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def is_made_from(directory: Path, made_from: Mapping[str, Any]) -> bool:
    """Whether `write_directory` has written the directory from this; False where nothing says so."""
    try:
        return json.loads((directory / MADE_FROM).read_text()) == made_from
    except (OSError, ValueError):
        return False


def remove_left(*folders: Path) -> None:
    """Removes from these folders what writes that were killed have left."""
    for folder in folders:
        for left in folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        for left in folder.glob(f"*{TEMPORARY}"):
            if left.is_file():
                left.unlink(missing_ok=True)
