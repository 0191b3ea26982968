"""Rounds of decoding in one data group, on the device: draft a tree, verify it with the target, commit the accepted path."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Integer

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode import sampling, verify
from tlt_jax.spec_decode.decode_state import (
    BROKEN,
    RUNNING,
    STOPPED,
    TRUNCATED,
    DecodeState,
    Weights,
    follow,
)
from tlt_jax.spec_decode.interface import (
    Context,
    DecodingParams,
    Drafter,
    DraftTree,
    NoiseAhead,
    PyTree,
    Target,
)
from tlt_jax.spec_decode.noise import draw_ahead, drawn_whole, gumbel, gumbel_at, nothing_drawn
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.tree import ancestors, rerank, root_only
from tlt_jax.spec_decode.verify import Stats, measure, nothing

LEVEL = 10**8  # bytes: what an H200 reads at 4.3 TB/s while it runs six kernels of 3.8 us each


class Decoder(NamedTuple):
    """The static arguments of a decoding program."""

    target: Target
    drafter: Drafter
    params: DecodingParams
    strategy: Strategy


@struct.dataclass
class Report:
    """The tokens that a round or a chunk emitted: the first counts[b] of row b.

    `finish` is RUNNING, STOPPED, TRUNCATED or BROKEN. `record`: of the token before each, see interface.TokenRecord.
    `support`: ids of the tokens from which each was drawn, -1 after the last, see DecodingParams.kept.
    """

    tokens: Int32[Array, "B R"]
    logprobs: Float[Array, "B R"]
    counts: Int32[Array, " B"]
    finish: Int32[Array, " B"]
    rounds: Int32[Array, ""]
    stats: Stats
    record: Integer[Array, "B R W"] | None = None
    support: Int32[Array, "B R K"] | None = None


def decode_chunk(
    decoder: Decoder,
    rounds: int,
    state: DecodeState,
    weights: Weights,
    host_context: PyTree,
    bounds: Int32[Array, " L"],
) -> tuple[DecodeState, Report]:
    """Decodes while at least bounds[0] rows are live, for at most min(bounds[1], `rounds`) rounds.

    The drafter may lack as many of the newest tokens as one round of the strategy can emit; `catch_up` handles more.
    """
    strategy, record, kept = decoder.strategy, decoder.target.record, decoder.params.kept
    batch, most = state.roots.shape[0], rounds * strategy.path
    report = Report(
        tokens=jnp.zeros((batch, most), jnp.int32),
        logprobs=jnp.zeros((batch, most), float_type(weights)),
        counts=jnp.zeros(batch, jnp.int32),
        finish=jnp.full(batch, RUNNING, jnp.int32),
        rounds=jnp.int32(0),
        stats=nothing(strategy, batch),
        record=record and jnp.zeros((batch, most, record.width), record.dtype),
        support=jnp.zeros((batch, most, kept), jnp.int32) if kept else None,
    )

    def has_work(carry: tuple[DecodeState, NoiseAhead | None, Report]) -> Array:
        state, _, report = carry
        return (report.rounds < jnp.minimum(bounds[1], rounds)) & (state.live.sum() >= bounds[0])

    def step(
        carry: tuple[DecodeState, NoiseAhead | None, Report],
    ) -> tuple[DecodeState, NoiseAhead | None, Report]:
        state, ahead, report = carry
        state, ahead, emitted = advance_round(decoder, state, ahead, weights, host_context)
        return state, ahead, append(report, emitted)

    ahead = None
    if reads_noise(decoder) and not decoder.target.unrolls:
        vocab, dtype = decoder.target.vocab, float_type(weights)
        ahead = nothing_drawn(state.lengths + 1, strategy.path, vocab, dtype)
    carry = state, ahead, report
    state, _, report = jax.lax.while_loop(has_work, step, carry)
    return state, report


@jax.named_scope("catch_up")
def catch_up(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    weights: Weights,
    missing: Int32[Array, ""],
) -> tuple[DecodeState, Int32[Array, ""]]:
    """The state whose drafter lacks at most `missing` (>= 1) tokens of any live row, and a scalar that is ready with it.

    The drafter lacks the tokens that were decoded without it, and prompts.
    """
    known = drafter.catch_up(
        weights, state.drafter, context_of(target, state, ()), state.live, missing
    )
    return state.replace(drafter=known), state.lengths.max()


def advance_round(
    decoder: Decoder,
    state: DecodeState,
    ahead: NoiseAhead | None,
    weights: Weights,
    host_context: PyTree,
) -> tuple[DecodeState, NoiseAhead | None, Report]:
    """One round: draft, verify with the target, commit.

    `ahead`: noise that the previous round drew for later positions; None when none is stored.
    """
    target, _, params, strategy = decoder
    stored = ahead
    if stored is not None:
        ahead = stored = draw_ahead(stored, state.keys, state.lengths + 1, state.live)
    elif reads_noise(decoder) or (strategy != PLAIN and chooses_at_once(decoder, state)):
        vocab, dtype = target.vocab, float_type(weights)
        ahead = drawn_whole(state.keys, state.lengths + 1, strategy.path, vocab, dtype)
    if strategy == PLAIN:
        tree = root_only(state.roots)
    else:
        context = context_of(target, state, host_context, ahead)
        known, tree = draft_tree(decoder, weights, state.drafter, context, state.roots)
        state = state.replace(drafter=known)
    positions = state.lengths[:, None] + tree.depths
    seen = ancestors(tree.parents)
    logits, scratch = target.forward(
        weights.target, tree.tokens, positions, seen, state.cache, state.lengths
    )
    if chooses_at_once(decoder, state):
        next_positions = state.lengths[:, None] + 1 + tree.depths
        choices = choose_in_one_pass(decoder, state, ahead, logits, next_positions)
        walk = verify.path_of(tree, seen, state.live, strategy.depth, choices)
    else:
        visit = partial(choose_at, decoder, state, ahead, logits)
        walk = verify.walk(tree, state.live, strategy.depth, visit, target.unrolls)
    chosen = walk.visits
    tokens = jnp.where(
        chosen.broken, params.eos_ids[0] if params.eos_ids else 0, chosen.tokens
    ).astype(jnp.int32)
    counts, finish, stop_state = settle(params, state, tokens, walk.accepted, chosen.broken)
    stats = measure(tree, walk.path, counts, state.live, strategy)
    logprobs, record, support = chosen.logprobs, None, None
    if params.kept:
        support, share = supports(decoder, logits, walk.path)
        logprobs -= share
    logprobs = jnp.where(chosen.broken, 0, logprobs)
    if target.record:
        record = jnp.take_along_axis(target.record.of(scratch), walk.path[:, :, None], axis=1)
    emitted = Report(tokens, logprobs, counts, finish, jnp.int32(1), stats, record, support)
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    after = state.replace(
        roots=jnp.where(counts > 0, last, state.roots),
        lengths=state.lengths + counts,
        live=state.live & (finish == RUNNING),
        stop_state=stop_state,
        history=remember(state.history, tokens, state.lengths),
        cache=target.keep(state.cache, scratch, walk.path, state.lengths),
    )
    return after, stored, emitted


def choose_at(
    decoder: Decoder,
    state: DecodeState,
    ahead: NoiseAhead | None,
    logits: Float[Array, "B N V"],
    nodes: Int32[Array, " B"],
    step: Int32[Array, ""],
    alive: Bool[Array, " B"],
) -> verify.Visit:
    """The target's choice of tokens at these nodes, `step` levels below the root; undefined for rows that are not alive."""
    rule, positions = decoder.params.sampling, state.lengths + 1 + step
    here = logits  # [B, 1, V]
    if logits.shape[1] > 1:
        here = jnp.take_along_axis(logits, nodes[:, None, None], axis=1)
    if decoder.target.choose:
        found = choose_in_one_pass(decoder, state, ahead, here, positions[:, None])
        return jax.tree.map(lambda leaf: leaf[:, 0], found)
    scaled = sampling.scale(here[:, 0], rule)

    def noise(rows: Int32[Array, " R"], ids: Int32[Array, "R U"] | None) -> Float[Array, "R U"]:
        if ids is not None:
            return gumbel_at(state.keys[rows], positions[rows], ids, scaled.dtype)
        if ahead is not None:
            places = ahead.places(positions)[rows]
            return ahead.values.at[places].get(mode="promise_in_bounds")
        keys, vocab = state.keys[rows], scaled.shape[1]
        return gumbel(keys, positions[rows][:, None], vocab, scaled.dtype)[:, 0]

    tokens = sampling.draw(scaled, alive, rule, noise, decoder.target.unrolls)
    return verify.Visit(tokens, *sampling.logprob(scaled, tokens))


def supports(
    decoder: Decoder, logits: Float[Array, "B N V"], path: Int32[Array, "B M"]
) -> tuple[Int32[Array, "B M K"], Float[Array, "B M"]]:
    """The tokens among which the target chooses at the nodes of a path, -1 after the last, and the log of their probability.

    Of more than K, which only ties with the last can be, K.
    """
    rule, target = decoder.params.sampling, decoder.target
    here = jnp.take_along_axis(logits, path[:, :, None], axis=1)
    scaled = sampling.scale(here, rule)
    kept = (target.filter or partial(sampling.filter, unrolls=target.unrolls))(scaled, rule)
    values, ids = jax.lax.top_k(kept, decoder.params.kept)
    share = jax.nn.logsumexp(kept, axis=-1) - jax.nn.logsumexp(scaled, axis=-1)
    return jnp.where(values > -jnp.inf, ids, -1).astype(jnp.int32), share


def chooses_at_once(decoder: Decoder, state: DecodeState) -> bool:
    """Whether the target chooses at all nodes at once, and not at one node of each row, level by level.

    All N nodes of a tree read 2 N rows of the vocabulary for each sequence, logits and noise; the levels read 2 M. Each
    level after the first runs about six kernels, in whose time a device reads LEVEL bytes. A filter reads the logits three
    times more, in three kernels.
    """
    strategy, target = decoder.strategy, decoder.target
    reads, kernels = (5, 9) if sampling.is_filtered(decoder.params.sampling) else (2, 6)
    row = 4 * state.roots.shape[0] * target.vocab
    more = reads * (strategy.nodes - strategy.path) * row
    return target.choose is not None and more <= strategy.depth * LEVEL * kernels / 6


def choose_in_one_pass(
    decoder: Decoder,
    state: DecodeState,
    ahead: NoiseAhead | None,
    logits: Float[Array, "B N V"],
    positions: Int32[Array, "B N"],
) -> verify.Visit:
    """The target's choices [B, N] of tokens at these positions; the noise is drawn unless the sampling is greedy."""
    rule, target = decoder.params.sampling, decoder.target
    scaled = perturbed = sampling.scale(logits, rule)
    if not rule.is_greedy:
        perturbed = (target.filter or partial(sampling.filter, unrolls=True))(scaled, rule)
        if ahead is None:
            perturbed += gumbel(state.keys, positions, scaled.shape[-1], scaled.dtype)
        else:
            rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
            places = rows * ahead.count + positions % ahead.count
            perturbed += ahead.values.at[places].get(mode="promise_in_bounds")
    tokens, chosen, total = target.choose(scaled, perturbed)
    logprobs = chosen - total
    return verify.Visit(tokens, logprobs, ~jnp.isfinite(logprobs) | (chosen < sampling.LEAST))


@jax.named_scope("draft")
def draft_tree(
    decoder: Decoder, weights: Weights, known: PyTree, context: Context, roots: Int32[Array, " B"]
) -> tuple[PyTree, DraftTree]:
    """The drafter's state with all tokens before the roots, and the tree of its best nodes."""
    drafter, strategy = decoder.drafter, decoder.strategy
    known = drafter.extend(weights, known, context, strategy.path)
    temperature = decoder.params.sampling.temperature
    candidates = drafter.draft(weights, known, context, strategy, temperature)
    counts = decoder.target.choose is not None
    return known, rerank(candidates, roots, strategy.nodes, counts)


def context_of(
    target: Target, state: DecodeState, host_context: PyTree, ahead: NoiseAhead | None = None
) -> Context:
    """What the drafter may read."""
    return Context(state.history, state.lengths, target.features(state.cache), host_context, ahead)


def reads_noise(decoder: Decoder) -> bool:
    """Whether the drafter reads the noise ahead; otherwise the noise is drawn at the visited nodes alone.

    Nodes of one depth share their noise, since a walk visits at most one of them.
    """
    is_greedy = decoder.params.sampling.is_greedy
    return decoder.strategy != PLAIN and decoder.drafter.reads_noise and not is_greedy


def float_type(weights: Weights) -> jnp.dtype:
    """The dtype of probabilities: at least float32."""
    return jnp.result_type(jnp.float32, *jax.tree.leaves(weights.target))


@shaped
def remember(
    history: Int32[Array, "B S"], tokens: Int32[Array, "B M"], lengths: Int32[Array, " B"]
) -> Int32[Array, "B S"]:
    """The history with a round's tokens after the roots; later rounds overwrite those that were not emitted."""
    if not history.shape[1]:
        return history
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start + 1,)))(
        history, tokens, lengths
    )


@shaped
def settle(
    params: DecodingParams,
    state: DecodeState,
    tokens: Int32[Array, "B M"],
    accepted: Int32[Array, " B"],
    broken: Bool[Array, "B M"],
) -> tuple[Int32[Array, " B"], Int32[Array, " B"], Int32[Array, " B"]]:
    """Number of a walk's tokens that each row emits, how it finishes, and its stop state after them.

    A row ends at EOS, with a stop text, at its limit, or where the logits are broken.
    """
    stops = jnp.zeros(tokens.shape, bool)
    if params.stops:
        after = follow(params.stops, state.stop_state, tokens)
        stops = after == params.stops.end
    for eos in params.eos_ids:
        stops |= tokens == eos
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    ends = stops | broken | (state.lengths[:, None] + steps + 2 >= state.limits[:, None])
    first = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1).astype(jnp.int32), tokens.shape[1])
    counts = jnp.where(state.live, jnp.minimum(accepted, first) + 1, 0)
    here = steps == first[:, None]
    finish = jnp.where((stops & here).any(axis=1), STOPPED, TRUNCATED)
    finish = jnp.where((broken & here).any(axis=1), BROKEN, finish)
    finish = jnp.where(state.live & (first <= accepted), finish, RUNNING).astype(jnp.int32)
    stop_state = state.stop_state
    if params.stops:
        last = jnp.take_along_axis(after, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        stop_state = jnp.where(counts > 0, last, stop_state)
    return counts, finish, stop_state


def append(report: Report, emitted: Report) -> Report:
    """The report with the tokens of one more round."""
    column = jnp.arange(report.tokens.shape[1])
    tokens, logprobs = report.tokens, report.logprobs
    for m in range(emitted.tokens.shape[1]):
        here = (column == (report.counts + m)[:, None]) & (m < emitted.counts)[:, None]
        tokens = jnp.where(here, emitted.tokens[:, m, None], tokens)
        logprobs = jnp.where(here, emitted.logprobs[:, m, None].astype(logprobs.dtype), logprobs)
    steps = jnp.arange(emitted.tokens.shape[1])
    places = jnp.where(steps < emitted.counts[:, None], report.counts[:, None] + steps, len(column))
    rows = jnp.arange(len(tokens))[:, None]

    def extended(whole: Array | None, new: Array | None) -> Array | None:
        if whole is None:
            return None
        return whole.at[rows, places].set(new, mode="drop", unique_indices=True)

    return Report(
        tokens,
        logprobs,
        report.counts + emitted.counts,
        jnp.where(emitted.finish == RUNNING, report.finish, emitted.finish),
        report.rounds + emitted.rounds,
        jax.tree.map(jnp.add, report.stats, emitted.stats),
        extended(report.record, emitted.record),
        extended(report.support, emitted.support),
    )
