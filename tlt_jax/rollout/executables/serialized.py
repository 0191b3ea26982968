"""Executables as bytes, loaded for the devices of any data group.

The only file that knows how JAX serializes executables, and that uses JAX's private functions to load
them for other devices than they were compiled for.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

Unpickler = getattr(serialize_executable, "_JaxPjrtUnpickler", object)
PLATFORMS = ("cpu", "cuda", "gpu")  # a TPU's executable is bound to the places of its chips
# Errors of backends or JAX versions that cannot serialize or load, and of damaged files.
FAILURES = (
    ImportError, AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError, KeyError,
    EOFError, pickle.UnpicklingError,
)  # fmt: skip


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
