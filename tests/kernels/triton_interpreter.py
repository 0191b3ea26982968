"""Runs a function's kernels in Triton's interpreter, on NumPy, in a separate process: Triton chooses it at import.

Reads, pickled, the function's name (module:function), the arguments of its calls, and whether the programs of a kernel run in
reversed order; calls it with all kernels as `fused`, and writes the list of the function's results.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading

os.environ["TRITON_INTERPRET"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_triton  # noqa: E402
import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tlt_jax.distributed.mesh import make_mesh  # noqa: E402
from tlt_jax.kernels import product_parts  # noqa: E402
from tlt_jax.kernels.fused import COSTS, Fused  # noqa: E402

ALONE = threading.Lock()  # the interpreter, which a program's callbacks enter from several threads
EXACT_DOT = interpreter.InterpreterBuilder.create_dot


class Pointer:
    """An array as the interpreter takes it."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """A bfloat16 array, whose bits the interpreter stores as integers, in float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def dot(builder, a, b, *rest):
    """A product that accumulates in float32, of bfloat16 too."""
    return EXACT_DOT(builder, widened(a), widened(b), *rest)


def unwritten(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """A result before the kernel runs: NaN, or a large integer."""
    if np.issubdtype(leaf.dtype, np.integer):
        return np.full(leaf.shape, np.iinfo(leaf.dtype).max // 3, leaf.dtype)
    return np.full(leaf.shape, np.nan, leaf.dtype)


def call(
    *arrays, kernel, out_type, grid, num_warps, num_stages, input_output_aliases=None, **given
):
    """Replaces `jax_triton.triton_call`."""
    names, aliases = kernel.arg_names, input_output_aliases or {}

    def run(*arrays):
        leaves, tree = jax.tree.flatten(out_type)
        arrays, results = [*map(np.asarray, arrays)], [*map(unwritten, leaves)]
        for source, place in aliases.items():
            arrays[source] = results[place] = arrays[source].copy()
        own = [array for place, array in enumerate(results) if place not in aliases.values()]
        pointers = [Pointer(array) for array in (*arrays, *own)]
        with ALONE:
            kernel[grid](*pointers, **{name: given[name] for name in names if name in given})
        return jax.tree.unflatten(tree, results)

    return jax.pure_callback(run, out_type, *arrays)


def from_the_last(*place: int) -> None:
    """Sets the program that runs next, as the interpreter does, but from the last to the first."""
    builder = interpreter.interpreter_builder
    builder.grid_idx = tuple(size - 1 - i for size, i in zip(builder.grid_dim, place, strict=True))


if __name__ == "__main__":
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.GridExecutor._init_args_hst = lambda executor, arrays, sizes: (arrays, sizes)
    interpreter.GridExecutor._restore_args_dev = lambda *same: None
    jax_triton.triton_call = call
    product_parts.LEAST_MATRIX = 0  # matrices of tests are small
    name, calls, is_reversed = pickle.load(sys.stdin.buffer)
    calls = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, calls)
    if is_reversed:
        interpreter.interpreter_builder.set_grid_idx = from_the_last
    module, _, function = name.partition(":")
    module = importlib.import_module(module)
    run = getattr(module, function)
    fused = Fused(make_mesh(1, 1), 90, frozenset(COSTS))
    found = []
    for args, keywords in calls:
        if (sizes := keywords.pop("chosen", None)) is not None:
            module.chosen = lambda *product, sizes=sizes, **more: sizes
        found.append(run(*args, fused=fused, **keywords))
    found = jax.tree.map(np.asarray, found)
    pickle.dump(found, sys.stdout.buffer)
