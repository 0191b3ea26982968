"""Devices that this machine does not have, and the bandwidth of each kind."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from tlt_jax.errors import ConfigError

INSTALL = 'pip install -e ".[gpu-aot]"'
HOST = 8  # GPUs of a host
# The share of a GPU's memory that XLA's allocator takes, and so the share that a run can use.
FRACTIONS, FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"), "0.75"


@dataclass(frozen=True)
class GPU:
    """A GPU with 132 multiprocessors of compute capability 9.0: memory in bytes, as CUDA reports it, bandwidth in bytes/s."""

    name: str
    memory: int
    bandwidth: int


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", int(79.1 * 2**30), 3_350_000_000_000),
    "h200": GPU("NVIDIA H200", int(139.7 * 2**30), 4_800_000_000_000),
}
# XLA's GpuTargetConfigProto. Limits: CUDA's table for compute capability 9.0. Software versions: the oldest of CUDA 13;
# without versions XLA leaves loops, library calls and custom calls out of CUDA graphs.
DESCRIPTION = """
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  pcie_bandwidth: 64000000000
  l2_cache_size: 52428800
  ecc_enabled: true
  device_address_bits: 64
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
"""
# What libtpu asks its host for, and prints about when nobody knows: a topology that is given by name does not depend on it.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
NEEDED = ("device_memory_size", "driver_version", "runtime_version")


@dataclass(frozen=True)
class Topology:
    """Device descriptions; `memory`: bytes of a device that a run can use; `bandwidth`: bytes a second of its memory.

    Both are None where the device kind determines them.
    """

    devices: Sequence[Any]
    memory: int | None = None
    bandwidth: float | None = None


def is_gpu(name: str) -> bool:
    """Whether the name is one of GPUs: h200:8, or FILE.txtpb:8."""
    kind = name.rpartition(":")[0]
    return kind in GPUS or kind.endswith(".txtpb")


def describe(name: str) -> Topology:
    """The devices of a topology: v5p:4x4x4, h200:8, or FILE.txtpb:8 with XLA's description of another GPU.

    Raises ConfigError when it is unknown, or its compiler is not installed.
    """
    if is_gpu(name):
        return gpus(name)
    if re.match(r"v\d", name):
        return Topology(tpus(name))
    raise ConfigError(
        f"--topology {name}: name GPUs and how many, such as h200:8 (known are {', '.join(GPUS)}; for another "
        "FILE.txtpb:8, with XLA's description of it), or a TPU topology, such as v5p:4x4x4"
    )


def gpus(name: str) -> Topology:
    """The topology of GPUs on hosts of 8."""
    kind, _, count = name.rpartition(":")
    number = int(count) if count.isdecimal() else 0
    if not number or (number > HOST and number % HOST):
        raise ConfigError(f"--topology {name}: {count!r} GPUs: give 1 to {HOST}, or a multiple")
    text = DESCRIPTION.format(**vars(GPUS[kind])) if kind in GPUS else description(Path(kind))
    check_plugin(name)
    from jax.experimental import topologies

    shape = f"{max(number // HOST, 1)}x1x{min(number, HOST)}"
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=text, topology=shape
        ).devices
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--topology {name}: {reason}") from error
    check_compiler(name, found[0])
    memory = usable(int(re.search(r"device_memory_size:\s*(\d+)", text)[1]))
    bandwidth = re.search(r"memory_bandwidth:\s*(\d+)", text)
    return Topology(found, memory, float(bandwidth[1]) if bandwidth else None)


def description(path: Path) -> str:
    """The text of a file with a GpuTargetConfigProto, as `--xla_dump_to` writes it in a run on the GPU.

    Raises ConfigError when it cannot be read, or lacks a field that CUDA graphs depend on.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--topology {path}: cannot be read: {error}") from error
    for field in NEEDED:
        if not re.search(rf"\b{field}\s*:", text):
            raise ConfigError(f"--topology {path}: {field} is missing: add it to gpu_device_info")
    return text


def check_plugin(name: str) -> None:
    """Raises ConfigError when JAX's plugin for GPUs is missing, or of another version."""
    try:
        plugin = version("jax-cuda13-plugin")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"--topology {name}: jax-cuda13-plugin, which compiles for GPUs, is not installed: {INSTALL}"
        ) from error
    jaxlib = version("jaxlib")
    if plugin.split(".")[:3] != jaxlib.split(".")[:3]:
        raise ConfigError(
            f"--topology {name}: jax-cuda13-plugin is {plugin} and jaxlib {jaxlib}: {INSTALL} brings its version"
        )


def check_compiler(name: str, device: Any) -> None:
    """Raises ConfigError when XLA does not find ptxas or libdevice, which it needs to compile for a GPU."""
    import jax

    number = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(jax.numpy.sin).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition(". ")[0]
        raise ConfigError(
            f"--topology {name}: {reason}: {INSTALL} brings what is missing"
        ) from error


def usable(memory: int) -> int:
    """Bytes of a GPU's `memory` that XLA's allocator takes; the rest is for CUDA, its graphs and NCCL."""
    name = next((name for name in FRACTIONS if os.environ.get(name)), FRACTIONS[0])
    text = os.environ.get(name) or FRACTION
    try:
        return int(memory * float(text))
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}: give a fraction such as {FRACTION}") from error


def tpus(name: str) -> Sequence[Any]:
    """The devices of a TPU topology. Raises ConfigError when libtpu does not know it."""
    os.environ |= QUIET | dict(os.environ)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--topology {name}: {reason}: name one such as v5p:2x2x2, and install tlt_jax[tpu]"
        ) from error


# Published bytes a second of a device, by its kind.
TPUS = {
    "TPU v4": 1.2e12, "TPU v5 lite": 0.82e12, "TPU v5e": 0.82e12, "TPU v5": 2.77e12, "TPU v5p": 2.77e12,
    "TPU v6 lite": 1.64e12, "TPU v6e": 1.64e12,
}  # fmt: skip
BANDWIDTHS = TPUS | {gpu.name: float(gpu.bandwidth) for gpu in GPUS.values()}


def moved(compiled: jax.stages.Compiled) -> float:
    """Bytes that one device reads and writes in a pass through the program, by XLA's count; each loop counts as one pass."""
    found = compiled.cost_analysis()
    if found is None:  # of a program for devices that are not here
        from jax._src.lib import _jax  # no public access to the count of an HLO module

        module = compiled.runtime_executable().hlo_modules()[0]
        found = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return found["bytes accessed"]


def has_counted_loop(hlo: str) -> bool:
    """Whether a program has a loop of more than one pass whose number XLA knows, so that `moved` is too low."""
    return '"known_trip_count":{"n":"' in hlo.replace('"known_trip_count":{"n":"1"', "")
