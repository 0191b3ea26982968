"""The Drafter of a learned network, whose cache follows the committed tokens, alone and with the candidates of another one."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.interface import Candidates, Context, Drafter, PyTree
from tlt_jax.spec_decode.network import BlockPass, Network
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import merge
from tlt_jax.spec_decode.tree_growth import (
    Coupling,
    expand_by_block,
    expand_by_level,
    score_children,
)

# Sequences x tokens per step of `catch_up`: while many tokens are missing, then for the rest.
BLOCKS = ((16, 64), (4, 16))


@struct.dataclass
class LearnedState:
    """State of a learned drafter.

    `built`: number of cache slots written; `hidden`: hidden state of the last of them, of width 0 if no draft reads it.
    """

    cache: PyTree
    built: Int32[Array, " B"]
    hidden: Float[Array, "B Z"]


def learned_drafter(network: Network, coupling: Coupling) -> Drafter:
    """The Drafter of a network."""
    expand = expand_by_block if isinstance(network.passes, BlockPass) else expand_by_level

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
            score_children,
            coupling=coupling,
            temperature=temperature or 1.0,
            k=strategy.topk,
            top=network.top,
            survey=network.survey,
        )
        candidates = expand(network, guess, weights, state.cache, state.hidden, context, strategy)
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
        reads_history=True,
        reads_noise=coupling.strength != 0,
    )


def merged_drafter(learned: Drafter, other: Drafter) -> Drafter:
    """The Drafter of the candidates of both, with the state and weights of `learned` and the host context of `other`.

    `other` has neither state nor weights. Ranks count the siblings of both drafters, so they can reach 2 topk - 1. They
    are clipped to topk - 1, the last rank that Stats.hits counts, so no count is lost, and the accept length estimated
    for the same tree with fewer nodes stays exact. For a tree of smaller topk the estimate is a lower bound: that tree
    has more nodes than those whose clipped ranks fit it.
    """

    def draft(
        weights: PyTree, state: PyTree, context: Context, strategy: Strategy, temperature: float
    ) -> Candidates:
        both = merge(
            learned.draft(weights, state, context, strategy, temperature),
            other.draft(weights, (), context, strategy, temperature),
            strategy.depth,
        )
        return both.replace(ranks=jnp.minimum(both.ranks, strategy.topk - 1))

    return learned._replace(draft=draft, host_context=other.host_context)


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
