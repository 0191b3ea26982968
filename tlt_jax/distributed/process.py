"""The process environment that JAX reads when it makes its devices; imports no JAX itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Mapping

from tlt_jax.config.schema import Config
from tlt_jax.errors import ConfigError

# Variables with the number of processes, set for each of them by us, Slurm's srun or Open MPI.
PROCESSES = ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
COUNT = "--xla_force_host_platform_device_count"
# Where NVIDIA's driver shows a GPU, as JAX looks for one.
NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
# XLA flags of every run that may find accelerators; flags of the environment override them.
# - Data groups run programs on their own devices, and all devices programs together. NCCL communicators that are split
#   from one another have deadlocked in this order (openxla/xla 15935, 36981, 39372): each is created separately.
# - A chunk of rounds is a loop. By default each round is a CUDA graph that the host launches and waits for; with WHILE
#   added to XLA's default command types, a chunk on one GPU is one graph that holds the loop and all of its kernels (for an
#   H200, plain and with trees, jax 0.10.2 and 0.11.2). Drivers too old for it get the default.
# - COLLECTIVES would capture collectives too, but hangs are reported (marin 5675, 8277): without it the host launches
#   the rounds of tensor-parallel groups in parts, between collectives.
# TPUs need no flags: their programs' collectives lie on rectangles of the mesh, and async collectives are the default.
ACCELERATOR_FLAGS = (
    "--xla_gpu_enable_nccl_comm_splitting=false",
    "--xla_gpu_enable_command_buffer=+WHILE",
)
# Flags of runs with rollout.deterministic: sums in a fixed order, and no autotuning of kernels.
DETERMINISTIC_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")


def processors() -> Collection[int]:
    """Numbers of the host's processors that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)


def set_environment(config: Config) -> None:
    """Sets fake devices, XLA flags and 64-bit numbers; call before JAX makes its devices.

    A process that has made its devices keeps them: ConfigError when there are too few.
    """
    skip_warnings()
    flags = os.environ.get("XLA_FLAGS", "").split()
    if config.mesh.fake_devices:
        flags = [flag for flag in flags if not flag.startswith(COUNT)] + [
            f"{COUNT}={config.mesh.fake_devices}"
        ]
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = " ".join(flags)
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        set_accelerator_flags(config)
    wide = "float64" in (config.model.param_dtype, config.model.compute_dtype)
    jax = sys.modules.get("jax")
    if jax is None:
        os.environ.update({"JAX_ENABLE_X64": "1"} if wide else {})
        return
    jax.config.update("jax_enable_x64", wide or jax.config.jax_enable_x64)
    if config.mesh.fake_devices:
        jax.config.update("jax_platforms", "cpu")
        has_devices = sys.modules["jax._src.xla_bridge"].backends_are_initialized()
        if has_devices and config.mesh.fake_devices > jax.device_count():
            raise ConfigError(
                f"mesh.fake_devices {config.mesh.fake_devices}, but JAX has made {jax.device_count()} devices: set the "
                "environment before it does"
            )


def skip_warnings() -> None:
    """Turns off what libraries would say of software that this process does not need; call before JAX makes its devices."""
    # Only the tokenizers of transformers are used; it would warn that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Without a GPU, JAX's plugin for GPUs (gpu-aot) would print a traceback: it finds no cuDNN.
    if not any(map(os.path.exists, NVIDIA)):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def set_accelerator_flags(config: Config) -> None:
    """Adds the flags for accelerators to XLA_FLAGS, except those already set; call before JAX makes its devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.partition("=")[0] for flag in flags}
    wanted = ACCELERATOR_FLAGS + DETERMINISTIC_FLAGS * config.rollout.deterministic
    flags += [flag for flag in wanted if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join(flags)


def refuse_many(environment: Mapping[str, str]) -> None:
    """Raises ConfigError when this process was started as one of several."""
    for name in PROCESSES:
        if environment.get(name, "1") != "1":
            raise ConfigError(
                f"{name} is {environment[name]}: this command runs as one process, and only python -m tlt_jax.train "
                "as many: start it once"
            )


def share_devices(config: Config, processes: int) -> None:
    """Divides the configuration's fake devices equally among the processes.

    Raises ConfigError when they do not divide.
    """
    devices = config.mesh.fake_devices
    if not devices:
        return
    if devices % processes:
        raise ConfigError(
            f"mesh.fake_devices {devices} cannot be shared by {processes} processes: make it a multiple"
        )
    flags = os.environ["XLA_FLAGS"].replace(f"{COUNT}={devices}", f"{COUNT}={devices // processes}")
    os.environ["XLA_FLAGS"] = flags


class Preemption:
    """Context that catches SIGTERM; `requested` (also the result of a call) is True once it has arrived."""

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
