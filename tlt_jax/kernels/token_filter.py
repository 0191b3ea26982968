"""Where top-k and top-p cut rows of a vocabulary, by three kernels on one NVIDIA GPU; knows no noise and no choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from tlt_jax.kernels.fused import FILTER, Fused
from tlt_jax.shapes import shaped


@jax.named_scope("filter")
@shaped
def border(
    scaled: Float[Array, "*A V"], top_k: int, top_p: float, fused: Fused
) -> UInt32[Array, "*A 1"] | None:
    """The ordered bits (`spec_decode.sampling.ordered_bits`) of the least logit that a row keeps; 0: it keeps all.

    Kept are the `top_k` (0: all) largest logits, and of these those with the largest probabilities of at least `top_p`
    together; logits that tie with the last one are kept too. A row with NaN or infinity has any border. None where XLA's
    operations run instead: on other devices, without Triton, in float64, and where several devices share the vocabulary:
    each of the three kernels reads sums over the whole row that the one before made, so an all-reduce would follow each.
    """
    if FILTER not in fused.on or fused.mesh.size > 1 or scaled.dtype != jnp.float32:
        return None
    from tlt_jax.kernels import token_filter_triton

    rows = scaled.reshape(-1, scaled.shape[-1])
    found = token_filter_triton.border(rows, top_k, top_p, fused)
    return found.reshape(*scaled.shape[:-1], 1)
