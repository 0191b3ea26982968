"""Runs `tree_attention.attend` on the accelerator of this machine, in a separate process, since the tests have CPUs.

Reads a pickled list of its arguments, and writes the platform, the capability for kernels, and the results.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial

import jax
import numpy as np

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import tree_attention
from tlt_jax.kernels.fused import Fused

if __name__ == "__main__":
    fused = Fused.of(make_mesh(1, 1))
    compiled = jax.jit(partial(tree_attention.attend, slots_last=False, fused=fused))
    found = [np.asarray(compiled(*case)[0]) for case in pickle.load(sys.stdin.buffer)]
    about = jax.default_backend(), fused.capability
    pickle.dump((*about, found), sys.stdout.buffer)
