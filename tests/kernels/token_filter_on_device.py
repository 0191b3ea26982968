"""Runs `bindings.filtered` and XLA's filter on the accelerator of this machine, in a separate process.

Reads a pickled list of (logits, top-k, top-p), and writes the platform, the capability for kernels, and for each case which
logits are kept: by the kernels, by XLA, and by the kernels once more.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial

import jax
import numpy as np

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels.fused import Fused
from tlt_jax.rollout import bindings
from tlt_jax.spec_decode import sampling
from tlt_jax.spec_decode.interface import Sampling

if __name__ == "__main__":
    fused, found = Fused.of(make_mesh(1, 1)), []
    for logits, top_k, top_p in pickle.load(sys.stdin.buffer):
        rule = Sampling(1.0, top_k, top_p)
        ours = jax.jit(partial(bindings.filtered, rule=rule, fused=fused))
        xla = jax.jit(partial(sampling.filter, sampling=rule, unrolls=True))
        found.append([np.asarray(one(logits)) > -np.inf for one in (ours, xla, ours)])
    about = jax.default_backend(), fused.capability
    pickle.dump((*about, found), sys.stdout.buffer)
