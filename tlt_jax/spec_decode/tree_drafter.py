"""The Drafter of a learned network: its cache follows the committed tokens; knows no network."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode import block_tree, level_tree
from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, Drafter, PyTree
from tlt_jax.spec_decode.network import BlockPass, Network
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree_growth import Coupling, children

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
    expand = (block_tree if isinstance(network.passes, BlockPass) else level_tree).expand

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
