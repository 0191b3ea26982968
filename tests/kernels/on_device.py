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
from typing import Any

import jax
import numpy as np
import pytest

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.rollout import bindings
from tlt_jax.spec_decode import sampling
from tlt_jax.spec_decode.interface import Sampling

HIDES_DEVICES = ("JAX_PLATFORMS", "XLA_FLAGS")  # as the tests set them


def on_device(name: str, cases: Sequence[tuple]) -> list[Any]:
    """What the function computes of each case. It skips the test where the device is no GPU."""
    environment = {name: os.environ[name] for name in os.environ if name not in HIDES_DEVICES}
    done = subprocess.run(
        [sys.executable, __file__], input=pickle.dumps((name, [*map(tuple, cases)])), capture_output=True, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    platform, capability, results = pickle.loads(done.stdout)
    if platform != "gpu":
        pytest.skip(f"the device is a {platform}, the kernels are for GPUs")
    assert capability is not None, done.stderr.decode()
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


def layers(*case: Any, fused: Fused) -> list[list[np.ndarray]]:
    """`node_layers.both`."""
    import node_layers

    return node_layers.both(*case, fused)


if __name__ == "__main__":
    name, cases = pickle.load(sys.stdin.buffer)
    fused = Fused.of(make_mesh(1, 1))
    found = [globals()[name](*case, fused=fused) for case in cases]
    pickle.dump((jax.default_backend(), fused.capability, found), sys.stdout.buffer)
