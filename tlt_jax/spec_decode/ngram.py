"""Drafts without weights: what followed the newest tokens the last time they occurred; knows texts, not networks.

`propose` looks the newest tokens up in the sequence itself and in a pool of related texts (inside jit); `Texts` is the
host's bounded memory of answers, by prompt, that pools are cut from. Losing it changes speed, never a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32

from tlt_jax.shapes import shaped
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree import Candidates

SEPARATOR = -1
POWER, ESCAPE = 1.4, 5.0  # fitted, see `grow`


@dataclass(frozen=True)
class Settings:
    """How texts are searched: at least `min_match` tokens must match, up to `max_match` are compared; the best
    `matches` places (longest match, then newest) make the tree."""

    min_match: int = 1
    max_match: int = 12
    matches: int = 16


@struct.dataclass
class Found:
    """Places where the newest tokens occurred, best first: how many tokens match there (0: no place) and what follows.

    The text of a place ends with the first SEPARATOR of follows[b, i]; what is behind it means nothing.
    """

    matched: Int32[Array, "B C"]
    follows: Int32[Array, "B C D"]


@shaped
def propose(
    history: Int32[Array, "B S"],
    lengths: Int32[Array, " B"],
    pool: Int32[Array, "B R"],
    strategy: Strategy,
    settings: Settings = Settings(),
) -> Candidates:
    """What followed before, at least strategy.nodes - 1 candidates.

    history[b, : lengths[b] + 1] is the sequence; its last token is the root.
    """
    fewest = -(-(strategy.nodes - 1) // strategy.depth)  # places that could make so many nodes
    settings = replace(settings, matches=max(settings.matches, fewest))
    found = search(history, lengths, pool, strategy.depth, settings)
    return grow(found, strategy.topk)


@shaped
def search(
    history: Int32[Array, "B S"],
    lengths: Int32[Array, " B"],
    pool: Int32[Array, "B R"],
    depth: int,
    settings: Settings = Settings(),
) -> Found:
    """The places that match best. One pass over the text for each of `max_match` tokens; memory linear in S + R."""
    text = jnp.concatenate([pool, jnp.full_like(pool, SEPARATOR, shape=(pool.shape[0], 1)), history], axis=1)
    root = pool.shape[1] + 1 + lengths
    places, matched = best_places(text, root, settings)
    # A place in the sequence itself goes on, past the root, with what it has proposed: the text is taken to be periodic.
    period = jnp.where(places > pool.shape[1], root[:, None] - places, text.shape[1])
    steps = jnp.arange(depth, dtype=jnp.int32) % jnp.maximum(period, 1)[:, :, None]
    index = jnp.minimum(places[:, :, None] + 1 + steps, text.shape[1] - 1).reshape(text.shape[0], -1)
    # Nothing comes after this gather: XLA would repeat it in all that `grow` computes for pairs of places.
    follows = jnp.take_along_axis(text, index, axis=1, mode="promise_in_bounds")
    return Found(matched, follows.reshape(*places.shape, depth))


@shaped
def best_places(
    text: Int32[Array, "B T"], root: Int32[Array, " B"], settings: Settings
) -> tuple[Int32[Array, "B C"], Int32[Array, "B C"]]:
    """Where the tokens up to the root occurred before, by length of the match, the later place among equals.

    Both numbers are one float32 key, because XLA selects floats without sorting all of them on CPUs; it is exact.
    """
    width, most = text.shape[1], settings.max_match
    if (most + 1) * width > 2**24:
        raise ValueError(f"{width} tokens of text times max_match {most} + 1 exceed {2**24}: lower one of them")
    back = root[:, None] - jnp.arange(most, dtype=jnp.int32)
    suffix = jnp.take_along_axis(text, jnp.maximum(back, 0), axis=1)
    suffix = jnp.where((back < 0) | (suffix == SEPARATOR), SEPARATOR - 1, suffix)
    before = jnp.pad(text, ((0, 0), (most - 1, 0)), constant_values=SEPARATOR)
    same, matched = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
    for m in range(most):
        start = most - 1 - m
        same &= before[:, start : start + width] == suffix[:, m, None]
        matched += same
    index = jnp.arange(width, dtype=jnp.int32)
    ends = jnp.pad(text[:, 1:], ((0, 0), (0, 1)), constant_values=SEPARATOR) == SEPARATOR
    usable = (matched >= settings.min_match) & (index < root[:, None]) & ~ends
    key = jnp.where(usable, matched * width + index, 0).astype(jnp.float32)
    key = jnp.pad(key, ((0, 0), (0, max(settings.matches - width, 0))))
    best = jax.lax.top_k(key, settings.matches)[0].astype(jnp.int32)
    return best % width, best // width


@shaped
def grow(found: Found, topk: int) -> Candidates:
    """The trie of the continuations: at every level one node for the places that agree so far, at most topk siblings.

    p(node | parent) = (sum of m ** POWER over the places that propose it) / (that sum over all places + ESCAPE), where m
    tokens match down to the parent: a lone match of 1, 3 or 12 tokens holds with probability 0.17, 0.48 or 0.87. Fitted by
    log loss, equal weights: 17,000 positions of GSM8K answers (alone, with other answers, with copies that have 10 % and
    30 % errors) and 4,400 of sampled answers to the fold task (alone, with 1 and 7 siblings; before and after RL). The best
    exponential weight loses 0.004 nats more, one free weight for each m gains 0.006. Calibrated within 0.05 on GSM8K alone;
    on siblings' samples scores promise too much (accept length 2.7, got 2.2), on near copies too little (4.3, got 5.7).
    """
    batch, count, depth = found.follows.shape
    dtype = jnp.result_type(float)
    own = jnp.arange(count, dtype=jnp.int32)
    shared = common(found)  # symmetric: sums run over axis 1, which XLA vectorizes on CPUs
    parent, rank, score = jnp.int32(-1), jnp.int32(0), jnp.zeros((), dtype)
    levels = []
    for level in range(depth):
        tokens = found.follows[:, :, level]
        # A text that has ended weighs nothing: its score is -inf from here on.
        weight = jnp.where(tokens == SEPARATOR, 0, (found.matched + level).astype(dtype) ** POWER)[:, :, None]
        siblings, agree = shared >= level, shared > level
        part, total = (jnp.sum(jnp.where(group, weight, 0), axis=1) for group in (agree, siblings))
        first = jnp.min(jnp.where(agree, own[:, None], count), axis=1)  # the node's place among the candidates
        leads = first == own
        better = (part[:, :, None] > part[:, None, :]) | (
            (part[:, :, None] == part[:, None, :]) & (own[:, None] < first[:, None, :])
        )
        rivals = jnp.sum(siblings & leads[:, :, None] & better, axis=1, dtype=jnp.int32)
        rank, score = jnp.maximum(rank, rivals), score + jnp.log(part / (total + ESCAPE))
        kept = jnp.where(leads & (rank < topk), score, -jnp.inf)
        parents = jnp.broadcast_to(parent, tokens.shape)
        levels.append(Candidates(tokens, parents, jnp.full_like(tokens, level + 1), kept, rank))
        parent = jnp.minimum(first, count - 1) + level * count
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *levels)


@shaped
def common(found: Found) -> Int32[Array, "B C C"]:
    """How many of their first steps two places have in common; -1 where one of them is no place."""
    depth = found.follows.shape[2]
    follows = jnp.moveaxis(found.follows, 2, 0)
    levels = jnp.arange(depth, dtype=jnp.int32)[:, None, None, None]
    shared = jnp.min(jnp.where(follows[:, :, :, None] != follows[:, :, None, :], levels, depth), axis=0)
    there = found.matched > 0
    return jnp.where(there[:, :, None] & there[:, None, :], shared, -1)
