"""The drafter of a simulated run: how much it has learned, in idle micro-steps and in updates of the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tlt_jax.config import Config
from tlt_jax.drafter.update import MicroStep
from tlt_jax.rollout.recorder import Completion
from tlt_jax.simulate.acceptance import Acceptances
from tlt_jax.simulate.simulator import Marker
from tlt_jax.train.adaptive import DrafterLearning

if TYPE_CHECKING:
    from tlt_jax.simulate.run import SimulatedEngine

# Micro-steps that are simulated as one: as many as fit in this share of the last rollout's seconds. RL work waits only for
# the micro-step that runs, as in a real run.
TOGETHER = 0.04


@dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter after `step` optimizer steps, with the tokens that it has `learned` from and not forgotten."""

    step: int = 0
    learned: float = 0.0
    params: Any = None

    def after(self, steps: int, tokens: float) -> SimulatedDrafter:
        """The drafter after more steps on these tokens."""
        return SimulatedDrafter(self.step + steps, self.learned + tokens)

    def forgot(self, share: float) -> SimulatedDrafter:
        """The drafter after the policy has moved."""
        return SimulatedDrafter(self.step, self.learned * (1 - share))


@dataclass
class MicroSteps:
    """`count` micro-steps of a program that run one after the other from `start` on, each for `each` seconds.

    Once the rollout is over they end after the micro-step that runs.
    """

    engine: SimulatedEngine
    program: MicroStep
    before: SimulatedDrafter
    marker: Marker
    start: float
    each: float
    count: int
    learns: bool

    def is_ready(self) -> bool:
        """Whether all micro-steps are done, or the one that ran when the rollout was over."""
        if self.engine.is_over:
            done = max(math.ceil((self.engine.clock.now() - self.start) / self.each), 1)
            if done < self.count:
                self.count, end = done, self.start + done * self.each
                self.marker = self.engine.programs.occupy(self.program.group, end)
        return self.marker.is_ready()

    def block_until_ready(self) -> None:
        """Waits on the virtual clock."""
        self.engine.clock.jump(self.marker.at)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Its tokens, and its loss, of which all that matters is that it is finite."""
        return np.asarray(self.count * self.program.tokens, dtype)

    @property
    def after(self) -> SimulatedDrafter:
        """The drafter after them."""
        tokens = self.count * self.program.tokens
        return self.before.after(self.count, tokens) if self.learns else self.before


class SimulatedCopies:
    """The groups' copies of the drafter; stands for drafter.update.Copies.

    The merge has learned the mean of the copies' tokens, weighted by these: as drafter.update weighs their weights.
    """

    def __init__(self, groups: int):
        self.groups = groups

    def spread(self, state: SimulatedDrafter) -> dict[int, SimulatedDrafter]:
        return dict.fromkeys(range(self.groups), state)

    def blank(self, group: int) -> SimulatedDrafter:
        return SimulatedDrafter()

    def merged(
        self, copies: Mapping[int, SimulatedDrafter | MicroSteps], tokens: Sequence[int]
    ) -> SimulatedDrafter:
        states = [settled(copies[group]) for group in range(self.groups)]
        learned = np.average([one.learned for one in states], weights=tokens)
        return SimulatedDrafter(max(one.step for one in states), float(learned))


def settled(state: SimulatedDrafter | MicroSteps) -> SimulatedDrafter:
    """A copy's drafter after its last piece."""
    return state.after if isinstance(state, MicroSteps) else state


# A group's windows of finished answers, in the place of drafter.replay.Replay: there are always some. None is copied out of
# the decoding state: what that costs is in the share of capturing features.
WINDOWS = SimpleNamespace(
    width=512,
    begin=lambda step, request: None,
    listen=lambda poll: None,
    wanted=lambda uid, length: (),
    sample=lambda draw, row_tokens, held_out=False: row_tokens,
    metrics=dict,
)


class SimulatedLearning(DrafterLearning):
    """A DrafterLearning in virtual time; adds the micro-step to the engine's programs.

    `start`: the drafter before its first update.
    """

    def __init__(
        self,
        config: Config,
        engine: SimulatedEngine,
        steps: int,
        start: SimulatedDrafter,
        acceptances: Acceptances,
    ):
        self.start, self.acceptances = start, acceptances
        self.depth = max((arm.depth for arm in engine.arms), default=1)
        super().__init__(config, engine, steps, self.levels(start) if start.step else None)
        engine.programs.kinds[MicroStep] = self.micro_step

    def copies_and_replays(self) -> tuple[SimulatedCopies, dict[int, SimpleNamespace]]:
        groups = self.engine.local_groups
        return SimulatedCopies(len(groups)), dict.fromkeys(groups, WINDOWS)

    def create(self, answers: Sequence[Completion]) -> SimulatedDrafter:
        return self.start

    def levels(self, drafter: SimulatedDrafter) -> list[float]:
        """Acceptance at every depth, given the depths before."""
        return list(self.acceptances.learned.levels(drafter.learned, self.depth))

    def micro_step(
        self,
        program: MicroStep,
        copy: SimulatedDrafter | MicroSteps,
        policy: Any,
        batch: Any,
        learns: Any,
    ) -> tuple[MicroSteps, dict[str, Any]]:
        """Dispatches a micro-step or, while the rollout goes on, several together: as IdleTraining runs its programs."""
        before, programs, count = settled(copy), self.engine.programs, 1
        each = programs.table.seconds("micro_step", program.tokens)
        if learns and not self.engine.is_over and program in programs.ran:
            count = max(int(TOGETHER * self.idle.seconds / each), 1)
        free = max(programs.clock.now(), programs.free_at.get(program.group, 0.0))
        marker = programs.occupy(program.group, free, count * each)
        start = marker.at - count * each
        learns = bool(learns)
        piece = MicroSteps(self.engine, program, before, marker, start, each, count, learns)
        if count > 1:  # its seconds say nothing about those of a micro-step
            programs.ran.discard(program)
        levels = {
            f"acceptance@{depth}": level for depth, level in enumerate(self.levels(before), 1)
        }
        return piece, {"loss": piece, "tokens": piece, **levels}

    def train(
        self, drafter: SimulatedDrafter, policy: Any, rows: Sequence[float], step: int
    ) -> tuple[SimulatedDrafter, dict[str, float], list[float]]:
        """`rows`: answer tokens of each accumulation step on all groups."""
        tokens, programs = sum(rows), self.engine.programs
        if rows:
            each = programs.table.seconds("drafter_update", rows[0] / len(self.engine.groups))
            programs.clock.sleep(len(rows) * each)
        metrics = {"drafter/update_steps": float(len(rows)), "drafter/update_tokens": tokens}
        return drafter.after(len(rows), tokens), metrics, self.levels(drafter) if rows else []
