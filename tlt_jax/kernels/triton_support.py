"""Whether Triton kernels run on a mesh, from the devices and the versions that are installed; imports no Triton."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from jax.sharding import Mesh

from tlt_jax.distributed.mesh import is_gpu

log = logging.getLogger(__name__)

OLDEST = {"jax": (0, 11), "jax-triton": (0, 4, 1), "triton": (3, 7)}
AMPERE = 8  # the first with products of bfloat16
INSTALL = 'with Python 3.12 or newer, pip install -U -e ".[gpu]"'


def capability(mesh: Mesh) -> int | None:
    """The compute capability of a GPU mesh (90 for 9.0) on which Triton kernels run; None where XLA's own code does.

    That a GPU does without them, and why, is said once in a process.
    """
    if not is_gpu(mesh):
        return None
    found = str(mesh.devices.flat[0].compute_capability)  # "9.0"; "gfx942" of an AMD GPU
    reason = without(found)
    if reason:
        say(reason)
        return None
    return int(found.replace(".", ""))


def without(compute_capability: str) -> str | None:
    """Why no Triton kernel runs on a GPU of this compute capability, in words; None where they do."""
    major = compute_capability.partition(".")[0]
    if not major.isdecimal() or int(major) < AMPERE:
        return f"the GPU is of compute capability {compute_capability}, they need 8.0 or newer, of NVIDIA"
    for package, oldest in OLDEST.items():
        needed = ".".join(map(str, oldest))
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"{package} {needed} or newer is not installed: {INSTALL}"
        if numbers(found) < oldest:
            return f"{package} is {found}, they need {needed} or newer: {INSTALL}"
    return None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 12, 0) of 0.12.0.dev1."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdecimal())


@cache
def say(reason: str) -> None:
    """Logs it, once in a process."""
    log.warning("attention runs without the Triton kernels, as XLA compiles it: %s", reason)
