"""Which fused kernels, in Triton on NVIDIA GPUs, the programs of a mesh have; and how a kernel is made and called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from tlt_jax.distributed.mesh import is_gpu

try:
    import triton
    import triton.language as tl
except ImportError:  # of the extra `gpu`, for Python 3.12 and newer
    triton = tl = None

log = logging.getLogger(__name__)

OLDEST = {"jax": (0, 11), "jax-triton": (0, 4, 1), "triton": (3, 7)}
AMPERE = 8  # major compute capability; the first with bfloat16 products
INSTALL = 'with Python 3.12 or newer, pip install -U -e ".[gpu]"'
OPTIONS = {
    # PTX 8.6, of CUDA 12.7: XLA's ptxas may not read the newest version that Triton writes.
    "ptx_version": 86,
    # Products are added in one rounding. Triton 3.10 changes the default, and so would bits.
    "enable_fp_fusion": True,
}

ATTENTION, CACHE_ROWS, FILTER = "tree_attention", "cache_rows", "token_filter"
HEADS, ADDED, GATED = "projections.heads", "projections.added", "projections.gated"
PART_HEADS, PART_ADDED = "product_parts.heads", "product_parts.added"
EXPERTS, FEW_EXPERTS = "experts", "experts.few"
OF_EXPERTS = frozenset((EXPERTS, FEW_EXPERTS))
# The kernels, each with what XLA's operations cost in its place.
COSTS = {
    ATTENTION: "about 6 more launches a layer, which store the scores of all slots",
    CACHE_ROWS: "1 more launch a layer",
    FILTER: "about 20 more launches a round",
    HEADS: "about 4 more launches a layer",
    ADDED: "about 2 more launches a layer",
    GATED: "about 2 more launches a layer",
    PART_HEADS: "1 to 4 more launches a layer",
    PART_ADDED: "2 more launches a layer",
    EXPERTS: "loops over the experts of a layer, which the host drives",
    FEW_EXPERTS: "11 more launches a layer, which sort its tokens",
}
# A kernel saves one or two others, of about 3.8 us each on an H200 (2026-11-26). XLA's products read a large matrix at 0.86 of
# the speed of a copy, and ours are not measured: they take matrices whose reading costs no more than two kernels, 24 MiB (7 us
# at 3.6 TB/s); product_parts takes larger ones.
MOST_MATRIX = 24 << 20


@dataclass(frozen=True)
class Fused:
    """The fused kernels of the programs of one mesh, by name: those that are `on` run where their shapes allow.

    `capability`: the compute capability of the GPUs, 90 for 9.0; None where none can run. Programs are made for one value.
    """

    mesh: Mesh
    capability: int | None = None
    on: frozenset[str] = frozenset()

    @classmethod
    def of(cls, mesh: Mesh) -> Fused:
        """All kernels where the devices and the installed versions run them, else none. Logs once why a GPU has none."""
        found = capability(mesh)
        return cls(mesh, found, frozenset(() if found is None else COSTS))

    def call(self, *arrays: Array, **given: Any) -> PyTree[Array]:
        """`jax_triton.triton_call` for these devices, with OPTIONS."""
        return binding().triton_call(
            *arrays, compute_capability=self.capability, backend_options=OPTIONS, **given
        )


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.jit`; without Triton, the function, which nothing calls."""
    return triton.jit(function) if triton else function


def constant(number: float) -> Any:
    """A number that kernels read from their module."""
    return tl.constexpr(number) if triton else number


@cache
def binding() -> Any:
    """jax_triton, which takes longer to import than Triton."""
    import jax_triton
    from jax_triton import triton_lib

    # The dead code rule of jax-triton 0.4.1 takes two arguments; jax 0.12 passes three.
    rules, primitive = triton_lib.pe.dce_rules, triton_lib.triton_kernel_call_p
    if len(inspect.signature(rules[primitive]).parameters) == 2:
        rules[primitive] = lambda used, *rest, rule=rules[primitive]: rule(used, rest[-1])
    return jax_triton


def capability(mesh: Mesh) -> int | None:
    """The compute capability of a GPU mesh (90 for 9.0) on which Triton kernels run; None where XLA's operations run."""
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
        parts = found.split("+")[0].split(".")[:3]  # (0, 12, 0) of 0.12.0.dev1
        if tuple(int(part) for part in parts if part.isdecimal()) < oldest:
            return f"{package} is {found}, they need {needed} or newer: {INSTALL}"
    return None


@cache
def say(reason: str) -> None:
    """Logs the reason, once in a process."""
    log.warning("decoding runs on XLA alone, without the Triton kernels: %s", reason)
