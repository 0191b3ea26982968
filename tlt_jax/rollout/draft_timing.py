"""How long drafting alone takes (speculation.time_drafting): programs of their own, run after a rollout."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from statistics import median

import jax
import jax.numpy as jnp

from tlt_jax.rollout.executables.compilation import Executables
from tlt_jax.rollout.executables.programs import DraftOnly, StateShape
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

TIMED_ROUNDS = 8
Shape = tuple[int, int, Strategy]  # batch bucket, cache slots, strategy


class DraftTiming:
    """Times one shape after each rollout; `seconds` of a round's drafting, by shape."""

    def __init__(self, programs: Executables, temperature: float):
        self.programs, self.temperature = programs, temperature
        self.seconds: dict[Shape, float] = {}

    def update(self, weights: Mapping[int, Weights], result: RolloutResult) -> None:
        """Times the shape that drafted most in this rollout of those that were not timed yet.

        This compiles the drafter for the shape, and runs a few rounds.
        """
        used: Counter[Shape] = Counter()
        for one in result.measurements:
            if one.strategy != PLAIN:
                used[one.batch, one.slots, one.strategy] += one.rounds
        for shape, rounds in used.most_common():
            if rounds and shape not in self.seconds:
                batch, slots, strategy = shape
                group = min(weights)
                state = StateShape(group, batch, slots)
                draft = DraftOnly(state, TIMED_ROUNDS, strategy, self.temperature)
                self.seconds[shape] = time_draft(self.programs, draft, weights[group])
                return


def time_draft(executables: Executables, draft: DraftOnly, weights: Weights) -> float:
    """Seconds of a round of drafting alone, on half-full sequences of zeros: the median of 3 runs after a first one."""
    shapes, batch = executables.shapes[draft.group], draft.state.batch
    spec = shapes.known(draft.state), shapes.drafter_of(draft.strategy).host_context(batch)
    known, host = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), spec
    )
    executables.get(draft)

    spent = []
    for _ in range(4):
        half = jnp.full(batch, draft.state.slots // 2, jnp.int32, device=known.lengths.sharding)
        known = jax.block_until_ready(known.replace(lengths=half))
        begin = time.perf_counter()
        known = jax.block_until_ready(draft(executables, known, weights, host))
        spent.append((time.perf_counter() - begin) / draft.rounds)
    return median(spent[1:])
