"""The kernels of top-k and top-p compiled for an H200 without one, and run on the GPU of a machine that has one."""

from __future__ import annotations

import re
from functools import partial

import jax
import numpy as np
import pytest
from kernels.devices import on_device
from kernels.triton_runs import FUSED, REASON, compiled, kernels, resource_usage

from tlt_jax.kernels import token_filter

FILTERS = {"top-p": (0, 0.95), "top-k": (50, 1.0), "both": (20, 0.95)}
VOCABULARIES = (152064, 49152)
REGISTERS = 128  # of a thread: two programs of 8 warps fit a multiprocessor


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_three_kernels_read_wide_and_fit_a_multiprocessor_twice(name, vocab, monkeypatch, tmp_path):
    pytest.importorskip("jax_triton", reason=REASON)
    top_k, top_p = FILTERS[name]
    border = partial(token_filter.border, top_k=top_k, top_p=top_p, fused=FUSED)
    found = kernels(border, monkeypatch, jax.ShapeDtypeStruct((32, vocab), "float32"))
    assert [one.name for one in found] == ["filter_survey", "filter_weigh", "filter_cut"]
    for one in found:
        usage, code = resource_usage(one, tmp_path), compiled(one)
        # The search of the last program may store four registers before its loops.
        assert int(re.search(r" STACK:(\d+) ", usage)[1]) <= 16 and " LOCAL:0 " in usage, usage
        assert int(re.search(r"REG:(\d+)", usage)[1]) <= REGISTERS, usage
        assert code.metadata.shared <= 32 << 10
        assert code.asm["ptx"].count("ld.global.v4.b32") >= 4, "16 logits of a thread, by four"
    added = re.findall(r"(?:atom|red)\.global\S*", compiled(found[1]).asm["ptx"])
    assert set(added) <= {f"red.global.gpu.relaxed.add.u{bits}" for bits in (32, 64)}
    # All threads have stored what they collected before it is counted, and nothing is read before all have counted.
    steps = r"st\.global|bar\.sync|atom\.global\.gpu\.acq_rel|ld\.global"
    order = re.findall(steps, compiled(found[2]).asm["ptx"])
    counted = order.index("atom.global.gpu.acq_rel")
    assert order[counted - 1] == "bar.sync" == order[counted + 1]
    assert "st.global" in order[:counted] and "ld.global" in order[counted:]


@pytest.mark.device
def test_on_a_gpu_the_kernels_keep_the_logits_that_xla_keeps():
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(8, 152064)) * np.array([0.01, 0.5, 1, 2, 3, 5, 8, 20])[:, None]
    tied, small = np.round(wide, 1), wide[:, :4999]
    cases = [
        (logits.astype(np.float32), top_k, top_p)
        for logits in (wide, tied, small)
        for top_k, top_p in (*FILTERS.values(), (2000, 0.99), (0, 0.9999))
    ]
    for (logits, top_k, top_p), (ours, xla, again) in zip(
        cases, on_device("token_filter_on_device.py", cases), strict=True
    ):
        assert again.tobytes() == ours.tobytes(), "whoever comes last"
        for row, one, other in zip(logits, ours, xla, strict=True):
            if top_p == 1:
                assert (one == other).all()
            differs = np.exp(row - row.max(), dtype=float)[one != other].sum()
            assert differs <= 1e-5 * np.exp(row - row.max(), dtype=float).sum(), (top_k, top_p)
