"""Compares the attention of this device's library with attention in blocks; exits with 1 if they differ.

Both get the same numbers in bfloat16; the blocks compute in float32. `tests/kernels/test_library_attention.py` calls it.
"""

from __future__ import annotations

import os
import sys

for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # of a test on the CPU
    os.environ.pop(name, None)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from tlt_jax.distributed.mesh import make_mesh  # noqa: E402
from tlt_jax.kernels import packed_attention  # noqa: E402

T, K, G = 2048, 2, 3
ROWS = [[2048], [1000, 600, 300], [200] * 10, [90] * 16]
LARGEST = 0.02  # of the error, as a share of what is right; bfloat16 has 8 bits


def slopes(given: tuple, segments: jax.Array, mesh) -> tuple:
    """Values and gradients, at tokens."""
    is_token = (segments > 0)[:, :, None, None, None]

    def total(given):
        mixed = packed_attention.attend(*given, segments, 128, mesh=mesh).astype(jnp.float32)
        return jnp.sum(jnp.where(is_token, mixed**2, 0)), jnp.where(is_token, mixed, 0)

    gradient, mixed = jax.jit(jax.grad(jax.checkpoint(total), has_aux=True))(given)
    return mixed, *gradient


def main() -> int:
    """Exit code 0 when values and gradients agree."""
    mesh = make_mesh(1, 1, jax.devices()[:1])
    segments = np.zeros((len(ROWS), T), np.int32)
    for row, lengths in zip(segments, ROWS, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    worst = 0.0
    for width in (64, 128):
        used = packed_attention.form(mesh, jnp.dtype("bfloat16"), width, False)
        if used == packed_attention.BLOCKS:
            print(f"{jax.devices()[0].device_kind} has no library's attention: run where one is")
            return 1
        random, B = np.random.default_rng(0), len(ROWS)
        shapes = (B, T, K, G, width), (B, T, K, width), (B, T, K, width)
        given = tuple(jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes)
        found = slopes(given, jnp.asarray(segments), mesh)
        with jax.default_matmul_precision("highest"):
            wide = jax.tree.map(lambda array: array.astype(jnp.float32), given)
            expected = slopes(wide, jnp.asarray(segments), None)
        for name, one, other in zip(
            ("values", "of queries", "of keys", "of values"), found, expected, strict=True
        ):
            one, other = np.asarray(one, np.float32), np.asarray(other)
            error = np.linalg.norm(one - other) / np.linalg.norm(other)
            worst = max(worst, error if np.isfinite(one).all() else np.inf)
            print(f"{used}, width {width}, {name}: off by {error:.4f}")
    return 0 if worst < LARGEST else 1


if __name__ == "__main__":
    sys.exit(main())
