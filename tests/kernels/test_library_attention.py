"""Laws of the libraries' attention: which is used where, and that its inputs and outputs give attention.

cuDNN runs on GPUs only: a plain function stands in that reads its operands from memory as cuDNN does.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.kernels import packed_attention
from tlt_jax.kernels.packed_attention import BLOCKS, CUDNN, SPLASH
from tlt_jax.shapes import most_segments

ROWS = [
    [100, 150, 40],
    [120, 80],
    [300],
    [],
]  # lengths of the segments; the rest of 300 tokens is padding
T, K, G = 300, 2, 3


def segments_of(rows, tokens: int = T) -> np.ndarray:
    numbered = [np.repeat(np.arange(1, len(row) + 1), row) for row in rows]
    return np.stack([np.pad(row, (0, tokens - len(row))) for row in numbered]).astype(np.int32)


def operands(B: int, width: int, tokens: int = T) -> tuple:
    random = np.random.default_rng(0)
    shapes = (B, tokens, K, G, width), (B, tokens, K, width), (B, tokens, K, width)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


def slopes(attend, given, segments) -> tuple:
    """The result where there is no padding, and the gradient of its sum."""
    is_token = (segments > 0)[..., None, None, None]
    weights = np.random.default_rng(1).normal(size=given[0].shape)

    def total(given):
        mixed = attend(*given, jnp.asarray(segments))
        return jnp.sum(jnp.where(is_token, mixed * weights, 0)), mixed

    gradient, mixed = jax.jit(jax.grad(jax.checkpoint(total), has_aux=True))(given)
    return jnp.where(is_token, mixed, 0), gradient


def assert_same(one, other, **tolerance):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def blocks(q, k, v, segments):
    return packed_attention.attend(q, k, v, segments, 64)


@pytest.mark.parametrize(("width", "longest"), [(64, None), (128, 150)])
def test_splash_attention_has_the_values_and_gradients_of_that_in_blocks(
    width, longest, monkeypatch
):
    """Three blocks a row, the last one partly beyond it; with a bound, the last block does not see the first."""
    monkeypatch.setattr(packed_attention, "SPLASH_BLOCK", 128)
    segments, given = segments_of([[100, 150, 40], [120, 80]], 300), operands(2, width, 300)
    library = partial(packed_attention.attend_by_splash, longest=longest, interpret=True)
    expected = slopes(blocks, given, segments)
    assert_same(slopes(library, given, segments), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "attend", [blocks, partial(packed_attention.attend_by_splash, interpret=True)]
)
def test_keys_of_nan_reach_the_tokens_that_see_them_and_no_other(attend):
    segments, (q, k, v) = jnp.asarray(segments_of([[100, 150, 40], [300]])), operands(2, 64)
    whole, found = (attend(q, one, v, segments) for one in (k, k.at[:, 130:250].set(jnp.nan)))
    rows, columns = np.mgrid[:2, :300]
    sees = (columns >= 130) & ((rows == 1) | (columns < 250))
    np.testing.assert_array_equal(np.isnan(found).all((2, 3, 4))[segments > 0], sees[segments > 0])
    np.testing.assert_array_equal(found[~sees & (segments > 0)], whole[~sees & (segments > 0)])


# cuDNN


@pytest.mark.parametrize("seed", range(4))
def test_the_layout_is_the_lengths_and_first_tokens_of_all_segments_in_order(seed):
    random = np.random.default_rng(seed)
    rows = [random.integers(1, 9, random.integers(0, 8)).tolist() for _ in range(5)]
    found = packed_attention.layout(jnp.asarray(segments_of(rows, 64)), 7)
    lengths, starts = [], []
    for index, row in enumerate(rows):
        place = 64 * index
        for length in row:
            lengths.append(length)
            starts.append(place)
            place += length
    lengths += [0] * (5 * 7 - len(lengths))
    starts += [5 * 64] * (5 * 8 - len(starts))
    np.testing.assert_array_equal(found[0], np.reshape(lengths, (5, 7)))
    np.testing.assert_array_equal(found[1], np.reshape(starts, (5, 8)))


def stand_in() -> SimpleNamespace:
    """The part of JAX's cuDNN that is used. Values that cuDNN does not write are NaN."""

    def owners(lengths, places, heads, tokens):
        """Which sequence each token belongs to, by its place in memory; -1: none."""
        starts, tokens = places.reshape(-1)[: lengths.size] // heads, jnp.arange(tokens)[:, None]
        inside = (starts <= tokens) & (tokens < starts + lengths.reshape(-1))
        return jnp.where(inside.any(1), inside.argmax(1), -1)

    def attention(q, k, v, lengths, places, others, scale):
        (B, tokens, H, E), heads = q.shape, k.shape[2]
        mine = owners(lengths, places, H * E, B * tokens)
        theirs = owners(lengths, others, heads * E, B * tokens)
        q, k, v = (x.reshape(B * tokens, -1, E) for x in (q, k, v))
        k, v = (jnp.repeat(x, H // heads, axis=1) for x in (k, v))
        seen = (mine[:, None] == theirs) & np.tri(B * tokens, dtype=bool) & (mine[:, None] >= 0)
        scores = jnp.where(seen, scale * jnp.einsum("qhe,khe->hqk", q, k), -1e30)
        mixed = jnp.einsum("hqk,khe->qhe", jax.nn.softmax(scores), v).reshape(B, tokens, H, E)
        return jnp.where((mine < 0).reshape(B, tokens, 1, 1), jnp.nan, mixed)

    def forward(q, k, v, bias, lengths, others, q_places, k_places, *pages, is_training, **options):
        assert {array.size for array in (bias, *pages)} == {0} and lengths is others
        assert options["mask_type"] == "padding, causal" and options["layout"] == "rows first"
        mixed = attention(q, k, v, lengths, q_places, k_places, options["scale"])
        return (mixed, jnp.zeros(())) if is_training else (mixed,)

    def backward(q, k, v, bias, lengths, others, q_places, k_places, *rest, scale, **options):
        *_, mixed, slope = rest

        def once(q, k, v):
            return attention(q, k, v, lengths, q_places, k_places, scale)

        unwritten = jnp.isnan(mixed[:, :, :1])
        grads = jax.vjp(once, q, k, v)[1](jnp.where(unwritten, 0, slope))
        return [jnp.where(unwritten, jnp.nan, grad) for grad in grads]

    return SimpleNamespace(
        MaskType=SimpleNamespace(PADDING_CAUSAL="padding, causal"),
        AttentionLayout=SimpleNamespace(BTNH=SimpleNamespace(value="rows first")),
        _dot_product_attention_fwd_p=SimpleNamespace(bind=forward),
        _dot_product_attention_bwd_p=SimpleNamespace(bind=backward),
    )


def test_what_cudnn_reads_and_writes_is_attention_within_segments(monkeypatch):
    monkeypatch.setattr(packed_attention, "cudnn", stand_in())
    segments, given = segments_of(ROWS), operands(4, 8)
    expected = slopes(blocks, given, segments)
    found = slopes(packed_attention.attend_by_cudnn, given, segments)
    assert_same(found, expected, rtol=1e-4, atol=2e-5)
    mixed = packed_attention.attend_by_cudnn(*given, jnp.asarray(segments))
    assert (np.asarray(mixed)[segments == 0] == 0).all()


def test_segments_beyond_the_bound_are_not_numbers(monkeypatch):
    monkeypatch.setattr(packed_attention, "cudnn", stand_in())
    segments = segments_of([[2] * (most_segments(128) + 2)], 128)
    mixed = np.asarray(
        packed_attention.attend_by_cudnn(*operands(1, 8, 128), jnp.asarray(segments))
    )
    assert np.isnan(mixed[:, 64:68]).all() and np.isfinite(mixed[:, :64]).all()
    assert np.isfinite(mixed[:, 68:]).all()


def test_jax_has_what_is_used_of_its_private_module():
    for name in ("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p"):
        assert callable(getattr(packed_attention.cudnn, name).bind)
    assert set(packed_attention.options(jnp.zeros((1, 1, 1, 64)))) >= {"mask_type", "layout"}


# Which is used


def device(platform: str, capability: str | None = None) -> SimpleNamespace:
    one = SimpleNamespace(platform=platform, compute_capability=capability)
    return SimpleNamespace(devices=np.array([one], object))


HOPPER = device("gpu", "9.0")


@pytest.mark.parametrize(
    ("mesh", "dtype", "width", "has_own", "expected"),
    [
        (HOPPER, "bfloat16", 128, False, CUDNN),
        (device("gpu", "10.0"), "bfloat16", 64, False, CUDNN),
        (device("gpu", "8.0"), "bfloat16", 128, False, BLOCKS),
        (device("gpu", "gfx942"), "bfloat16", 128, False, BLOCKS),
        (HOPPER, "bfloat16", 256, False, BLOCKS),
        (HOPPER, "bfloat16", 36, False, BLOCKS),
        (HOPPER, "float32", 128, False, BLOCKS),
        (HOPPER, "bfloat16", 128, True, BLOCKS),
        (device("tpu"), "bfloat16", 64, False, SPLASH),
        (device("tpu"), "float32", 64, False, BLOCKS),
        (device("cpu"), "bfloat16", 128, False, BLOCKS),
        (None, "bfloat16", 128, False, BLOCKS),
    ],
)
def test_the_form_follows_from_device_dtype_and_width(mesh, dtype, width, has_own, expected):
    assert packed_attention.form(mesh, jnp.dtype(dtype), width, has_own) == expected


@pytest.mark.device
def test_on_the_device_here_the_library_is_the_attention_in_blocks_up_to_rounding():
    """In a separate process: this one is on the CPU."""
    script = Path(__file__).with_name("packed_attention_on_device.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
