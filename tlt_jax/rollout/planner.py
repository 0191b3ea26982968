"""Decides the shape of every chunk: buckets that fit, and the tuner's strategy; knows no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlt_jax.rollout.events import Decision
from tlt_jax.rollout.state import GroupView
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.tuner.interface import Measurement, Tuner

# Of the live sequences, one in so many may have ended before the others wait for the next to be admitted.
ADMISSION_PATIENCE = 64
FEW = 4  # a chunk that could run fewer rounds than this is given a longer cache


class Planner:
    """Decides from buckets and a tuner, whose `state` it owns while rollouts run; may serve several of them."""

    def __init__(
        self, batches: Sequence[int], slots: Sequence[int], tuner: Tuner, state: Any = None
    ):
        self.batches, self.slots, self.tuner = batches, slots, tuner
        self.state = tuner.init() if state is None else state

    def decide(self, view: GroupView) -> Decision:
        """The smallest buckets that fit, and a strategy for them; the cache shrinks only together with the batch.

        A chunk that could fill more slots than one of plain decoding has fewer rounds, as long as these are not few.
        """
        batch = next(size for size in self.batches if size >= view.live)
        least = view.slots if batch == view.batch else 0

        def room(*chunk: Any) -> int:
            return next(size for size in self.slots if size >= max(view.need(*chunk), least))

        slots = room(PLAIN)
        self.state, choice = self.tuner.choose(self.state, view.live, batch, slots)
        rounds, fit = choice.rounds, (slots - view.tokens) // choice.strategy.path
        if fit >= FEW and room(choice.strategy, rounds) > slots:
            rounds = fit
        slots = room(choice.strategy, rounds)
        fewer = max((size for size in self.batches if size < batch), default=0)
        min_live = max(
            view.live - view.live // ADMISSION_PATIENCE if view.waiting else 1, fewer + 1
        )
        expected = {
            "predicted": choice.predicted,
            "reason": choice.reason,
            "is_exploring": choice.is_exploring,
        }
        return Decision(
            view.group, view.retired, batch, slots, choice.strategy, min_live, rounds, **expected
        )

    def observe(self, measurement: Measurement) -> None:
        """Updates the tuner with the measurement of a chunk."""
        self.state = self.tuner.observe(self.state, measurement)
