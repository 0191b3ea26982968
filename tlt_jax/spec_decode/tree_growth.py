"""Draft trees that grow level by level, correlated with the target's sampling noise.

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
import numpy as np
from jaxtyping import Array, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode import one_pass
from tlt_jax.spec_decode.interface import Candidates, Context, PyTree
from tlt_jax.spec_decode.network import Network
from tlt_jax.spec_decode.strategy import Strategy, name
from tlt_jax.spec_decode.tree import chosen

# Tokens of the children of w nodes, and their log-probabilities given the parents.
Children = tuple[Int32[Array, "B w k"], Float[Array, "B w k"]]
Guess = Callable[..., Children]  # guess(logits, noise, ids): `score_children`


@dataclass(frozen=True)
class Coupling:
    """How much the noise determines the order and the scores of siblings.

    Siblings are ordered by log q + strength * noise; scores are the log-softmax of `sharpness` times that.
    """

    strength: float = 0.75
    sharpness: float = 1.0


def expand_tree(
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
        candidates = candidates_below(beams, index, *found, level + 2)

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
def score_children(
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
def candidates_below(
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


def expand_by_level(
    network: Network,
    guess: Guess,
    weights: PyTree,
    cache: PyTree,
    hidden: Float[Array, "B Z"],
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round by a network that runs once for each level.

    `hidden`: the state at the token before the root.
    """
    B, k, depth = context.lengths.shape[0], strategy.topk, strategy.depth
    ids = network.ids(weights)
    root = guess(network.logits(weights, hidden[:, None]), noise_of(context, 0, ids), ids)

    def below(
        beams: Candidates, of_beams: tuple[Array, Array], scratch: PyTree, level: Int32[Array, ""]
    ) -> tuple[Children, tuple[Array, Array], PyTree]:
        hidden, seen = of_beams
        seen = seen | (jnp.arange(seen.shape[2]) == level * k + jnp.arange(k)[:, None])
        positions = jnp.broadcast_to((context.lengths + level)[:, None], (B, k))
        scratch, hidden = network.passes.step(
            weights, cache, scratch, beams.tokens, hidden, positions, context.lengths, seen, level
        )
        found = guess(network.logits(weights, hidden), noise_of(context, level + 1, ids), ids)
        return found, (hidden, seen), scratch

    nodes = k * (depth - 1)
    hidden = jnp.broadcast_to(hidden[:, None], (B, k, hidden.shape[-1]))
    of_beams, scratch = (hidden, jnp.zeros((B, k, nodes), bool)), network.passes.scratch(B, nodes)
    levels = np.arange(depth - 1, dtype=np.int32)  # constants of the unrolled levels
    return expand_tree(network, root, below, of_beams, scratch, levels)


def expand_by_block(
    network: Network,
    guess: Guess,
    weights: PyTree,
    cache: PyTree,
    _: Float[Array, "B Z"],
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round by a network that drafts all levels in one pass.

    Logits of a level are the same for all nodes, apart from a bias by the parent's token (DSpark, arXiv 2607.05147). The
    confidence of a level scales the scores of its nodes. Raises ValueError when the strategy is deeper than the network
    drafts.
    """
    k, depth, block = strategy.topk, strategy.depth, network.passes
    if depth > block.depth:
        raise ValueError(
            f"strategy {name(strategy)}: the drafter drafts {block.depth} levels: use depth {block.depth} or less"
        )
    ids = network.ids(weights)
    roots = jnp.take_along_axis(context.history, context.lengths[:, None], axis=1)
    hidden = block.draft(weights, cache, roots[:, 0], context.lengths, depth)
    hidden = jnp.moveaxis(hidden, 1, 0)[:, :, None]  # levels first: XLA would copy the logits
    logits = network.logits(weights, hidden)

    def children_of(
        tokens: Int32[Array, "B w"],
        level: int | Int32[Array, ""],
        hidden: Float[Array, "B 1 Z"],
        logits: Float[Array, "B 1 U"],
    ) -> Children:
        """The children, at this level, of nodes with these tokens."""
        if block.bias is not None:
            logits = logits + block.bias(weights, tokens)
        shape = (*tokens.shape, k)
        found, scores = guess(logits, noise_of(context, level, ids), ids)
        found, scores = jnp.broadcast_to(found, shape), jnp.broadcast_to(scores, shape)
        if block.confidence is not None:
            sure = block.confidence(weights, hidden, tokens)[:, :, None]
            scores = scores + jnp.where(jnp.isnan(sure), -jnp.inf, sure)
        return found, scores

    def below(
        beams: Candidates, _: tuple, __: tuple, given: tuple
    ) -> tuple[Children, tuple, tuple]:
        level, *states = given
        return children_of(beams.tokens, level + 1, *states), (), ()

    root = children_of(roots, 0, hidden[0], logits[0])
    levels = np.arange(depth - 1, dtype=np.int32)  # constants of the unrolled levels
    return expand_tree(network, root, below, (), (), (levels, hidden[1:], logits[1:]))
