"""Candidates of a learned drafter: beams coupled with the target's noise; knows no network.

The shapes are those of EAGLE-2's dynamic tree (Li et al. 2024): k children for each of k beams on
every level, that is k + (D - 1) k^2 candidates. What is new: siblings are ordered by log q +
coupling * noise, with the very noise that the target will choose with, and a node's score is the
log-probability that the target goes there, given that noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.interface import Context, Drafter, Network, PyTree
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import Candidates, chosen

BLOCKS = ((16, 64), (4, 16))  # sequences and tokens of each in a step of catching up: while much is missing, and then


@dataclass(frozen=True)
class Coupling:
    """How siblings are ordered, log q + strength * noise, and how sharply scores follow that order."""

    strength: float = 0.75
    sharpness: float = 1.0


@struct.dataclass
class LearnedState:
    """State of a learned drafter: its cache, how many slots of it exist, and the hidden state of the last of them."""

    cache: PyTree
    built: Int32[Array, " B"]
    hidden: Float[Array, "B Z"]


def learned_drafter(network: Network, coupling: Coupling) -> Drafter:
    """The drafter that a network makes."""

    def extend(weights: PyTree, state: LearnedState, context: Context, width: int) -> LearnedState:
        starts = jnp.minimum(state.built, context.history.shape[1] - width - 1)
        tokens, features = window(context.history, starts + 1, width), window(context.features, starts, width)
        last = jnp.clip(context.lengths - 1 - starts, 0, width - 1)
        cache, newest = network.extend(weights, state.cache, tokens, features, starts, last)
        behind = state.built < context.lengths
        return LearnedState(
            cache=cache,
            built=jnp.minimum(starts + width, context.lengths),
            hidden=jnp.where(behind[:, None], newest, state.hidden),
        )

    def catch_up(weights: PyTree, state: LearnedState, context: Context, live: Array, missing: Array) -> LearnedState:
        batch, slots = context.history.shape

        def lacking(state: LearnedState) -> Array:
            return jnp.where(live, jnp.maximum(context.lengths - missing - state.built, 0), 0)

        def step(state: LearnedState, rows: int, width: int) -> LearnedState:
            chosen = jax.lax.top_k(lacking(state), rows)[1]
            built = state.built[chosen]
            starts = jnp.minimum(built, slots - width - 1)
            tokens = window(context.history, starts + 1, width, chosen)
            features = window(context.features, starts, width, chosen)
            # One is left to `extend`, which gives its hidden state.
            after = jnp.maximum(built, jnp.minimum(starts + width, context.lengths[chosen] - 1))
            cache = network.fill(weights, state.cache, tokens, features, chosen, starts)
            return state.replace(cache=cache, built=state.built.at[chosen].set(after))

        for (rows, width), is_last in zip(BLOCKS, (False, True), strict=True):
            sizes = {"rows": min(rows, batch), "width": min(width, slots - 1)}
            enough = 0 if is_last else sizes["rows"] * sizes["width"] // 4
            state = jax.lax.while_loop(
                lambda state, enough=enough: lacking(state).sum() > enough, partial(step, **sizes), state
            )
        return state

    def draft(
        weights: PyTree, state: LearnedState, context: Context, strategy: Strategy, temperature: float
    ) -> Candidates:
        guess = partial(children, coupling=coupling, temperature=temperature or 1.0, k=strategy.topk, top=network.top)
        candidates = expand(network, guess, weights, state, context, strategy)
        knows = (context.lengths > 0)[:, None]  # before the second token there are no features to start from
        return candidates.replace(scores=jnp.where(knows, candidates.scores, -jnp.inf))

    def resize(state: LearnedState, rows: Array, slots: int) -> LearnedState:
        source = jnp.maximum(rows, 0)
        return LearnedState(network.resize(state.cache, rows, slots), state.built[source], state.hidden[source])

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
        guide=lambda batch: (),
        params=network.params,
        remembers=True,
    )


@shaped
def window(array: Array, starts: Int32[Array, " R"], width: int, rows: Int32[Array, " R"] | None = None) -> Array:
    """array[rows[r], starts[r] : starts[r] + width]; of every row when none are named."""
    batch, slots = array.shape[:2]
    rows = jnp.arange(batch) if rows is None else rows
    index = (rows * slots + starts)[:, None] + jnp.arange(width)
    flat = array.reshape(batch * slots, *array.shape[2:])
    return flat.at[index.reshape(-1)].get(mode="promise_in_bounds").reshape(len(rows), width, *array.shape[2:])


def expand(
    network: Network,
    guess: Callable[..., tuple[Array, Array]],
    weights: PyTree,
    state: LearnedState,
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round: the root's k best children, and k for each of the k best beams of every level."""
    B, k, depth = context.lengths.shape[0], strategy.topk, strategy.depth
    ids = network.ids(weights)
    logits = network.logits(weights, state.hidden[:, None])
    tokens, scores = (found[:, 0] for found in guess(logits, noise_of(context, 0, ids), ids))
    ranks = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))
    levels = [Candidates(tokens, jnp.full((B, k), -1, jnp.int32), jnp.ones((B, k), jnp.int32), scores, ranks)]
    beams, index = levels[0], jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (B, k))
    hidden = jnp.broadcast_to(state.hidden[:, None], (B, k, state.hidden.shape[-1]))
    scratch, seen, offset = network.scratch(B, k * (depth - 1)), jnp.zeros((B, k, 0), bool), k
    for level in range(depth - 1):
        seen = jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(k, dtype=bool), (B, k, k))], axis=2)
        positions = jnp.broadcast_to((context.lengths + level)[:, None], (B, k))
        scratch, hidden = network.step(
            weights, state.cache, scratch, beams.tokens, hidden, positions, context.lengths, seen, level
        )
        found = guess(network.logits(weights, hidden), noise_of(context, level + 1, ids), ids)
        levels.append(grown(beams, index, *found, level + 2))
        best = jax.lax.top_k(levels[-1].scores, k)[1]
        beams = chosen(levels[-1], best)
        row, index, offset = best // k, offset + best, offset + k * k
        hidden, seen = (jnp.take_along_axis(leaf, row[:, :, None], axis=1) for leaf in (hidden, seen))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *levels)


@shaped
def noise_of(context: Context, level: int, ids: Int32[Array, " U"] | None) -> Float[Array, "B 1 U"] | None:
    """The noise with which the target will choose among the children of this level, at the drafter's ids."""
    if context.noise is None:
        return None
    noise = context.noise[:, level : level + 1]
    return noise if ids is None else noise[:, :, ids]


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
) -> tuple[Int32[Array, "B w k"], Float[Array, "B w k"]]:
    """Tokens of the k best children of w nodes, and the log-probability of each that the target chooses it there.

    Given the noise G, a target that differs from the drafter by a random error chooses v with a probability that the
    softmax of sharpness * (log q + strength * G) models. Non-finite values make a child that never holds.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    value = jax.nn.log_softmax(wide / temperature, axis=-1)
    if noise is not None and coupling.strength:
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
    depth: int,
) -> Candidates:
    """The children of the beams as candidates; `index` is each beam's own."""
    B, k, _ = tokens.shape
    flat = (B, k * k)
    places = jnp.maximum(beams.ranks[:, :, None], jnp.arange(k, dtype=jnp.int32))
    return Candidates(
        tokens=tokens.reshape(flat),
        parents=jnp.repeat(index, k, axis=1),
        depths=jnp.full(flat, depth, jnp.int32),
        scores=(beams.scores[:, :, None] + scores).reshape(flat),
        ranks=places.reshape(flat),
    )
