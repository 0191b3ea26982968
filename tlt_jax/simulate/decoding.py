"""The effect of simulated programs on the rows of a group: counts without a network; knows no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tlt_jax.rollout.executables.programs import Decode
from tlt_jax.simulate.trees import Trees, counted
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.decode_state import RUNNING, STOPPED, TRUNCATED, Admission, Appended
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.spec_decode.verify import BINS, Stats

NOTHING = np.int8(0)  # a token, and a log-prob

Lengths = Callable[[np.ndarray], int]  # key uint32[2] of a sequence -> tokens of its answer
Acceptance = Callable[[Strategy], Trees]  # strategy -> a sample of its rounds


@dataclass(frozen=True)
class Rows:
    """B sequences in decoding: keys[B, 2], rounds and tokens so far (with the prompt), the final number of tokens `ends`.

    `finish`: the reason why they end there. A row that is not live is free.
    """

    keys: np.ndarray
    rounds: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray
    finish: np.ndarray
    live: np.ndarray


def empty(batch: int) -> Rows:
    """Free rows."""
    rounds, tokens, ends, finish = np.zeros((4, batch), np.int32)
    keys, live = np.zeros((batch, 2), np.uint32), np.zeros(batch, bool)
    return Rows(keys, rounds, tokens, ends, finish, live)


def resize(rows: Rows, kept: np.ndarray) -> Rows:
    """The rows `kept`[B] (-1: a free one)."""
    taken = {name: array[np.maximum(kept, 0)] for name, array in vars(rows).items()}
    return Rows(**{**taken, "live": taken["live"] & (kept >= 0)})


def admit(rows: Rows, new: Admission, lengths: Lengths) -> Rows:
    """The rows with new sequences; an answer has the tokens that `lengths` gives, up to its limit."""
    rows = resize(rows, np.arange(len(rows.live)))
    for at in np.flatnonzero(new.rows < len(rows.live)):
        row = new.rows[at]
        rows.keys[row], rows.rounds[row] = new.keys[at], 0
        begin(rows, row, new.lengths[at] + 1, new.limits[at], lengths)  # with the root
    return rows


def append(rows: Rows, new: Appended, lengths: Lengths) -> Rows:
    """The rows in which these sequences go on after their replies."""
    before, rows = rows.tokens, resize(rows, np.arange(len(rows.live)))
    for row, count, limit in zip(new.rows, new.counts, new.limits, strict=True):
        begin(rows, row, before[row] + count, limit, lengths)
    return rows


def begin(rows: Rows, row: int, tokens: int, limit: int, lengths: Lengths) -> None:
    """Lets the row decode from so many tokens on."""
    end = tokens + lengths(rows.keys[row])
    rows.tokens[row], rows.live[row], rows.ends[row] = tokens, True, min(end, limit)
    rows.finish[row] = STOPPED if end <= limit else TRUNCATED


def decode_chunk(
    acceptance: Acceptance,
    program: Decode,
    rows: Rows,
    min_live: int,
    most: int,
) -> tuple[Rows, Report]:
    """The rows after a chunk, as spec_decode.decode runs it, and its report.

    The key of a row selects a round of those of `acceptance`, from which on it takes them in order, again and again. Every
    token is NOTHING.
    """
    at = np.flatnonzero(rows.live)
    if len(at) < max(min_live, 1):
        return rows, no_rounds(program.strategy, len(rows.live))
    left = last = (rows.ends - rows.tokens)[at]
    trees = first = None
    if program.strategy != PLAIN:
        trees = acceptance(program.strategy)
        starts = hashed(*rows.keys[at].T) % np.uint64(len(trees.accepted))
        first = (starts.astype(int) + rows.rounds[at]) % len(trees.accepted)
        last = rounds_for(trees, first, left)
    ends = len(at) - max(min_live, 1)  # once so many rows have ended, too few are left
    rounds = min(most, program.rounds, int(np.partition(last, ends)[ends]))
    lasted, is_over = np.minimum(last, rounds), last <= rounds

    gained = lasted
    if trees:
        times, place = np.divmod(first + lasted, len(trees.accepted))
        gained = times * trees.emitted[-1] + trees.emitted[place] - trees.emitted[first]
    counts, row_rounds = np.zeros((2, *rows.tokens.shape), rows.tokens.dtype)
    live = rows.live.copy()
    counts[at], row_rounds[at], live[at] = np.minimum(gained, left), lasted, ~is_over
    tokens = rows.tokens + counts
    longest = tokens[rows.live].max(initial=0)
    if longest > program.state.slots:
        raise ValueError(f"{longest} tokens of a sequence in a cache of {program.state.slots}")

    texts = np.broadcast_to(NOTHING, (len(counts), int(counts.max(initial=0))))
    report = Report(
        tokens=texts,
        logprobs=texts,
        counts=counts,
        finish=np.where(rows.live & ~live, rows.finish, RUNNING),
        rounds=rounds,
        stats=tree_stats(program.strategy, row_rounds, trees, first, lasted, gained - left),
    )
    return replace(rows, rounds=rows.rounds + row_rounds, tokens=tokens, live=live), report


@lru_cache(1024)
def no_rounds(strategy: Strategy, batch: int) -> Report:
    """The report of a chunk without a round."""
    nothing, texts = np.zeros(batch, np.int32), np.zeros((batch, 0), np.int32)
    return Report(texts, texts, nothing, nothing + RUNNING, 0, no_trees(strategy, nothing))


def no_trees(strategy: Strategy, row_rounds: np.ndarray) -> Stats:
    """Statistics of rounds without a drafted node."""
    nodes, promised, accepted = np.zeros((3, BINS))
    hits = np.zeros((strategy.depth, strategy.nodes, strategy.topk), int)
    return Stats(row_rounds, 0, hits, nodes, promised, accepted)


def held(before: Rows, after: Rows, rounds: int) -> float:
    """Tokens that a row holds on average during a chunk of so many rounds; a row that is free or has ended holds none."""
    lasted = (after.rounds - before.rounds).astype(np.int64)
    tokens = (before.tokens + after.tokens) * lasted
    return float(tokens.sum()) / (2 * max(rounds, 1) * len(lasted))


def rounds_for(trees: Trees, first: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The fewest rounds [L], from the rounds `first`[L] on, that emit these `tokens`[L] or more."""
    whole, needed = trees.emitted[-1], trees.emitted[first] + tokens
    times = (needed - 1) // whole
    place = np.searchsorted(trees.emitted, needed - times * whole)
    return times * len(trees.accepted) + place - first


def taken(trees: Trees, first: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """How many times [S] each round was taken by rows that ran `rounds`[L] of them, from `first`[L] on."""
    count = len(trees.accepted)
    times, rest = np.divmod(rounds, count)
    begun = np.bincount(first, minlength=2 * count) - np.bincount(first + rest, minlength=2 * count)
    return np.cumsum(begun).reshape(2, count).sum(0) + times.sum()


def tree_stats(
    strategy: Strategy,
    row_rounds: np.ndarray,
    trees: Trees | None,
    first: np.ndarray | None,
    lasted: np.ndarray,
    excess: np.ndarray,
) -> Stats:
    """Statistics of the trees of `lasted`[L] rounds of each row, from `first`[L] on, as spec_decode.verify counts them.

    In the last of them, the last `excess`[L] accepted nodes (if positive) were not emitted.
    """
    if trees is None:
        return no_trees(strategy, row_rounds)
    times = taken(trees, first, lasted)
    nodes, promised = np.tensordot(times, trees.diagram, 1)
    row, depth, rank, sibling, bins = trees.found
    hits = counted(depth, rank, sibling, times[row], strategy)
    accepted = np.bincount(bins, times[row], BINS)

    cut = np.flatnonzero((excess > 0) & (lasted > 0))
    ends = (first[cut] + lasted[cut] - 1) % len(trees.accepted)
    kept = np.arange(strategy.depth) < (trees.accepted[ends] - excess[cut])[:, None]
    row, depth = np.nonzero((trees.rank[ends] >= 0) & ~kept)
    rank, sibling = (one[ends[row], depth] for one in (trees.rank, trees.sibling))
    hits -= counted(depth, rank, sibling, np.ones(len(row)), strategy)
    accepted -= np.bincount(trees.bins[ends[row], rank], minlength=BINS)
    return Stats(
        row_rounds=row_rounds,
        declined=0,
        hits=hits,
        nodes=nodes,
        promised=promised,
        accepted=accepted,
    )


def hashed(*words: np.ndarray) -> np.ndarray:
    """Pseudo-random uint64 numbers, a function of the words (splitmix64)."""
    value = np.zeros(1, np.uint64)
    for word in words:
        value = (value ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return value
