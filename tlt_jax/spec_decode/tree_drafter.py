"""The Drafter of a learned drafter: its cache follows the committed tokens, and its trees grow level by level.

The shape of a tree is that of EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): k children for each of the k best nodes
of every level, k + (D - 1) k^2 candidates. The difference: siblings are ordered by log q + strength * noise, with the noise
that the target samples with, and a node's score is the log-probability that the target chooses its path, given that noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.kernels.fused import Fused
from tlt_jax.models import block_drafter, drafter as drafters, eagle, kv_cache
from tlt_jax.models.drafter import DrafterConfig, DrafterParams, Shared
from tlt_jax.shapes import shaped
from tlt_jax.spec_decode import one_pass
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import Candidates, Context, Drafter, PyTree, Target
from tlt_jax.spec_decode.strategy import Strategy, name
from tlt_jax.spec_decode.tree import chosen, merge

# Sequences x tokens per step of `catch_up`: while many tokens are missing, then for the rest.
BLOCKS = ((16, 64), (4, 16))

# Tokens of the children of w nodes, and their log-probabilities given the parents.
Children = tuple[Int32[Array, "B w k"], Float[Array, "B w k"]]
# (logits [B, w, U] of w nodes, level of the children, `bias_at` of score_children or None) -> their children
Score = Callable[[Array, Any, Callable[[Array], Array] | None], Children]
Given = tuple[DrafterParams, DrafterConfig, Shared]  # the first arguments of a network's functions


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

    `built`: number of cache slots written; `hidden`: hidden state of the last of them, of width 0 if no draft reads it.
    """

    cache: PyTree
    built: Int32[Array, " B"]
    hidden: Float[Array, "B Z"]


def learned_drafter(
    config: DrafterConfig,
    target: Target,
    fused: Fused,
    dtype: str,
    coupling: Coupling = Coupling(),
    network: Any = None,
) -> Drafter:
    """The Drafter of a learned drafter on one data group; embedding and LM head are the target's.

    `network`: its functions, those of the module eagle or block_drafter unless given.
    """
    network, mesh = network or (block_drafter if config.is_block else eagle), fused.mesh

    def given(weights: Weights) -> Given:
        return weights.drafter, config, drafters.shared(weights.target)

    def extend(weights: Weights, state: LearnedState, context: Context, width: int) -> LearnedState:
        starts = jnp.minimum(state.built, context.history.shape[1] - width - 1)
        tokens = window(context.history, starts + 1, width)
        features = window(context.features, starts, width)
        last = jnp.clip(context.lengths - 1 - starts, 0, width - 1)
        cache, newest = network.extend(
            *given(weights), state.cache, tokens, features, starts, last, fused
        )
        behind = state.built < context.lengths
        return LearnedState(
            cache=cache,
            built=jnp.minimum(starts + width, context.lengths),
            hidden=jnp.where(behind[:, None], newest, state.hidden),
        )

    def draft(
        weights: Weights,
        state: LearnedState,
        context: Context,
        strategy: Strategy,
        temperature: float,
    ) -> Candidates:
        def score(
            logits: Array, level: int | Array, bias_at: Callable[[Array], Array] | None = None
        ) -> Children:
            """With the noise, if read, by which the target chooses among the children of this level."""
            ids, ahead, noise = weights.drafter.ids, context.ahead, None
            if ahead is not None:
                places = ahead.places(context.lengths + 1 + level)[:, None]
                where = places if ids is None else (places[:, :, None], ids)
                noise = ahead.values.at[where].get(mode="promise_in_bounds")
            return score_children(
                logits, noise, ids, coupling=coupling, temperature=temperature or 1.0,
                k=strategy.topk, mesh=mesh, in_one_pass=target.choose is not None, bias_at=bias_at,
                candidates=min(config.selector_top_k, config.draft_vocab_size),
            )  # fmt: skip

        expand = expand_by_block if config.is_block else expand_by_level
        candidates = expand(network, given(weights), target, fused, score, state, context, strategy)
        knows = (context.lengths > 0)[:, None]  # the first token has no features before it
        return candidates.replace(scores=jnp.where(knows, candidates.scores, -jnp.inf))

    def resize(state: LearnedState, rows: Array, slots: int) -> LearnedState:
        source, padded = jnp.maximum(rows, 0), target.padded_slots(slots)
        cache = kv_cache.resize(state.cache, rows, padded)
        return LearnedState(cache, state.built[source], state.hidden[source])

    def empty(batch: int, slots: int) -> LearnedState:
        array = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
        padded = target.padded_slots(slots)
        return LearnedState(
            cache=kv_cache.abstract(config.layers, batch, padded, 0, dtype, mesh),
            built=array((batch,), jnp.int32),
            hidden=array((batch, config.state_width), dtype),
        )

    def fill(weights: Weights, *rest: Array) -> PyTree:
        return network.fill(*given(weights), *rest, fused)

    return Drafter(
        draft=draft,
        catch_up=partial(catch_up, fill),
        extend=extend,
        reset=lambda state, fresh: state.replace(built=jnp.where(fresh, 0, state.built)),
        resize=resize,
        empty=empty,
        host_context=lambda batch: (),
        params=drafters.abstract(config, mesh, "rollout", dtype, is_bound=True),
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


def catch_up(
    fill: Callable[..., PyTree],
    weights: Weights,
    state: LearnedState,
    context: Context,
    live: Bool[Array, " B"],
    missing: Int32[Array, ""],
) -> LearnedState:
    """The state that lacks at most the last `missing` committed tokens of any live row.

    fill(weights, cache, tokens, features, rows, starts) -> the cache with a window of these rows.
    """
    batch, slots = context.history.shape

    def lacking(state: LearnedState) -> Array:
        return jnp.where(live, jnp.maximum(context.lengths - missing - state.built, 0), 0)

    def step(state: LearnedState, rows: int, width: int) -> LearnedState:
        most = jax.lax.top_k(lacking(state), rows)[1]
        built = state.built[most]
        starts = jnp.minimum(built, slots - width - 1)
        tokens = window(context.history, starts + 1, width, most)
        features = window(context.features, starts, width, most)
        # The last token is left to `extend`, which computes its hidden state.
        after = jnp.maximum(built, jnp.minimum(starts + width, context.lengths[most] - 1))
        cache = fill(weights, state.cache, tokens, features, most, starts)
        return state.replace(cache=cache, built=state.built.at[most].set(after))

    for (rows, width), is_last in zip(BLOCKS, (False, True), strict=True):
        sizes = {"rows": min(rows, batch), "width": min(width, slots - 1)}
        enough = 0 if is_last else sizes["rows"] * sizes["width"] // 4
        state = jax.lax.while_loop(
            lambda state, enough=enough: lacking(state).sum() > enough,
            partial(step, **sizes),
            state,
        )
    return state


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


def expand_by_level(
    network: Any,
    given: Given,
    target: Target,
    fused: Fused,
    score: Score,
    state: LearnedState,
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round by a network that runs once for each level."""
    config, hidden = given[1], state.hidden  # at the token before the root
    B, k, nodes = len(hidden), strategy.topk, strategy.topk * (strategy.depth - 1)
    root = score(network.logits(*given, hidden[:, None], fused), 0)

    def below(
        beams: Candidates, of_beams: tuple[Array, Array], scratch: PyTree, level: Int32[Array, ""]
    ) -> tuple[Children, tuple[Array, Array], PyTree]:
        hidden, seen = of_beams
        seen = seen | (jnp.arange(seen.shape[2]) == level * k + jnp.arange(k)[:, None])
        positions = jnp.broadcast_to((context.lengths + level)[:, None], (B, k))
        scratch, hidden = network.draft_level(
            *given, state.cache, scratch, beams.tokens, hidden, positions, context.lengths, seen, level, fused
        )  # fmt: skip
        found = score(network.logits(*given, hidden, fused), level + 1)
        return found, (hidden, seen), scratch

    of_beams = (
        jnp.broadcast_to(hidden[:, None], (B, k, hidden.shape[-1])),
        jnp.zeros((B, k, nodes), bool),
    )
    scratch = network.scratch(config, B, nodes, hidden.dtype, fused.mesh.shape["model"])
    levels = np.arange(strategy.depth - 1, dtype=np.int32)  # constants of the unrolled levels
    return expand_tree(target, root, below, of_beams, scratch, levels)


def expand_by_block(
    network: Any,
    given: Given,
    target: Target,
    fused: Fused,
    score: Score,
    state: LearnedState,
    context: Context,
    strategy: Strategy,
) -> Candidates:
    """All candidates of a round by a network that drafts all levels in one pass.

    Logits of a level are the same for all nodes, apart from a bias by the parent's token (DSpark, arXiv 2607.05147); a path
    selector adds it to the most likely tokens only. The confidence of a level scales the scores of its nodes. Raises
    ValueError when the strategy is deeper than the network drafts.
    """
    (params, config, _), k, depth = given, strategy.topk, strategy.depth
    if depth > config.depth:
        raise ValueError(
            f"strategy {name(strategy)}: the drafter drafts {config.depth} levels: use depth {config.depth} or less"
        )
    roots = jnp.take_along_axis(context.history, context.lengths[:, None], axis=1)
    hidden = network.draft_block(*given, state.cache, roots[:, 0], context.lengths, depth, fused)
    hidden = jnp.moveaxis(hidden, 1, 0)[:, :, None]  # levels first: XLA would copy the logits
    logits = network.logits(*given, hidden, fused)

    def children_of(
        tokens: Int32[Array, "B w"],
        level: int | Int32[Array, ""],
        hidden: Float[Array, "B 1 Z"],
        logits: Float[Array, "B 1 U"],
    ) -> Children:
        """The children, at this level, of nodes with these tokens."""
        embedding = partial(network.markov_embedding, params, tokens, hidden.dtype)
        bias_at = None
        if config.selector_top_k:
            bias_at = partial(network.markov_bias, params, embedding(), hidden)
        elif config.markov_rank:
            logits = logits + network.markov_bias(params, embedding(), hidden)
        shape = (*tokens.shape, k)
        found, scores = (jnp.broadcast_to(part, shape) for part in score(logits, level, bias_at))
        if config.confidence:
            wide = jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
            sure = jax.nn.log_sigmoid(network.confidence(params, wide, embedding()))[:, :, None]
            scores = scores + jnp.where(jnp.isnan(sure), -jnp.inf, sure)
        return found, scores

    def below(
        beams: Candidates, _: tuple, __: tuple, given: tuple
    ) -> tuple[Children, tuple, tuple]:
        level, *states = given
        return children_of(beams.tokens, level + 1, *states), (), ()

    root = children_of(roots, 0, hidden[0], logits[0])
    levels = np.arange(depth - 1, dtype=np.int32)  # constants of the unrolled levels
    return expand_tree(target, root, below, (), (), (levels, hidden[1:], logits[1:]))


def expand_tree(
    target: Target,
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

        is_small = target.choose is not None and k <= one_pass.MOST
        best = (one_pass.top_k if is_small else jax.lax.top_k)(candidates.scores, k)[1]
        row, index = (best // k)[:, :, None], (k + level * k * k + best).astype(jnp.int32)
        of_beams = jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, row, axis=1), of_beams)
        return (chosen(candidates, best), index, of_beams, carried), candidates

    carry = first, places, of_beams, carried
    _, rest = jax.lax.scan(grow_level, carry, levels, unroll=target.unrolls)
    rest = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(B, -1), rest)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, rest)


@shaped
def score_children(
    logits: Float[Array, "B v U"],
    noise: Float[Array, "B 1 U"] | None,
    ids: Int32[Array, " U"] | None,
    *,
    coupling: Coupling,
    temperature: float,
    k: int,
    mesh: Mesh | None = None,
    in_one_pass: bool = False,
    bias_at: Callable[[Array], Array] | None = None,
    candidates: int = 0,
) -> Children:
    """Tokens of the k best children of w nodes, and their log-probabilities given the parent; v is w, or 1 with `bias_at`.

    The model: given the noise G, a target that differs from the drafter by a random error chooses v with probability
    softmax(sharpness * (log q + strength * G)). Children with values that are not finite score -inf. `ids`: token ids of
    the draft vocabulary; None: 0, 1, ... `mesh`: of the data group, over which they may lie. `in_one_pass`: for GPUs, where
    kernels cost more than their arithmetic.

    `bias_at`, of a path selector: from the places [B, 1, c] of the best c = max(k, candidates), which all nodes of a row have
    in common, to what it adds to log q of each node's [B, w, c]. They are found with the noise, and share what they had:
    published programs, which know no noise, find them without it, and give no other token any probability.
    """
    most = k if bias_at is None else max(k, candidates)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if in_one_pass:  # the first log_softmax below shifts the second
        value = wide / temperature + (0 if noise is None else coupling.strength * noise)
        best, places, total = topk_with_logsumexp(coupling.sharpness * value, most, mesh)
        value = best - total[..., None]
        scores = jnp.where(jnp.isnan(value), -jnp.inf, jnp.minimum(value, 0))
    else:
        value = jax.nn.log_softmax(wide / temperature, axis=-1)
        if noise is not None:
            value = value + coupling.strength * noise
        value = jax.nn.log_softmax(coupling.sharpness * value, axis=-1)
        value = jnp.where(jnp.isnan(value), -jnp.inf, jnp.minimum(value, 0))
        scores, places = top_k(value, most, mesh)

    if bias_at is not None:
        bias = coupling.sharpness / temperature * bias_at(places).astype(scores.dtype)
        scores = jnp.minimum(block_drafter.selected(scores, bias), 0)
        scores, found = jax.lax.top_k(scores, k)
        places = jnp.take_along_axis(jnp.broadcast_to(places, (*found.shape[:2], most)), found, -1)
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


def top_k(values: Array, k: int, mesh: Mesh | None) -> tuple[Array, Array]:
    """lax.top_k along an axis that may lie over `model`: every device looks through its own part first.

    Of lax.top_k alone XLA makes a sort, and deals rows of logits, and all that is computed from the result, to the devices.
    """
    parts = mesh.shape["model"] if mesh else 1
    width = values.shape[-1] // parts
    if parts == 1 or values.shape[-1] % parts or width < k:
        return jax.lax.top_k(values, k)
    best, places = jax.lax.top_k(values.reshape(*values.shape[:-1], parts, width), k)
    places += width * jnp.arange(parts)[:, None]
    whole = NamedSharding(mesh, PartitionSpec())
    best, places = (
        jax.lax.with_sharding_constraint(array.reshape(*values.shape[:-1], parts * k), whole)
        for array in (best, places)
    )
    best, chosen = jax.lax.top_k(best, k)
    return best, jnp.take_along_axis(places, chosen, axis=-1)


def topk_with_logsumexp(values: Array, k: int, mesh: Mesh | None) -> tuple[Array, Array, Array]:
    """`top_k` and the logsumexp, NaN where a value is (the others are any there): in one pass while k is small."""
    if k > one_pass.MOST:
        return *top_k(values, k, mesh), jax.nn.logsumexp(values, axis=-1)

    def whole(found: Sequence[Array]) -> Sequence[Array]:
        """Gathered in one array of floats, in which indices are exact up to 2**24."""
        joined = jnp.stack([array.astype(values.dtype) for array in found], axis=-2)
        joined = jax.lax.with_sharding_constraint(joined, NamedSharding(mesh, PartitionSpec()))
        return [joined[..., n, :].astype(array.dtype) for n, array in enumerate(found)]

    return one_pass.top_k(values, k, whole if mesh and mesh.shape["model"] > 1 else list)
