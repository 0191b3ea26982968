"""A folder of serialized executables for later runs, and what is known of them before they are lowered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax

from tlt_jax import atomic
from tlt_jax.rollout.executables.serialized import (
    SerializationError,
    SerializedExecutable,
    deserialize,
)

SECONDS = "seconds"  # the folder of what compilations took, by what they were asked for
KEPT_S, MOST_BYTES = 30 * 86400.0, 8 << 30  # of programs that nobody uses, and of all
ABANDONED_S = 86400.0  # after which nobody is still writing a file
PROBE_BYTES = 4096
UNWRITABLE = "programs are not kept, since %s cannot be written (%s): set rollout.compile_cache to a folder of yours, or off"

log = logging.getLogger(__name__)


class ExecutableCache:
    """Serialized executables, each under a digest of all that it was compiled from; without a folder nothing is kept.

    Only folders that nobody else can write to are safe: loading an executable may run any code, as
    it does from JAX's own compilation cache.
    """

    def __init__(self, folder: Path | None = None, is_writable: bool = True):
        self.folder, self.is_writable = folder, is_writable
        self.found: dict[str, float | None] = {}

    def path(self, lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Path:
        """Where an executable of this program lies."""
        return self.folder / digest(*machine(), sorted(options.items()), lowered.as_text())

    def get(
        self,
        lowered: jax.stages.Lowered,
        options: Mapping[str, Any],
        devices: Sequence[jax.Device],
    ) -> tuple[jax.stages.Compiled, SerializedExecutable] | None:
        """The executable for these devices, if it is there and can be loaded."""
        path = self.path(lowered, options) if self.folder else None
        if path is None or not path.exists():
            return None
        try:
            head, _, data = path.read_bytes().partition(b"\n")
            with contextlib.suppress(OSError):
                os.utime(path)  # what is used is pruned last
            serialized = SerializedExecutable(
                data, tuple(json.loads(head)), lowered.in_tree, lowered.out_tree
            )
            return deserialize(serialized, devices), serialized
        except (SerializationError, OSError, ValueError, TypeError) as error:
            log.info("%s is not used, and compiled again: %s", path, error)
            return None

    def put(
        self,
        lowered: jax.stages.Lowered,
        options: Mapping[str, Any],
        serialized: SerializedExecutable,
    ) -> None:
        """Keeps the executable."""
        if self.folder:
            head = json.dumps(serialized.devices).encode()
            self.write(self.path(lowered, options), head + b"\n" + serialized.data)

    def seconds(self, asked: str) -> float | None:
        """What compiling took an earlier run that was asked for the same; None when none was.

        `asked` names a program and the shapes of its weights. It is only an estimate of what the
        executable was compiled from: the same text may lead to another program where no file of
        the package and no version differs.
        """
        if self.folder and asked not in self.found:
            try:
                self.found[asked] = float(self.note_path(asked).read_text())
            except (OSError, ValueError):
                self.found[asked] = None
        return self.found.get(asked)

    def note(self, asked: str, seconds: float) -> None:
        """Keeps what a compilation took, for `seconds` of later runs: its executable is in this folder or in JAX's own."""
        if self.folder:
            self.write(self.note_path(asked), f"{seconds:.3f}".encode())

    def write(self, path: Path, content: bytes) -> None:
        """Writes a file atomically, with the folder it is in; after one that cannot be written no more is tried."""
        if not self.is_writable:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            self.is_writable = False
            log.warning(UNWRITABLE, self.folder, error.strerror or error)

    def note_path(self, asked: str) -> Path:
        """Where it is said what a compilation took."""
        return self.folder / SECONDS / digest(*machine(), sources(), asked)


def digest(*basis: Any) -> str:
    """A file name for these values."""
    return hashlib.sha256(repr(basis).encode()).hexdigest()


def machine() -> tuple[str | None, ...]:
    """What an executable is bound to, beside its program and XLA's options."""
    device = jax.local_devices()[0]
    return (
        jax.__version__, device.client.platform_version, device.device_kind, os.environ.get("XLA_FLAGS"),
    )  # fmt: skip


@cache
def sources() -> str:
    """A digest of the package's source files."""
    files = sorted(Path(__file__).parents[2].rglob("*.py"))
    return digest(*(hashlib.sha256(file.read_bytes()).hexdigest() for file in files))


def unwritable(folder: Path) -> str:
    """Why nothing can be written to a folder, which is made if need be; empty when it can be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(folder / "probe") as temporary:
            temporary.write_bytes(b"0" * PROBE_BYTES)
        (folder / "probe").unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def prune(folder: Path, now: float) -> None:
    """Deletes what nobody has used for KEPT_S, and of the rest what was used longest ago, until MOST_BYTES are left.

    `now` is in seconds of time.time. Other processes may do the same, and read or write meanwhile: each file is
    there whole or not at all.
    """
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process has deleted it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append((max(status.st_mtime, status.st_atime), status.st_size, path))
    left = MOST_BYTES
    for used, size, path in sorted(files, key=lambda file: file[0], reverse=True):
        left -= size
        is_abandoned = path.suffix == atomic.TEMPORARY and now - used > ABANDONED_S
        if left < 0 or now - used > KEPT_S or is_abandoned:
            with contextlib.suppress(OSError):
                path.unlink()
