"""Draft trees that grow level by level, correlated with the target's sampling noise; knows no network.

The shape is that of EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): k children for each of the k best nodes of
every level, k + (D - 1) k^2 candidates. The difference: siblings are ordered by log q + strength * noise, with the noise
that the target samples with, and a node's score is the log-probability that the target chooses its path, given that
noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode import one_pass
from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, PyTree
from tlt_jax.spec_decode.network import Network
from tlt_jax.spec_decode.tree import chosen

# Tokens of the children of w nodes, and their log-probabilities given the parents.
Children = tuple[Int32[Array, "B w k"], Float[Array, "B w k"]]
Guess = Callable[..., Children]  # guess(logits, noise, ids): `children`


@dataclass(frozen=True)
class Coupling:
    """How much the noise determines the order and the scores of siblings.

    Siblings are ordered by log q + strength * noise; scores are the log-softmax of `sharpness` times that.
    """

    strength: float = 0.75
    sharpness: float = 1.0


def grow(
    network: Network,
    root: Children,
    below: Callable[[Candidates, PyTree, PyTree, PyTree], tuple[Children, PyTree, PyTree]],
    of_beams: PyTree,
    carried: PyTree,
    levels: PyTree,
) -> Candidates:
    """All candidates of a round: the k children of the root, and k children of each of the k best nodes of a level.

    below(beams, of_beams, carried, level) -> the children of the beams, and the new `of_beams` and `carried`, from an
    element of `levels` (arrays [D - 1, ...], of which the first counts from 0). `of_beams` is a pytree of [B, k, ...] that
    each next beam gets from its parent; `carried` stays as it is.
    """
    tokens, scores = (found[:, 0] for found in root)
    B, k = tokens.shape
    places = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))
    parents, depths = jnp.full((B, k), -1, jnp.int32), jnp.ones((B, k), jnp.int32)
    first = Candidates(tokens, parents, depths, scores, places)
    if not len(jax.tree.leaves(levels)[0]):
        return first

    def grow_level(carry: tuple, given: PyTree) -> tuple[tuple, Candidates]:
        """The next beams are the best children of these."""
        beams, index, of_beams, carried = carry
        found, of_beams, carried = below(beams, of_beams, carried, given)
        level = jax.tree.leaves(given)[0]
        candidates = grown(beams, index, *found, level + 2)

        is_small = network.survey is not None and k <= one_pass.MOST
        best = (one_pass.top_k if is_small else jax.lax.top_k)(candidates.scores, k)[1]
        row, index = (best // k)[:, :, None], (k + level * k * k + best).astype(jnp.int32)
        of_beams = jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, row, axis=1), of_beams)
        return (chosen(candidates, best), index, of_beams, carried), candidates

    carry = first, places, of_beams, carried
    _, rest = jax.lax.scan(grow_level, carry, levels, unroll=network.unrolls)
    rest = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(B, -1), rest)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, rest)


@shaped
def noise_of(
    context: Context, level: int | Int32[Array, ""], ids: Int32[Array, " U"] | None
) -> Float[Array, "B 1 U"] | None:
    """The noise with which the target chooses among the children of this level, at the ids of the draft vocabulary.

    None when the target is greedy, or the drafter reads no noise.
    """
    if context.ahead is None:
        return None
    places = context.ahead.places(context.lengths + 1 + level)[:, None]
    where = places if ids is None else (places[:, :, None], ids)
    return context.ahead.values.at[where].get(mode="promise_in_bounds")


@shaped
def children(
    logits: Float[Array, "B w U"],
    noise: Float[Array, "B 1 U"] | None,
    ids: Int32[Array, " U"] | None,
    *,
    coupling: Coupling,
    temperature: float,
    k: int,
    top: Callable[[Array, int], tuple[Array, Array]] = jax.lax.top_k,
    survey: Callable[[Array, int], tuple[Array, Array, Array]] | None = None,
) -> tuple[Int32[Array, "B w k"], Float[Array, "B w k"]]:
    """Tokens of the k best children of w nodes, and their log-probabilities given the parent.

    The model: given the noise G, a target that differs from the drafter by a random error chooses v with probability
    softmax(sharpness * (log q + strength * G)). Children with values that are not finite score -inf. `ids`: token ids of
    the draft vocabulary; None: 0, 1, ...
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if survey is not None:  # the first log_softmax below shifts the second
        value = wide / temperature + (0 if noise is None else coupling.strength * noise)
        best, places, total = survey(coupling.sharpness * value, k)
        value = best - total[..., None]
        scores = jnp.where(jnp.isnan(value), -jnp.inf, jnp.minimum(value, 0))
        return (places if ids is None else ids[places]).astype(jnp.int32), scores

    value = jax.nn.log_softmax(wide / temperature, axis=-1)
    if noise is not None:
        value = value + coupling.strength * noise
    value = jax.nn.log_softmax(coupling.sharpness * value, axis=-1)
    value = jnp.where(jnp.isnan(value), -jnp.inf, jnp.minimum(value, 0))

    scores, places = top(value, k)
    return (places if ids is None else ids[places]).astype(jnp.int32), scores


@shaped
def grown(
    beams: Candidates,
    index: Int32[Array, "B k"],
    tokens: Int32[Array, "B k k2"],
    scores: Float[Array, "B k k2"],
    depth: Int32[Array, ""],
) -> Candidates:
    """The children of the beams as candidates; `index`: candidate index of each beam."""
    B, k, _ = tokens.shape
    flat = (B, k * k)
    places = jnp.maximum(beams.ranks[:, :, None], jnp.arange(k, dtype=jnp.int32))
    return Candidates(
        tokens=tokens.reshape(flat),
        parents=jnp.repeat(index, k, axis=1),
        depths=jnp.broadcast_to(depth, flat),
        scores=(beams.scores[:, :, None] + scores).reshape(flat),
        ranks=places.reshape(flat),
    )
