"""Whether Triton kernels run on a mesh, by its devices and the installed versions; imports no Triton."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from jax.sharding import Mesh

from tlt_jax.distributed.mesh import is_gpu

log = logging.getLogger(__name__)

OLDEST = {"jax": (0, 11), "jax-triton": (0, 4, 1), "triton": (3, 7)}
AMPERE = 8  # major compute capability; the first with bfloat16 products
INSTALL = 'with Python 3.12 or newer, pip install -U -e ".[gpu]"'


def capability(mesh: Mesh) -> int | None:
    """The compute capability of a GPU mesh (90 for 9.0) on which Triton kernels run; None where XLA's attention runs.

    Logs once in a process why a GPU runs without the kernels.
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
    """Why Triton kernels do not run on a GPU of this compute capability; None when they do."""
    major = compute_capability.partition(".")[0]
    if not major.isdecimal() or int(major) < AMPERE:
        return f"the GPU has compute capability {compute_capability}, they need 8.0 or newer, of NVIDIA"
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
    """Logs the reason, once in a process."""
    log.warning("decoding runs on XLA alone, without the Triton kernels: %s", reason)
