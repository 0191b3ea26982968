"""Laws of attention within packed rows: every implementation has the values and gradients of the plain one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.kernels import packed_attention

LENGTHS = [5, 7, 1, 6, 3], [7, 7, 2, 4, 0]  # of the segments of two rows; the rest is padding
T, K, G, E, J = 24, 2, 3, 4, 2


def segments_of(lengths: list[int]) -> np.ndarray:
    numbered = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(numbered, (0, T - len(numbered)))


SEGMENTS = np.stack([segments_of(lengths) for lengths in LENGTHS])


def operands(has_own: bool) -> tuple:
    """Random queries, keys and values, and every token's own keys and values."""
    random = np.random.default_rng(0)
    shapes = [(2, T, K, G, E), (2, T, K, E), (2, T, K, E)]
    q, k, v = (jnp.asarray(2 * random.normal(size=shape)) for shape in shapes)
    own = tuple(jnp.asarray(random.normal(size=(2, T, J, K, E))) for _ in range(2))
    return q, k, v, own if has_own else None


def plain(q, k, v, own):
    """Attention from all scores at once; 0 at padding."""
    scores = jnp.einsum("btkge,bske->bkgts", q, k) / np.sqrt(E)
    same = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & np.tri(T, dtype=bool)
    scores = jnp.where(same[:, None, None], scores, -jnp.inf)
    if own is not None:
        scores = jnp.concatenate(
            [scores, jnp.einsum("btkge,btjke->bkgtj", q, own[0]) / np.sqrt(E)], axis=-1
        )
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bkgts,bske->btkge", weights[..., :T], v)
    if own is not None:
        mixed += jnp.einsum("bkgtj,btjke->btkge", weights[..., T:], own[1])
    return mixed * (SEGMENTS > 0)[:, :, None, None, None]


def packed(block: int, longest: int | None):
    def attend(q, k, v, own):
        mixed = packed_attention.attend(q, k, v, jnp.asarray(SEGMENTS), block, longest, own)
        return mixed * (SEGMENTS > 0)[:, :, None, None, None]

    return attend


def slopes(attend, given) -> tuple:
    """The result, and the gradient of a sum that weights every number differently."""
    weights = np.random.default_rng(1).normal(size=given[0].shape)

    def total(given):
        mixed = attend(*given)
        return jnp.sum(mixed * weights), mixed

    gradient, mixed = jax.jit(jax.grad(total, has_aux=True))(given)
    return mixed, gradient


def is_same(one, other) -> bool:
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return all(np.allclose(a, b, rtol=1e-11, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize(
    ("block", "longest"), [(24, None), (4, None), (4, 7), (5, 7), (7, 7), (3, 20), (24, 7)]
)
def test_attention_in_blocks_has_the_values_and_gradients_of_the_whole(
    block, longest, has_own, x64
):
    given = operands(has_own)
    assert is_same(slopes(plain, given), slopes(packed(block, longest), given))


def test_attention_with_too_short_a_length_is_not_that_of_the_whole(x64):
    """So a block reads no further back than `longest`."""
    given = operands(False)
    assert not is_same(slopes(plain, given), slopes(packed(2, 3), given))
