"""Laws of attention within packed rows: every implementation has the values and gradients of the plain one.

cuDNN runs on GPUs only: a plain function stands in that reads its operands from memory as cuDNN does.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.on_device import on_device

from tlt_jax.kernels import packed_attention
from tlt_jax.kernels.packed_attention import BLOCKS, CUDNN, SPLASH
from tlt_jax.shapes import most_segments

K, G, J = 2, 2, 2


def segments_of(rows, tokens: int) -> np.ndarray:
    """Rows of segments of these lengths; the rest is padding."""
    numbered = [np.repeat(np.arange(1, len(row) + 1), row) for row in rows]
    return np.stack([np.pad(row, (0, tokens - len(row))) for row in numbered]).astype(np.int32)


def operands(B: int, tokens: int, width: int, dtype: str = "float32") -> tuple:
    """Random queries, keys and values."""
    random = np.random.default_rng(0)
    shapes = (B, tokens, K, G, width), (B, tokens, K, width), (B, tokens, K, width)
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def slopes(attend, given, segments) -> tuple:
    """The result where there is no padding, and the gradient of a sum that weights every number differently."""
    is_token = (segments > 0)[..., None, None, None]
    weights = np.random.default_rng(1).normal(size=given[0].shape)

    def total(given):
        mixed = attend(*given[:3], jnp.asarray(segments), *given[3:])
        return jnp.sum(jnp.where(is_token, mixed * weights, 0)), mixed

    gradient, mixed = jax.jit(jax.grad(jax.checkpoint(total), has_aux=True))(given)
    return jnp.where(is_token, mixed, 0), gradient


def assert_same(one, other, **tolerance):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def blocks(q, k, v, segments, own=None, block: int = 16, longest: int | None = None):
    return packed_attention.attend(q, k, v, segments, block, longest, own)


SMALL = segments_of([[5, 7, 1, 6, 3], [7, 7, 2, 4, 0]], 24)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def plain(q, k, v, segments, own=None):
    """Attention from all scores at once."""
    T, scale = q.shape[1], 1 / np.sqrt(q.shape[-1])
    scores = scale * jnp.einsum("btkge,bske->bkgts", q, k)
    same = (segments[:, :, None] == segments[:, None]) & np.tri(T, dtype=bool)
    scores = jnp.where(same[:, None, None], scores, -jnp.inf)
    if own is not None:
        own_scores = scale * jnp.einsum("btkge,btjke->bkgtj", q, own[0])
        scores = jnp.concatenate([scores, own_scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bkgts,bske->btkge", weights[..., :T], v)
    return (
        mixed if own is None else mixed + jnp.einsum("bkgtj,btjke->btkge", weights[..., T:], own[1])
    )


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize(
    ("block", "longest"), [(24, None), (4, None), (4, 7), (5, 7), (7, 7), (3, 20), (24, 7)]
)
def test_attention_in_blocks_has_the_values_and_gradients_of_the_whole(
    block, longest, has_own, x64
):
    random, given = np.random.default_rng(2), operands(2, 24, 4, "float64")
    if has_own:
        given += (tuple(jnp.asarray(random.normal(size=(2, 24, J, K, 4))) for _ in range(2)),)
    attend = partial(blocks, block=block, longest=longest)
    assert_same(slopes(attend, given, SMALL), slopes(plain, given, SMALL), **EXACT)


def test_attention_with_too_short_a_length_is_not_that_of_the_whole(x64):
    """So a block reads no further back than `longest`."""
    given = operands(2, 24, 4, "float64")
    found = slopes(partial(blocks, block=2, longest=3), given, SMALL)[0]
    assert not np.allclose(found, slopes(plain, given, SMALL)[0], **EXACT)


# Libraries


@pytest.mark.parametrize(("width", "longest"), [(64, None), (128, 150)])
def test_splash_attention_has_the_values_and_gradients_of_that_in_blocks(
    width, longest, monkeypatch
):
    """Three blocks a row, the last one partly beyond it; with a bound, the last block does not see the first."""
    monkeypatch.setattr(packed_attention, "SPLASH_BLOCK", 128)
    segments, given = segments_of([[100, 150, 40], [120, 80]], 300), operands(2, 300, width)
    library = partial(packed_attention.attend_by_splash, longest=longest, interpret=True)
    expected = slopes(blocks, given, segments)
    assert_same(slopes(library, given, segments), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "attend", [blocks, partial(packed_attention.attend_by_splash, interpret=True)]
)
def test_keys_of_nan_reach_the_tokens_that_see_them_and_no_other(attend):
    segments, (q, k, v) = segments_of([[100, 150, 40], [300]], 300), operands(2, 300, 64)
    attend = jax.jit(attend)
    whole, found = (attend(q, one, v, segments) for one in (k, k.at[:, 130:250].set(jnp.nan)))
    rows, columns = np.mgrid[:2, :300]
    sees = (columns >= 130) & ((rows == 1) | (columns < 250))
    np.testing.assert_array_equal(np.isnan(found).all((2, 3, 4))[segments > 0], sees[segments > 0])
    np.testing.assert_array_equal(found[~sees & (segments > 0)], whole[~sees & (segments > 0)])


# cuDNN


def test_the_layout_is_the_lengths_and_first_tokens_of_all_segments_in_order():
    layout, random = jax.jit(packed_attention.layout, static_argnums=1), np.random.default_rng(0)
    for _ in range(4):
        rows = [random.integers(1, 9, random.integers(0, 8)).tolist() for _ in range(5)]
        found = layout(segments_of(rows, 64), 7)
        lengths = [length for row in rows for length in row]
        starts = [
            64 * index + sum(row[:i]) for index, row in enumerate(rows) for i in range(len(row))
        ]
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
    segments, given = segments_of([[20, 30, 9], [25, 16], [60], []], 60), operands(4, 60, 8)
    expected = slopes(blocks, given, segments)
    found = slopes(packed_attention.attend_by_cudnn, given, segments)
    assert_same(found, expected, rtol=1e-4, atol=2e-5)
    mixed = jax.jit(packed_attention.attend_by_cudnn)(*given, segments)
    assert (np.asarray(mixed)[segments == 0] == 0).all()


def test_segments_beyond_the_bound_are_not_numbers(monkeypatch):
    monkeypatch.setattr(packed_attention, "cudnn", stand_in())
    segments = segments_of([[2] * (most_segments(128) + 2)], 128)
    mixed = np.asarray(jax.jit(packed_attention.attend_by_cudnn)(*operands(1, 128, 8), segments))
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
    for form, found, expected in on_device("packed", [(64,), (128,)], ("gpu", "tpu")):
        assert form != BLOCKS
        for one, other in zip(found, expected, strict=True):
            assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other)
