"""The disk cache of serialized executables, and the seconds that compiling them took, known before lowering.

JAX's own cache, which is on too, does not suffice: on a CPU its keys have the device, and what it loads cannot be serialized
again, so that in a second run every data group but the first would compile. Loading an executable for other devices than
it was compiled for takes private functions of JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from tlt_jax import atomic

SECONDS = "seconds"  # the subfolder of compile seconds, by cache key
MAX_AGE_S, MOST_BYTES = 30 * 86400.0, 8 << 30  # since a file's last use, and of all files
ABANDONED_S = 86400.0  # age at which a temporary file counts as abandoned by its writer
PROBE_BYTES = 4096
NEVER_S = 1e9  # longer than any compilation
UNWRITABLE = "programs are not cached: %s cannot be written (%s): set rollout.compile_cache to a folder of yours, or off"
Unpickler = getattr(serialize_executable, "_JaxPjrtUnpickler", object)
PLATFORMS = ("cpu", "cuda", "gpu")  # a TPU's executable is bound to the places of its chips
# Errors of backends or JAX versions that cannot serialize or load, and of damaged files.
FAILURES = (
    ImportError, AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError, KeyError,
    EOFError, pickle.UnpicklingError,
)  # fmt: skip

log = logging.getLogger(__name__)


class SerializationError(Exception):
    """The executable cannot be serialized, or cannot be loaded for these devices."""


@dataclass(frozen=True)
class SerializedExecutable:
    """A serialized executable, the ids of the devices that it was compiled for, and its arguments' and results' trees."""

    data: bytes
    devices: tuple[int, ...]
    in_tree: Any
    out_tree: Any


def serialize(
    executable: jax.stages.Compiled, devices: Sequence[jax.Device]
) -> SerializedExecutable:
    """Serializes an executable that this process compiled for these devices; a loaded one has lost its kernels.

    Raises SerializationError.
    """
    if devices[0].platform not in PLATFORMS:
        raise SerializationError(f"not on {devices[0].platform}")
    try:
        data, *trees = serialize_executable.serialize(executable)
    except FAILURES as error:
        raise SerializationError(str(error)) from error
    return SerializedExecutable(data, tuple(device.id for device in devices), *trees)


def deserialize(
    serialized: SerializedExecutable, devices: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """Loads the executable for these devices, in a twentieth of a compilation's time. Raises SerializationError."""
    try:
        moved = dict(zip(serialized.devices, devices, strict=True))
        unloaded, arguments, no_kwargs = Loader(serialized.data, moved).load()
        executable = jax.stages.Compiled(
            unloaded.load(),
            [],
            serialized.in_tree.unflatten(arguments),
            serialized.out_tree,
            no_kwargs=no_kwargs,
        )
        held = executable.runtime_executable().local_devices()
    except FAILURES as error:
        raise SerializationError(str(error)) from error
    if set(held) != set(devices):
        raise SerializationError(f"it was loaded for {held}")
    return executable


class Loader(Unpickler):
    """Unpickles an executable for other devices; `moved`: id of a device it was compiled for -> its replacement."""

    def __init__(self, data: bytes, moved: Mapping[int, jax.Device]):
        from jax._src import compiler

        devices = tuple(moved.values())
        super().__init__(io.BytesIO(data), devices[0].client, devices)
        self.devices_by_id = dict(moved)
        assignment = np.array([[device.id for device in devices]])
        self.options = compiler.get_compile_options(1, len(devices), assignment)

    def persistent_load(self, name: tuple) -> Any:
        if name[0] != "exec":
            return super().persistent_load(name)
        return self.backend.deserialize_executable(name[1], self.execution_devices, self.options)


class ExecutableCache:
    """A folder of serialized executables, each under a digest of its compile inputs; without a folder, an empty cache.

    Only folders that nobody else can write to are safe: loading an executable may run any code, as
    with JAX's own compilation cache.
    """

    def __init__(self, folder: Path | None = None, is_writable: bool = True):
        self.folder, self.is_writable = folder, is_writable
        self.found: dict[str, float | None] = {}

    def path(self, lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Path:
        """The file of this program's executable."""
        # The text does not have the arguments that the program ignores, as plain decoding ignores a drafter's weights.
        arguments = [
            (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype))
            for path, leaf in jax.tree.leaves_with_path(lowered.args_info)
        ]
        return self.folder / digest(
            *machine(), sorted(options.items()), lowered.as_text(), arguments
        )

    def get(
        self,
        lowered: jax.stages.Lowered,
        options: Mapping[str, Any],
        devices: Sequence[jax.Device],
    ) -> tuple[jax.stages.Compiled, SerializedExecutable, float] | None:
        """The executable for these devices, if it is cached and can be loaded, and the seconds that compiling it took."""
        path = self.path(lowered, options) if self.folder else None
        if path is None or not path.exists():
            return None
        try:
            head, _, data = path.read_bytes().partition(b"\n")
            with contextlib.suppress(OSError):
                os.utime(path)  # files are pruned by their last use
            facts = json.loads(head)
            serialized = SerializedExecutable(
                data, tuple(facts["devices"]), lowered.in_tree, lowered.out_tree
            )
            return deserialize(serialized, devices), serialized, float(facts["seconds"])
        except (SerializationError, OSError, ValueError, TypeError, KeyError) as error:
            log.info("%s cannot be loaded, and is compiled again: %s", path, error)
            return None

    def put(
        self,
        lowered: jax.stages.Lowered,
        options: Mapping[str, Any],
        serialized: SerializedExecutable,
        seconds: float,
    ) -> None:
        """Stores the executable, and the seconds that compiling it took."""
        if self.folder:
            facts = {"devices": serialized.devices, "seconds": round(seconds, 3)}
            head = json.dumps(facts).encode()
            self.write(self.path(lowered, options), head + b"\n" + serialized.data)

    def seconds(self, key: str) -> float | None:
        """Seconds that an earlier run took to compile the program of this key; None when none did.

        `key` names a program and the shapes of its weights. It only approximates the executable's
        digest: with the same files of the package and the same versions, one key may still stand
        for different programs.
        """
        if self.folder and key not in self.found:
            try:
                self.found[key] = float(self.note_path(key).read_text())
            except (OSError, ValueError):
                self.found[key] = None
        return self.found.get(key)

    def note(self, key: str, seconds: float) -> None:
        """Stores the seconds of a compilation for later runs; its executable is in this folder or in JAX's own cache."""
        if self.folder:
            self.write(self.note_path(key), f"{seconds:.3f}".encode())

    def write(self, path: Path, content: bytes) -> None:
        """Writes a file atomically, and makes its folder; after the first failure nothing more is written."""
        if not self.is_writable:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            self.is_writable = False
            log.warning(UNWRITABLE, self.folder, error.strerror or error)

    def note_path(self, key: str) -> Path:
        """The file with the seconds of a compilation."""
        return self.folder / SECONDS / digest(*machine(), sources(), key)


def digest(*basis: Any) -> str:
    """A file name for these values."""
    return hashlib.sha256(repr(basis).encode()).hexdigest()


def machine() -> tuple[str | None, ...]:
    """The versions, hardware and flags that an executable is bound to, besides its program and XLA's options."""
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
    """Why a folder, which is made when it is missing, cannot be written; empty when it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(folder / "probe") as temporary:
            temporary.write_bytes(b"0" * PROBE_BYTES)
        (folder / "probe").unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def prune(folder: Path, now: float) -> None:
    """Deletes files unused for MAX_AGE_S, then the least recently used ones until MOST_BYTES are left.

    `now` is in seconds of time.time. Other processes may prune, read or write at the same time: each file
    exists whole or not at all.
    """
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may have deleted it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append((max(status.st_mtime, status.st_atime), status.st_size, path))
    left = MOST_BYTES
    for used, size, path in sorted(files, key=lambda file: file[0], reverse=True):
        left -= size
        is_abandoned = path.suffix == atomic.TEMPORARY and now - used > ABANDONED_S
        if left < 0 or now - used > MAX_AGE_S or is_abandoned:
            with contextlib.suppress(OSError):
                path.unlink()


def folder_of(folder: str) -> Path:
    """The folder of rollout.compile_cache; "": the default one."""
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "tlt_jax" / "xla"


def use_compile_cache(folder: str) -> ExecutableCache:
    """Turns on JAX's persistent compilation cache in `folder` ("": the default one, "off": none), and prunes it.

    The returned cache of the rollout's executables is a subfolder of it. A folder that cannot be written is only read, or
    not used when it cannot be read either, with one warning.
    """
    if folder == "off":
        return ExecutableCache()
    path = folder_of(folder)
    if reason := unwritable(path):
        log.warning(UNWRITABLE, path, reason)
        if not os.access(path, os.R_OK | os.X_OK):
            return ExecutableCache()
    else:
        prune(path, time.time())
    if jax.config.jax_compilation_cache_dir != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        compilation_cache.reset_cache()  # JAX decides at its first compilation whether to use a cache
    # JAX writes what compiled for at least this long: everything, or nothing.
    least = NEVER_S if reason else 0.0
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return ExecutableCache(path / "rollout", is_writable=not reason)
