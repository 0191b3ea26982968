"""The effect of simulated programs on the rows of a group: counts without a network; knows no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tlt_jax.rollout.executables.programs import Decode
from tlt_jax.simulate import scenarios
from tlt_jax.simulate.scenarios import Trees
from tlt_jax.spec_decode.admission import Admission
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.stats import BINS, Stats
from tlt_jax.spec_decode.stopping import RUNNING, STOPPED, TRUNCATED
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

VOCAB = 1 << 15  # simulated tokens are hashes below this
NOTHING = np.int8(0)  # what is emitted where no token is written
LEAST, MOST = 16, 16384  # rounds of a row, and of all rows, that are drawn together

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
        row, key, prompt = new.rows[at], new.keys[at], new.lengths[at] + 1  # with the root
        end = prompt + lengths(key)
        rows.keys[row], rows.rounds[row], rows.tokens[row] = key, 0, prompt
        rows.live[row] = True
        rows.ends[row] = min(end, new.limits[at])
        rows.finish[row] = STOPPED if end <= new.limits[at] else TRUNCATED
    return rows


class Drawn(NamedTuple):
    """The rounds of the L live rows of a chunk: the tree of each, which[L, R], and how many rounds each row has, last[L]."""

    which: np.ndarray
    last: np.ndarray


def decode_chunk(
    acceptance: Acceptance,
    program: Decode,
    rows: Rows,
    min_live: int,
    most: int,
    writes: bool = True,
) -> tuple[Rows, Report]:
    """The rows after a chunk, as spec_decode.decode runs it, and its report.

    The key of a row and its number of rounds so far select its next round from those of `acceptance`. Without `writes`
    every token is NOTHING.
    """
    at = np.flatnonzero(rows.live)
    left, most = (rows.ends - rows.tokens)[at], min(most, program.rounds)
    trees = None if program.strategy == PLAIN else acceptance(program.strategy)
    if trees is None:
        drawn = Drawn(np.zeros((len(at), 0), int), left)
    else:
        drawn = draw(trees, rows.keys[at], rows.rounds[at], left, min_live, most)
    rounds = rounds_until(drawn.last, min_live, most)
    lasted, is_over = np.minimum(drawn.last, rounds), drawn.last <= rounds

    gained = lasted if trees is None else emitted(trees, drawn.which, lasted)
    counts, row_rounds, live = (
        np.zeros_like(rows.tokens),
        np.zeros_like(rows.tokens),
        rows.live.copy(),
    )
    counts[at], row_rounds[at], live[at] = np.minimum(gained, left), lasted, ~is_over
    tokens = rows.tokens + counts
    longest = tokens[rows.live].max(initial=0)
    if longest > program.state.slots:
        raise ValueError(f"{longest} tokens of a sequence in a cache of {program.state.slots}")

    texts = written(rows, counts, writes)
    report = Report(
        tokens=texts,
        logprobs=np.broadcast_to(np.float32(0) if writes else NOTHING, texts.shape),
        counts=counts,
        finish=np.where(rows.live & ~live, rows.finish, RUNNING),
        rounds=rounds,
        stats=tree_stats(program.strategy, row_rounds, trees, drawn, lasted, gained - left),
    )
    return replace(rows, rounds=rows.rounds + row_rounds, tokens=tokens, live=live), report


def held(before: Rows, after: Rows) -> float:
    """Tokens that a row holds on average during a chunk; a row that was free or has ended holds none."""
    tokens = (before.tokens + after.tokens)[before.live].sum() / 2
    return float(tokens) / len(before.tokens)


def rounds_until(last: np.ndarray, min_live: int, most: int) -> int:
    """Rounds of a chunk that ends after `most` of them, or once fewer than `min_live` rows, of `last` rounds each, are left."""
    ends = len(last) - max(min_live, 1)
    return min(most, int(np.partition(last, ends)[ends])) if ends >= 0 else 0


def draw(
    trees: Trees, keys: np.ndarray, done: np.ndarray, left: np.ndarray, min_live: int, most: int
) -> Drawn:
    """The rounds of rows that have done `done`[L] of them and have `left`[L] tokens to go, until a chunk is sure to end.

    A row that ends later than the last of these rounds has `last` most + 1.
    """
    count, blocks, first = len(trees.accepted), [], 0
    gained, last = np.zeros(len(left), int), np.full(len(left), most + 1)
    block = block_of(trees, left, min_live)
    while first < most and (last > most).sum() >= max(min_live, 1):
        number = done[:, None] + np.arange(first, min(first + block, most))
        which = (hashed(*keys.T[..., None], number) % np.uint64(count)).astype(int)
        so_far = gained[:, None] + np.cumsum(trees.accepted[which] + 1, axis=1)
        is_over = so_far >= left[:, None]
        ends = is_over[:, -1] & (last > most)
        last[ends] = first + 1 + is_over[ends].argmax(1)
        gained, first = so_far[:, -1], first + block
        blocks.append(which)
    return Drawn(np.concatenate([np.zeros((len(left), 0), int), *blocks], axis=1), last)


def block_of(trees: Trees, left: np.ndarray, min_live: int) -> int:
    """Rounds of a row to draw together: those in which a chunk is expected to end, within LEAST and MOST."""
    ends = len(left) - max(min_live, 1)
    tokens = np.partition(left, ends)[ends] if ends >= 0 else 0
    expected = LEAST + int(1.1 * tokens / (1 + trees.accepted.mean()))
    return max(min(expected, MOST // max(len(left), 1)), LEAST)


def emitted(trees: Trees, which: np.ndarray, lasted: np.ndarray) -> np.ndarray:
    """Tokens [L] that the first `lasted`[L] of the rounds which[L, R] emit when no answer ends."""
    gains = np.where(np.arange(which.shape[1]) < lasted[:, None], trees.accepted[which] + 1, 0)
    return gains.sum(1)


def written(rows: Rows, counts: np.ndarray, writes: bool) -> np.ndarray:
    """The tokens that rows emit, int32[B, T]; NOTHING everywhere without `writes`."""
    shape = len(counts), int(counts.max(initial=0))
    if not writes:
        return np.broadcast_to(NOTHING, shape)
    places = rows.tokens[:, None] + np.arange(shape[1])
    return (hashed(*rows.keys.T[..., None], places) % np.uint64(VOCAB)).astype(np.int32)


def tree_stats(
    strategy: Strategy,
    row_rounds: np.ndarray,
    trees: Trees | None,
    drawn: Drawn,
    lasted: np.ndarray,
    excess: np.ndarray,
) -> Stats:
    """Statistics of the trees of the first `lasted`[L] rounds of each row, as spec_decode.stats counts them.

    In the last of them, the last `excess`[L] accepted nodes (if positive) were not emitted.
    """
    nodes, promised, accepted = np.zeros((3, BINS))
    hits = np.zeros((strategy.depth, strategy.nodes, strategy.topk), int)
    if trees is not None:
        is_run = np.arange(drawn.which.shape[1]) < lasted[:, None]
        times = np.bincount(drawn.which[is_run], minlength=len(trees.rank))
        nodes, promised = np.tensordot(times, trees.diagram, 1)
        row, depth, rank, sibling, bins = trees.found
        hits = scenarios.counted(depth, rank, sibling, times[row], strategy)
        accepted = np.bincount(bins, times[row], BINS)

        cut = np.flatnonzero((excess > 0) & (lasted > 0))
        ends = drawn.which[cut, lasted[cut] - 1]
        kept = np.arange(strategy.depth) < (trees.accepted[ends] - excess[cut])[:, None]
        row, depth = np.nonzero((trees.rank[ends] >= 0) & ~kept)
        rank, sibling = (one[ends[row], depth] for one in (trees.rank, trees.sibling))
        hits -= scenarios.counted(depth, rank, sibling, np.ones(len(row)), strategy)
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
