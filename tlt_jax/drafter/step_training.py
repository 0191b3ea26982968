"""The drafter's training step in the policy update: it trains on the packed rows of the RL step; knows no rollout.

The rows are on-policy and of every length, and no data group has to be idle. The copies of idle groups were merged
before.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import numpy as np

from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.drafter import update
from tlt_jax.drafter.batch import Batch
from tlt_jax.drafter.investment import Investment, Worth
from tlt_jax.drafter.recipe import DrafterState, Recipe, scaled
from tlt_jax.models.architecture import Params

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learned:
    """The metrics of the drafter's training step.

    `depths`: acceptance at depth 1, 2, ..., each given the depths before, on the rows before training on them; empty when
    there were none.
    """

    metrics: dict[str, float]
    depths: list[float]


class Rows(Protocol):
    """Packed rows [R, T] of an accumulation step of the policy's update; `is_answer` where the next token is an answer's."""

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    is_answer: jax.Array


@dataclass
class Lesson:
    """The drafter's training step in one policy update: a call trains `drafter` on the rows of the RL step.

    `policy`: the one that generated the rows; `step`: RL steps done before; `choose(count)`: the accumulation steps to
    train on; `timed()`: a context that times the training. A call sets `drafter`, `learned` (None before) and `seconds`.
    """

    recipe: Recipe
    choose: Callable[[int], list[int]]
    step: int
    policy: Params
    drafter: DrafterState
    timed: Callable[[], AbstractContextManager[None]]
    learned: Learned | None = None
    seconds: float = 0.0

    def __call__(self, rows: Sequence[Rows]) -> None:
        chosen = self.choose(len(rows))
        batches = [
            Batch(one.tokens, one.positions, one.segments, one.is_answer)
            for one in (rows[place] for place in chosen)
        ]
        with self.timed():
            jax.block_until_ready(batches)
            start = time.perf_counter()
            self.drafter, self.learned = learn(
                self.drafter, self.policy, batches, self.recipe, self.step
            )
            self.seconds = time.perf_counter() - start
        self.learned.metrics["drafter/share"] = len(chosen) / len(rows)


@dataclass
class StepTraining:
    """How many rows of each policy update train the drafter: drafter_training.share.

    `share` of the rows; None: what the Investment pays for. `compile_cost`: expected seconds of compiling this.
    `broadcast`: the number of process 0, on all processes.
    """

    recipe: Recipe
    share: float | None
    compile_cost: Callable[[StepTraining], float]
    broadcast: Callable[[float], float]
    has_learned: bool = False

    @property
    def relative_seconds(self) -> float:
        """Expected compile seconds over a plain chunk's: those of a micro-step, and a forward pass of the policy."""
        return 2.0 + 0.4 * self.recipe.objective.compile_steps

    def earned(
        self, investment: Investment, worth: Worth, done: int, left: int, drafts: bool
    ) -> Investment:
        """With the credit of this step; see Investment.earned."""
        if self.share is not None:
            return investment
        compile_cost = 0.0 if self.has_learned else self.compile_cost(self)
        earned = investment.earned(worth, done, left, compile_cost, drafts)
        return replace(earned, credit=self.broadcast(earned.credit))

    def chosen(
        self, investment: Investment, step: int, has_trained: bool
    ) -> Callable[[int], list[int]] | None:
        """The function that chooses the accumulation steps to train on in this step; None: none. All processes call it.

        `has_trained`: idle groups have trained on the sequences of this step; the Investment pays only for other steps.
        """
        if self.share is not None:
            return partial(taken, self.share, step)
        most = 0 if has_trained else investment.affords(not self.has_learned)
        most = int(self.broadcast(most))  # seconds differ between processes
        return partial(rotated, 0, most) if most else None  # the longest answers are packed first

    def after(self, investment: Investment, lesson: Lesson) -> Investment:
        """The investment after a training step."""
        steps = int(lesson.learned.metrics["drafter/update_steps"])
        if not steps:
            return investment
        tokens = lesson.learned.metrics["drafter/update_tokens"]
        compiles, self.has_learned = not self.has_learned, True
        measured = investment.measured(lesson.learned.depths, tokens)
        return measured.learned(tokens, steps, lesson.seconds, compiles)


def taken(share: float, step: int, count: int) -> list[int]:
    """The accumulation steps to train on of the `count` ones of an RL step: this share of them, as a mean over the steps.

    A function of the step alone, so that a resumed run takes the same ones.
    """
    first = math.floor(share * step * count)
    return rotated(first, math.floor(share * (step + 1) * count) - first, count)


def rotated(first: int, most: int, count: int) -> list[int]:
    """At most `most` of `count` indices, from `first` on and around the end; ascending."""
    return sorted((first + i) % count for i in range(min(most, count)))


def learn(
    state: DrafterState, policy: Params, batches: Sequence[Batch], recipe: Recipe, step: int
) -> tuple[DrafterState, Learned]:
    """The drafter after an optimizer step on each of the batches, and the metrics.

    `policy`: the one that generated the rows, in the "train" layout; a separate program computes its features. The state
    is donated. An update that is not finite changes nothing. A batch of few tokens has a smaller learning rate, see
    recipe.scaled.
    """
    if not batches:
        return state, Learned({"drafter/update_steps": 0.0, "drafter/update_tokens": 0.0}, [])
    recipe = replace(recipe, adam=scaled(recipe.adam, batches[0].tokens.size))
    observe, program = update.observation(recipe), update.program(recipe)
    found = []
    for batch in batches:
        state, metrics = program(state, policy, observe(policy, batch))
        found.append(metrics)
        # At most two batches' features exist at once. On fake devices of a CPU, collectives of two batches may take each
        # other's threads and wait for ever.
        jax.block_until_ready(found[-1] if is_cpu(recipe.mesh) else found[-2:][0])
    found = [{name: float(value) for name, value in one.items()} for one in jax.device_get(found)]
    finite = [one for one in found if math.isfinite(one["loss"])]
    if len(finite) < len(found):
        log.warning("step %d: the drafter's loss is not finite: that update is skipped", step + 1)
    counts = {
        "update_steps": float(len(finite)),
        "update_tokens": sum(one["tokens"] for one in finite),
        "nonfinite": found[-1]["nonfinite"],
    }
    weights = [max(one["tokens"], 1.0) for one in finite]
    means = {
        name: float(np.average([one[name] for one in finite], weights=weights))
        for name in found[0].keys() - {"tokens", "nonfinite"}
        if finite
    }
    metrics = {f"drafter/{name}": value for name, value in (means | counts).items()}
    return state, Learned(metrics, update.depths(means))
