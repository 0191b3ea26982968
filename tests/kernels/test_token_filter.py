"""Top-k and top-p by the kernels: interpreted, against sorting in NumPy and against XLA's form, and compiled for a GPU."""

from __future__ import annotations

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.on_device import on_device
from kernels.triton_runs import FUSED, compiled, interpreted, kernels, resource_usage

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import token_filter
from tlt_jax.kernels.fused import Fused
from tlt_jax.rollout import bindings
from tlt_jax.spec_decode import sampling
from tlt_jax.spec_decode.interface import Sampling

PADDING = np.finfo(np.float32).min
ROUNDING = 1e-6  # of a sum of probabilities
BORDER = "tlt_jax.kernels.token_filter:border"
# (vocabulary, top-k, top-p): a part of a tile; full tiles, with a bound of top-k and without; more logits of a bin than a tile.
CASES = [
    (100, 99, 1.0), (100, 100, 1e-5), (100, 20, 0.5), (8999, 0, 0.95), (8999, 1, 1.0), (8999, 20, 0.9), (8999, 200, 0.9999),
    (8999, 6000, 1.0), (8999, 6000, 0.7),
]  # fmt: skip
REVERSED = (3, 5)
SPECIAL = 3  # last rows: NaN, infinity, -inf


@cache
def rows(vocab: int) -> np.ndarray:
    """Logits that are close, wide, tied, of one token, padded and far from one outlier; then SPECIAL broken ones."""
    rng = np.random.default_rng(vocab)
    found = [scale * rng.normal(size=vocab) for scale in (0.01, 1, 5)]
    found += [np.round(found[1] * 2, 1), np.full(vocab, -np.inf), found[2].copy()]
    found[4][vocab // 2], found[5][-9:] = 3.0, PADDING
    found += [0.001 * rng.normal(size=vocab), found[1].copy(), found[1].copy()]
    found[6][3], found[7][7], found[8][-1] = 8.0, np.nan, np.inf
    return np.array([*found, np.full(vocab, -np.inf)], np.float32)


@cache
def borders() -> list[np.ndarray]:
    """Those of all cases, and of three rows alone, and of the cases REVERSED with the programs in reversed order."""
    calls = [((rows(vocab), k, p), {}) for vocab, k, p in CASES]
    alone = [((row[None], 20, 0.9), {}) for row in rows(8999)[1:4]]
    return interpreted(BORDER, calls + alone) + interpreted(
        BORDER, [calls[one] for one in REVERSED], is_reversed=True
    )


def value_of(border: np.ndarray) -> np.ndarray:
    """The float32 with these ordered bits; -inf of 0."""
    border = np.asarray(border, np.uint32)
    sign = np.uint32(1 << 31)
    found = np.where(border & sign, border ^ sign, ~border).astype(np.uint32).view(np.float32)
    return np.where(border == 0, -np.float32(np.inf), found)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_a_border_is_that_of_sorted_logits(case):
    vocab, k, p = CASES[case]
    for row, least in zip(
        rows(vocab)[:-SPECIAL], value_of(borders()[case][:-SPECIAL, 0]), strict=True
    ):
        ordered = np.sort(np.where(row == PADDING, -np.inf, row))[::-1].astype(float)
        if 0 < k < vocab:
            ordered = ordered[ordered >= ordered[k - 1]]
        if p == 1:
            assert least == ordered[-1]
            continue
        sums = np.cumsum(np.exp(ordered - ordered[0]))
        kept = ordered >= least
        assert least in ordered or kept.all()
        assert sums[kept][-1] >= p * sums[-1] * (1 - ROUNDING)
        above = sums[ordered > ordered[kept][-1]]
        assert not above.size or above[-1] < p * sums[-1] * (1 + ROUNDING)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_tokens_are_those_of_the_filter_in_xla(case):
    vocab, k, p = CASES[case]
    scaled, rule = jnp.asarray(rows(vocab)[:-SPECIAL]), Sampling(1.0, k, p)
    border = jnp.asarray(borders()[case][:-SPECIAL])
    noise = jax.random.gumbel(jax.random.key(0), (20, *scaled.shape))
    ours = jnp.where(sampling.ordered_bits(scaled) >= border, scaled, -jnp.inf)
    xla = sampling.filter(scaled, rule, unrolls=True)
    np.testing.assert_array_equal(sampling.choose(ours + noise), sampling.choose(xla + noise))
    for row, differs in zip(rows(vocab), (ours > -jnp.inf) != (xla > -jnp.inf), strict=False):
        assert len({*row[differs]} - {PADDING}) <= 1, "only where sums are rounded"


def test_borders_depend_neither_on_the_order_of_programs_nor_on_other_rows():
    found, alone = borders()[: len(CASES)], borders()[len(CASES) : len(CASES) + 3]
    for one, other in zip(REVERSED, borders()[len(CASES) + 3 :], strict=True):
        np.testing.assert_array_equal(found[one][:-SPECIAL], other[:-SPECIAL])
    case = CASES.index((8999, 20, 0.9))
    np.testing.assert_array_equal(np.concatenate(alone), found[case][1:4])


def test_a_target_filters_by_the_border_where_there_is_one(monkeypatch):
    fused, rule = Fused.of(make_mesh(1, 1)), Sampling(1.0, 3, 0.9)
    scaled = jnp.asarray(rows(100)[:4].reshape(2, 2, 100))
    expected = jax.jit(partial(sampling.filter, sampling=rule, unrolls=True))(scaled)
    assert token_filter.border(scaled, rule.top_k, rule.top_p, fused) is None
    filtered = jax.jit(bindings.filtered, static_argnums=(1, 2))
    np.testing.assert_array_equal(filtered(scaled, rule, fused), expected)
    top = jnp.max(sampling.ordered_bits(scaled), axis=-1, keepdims=True)
    monkeypatch.setattr(token_filter, "border", lambda *given: top)
    kept = bindings.filtered(scaled, rule, fused) > -jnp.inf
    np.testing.assert_array_equal(kept, scaled == scaled.max(axis=-1, keepdims=True))
    unfiltered = Sampling(1.0)
    np.testing.assert_array_equal(bindings.filtered(scaled, unfiltered, fused), scaled)


# Compiled for an H200, and run on the GPU of a machine that has one

FILTERS = {"top-p": (0, 0.95), "top-k": (50, 1.0), "both": (20, 0.95)}
VOCABULARIES = (152064, 49152)
REGISTERS = 128  # of a thread: two programs of 8 warps fit a multiprocessor


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_three_kernels_read_wide_and_fit_a_multiprocessor_twice(name, vocab, monkeypatch, tmp_path):
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
        cases, on_device("kept", cases), strict=True
    ):
        assert again.tobytes() == ours.tobytes(), "whoever comes last"
        for row, one, other in zip(logits, ours, xla, strict=True):
            if top_p == 1:
                assert (one == other).all()
            differs = np.exp(row - row.max(), dtype=float)[one != other].sum()
            assert differs <= 1e-5 * np.exp(row - row.max(), dtype=float).sum(), (top_k, top_p)
