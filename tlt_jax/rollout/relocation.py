"""An executable of one data group's devices loaded for another group's; the only file that knows how JAX does that."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

# JAX serializes executables in its experimental module, and loads them for the devices that they
# were compiled for: the classes and options that load them for others are not public.
Unpickler = getattr(serialize_executable, "_JaxPjrtUnpickler", None)
PLATFORMS = ("cpu", "cuda", "gpu")  # a TPU's executable knows where its chips lie


class RelocationError(Exception):
    """This executable, backend or version of JAX cannot be loaded for other devices."""


def relocated(
    executable: jax.stages.Compiled, devices: Mapping[jax.Device, jax.Device]
) -> jax.stages.Compiled:
    """The executable for other devices: `devices` maps each that it was compiled for to its own.

    Takes a twentieth of a compilation. Raises RelocationError where it cannot be done; then nothing
    has happened.
    """
    platform = next(iter(devices)).platform
    if Unpickler is None or platform not in PLATFORMS:
        raise RelocationError(f"not on {platform}, or not with JAX {jax.__version__}")
    try:
        payload, inputs, outputs = serialize_executable.serialize(executable)
        unloaded, arguments, has_no_keywords = Loader(io.BytesIO(payload), devices).load()
        loaded = jax.stages.Compiled(
            unloaded.load(),
            [],
            inputs.unflatten(arguments),
            outputs,
            no_kwargs=has_no_keywords,
        )
        held = set(loaded.runtime_executable().local_devices())
    except (
        ImportError,
        AttributeError,
        NotImplementedError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        raise RelocationError(str(error)) from error

    if held != set(devices.values()):
        raise RelocationError(f"it was loaded for {held}")
    return loaded


def compile_options(devices: Mapping[jax.Device, jax.Device]) -> Any:
    """XLA's options with the devices of one replica of the program."""
    from jax._src import compiler

    assignment = np.array([[device.id for device in devices.values()]])
    return compiler.get_compile_options(1, len(devices), assignment)


class Loader(Unpickler or object):
    """Reads what this process serialized, with other devices."""

    def __init__(self, payload: io.BytesIO, devices: Mapping[jax.Device, jax.Device]):
        others = tuple(devices.values())
        super().__init__(payload, others[0].client, others)
        self.devices_by_id = {one.id: other for one, other in devices.items()}
        self.options = compile_options(devices)

    def persistent_load(self, name: tuple) -> Any:
        if name[0] == "exec":
            backend, devices = self.backend, self.execution_devices
            return backend.deserialize_executable(name[1], devices, self.options)
        return super().persistent_load(name)
