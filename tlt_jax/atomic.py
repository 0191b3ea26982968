"""Atomic writes of files and directories: written next to the target, then renamed; and the lines of a file. No JAX."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Suffixes of files and directories that are being written, or that a killed process left unfinished.
TEMPORARY, PARTIAL = ".tmp", ".partial"
MADE_FROM = "made_from.json"  # in a directory: its provenance


def unique(path: Path, suffix: str) -> Path:
    """A unique name next to the path: with the host and a random part, since in containers every process id is 1."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{secrets.token_hex(4)}{suffix}")


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Context with a temporary path to write to; replaces `path` when the block succeeds, else is removed.

    `temporary` must be on the same file system; by default it is next to `path`.
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
        error.needed = len(content)  # bytes, for the error message of the caller
        raise


def lines(path: Path) -> list[bytes]:
    """The lines of a file of JSON values: only a line feed ends one, not the other separators that a JSON text may have."""
    *whole, last = path.read_bytes().split(b"\n")
    return [*whole, last] if last else whole


def write_directory(
    directory: Path,
    write: Callable[[Path], None],
    is_owner: bool = True,
    made_from: Mapping[str, Any] | None = None,
) -> None:
    """Calls `write` with a temporary path next to the directory, which then replaces the directory.

    When several processes call it together, only the one with `is_owner` renames. `made_from`: provenance,
    stored in the directory for `is_made_from`.
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
    """Whether the directory records this provenance; False when it records none."""
    try:
        return json.loads((directory / MADE_FROM).read_text()) == made_from
    except (OSError, ValueError):
        return False


def remove_left(*folders: Path) -> None:
    """Removes the temporary files and directories that killed writes left in these folders."""
    for folder in folders:
        for left in folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        for left in folder.glob(f"*{TEMPORARY}"):
            if left.is_file():
                left.unlink(missing_ok=True)
