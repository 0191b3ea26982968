"""Rollouts without a scheduler, for tests of tuners: the smallest fitting shapes, decisions one chunk late, a noisy clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scenarios import Scenario, lengths, table

from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner.interface import Measurement, Tuner

BATCHES = (1, 4, 16, 64)
SLOTS = (256, 512, 1024, 2048)
CHUNK = 16  # rounds


def measured(strategy, batch=4, slots=512, accepted=0.0, per_round=0.02, rounds=16, group=0):
    """A chunk whose rows all accepted the same, at depth 1."""
    hits = np.zeros((max(strategy.depth, 1), strategy.nodes, max(strategy.topk, 1)))
    hits[0, 0, 0] = accepted * rounds * batch
    tokens = int((1 + accepted) * rounds * batch)
    return Measurement(
        group,
        batch,
        batch,
        slots,
        strategy,
        rounds,
        rounds * batch,
        tokens,
        per_round * rounds,
        hits,
    )


@dataclass
class Run:
    """A run: its total seconds, with and without noise, each chunk's choice and measurement, and the tuner's calls."""

    seconds: float = 0.0
    quiet: float = 0.0
    chunks: list = field(default_factory=list)
    calls: list = field(default_factory=list)


def rollout(
    scenario: Scenario,
    tuner: Tuner,
    state: dict,
    answers: np.ndarray,
    seed: int,
    seen: set | None = None,
):
    """Decodes the answers with a decision one chunk late (two chunks in flight); (state, Run)."""
    random, run, seen = np.random.default_rng(seed), Run(), set() if seen is None else seen
    left, done, last, waiting = answers.copy(), np.zeros_like(answers), None, []
    while (left > 0).any():
        live = int((left > 0).sum())
        batch = next(size for size in BATCHES if size >= live)
        slots = next(size for size in SLOTS if size >= min(done[left > 0].max() + 256, SLOTS[-1]))
        state, choice = tuner.choose(state, live, batch, slots)
        run.calls.append(("choose", (live, batch, slots), choice))
        measured = chunk(scenario, random, choice, left, done, batch, slots)
        seconds = clocked(scenario, random, measured, run, last, seen)
        taken, last = scenario.taken(run.seconds), choice.strategy
        run.quiet += measured.seconds
        measured = measured._replace(seconds=seconds, taken=taken)
        run.seconds += seconds
        run.chunks.append((choice, measured))
        waiting.append(measured)
        if len(waiting) > 1:
            state = tuner.observe(state, waiting[0])
            run.calls.append(("observe", waiting.pop(0), None))
    for measured in waiting:
        state = tuner.observe(state, measured)
        run.calls.append(("observe", measured, None))
    return state, run


def decode(scenario, tuner, rollouts=3, seed=0, state=None, update_prior=True):
    """(state, runs) of successive rollouts of 48 answers, with an update of the weights after each."""
    random, runs, seen = np.random.default_rng(seed), [], set()
    state = tuner.init() if state is None else state
    for i in range(rollouts):
        answers = lengths(random, 48, 1200)
        state, run = rollout(scenario, tuner, state, answers, 100 * seed + i, seen)
        runs.append(run)
        state = tuner.update_prior(state) if update_prior else state
    return state, runs


def seconds(runs) -> float:
    return sum(run.seconds for run in runs)


def chunk(scenario, random, choice, left, done, batch, slots) -> Measurement:
    """Runs up to CHUNK rounds on the answers, in place; its seconds have no noise."""
    arm, rows = choice.strategy, np.nonzero(left > 0)[0]
    hits = np.zeros((max(arm.depth, 1), arm.nodes, max(arm.topk, 1)), int)
    rounds = row_rounds = tokens = 0
    while rounds < min(CHUNK, choice.rounds) and len(rows):
        accepted = np.zeros(len(rows), int)
        if arm != PLAIN:
            rank, sibling, _ = scenario.trees(arm)
            drawn = random.integers(len(rank), size=len(rows))
            hits += table(rank[drawn], sibling[drawn], arm)
            accepted = (rank[drawn] >= 0).sum(1)
        emitted = np.minimum(accepted + 1, left[rows])
        left[rows] -= emitted
        done[rows] += emitted
        rounds, row_rounds, tokens = rounds + 1, row_rounds + len(rows), tokens + int(emitted.sum())
        rows = rows[left[rows] > 0]
    quiet = rounds * scenario.cost(batch, slots, arm) / 1e3
    return Measurement(
        0,
        batch,
        row_rounds / rounds,
        slots,
        arm,
        rounds,
        row_rounds,
        tokens,
        quiet,
        hits,
        reason=choice.reason,
    )


def clocked(
    scenario: Scenario, random, measured: Measurement, run: Run, last: Strategy | None, seen: set
) -> float:
    """The chunk's seconds on a real clock: jitter, stalls, first calls, the drafter's catch-up, bursts of other load."""
    cell = (measured.batch, measured.slots, measured.strategy)
    seconds = scenario.with_noise(random, measured.seconds, cell not in seen)
    seen.add(cell)
    if last == PLAIN and measured.strategy != PLAIN:
        seconds += 2 * scenario.cost(measured.batch, measured.slots, PLAIN) / 1e3
    return seconds * scenario.load(run.seconds)
