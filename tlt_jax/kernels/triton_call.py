"""Calls a Triton kernel inside a JAX program. Import it only where it is called: Triton is not always installed."""

from __future__ import annotations

import inspect
from typing import Any

import jax_triton
from jax_triton import triton_lib
from jaxtyping import Array, PyTree

# The dead code rule of jax-triton 0.4.1 takes two arguments; jax 0.12 passes three.
RULES, CALL = triton_lib.pe.dce_rules, triton_lib.triton_kernel_call_p
if len(inspect.signature(RULES[CALL]).parameters) == 2:
    RULES[CALL] = lambda used, *rest, rule=RULES[CALL]: rule(used, rest[-1])

OPTIONS = {
    # PTX 8.6, of CUDA 12.7: XLA's ptxas may not read the newest version that Triton writes.
    "ptx_version": 86,
    # Products are added in one rounding. Triton 3.10 changes the default, and so would bits.
    "enable_fp_fusion": True,
}


def call(*arrays: Array, capability: int, **given: Any) -> PyTree[Array]:
    """`jax_triton.triton_call` for this compute capability (90 for 9.0), with OPTIONS."""
    return jax_triton.triton_call(
        *arrays, compute_capability=capability, backend_options=OPTIONS, **given
    )
