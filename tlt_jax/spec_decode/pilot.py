"""Who decides the shape of every chunk: buckets that fit, and the strategy that the tuner takes; knows no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlt_jax.spec_decode.records import Decision, View
from tlt_jax.spec_decode.tuner import Measurement, Tuner


class Pilot:
    """Owns the state of the tuner during a rollout; `decide` is a Decider, `observe` takes what the chunks measured."""

    def __init__(self, batches: Sequence[int], slots: Sequence[int], tuner: Tuner, state: Any = None):
        self.batches, self.slots, self.tuner = batches, slots, tuner
        self.state = tuner.init() if state is None else state

    def decide(self, view: View) -> Decision:
        """The smallest buckets that fit, and a strategy for them; the cache shrinks only together with the batch."""
        batch = next(size for size in self.batches if size >= view.live)
        room = next(size for size in self.slots if size >= view.longest)
        if batch == view.batch:
            room = max(room, view.slots)
        self.state, choice = self.tuner.choose(self.state, view.live, batch, room)
        return Decision(
            view.group, view.retired, batch, room, choice.strategy, predicted=choice.predicted, reason=choice.reason
        )

    def observe(self, measurement: Measurement) -> None:
        """What a chunk measured."""
        self.state = self.tuner.observe(self.state, measurement)
