"""Triton kernels without a GPU: in Triton's interpreter, and as what Triton compiles them to for an H200."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels.fused import COSTS, Fused

FUSED = Fused(make_mesh(1, 1), 90, frozenset(COSTS))  # of an H200
REASON = "Triton, jax-triton: Python 3.12 and the gpu extra"
LETTERS = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "int8": "i8",
    "bool": "i1",
    "int32": "i32",
    "uint32": "u32",
}


def interpreted(
    name: str, calls: Sequence[tuple[tuple, dict[str, Any]]], is_reversed: bool = False
) -> list[Any]:
    """The results, as NumPy arrays, of function `name` (module:function) for each (arguments, keywords).

    Its kernels run in Triton's interpreter, in a separate process; their programs one by one, from the first to the last
    unless `is_reversed`.
    """
    for module in ("triton", "jax_triton"):
        pytest.importorskip(module, reason=REASON)
    script = Path(__file__).with_name("triton_interpreter.py")
    given = pickle.dumps((name, list(calls), is_reversed))
    done = subprocess.run([sys.executable, script], input=given, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


class Kernel(NamedTuple):
    """A kernel of a call: its name, and its source and options as Triton's compiler takes them."""

    name: str
    source: Any
    options: dict[str, Any]


def kernels(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *arrays: Any
) -> list[Kernel]:
    """The kernels that the function calls for such arrays (their values do not matter)."""
    jax_triton = pytest.importorskip("jax_triton", reason=REASON)
    from triton.compiler import ASTSource

    made = []

    def call(
        *arrays, kernel, out_type, backend_options, num_warps, num_stages, name="",
        input_output_aliases=None, **given
    ):  # fmt: skip
        aliased = {*(input_output_aliases or {}).values()}
        results = enumerate(jax.tree.leaves(out_type))
        leaves = [*arrays, *(leaf for place, leaf in results if place not in aliased)]
        names = kernel.arg_names
        signature = dict.fromkeys(names, "constexpr") | {
            name: f"*{LETTERS[leaf.dtype.name]}" for name, leaf in zip(names, leaves, strict=False)
        }
        constants = {name: given[name] for name in names if name in given}
        aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(leaves))}
        options = {"num_warps": num_warps, "num_stages": num_stages, **backend_options}
        made.append(Kernel(name, ASTSource(kernel, signature, constants, aligned), options))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out_type)

    monkeypatch.setattr(jax_triton, "triton_call", call)
    jax.eval_shape(function, *arrays)
    return made


def compiled(kernel: Kernel) -> Any:
    """The kernel as Triton compiles it for compute capability 9.0: `asm["ptx"]`, `asm["cubin"]`, `metadata.shared`."""
    import triton

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(kernel.source, target=target, options=kernel.options)


def resource_usage(kernel: Kernel, folder: Path) -> str:
    """What cuobjdump says of its registers, stack and shared memory; " STACK:0 " and " LOCAL:0 " without spills."""
    import triton

    (folder / "code").write_bytes(compiled(kernel).asm["cubin"])
    return subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", folder / "code"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
