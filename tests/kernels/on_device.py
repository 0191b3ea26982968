"""Runs a function of this file on the GPU of this machine, in a separate process, since the tests have CPUs.

As a script it reads, pickled, the function's name and its cases, and writes the platform, the capability for kernels, and the
results.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import packed_attention, tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.rollout import bindings
from tlt_jax.spec_decode import sampling
from tlt_jax.spec_decode.interface import Sampling

HIDES_DEVICES = ("JAX_PLATFORMS", "XLA_FLAGS")  # as the tests set them


def on_device(name: str, cases: Sequence[tuple], platforms: Sequence[str] = ("gpu",)) -> list[Any]:
    """What the function computes of each case. It skips the test where the device is of no such platform."""
    environment = {name: os.environ[name] for name in os.environ if name not in HIDES_DEVICES}
    done = subprocess.run(
        [sys.executable, __file__], input=pickle.dumps((name, [*map(tuple, cases)])), capture_output=True, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    platform, capability, results = pickle.loads(done.stdout)
    if platform not in platforms:
        pytest.skip(f"the device is a {platform}, this is for {', '.join(platforms)}")
    assert capability is not None or platform != "gpu", done.stderr.decode()
    return results


def attended(*arrays: np.ndarray, fused: Fused) -> np.ndarray:
    """`tree_attention.attend`."""
    compiled = jax.jit(partial(tree_attention.attend, slots_last=False, fused=fused))
    return np.asarray(compiled(*arrays)[0])


def kept(logits: np.ndarray, top_k: int, top_p: float, *, fused: Fused) -> list[np.ndarray]:
    """Which logits are kept: by the kernels, by XLA, and by the kernels once more."""
    rule = Sampling(1.0, top_k, top_p)
    ours = jax.jit(partial(bindings.filtered, rule=rule, fused=fused))
    xla = jax.jit(partial(sampling.filter, sampling=rule, unrolls=True))
    return [np.asarray(one(logits)) > -np.inf for one in (ours, xla, ours)]


def packed(width: int, *, fused: Fused) -> tuple[str, list[np.ndarray], list[np.ndarray]]:
    """Values and gradients of attention in packed rows, by what runs in bfloat16, which is named, and in float32 in blocks."""
    from kernels.test_packed_attention import operands, segments_of, slopes

    attend = partial(packed_attention.attend, block=128, mesh=fused.mesh)
    form = packed_attention.form(fused.mesh, jnp.dtype("bfloat16"), width, False)
    segments = segments_of([[2048], [1000, 600, 300], [200] * 10, [90] * 16], 2048)
    given = operands(4, 2048, width, "bfloat16")
    with jax.default_matmul_precision("highest"):
        wide = slopes(attend, jax.tree.map(lambda x: x.astype(jnp.float32), given), segments)
    both = slopes(attend, given, segments), wide
    return form, *([np.asarray(x, np.float32) for x in jax.tree.leaves(one)] for one in both)


def layers(*case: Any, fused: Fused) -> list[list[np.ndarray]]:
    """`node_layers.both`."""
    from kernels import node_layers

    return node_layers.both(*case, fused)


def mixes(*arrays: Any, fused: Fused) -> Any:
    """A mix of experts by the kernels of few tokens, and by those of sorted rows with its gradients."""
    from kernels import expert_mixes

    x, ids, gates, matrices, down, _ = arrays
    few = expert_mixes.mixed(x, ids, gates, (np.stack(matrices, 1),), down, fused=fused)
    return jax.device_get((few, expert_mixes.tiled(*arrays, block=16, fused=fused)))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    name, cases = pickle.load(sys.stdin.buffer)
    fused = Fused.of(make_mesh(1, 1))
    found = [globals()[name](*case, fused=fused) for case in cases]
    pickle.dump((jax.default_backend(), fused.capability, found), sys.stdout.buffer)
