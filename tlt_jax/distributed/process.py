"""The process environment that JAX reads when it makes its devices; imports no JAX itself."""

from __future__ import annotations

import os
import signal
import sys

from tlt_jax.config import Config
from tlt_jax.errors import ConfigError

COUNT = "--xla_force_host_platform_device_count"


def set_environment(config: Config) -> None:
    """Fake devices, XLA flags, matrix precision and 64-bit numbers of the configuration; call before JAX makes devices.

    A process that has made its devices keeps them: ConfigError when they are too few.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if config.mesh.fake_devices:
        flags = [flag for flag in flags if not flag.startswith(COUNT)] + [
            f"{COUNT}={config.mesh.fake_devices}"
        ]
        os.environ["JAX_PLATFORMS"] = "cpu"
    flags += [flag for flag in config.mesh.xla_flags.split() if flag not in flags]
    if flags:
        os.environ["XLA_FLAGS"] = " ".join(flags)
    wide = "float64" in (config.model.param_dtype, config.model.compute_dtype)
    precision = config.model.matmul_precision
    jax = sys.modules.get("jax")
    if jax is None:
        os.environ.update({"JAX_ENABLE_X64": "1"} if wide else {})
        os.environ.update(
            {"JAX_DEFAULT_MATMUL_PRECISION": precision} if precision != "default" else {}
        )
        return
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)
    jax.config.update("jax_enable_x64", wide or jax.config.jax_enable_x64)
    if config.mesh.fake_devices:
        jax.config.update("jax_platforms", "cpu")
        if config.mesh.fake_devices > jax.device_count():
            raise ConfigError(
                f"mesh.fake_devices {config.mesh.fake_devices}, but JAX has made {jax.device_count()} devices: set the "
                "environment before it does"
            )


class Preemption:
    """Context that turns SIGTERM into a claim to look at: `requested` is True once the signal has come."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> Preemption:
        self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def __call__(self) -> bool:
        return self.requested

    def _note(self, *_) -> None:
        self.requested = True
