"""What runs on the devices of one data group: rounds of decoding, admission and compaction; knows no host, clock or queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, UInt32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode import noise, sampling, verify
from tlt_jax.spec_decode.sampling import Sampling
from tlt_jax.spec_decode.tree import Drafter, DraftTree, PyTree, Strategy, Target, ancestors

RUNNING, STOPPED, TRUNCATED = 0, 1, 2


@dataclass(frozen=True)
class Rules:
    """What the tokens depend on besides weights and keys: how they are drawn, and what ends an answer."""

    sampling: Sampling = Sampling()
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def tail(self) -> int:
        """How many of its last tokens a sequence must remember to notice a stop sequence."""
        return max((len(stop) for stop in self.stop_ids), default=1) - 1


class Decoder(NamedTuple):
    """What one program decodes with; all of it is static."""

    target: Target
    drafter: Drafter
    rules: Rules
    strategy: Strategy


@struct.dataclass
class Weights:
    """Parameters of the target and of the drafter."""

    target: PyTree
    drafter: PyTree


@struct.dataclass
class DecodeState:
    """Sequences in decoding. The root is the newest token: its position is `lengths`, and the cache holds all before it.

    `limits` are the tokens of prompt and answer together. A row that is not live changes nothing that is ever read.
    """

    roots: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    live: Bool[Array, " B"]
    keys: UInt32[Array, "B 2"]
    tail: Int32[Array, "B W"]
    cache: PyTree
    drafter: PyTree


@struct.dataclass
class Admission:
    """New sequences for the rows whose source (a row of a prefill) is not -1."""

    source: Int32[Array, " B"]
    roots: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    keys: UInt32[Array, "B 2"]


@struct.dataclass
class Report:
    """What a chunk emitted, in order and from the left of each row; `finish` is RUNNING, STOPPED or TRUNCATED."""

    tokens: Int32[Array, "B R"]
    logprobs: Float[Array, "B R"]
    counts: Int32[Array, " B"]
    finish: Int32[Array, " B"]
    rounds: Int32[Array, ""]


def chunk(decoder: Decoder, rounds: int, state: DecodeState, weights: Weights) -> tuple[DecodeState, Report]:
    """Decodes for up to `rounds` rounds, fewer when no row is live any more."""
    batch, room = state.roots.shape[0], rounds * decoder.strategy.path
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(weights.target))
    report = Report(
        tokens=jnp.zeros((batch, room), jnp.int32),
        logprobs=jnp.zeros((batch, room), dtype),
        counts=jnp.zeros(batch, jnp.int32),
        finish=jnp.full(batch, RUNNING, jnp.int32),
        rounds=jnp.int32(0),
    )

    def goes_on(carry: tuple[DecodeState, Report]) -> Array:
        state, report = carry
        return (report.rounds < rounds) & state.live.any()

    def step(carry: tuple[DecodeState, Report]) -> tuple[DecodeState, Report]:
        state, report = carry
        state, emitted = advance_round(decoder, state, weights)
        return state, append(report, emitted)

    return jax.lax.while_loop(goes_on, step, (state, report))


@struct.dataclass
class Emitted:
    """Tokens of one round: the first counts[b] of row b."""

    tokens: Int32[Array, "B M"]
    logprobs: Float[Array, "B M"]
    counts: Int32[Array, " B"]
    finish: Int32[Array, " B"]


def advance_round(decoder: Decoder, state: DecodeState, weights: Weights) -> tuple[DecodeState, Emitted]:
    """Draft, forward, choose at every node, follow the matches, commit."""
    target, drafter, rules, strategy = decoder
    tree = drafter.draft(weights.drafter, state.drafter, state.roots, state.lengths, state.keys, strategy)
    positions = state.lengths[:, None] + tree.depths
    logits, features, scratch = target.forward(
        weights.target, tree.tokens, positions, ancestors(tree.parents), state.cache, state.lengths
    )
    scaled = sampling.scale(logits, rules.sampling)
    chosen = choose(scaled, rules.sampling, tree, state, strategy)
    walk = verify.match(tree, chosen, strategy.depth)
    visited, features = (along(walk.path, nodes) for nodes in (scaled, features))
    counts, finish = settle(rules, state, walk.tokens, walk.accepted)
    emitted = Emitted(walk.tokens, sampling.logprob(visited, walk.tokens), counts, finish)
    last = jnp.take_along_axis(walk.tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    state = state.replace(
        roots=jnp.where(counts > 0, last, state.roots),
        lengths=state.lengths + counts,
        live=state.live & (finish == RUNNING),
        tail=shift(state.tail, walk.tokens, counts),
        cache=target.keep(state.cache, scratch, walk.path, state.lengths),
        drafter=drafter.extend(weights.drafter, state.drafter, walk.tokens, counts, features),
    )
    return state, emitted


@shaped
def along(path: Int32[Array, "B M"], nodes: Float[Array, "B N X"]) -> Float[Array, "B M X"]:
    """The rows of the nodes on the path."""
    return nodes if nodes.shape[1] == 1 else jnp.take_along_axis(nodes, path[:, :, None], axis=1)


def choose(
    scaled: Array, rule: Sampling, tree: DraftTree, state: DecodeState, strategy: Strategy
) -> Int32[Array, "B N"]:
    """The target's token after every node, with the noise of the position that it would take."""
    filtered = sampling.filter(scaled, rule)
    if rule.is_greedy:
        return sampling.choose(filtered)
    positions = state.lengths[:, None] + 1 + jnp.arange(strategy.path, dtype=jnp.int32)
    gumbel = noise.gumbel(state.keys, positions, scaled.shape[-1], scaled.dtype)
    return sampling.choose(filtered + along(tree.depths, gumbel))  # one depth, one noise: at most one node is visited


@shaped
def settle(
    rules: Rules, state: DecodeState, tokens: Int32[Array, "B M"], accepted: Int32[Array, " B"]
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """How many of a walk's tokens each row emits, and whether it ends: at EOS, a stop sequence, or its limit."""
    stops = ends_sequence(rules, state.tail, tokens)
    for eos in rules.eos_ids:
        stops |= tokens == eos
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    ends = stops | (state.lengths[:, None] + steps + 2 >= state.limits[:, None])
    first = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1).astype(jnp.int32), tokens.shape[1])
    counts = jnp.where(state.live, jnp.minimum(accepted, first) + 1, 0)
    stopped = (stops & (steps == first[:, None])).any(axis=1)
    finish = jnp.where(stopped, STOPPED, TRUNCATED)
    return counts, jnp.where(state.live & (first <= accepted), finish, RUNNING).astype(jnp.int32)


@shaped
def ends_sequence(rules: Rules, tail: Int32[Array, "B W"], tokens: Int32[Array, "B M"]) -> Bool[Array, "B M"]:
    """Whether a stop sequence is complete with each token."""
    window = jnp.concatenate([tail, tokens], axis=1)
    hit = jnp.zeros(tokens.shape, bool)
    for stop in rules.stop_ids:
        same = jnp.ones(tokens.shape, bool)
        for back, token in enumerate(reversed(stop)):
            start = tail.shape[1] - back
            same &= window[:, start : start + tokens.shape[1]] == token
        hit |= same
    return hit


@shaped
def shift(tail: Int32[Array, "B W"], tokens: Int32[Array, "B M"], counts: Int32[Array, " B"]) -> Int32[Array, "B W"]:
    """The last W tokens after counts[b] more."""
    window = jnp.concatenate([tail, tokens], axis=1)
    return jnp.take_along_axis(window, counts[:, None] + jnp.arange(tail.shape[1]), axis=1)


def append(report: Report, emitted: Emitted) -> Report:
    """The report with one round more."""
    column = jnp.arange(report.tokens.shape[1])
    tokens, logprobs = report.tokens, report.logprobs
    for m in range(emitted.tokens.shape[1]):
        here = (column == (report.counts + m)[:, None]) & (m < emitted.counts)[:, None]
        tokens = jnp.where(here, emitted.tokens[:, m, None], tokens)
        logprobs = jnp.where(here, emitted.logprobs[:, m, None].astype(logprobs.dtype), logprobs)
    return Report(
        tokens,
        logprobs,
        report.counts + emitted.counts,
        jnp.where(emitted.finish == RUNNING, report.finish, emitted.finish),
        report.rounds + 1,
    )


def admit(target: Target, state: DecodeState, prefilled: PyTree, new: Admission) -> DecodeState:
    """Puts new sequences into rows; each takes the keys and values of its prompt from a prefill."""
    fresh = new.source >= 0

    def take(ours: Array, theirs: Array) -> Array:
        return jnp.where(fresh if ours.ndim == 1 else fresh[:, None], theirs, ours)

    return state.replace(
        roots=take(state.roots, new.roots),
        lengths=take(state.lengths, new.lengths),
        limits=take(state.limits, new.limits),
        live=state.live | fresh,
        keys=take(state.keys, new.keys),
        tail=take(state.tail, jnp.full_like(state.tail, -1)),
        cache=target.insert(state.cache, prefilled, new.source),
    )


def resize(target: Target, slots: int, state: DecodeState, rows: Int32[Array, " C"]) -> DecodeState:
    """The given rows of the state (-1: an empty row), with room for `slots` committed tokens."""
    source = jnp.maximum(rows, 0)
    taken = {name: getattr(state, name)[source] for name in ("roots", "lengths", "limits", "keys", "tail")}
    live = state.live[source] & (rows >= 0)
    cache = target.resize(state.cache, rows, slots)
    return state.replace(
        live=live, cache=cache, drafter=jax.tree.map(lambda leaf: leaf[source], state.drafter), **taken
    )
