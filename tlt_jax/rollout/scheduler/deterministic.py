"""A deterministic rollout: decisions depend on counts and a cost table, not on a clock (`rollout.deterministic`).

Prompts are assigned to the data groups beforehand, every group has its own planner, chunks are read
one by one in the order in which decisions follow from them, every program counts as compiled, and a
round costs what the cost model predicts for its shape before any measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tlt_jax.rollout.scheduler.queue import Taken
from tlt_jax.tuner import cost_model
from tlt_jax.tuner.interface import Cell, Measurement, State, Tuner

ROUND = 0.02  # seconds assumed for the fixed part of a round

CostTable = Callable[[Measurement], Measurement]


def cost_table(node: float, one_pass: cost_model.OnePass | None = None) -> CostTable:
    """Replaces the measured seconds by those of the table; `node`: cost of a node, in rounds.

    `one_pass`: the draft of a learned drafter that does not run once a level.
    """

    def with_table_seconds(seen: Measurement) -> Measurement:
        cell = Cell(seen.batch, seen.slots, seen.strategy)
        seconds = ROUND * cost_model.prior_rounds(cell, node, one_pass) * seen.rounds
        return seen._replace(seconds=seconds, uncertainty=0.0, catch_up=0.0, is_moved=False)

    return with_table_seconds


class DealtQueue:
    """The queue of group `index` of G: all samples of prompts index, index + G, ..., prompt by prompt.

    `bound`: prompts from there on are not given now; None: all are. It may only rise once all groups have decoded what is
    below it, and is read again once this group has taken all of that: so what a group takes depends on no clock.
    """

    def __init__(
        self,
        index: int,
        groups: int,
        prompts: int,
        samples: int,
        bound: Callable[[], int] | None = None,
    ):
        self.index, self.groups, self.prompts, self.samples = index, groups, prompts, samples
        self.bound = bound or (lambda: prompts)
        self.dealt = 0  # prompts that were dealt to all groups
        self.left: list[tuple[int, int]] = []
        self.deal()

    def deal(self) -> None:
        """Deals the prompts up to the bound."""
        bound = max(self.bound(), self.dealt)
        for prompt in range(self.dealt, bound):
            if prompt % self.groups == self.index:
                self.left += [(prompt, sample) for sample in range(self.samples)]
        self.dealt = bound

    def take(self, free: int, prefilled: Iterable[int] = ()) -> Taken:
        """As WorkQueue.take, without work stealing."""
        if not self.left:
            self.deal()
        taken, self.left = self.left[:free], self.left[free:]
        waiting = {prompt for prompt, _ in self.left}
        begun = {prompt for prompt, _ in taken} | set(prefilled)
        is_all = self.dealt >= self.prompts
        is_empty = not self.left
        return Taken(
            taken, frozenset(begun - waiting), is_empty and is_all, is_empty and not is_all
        )


def learned(
    tuner: Tuner, state: State, measurements: Sequence[Measurement], with_table_seconds: CostTable
) -> State:
    """The tuner's state after a rollout; independent of the order in which the chunks were read."""
    for seen in sorted(measurements, key=lambda seen: (seen.number, seen.group)):
        state = tuner.observe(state, with_table_seconds(seen))
    return state
