"""Draft trees of a learned drafter, correlated with the target's sampling noise; knows no network.

The shape is that of EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): k children for each of the k best nodes of
every level, k + (D - 1) k^2 candidates. The difference: siblings are ordered by log q + strength * noise, with the noise
that the target samples with, and a node's score is the log-probability that the target chooses its path, given that
noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode import one_pass
from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, Drafter, Network, PyTree
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import chosen

# Sequences x tokens per step of `catch_up`: while many tokens are missing, then for the rest.
BLOCKS = ((16, 64), (4, 16))


@dataclass(frozen=True)
class Coupling:
    """How much the noise determines the order and the scores of siblings.

    Siblings are ordered by log q + strength * noise; scores are the log-softmax of `sharpness` times that.
    """

    strength: float = 0.75
    sharpness: float = 1.0


@struct.dataclass
class LearnedState:
    """State of a learned drafter.

    `built`: number of cache slots written; `hidden`: hidden state of the last of them.
    """

    cache: PyTree
    built: Int32[Array, " B"]
    hidden: Float[Array, "B Z"]


def learned_drafter(network: Network, coupling: Coupling) -> Drafter:
    """The Drafter of a network."""

    def extend(weights: PyTree, state: LearnedState, context: Context, width: int) -> LearnedState:
        starts = jnp.minimum(state.built, context.history.shape[1] - width - 1)
        tokens, features = (
            window(context.history, starts + 1, width),
            window(context.features, starts, width),
        )
        last = jnp.clip(context.lengths - 1 - starts, 0, width - 1)
        cache, newest = network.extend(weights, state.cache, tokens, features, starts, last)
        behind = state.built < context.lengths
        return LearnedState(
            cache=cache,
            built=jnp.minimum(starts + width, context.lengths),
            hidden=jnp.where(behind[:, None], newest, state.hidden),
        )

    def catch_up(
        weights: PyTree, state: LearnedState, context: Context, live: Array, missing: Array
    ) -> LearnedState:
        batch, slots = context.history.shape

        def lacking(state: LearnedState) -> Array:
            return jnp.where(live, jnp.maximum(context.lengths - missing - state.built, 0), 0)

        def step(state: LearnedState, rows: int, width: int) -> LearnedState:
            chosen = jax.lax.top_k(lacking(state), rows)[1]
            built = state.built[chosen]
            starts = jnp.minimum(built, slots - width - 1)
            tokens = window(context.history, starts + 1, width, chosen)
            features = window(context.features, starts, width, chosen)
            # The last token is left to `extend`, which computes its hidden state.
            after = jnp.maximum(built, jnp.minimum(starts + width, context.lengths[chosen] - 1))
            cache = network.fill(weights, state.cache, tokens, features, chosen, starts)
            return state.replace(cache=cache, built=state.built.at[chosen].set(after))

        for (rows, width), is_last in zip(BLOCKS, (False, True), strict=True):
            sizes = {"rows": min(rows, batch), "width": min(width, slots - 1)}
            enough = 0 if is_last else sizes["rows"] * sizes["width"] // 4
            state = jax.lax.while_loop(
                lambda state, enough=enough: lacking(state).sum() > enough,
                partial(step, **sizes),
                state,
            )
        return state

    def draft(
        weights: PyTree,
        state: LearnedState,
        context: Context,
        strategy: Strategy,
        temperature: float,
    ) -> Candidates:
        guess = partial(
            children,
            coupling=coupling,
            temperature=temperature or 1.0,
            k=strategy.topk,
            top=network.top,
            survey=network.survey,
        )
        candidates = expand(network, guess, weights, state, context, strategy)
        knows = (context.lengths > 0)[:, None]  # the first token has no features before it
        return candidates.replace(scores=jnp.where(knows, candidates.scores, -jnp.inf))

    def resize(state: LearnedState, rows: Array, slots: int) -> LearnedState:
        source = jnp.maximum(rows, 0)
        return LearnedState(
            network.resize(state.cache, rows, slots), state.built[source], state.hidden[source]
        )

    def empty(batch: int, slots: int) -> LearnedState:
        small, sharding = network.hidden, network.hidden.sharding
        return LearnedState(
            cache=network.empty(batch, slots),
            built=jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=sharding),
            hidden=jax.ShapeDtypeStruct((batch, *small.shape[1:]), small.dtype, sharding=sharding),
        )

    return Drafter(
        draft=draft,
        catch_up=catch_up,
        extend=extend,
        reset=lambda state, fresh: state.replace(built=jnp.where(fresh, 0, state.built)),
        resize=resize,
        empty=empty,
        host_context=lambda batch: (),
        params=network.params,
        remembers=True,
        reads_noise=coupling.strength != 0,
    )


@shaped
def window(
    array: Array, starts: Int32[Array, " R"], width: int, rows: Int32[Array, " R"] | None = None
) -> Array:
    """array[rows[r], starts[r] : starts[r] + width]; of every row when `rows` is None.

    Indices must be in bounds.
    """
    batch, slots = array.shape[:2]
    rows = jnp.arange(batch) if rows is None else rows
    index = (rows * slots + starts)[:, None] + jnp.arange(width)
    flat = array.reshape(batch * slots, *array.shape[2:])
    return (
        flat.at[index.reshape(-1)]
        .get(mode="promise_in_bounds")
        .reshape(len(rows), width, *array.shape[2:])
    )


def expand(
    network: Network,
    guess: Callable[..., tuple[Array, Array]],
    weights: PyTree,
    state: LearnedState,
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round: k children of the root, and k children of each of the k best nodes of a level."""
    B, k, depth = context.lengths.shape[0], strategy.topk, strategy.depth
    ids = network.ids(weights)
    logits = network.logits(weights, state.hidden[:, None])
    tokens, scores = (found[:, 0] for found in guess(logits, noise_of(context, 0, ids), ids))

    places = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))
    parents, depths = jnp.full((B, k), -1, jnp.int32), jnp.ones((B, k), jnp.int32)
    first = Candidates(tokens, parents, depths, scores, places)
    if depth == 1:
        return first

    def grow(carry: tuple, level: Int32[Array, ""]) -> tuple[tuple, Candidates]:
        """Adds a level: the children of the beams; the best of them are the next beams."""
        beams, index, hidden, scratch, seen = carry
        seen = seen | (jnp.arange(seen.shape[2]) == level * k + jnp.arange(k)[:, None])
        positions = jnp.broadcast_to((context.lengths + level)[:, None], (B, k))
        scratch, hidden = network.step(
            weights,
            state.cache,
            scratch,
            beams.tokens,
            hidden,
            positions,
            context.lengths,
            seen,
            level,
        )
        found = guess(network.logits(weights, hidden), noise_of(context, level + 1, ids), ids)
        candidates = grown(beams, index, *found, level + 2)

        is_small = network.survey is not None and k <= one_pass.MOST
        best = (one_pass.top_k if is_small else jax.lax.top_k)(candidates.scores, k)[1]
        row, index = best // k, k + level * k * k + best
        hidden, seen = (
            jnp.take_along_axis(leaf, row[:, :, None], axis=1) for leaf in (hidden, seen)
        )
        return (chosen(candidates, best), index, hidden, scratch, seen), candidates

    hidden = jnp.broadcast_to(state.hidden[:, None], (B, k, state.hidden.shape[-1]))
    nodes = k * (depth - 1)
    carry = first, places, hidden, network.scratch(B, nodes), jnp.zeros((B, k, nodes), bool)
    levels = np.arange(depth - 1, dtype=np.int32)  # constants of the unrolled levels
    _, rest = jax.lax.scan(grow, carry, levels, unroll=network.unrolls)
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
