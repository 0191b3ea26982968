"""The effect of simulated programs on the rows of a group: counts without a network; knows no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlt_jax.rollout.executables.programs import Decode
from tlt_jax.simulate.scenarios import Trees, table
from tlt_jax.spec_decode.admission import Admission
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.stats import BINS, Stats
from tlt_jax.spec_decode.stopping import RUNNING, STOPPED, TRUNCATED
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

VOCAB = 1 << 15  # simulated tokens are hashes below this

Lengths = Callable[[np.ndarray], int]  # key uint32[2] of a sequence -> tokens of its answer
Acceptance = Callable[[Strategy], Trees]  # strategy -> a sample of its rounds


@dataclass(frozen=True)
class Rows:
    """B sequences in decoding: keys[B, 2], tokens so far (with the prompt), and the final number of tokens `ends`.

    `finish`: the reason why they end there. A row that is not live is free.
    """

    keys: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray
    finish: np.ndarray
    live: np.ndarray


def empty(batch: int) -> Rows:
    """Free rows."""
    tokens, ends, finish = np.zeros((3, batch), np.int32)
    return Rows(np.zeros((batch, 2), np.uint32), tokens, ends, finish, np.zeros(batch, bool))


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
        rows.keys[row], rows.tokens[row], rows.live[row] = key, prompt, True
        rows.ends[row] = min(end, new.limits[at])
        rows.finish[row] = STOPPED if end <= new.limits[at] else TRUNCATED
    return rows


def decode_chunk(
    acceptance: Acceptance, program: Decode, rows: Rows, min_live: int, most: int
) -> tuple[Rows, Report]:
    """The rows after a chunk, as spec_decode.decode runs it, and its report.

    The key of a row and its number of tokens select its next round from those of `acceptance`.
    """
    rounds, row_rounds = 0, np.zeros(len(rows.live), np.int32)
    tokens, live = rows.tokens.copy(), rows.live.copy()
    trees = None if program.strategy == PLAIN else acceptance(program.strategy)
    accepted = None if trees is None else (trees.rank >= 0).sum(1)
    drawn, kept = [], []
    while rounds < min(most, program.rounds) and live.sum() >= min_live:
        at = np.flatnonzero(live)
        left, more = rows.ends[at] - tokens[at], 0
        if trees is not None:
            which = (hashed(*rows.keys[at].T, tokens[at]) % len(accepted)).astype(int)
            more = np.minimum(accepted[which], left - 1)
            drawn.append(which), kept.append(more)
        tokens[at] += more + 1
        live[at] = left > more + 1
        row_rounds[at] += 1
        rounds += 1

    longest = tokens[rows.live].max(initial=0)
    if longest > program.state.slots:
        raise ValueError(f"{longest} tokens of a sequence in a cache of {program.state.slots}")
    counts = tokens - rows.tokens
    places = rows.tokens[:, None] + np.arange(counts.max())
    emitted = hashed(*rows.keys.T[..., None], places) % VOCAB
    report = Report(
        tokens=emitted.astype(np.int32),
        logprobs=np.zeros(emitted.shape, np.float32),
        counts=counts,
        finish=np.where(rows.live & ~live, rows.finish, RUNNING),
        rounds=rounds,
        stats=tree_stats(program.strategy, row_rounds, trees, drawn, kept),
    )
    return replace(rows, tokens=tokens, live=live), report


def tree_stats(
    strategy: Strategy,
    row_rounds: np.ndarray,
    trees: Trees | None,
    drawn: Sequence[np.ndarray],
    kept: Sequence[np.ndarray],
) -> Stats:
    """Statistics of the `drawn` trees, as spec_decode.stats counts them.

    The first `kept` of each tree's accepted nodes were emitted.
    """
    nodes, promised, accepted = np.zeros((3, BINS))
    hits = np.zeros((strategy.depth, strategy.nodes, strategy.topk), int)
    if drawn:
        which, kept = np.concatenate(drawn), np.concatenate(kept)
        is_kept = np.arange(strategy.depth) < kept[:, None]
        rank, chance = np.where(is_kept, trees.rank[which], -1), trees.chance[which]
        hits = table(rank, trees.sibling[which], strategy)
        bins = np.minimum((BINS * chance).astype(int), BINS - 1)
        nodes = np.bincount(bins.ravel(), minlength=BINS)
        promised = np.bincount(bins.ravel(), chance.ravel(), BINS)
        accepted = np.bincount(bins[np.nonzero(is_kept)[0], rank[is_kept]], minlength=BINS)
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
