"""The drafter learns from an RL step's own packed rows, on the mesh of the update; knows no rollout.

The rows are fresh, of the policy that wrote them, and of every length, and no data group has to be idle for it. What
idle groups learned of the same step was merged before.
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

from tlt_jax.drafter import update
from tlt_jax.drafter.batch import Batch
from tlt_jax.drafter.investment import Investment, Worth
from tlt_jax.drafter.recipe import DrafterState, Recipe, scaled
from tlt_jax.models.transformer import Params

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learned:
    """What the drafter learned in a step.

    `depths`: acceptance at depth 1, 2, ..., each given the depths before, of the rows before they were learned from;
    empty when there were none.
    """

    metrics: dict[str, float]
    depths: list[float]


class Rows(Protocol):
    """Packed rows [R, T] of an accumulation step of the policy's update; `weights` > 0 where the next token is an answer's."""

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    weights: jax.Array


@dataclass
class Lesson:
    """What the drafter learns from the rows of one RL step, which it is called with; `drafter` is it after that.

    `policy`: the one that wrote the rows; `step`: RL steps done before; `choose`: which of so many accumulation steps are
    learned from; `timed`: makes a context of the seconds that it takes. `learned`: None before it was called; `seconds` it
    then took.
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
            Batch(one.tokens, one.positions, one.segments, one.weights > 0)
            for one in (rows[place] for place in chosen)
        ]
        with self.timed():
            jax.block_until_ready(batches)
            began = time.perf_counter()
            self.drafter, self.learned = learn(
                self.drafter, self.policy, batches, self.recipe, self.step
            )
            self.seconds = time.perf_counter() - began
        self.learned.metrics["drafter/share"] = len(chosen) / len(rows)


@dataclass
class StepTraining:
    """How much the drafter learns in each update of a run: drafter_training.share.

    `share` of the rows; None: as much as `investment` says that the run repays. `compile_cost`: seconds that compiling this is
    expected to take. `told`: what process 0 counts, for all.
    """

    recipe: Recipe
    share: float | None
    compile_cost: Callable[[StepTraining], float]
    told: Callable[[float], float]
    has_learned: bool = False

    @property
    def relative_seconds(self) -> float:
        """Expected seconds of compiling over those of a plain chunk: as a micro-step, and a forward pass of the policy."""
        return 2.0 + 0.4 * self.recipe.objective.unroll

    def earned(
        self, investment: Investment, worth: Worth, done: int, left: int, drafts: bool
    ) -> Investment:
        """With the seconds that may be spent in this step; see Investment.earned."""
        if self.share is not None:
            return investment
        compile_cost = 0.0 if self.has_learned else self.compile_cost(self)
        earned = investment.earned(worth, done, left, compile_cost, drafts)
        return replace(earned, credit=self.told(earned.credit))

    def chosen(
        self, investment: Investment, step: int, has_trained: bool
    ) -> Callable[[int], list[int]] | None:
        """Which of so many accumulation steps are learned from in this step; None when none is. All processes call it.

        `has_trained`: data groups have learned from what they harvested, which is not learned twice.
        """
        if self.share is not None:
            return partial(taken, self.share, step)
        most = 0 if has_trained else investment.affords(not self.has_learned)
        most = int(self.told(most))  # seconds differ between processes
        return partial(rotated, 0, most) if most else None  # the longest answers are packed first

    def after(self, investment: Investment, lesson: Lesson) -> Investment:
        """After a lesson."""
        steps = int(lesson.learned.metrics["drafter/update_steps"])
        if not steps:
            return investment
        tokens = lesson.learned.metrics["drafter/update_tokens"]
        compiles, self.has_learned = not self.has_learned, True
        measured = investment.measured(lesson.learned.depths, tokens)
        return measured.learned(tokens, steps, lesson.seconds, compiles)


def taken(share: float, step: int, count: int) -> list[int]:
    """Which of the `count` accumulation steps of an RL step are learned from: this share of them, over the steps.

    A function of the step alone, so that a resumed run takes the same ones.
    """
    first = math.floor(share * step * count)
    return rotated(first, math.floor(share * (step + 1) * count) - first, count)


def rotated(first: int, most: int, count: int) -> list[int]:
    """So many of `count`, from the first on, and from the beginning again."""
    return sorted((first + i) % count for i in range(min(most, count)))


def learn(
    state: DrafterState, policy: Params, batches: Sequence[Batch], recipe: Recipe, step: int
) -> tuple[DrafterState, Learned]:
    """The drafter after an optimizer step on each of the batches, and what it measured.

    `policy` is the one that wrote the rows, in its "train" layout: its features are computed here, by a program of their
    own. The state is donated. An update that is not finite changes nothing. A batch of few tokens has a smaller learning
    rate, see recipe.scaled.
    """
    if not batches:
        return state, Learned({"drafter/update_steps": 0.0, "drafter/update_tokens": 0.0}, [])
    recipe = replace(recipe, adam=scaled(recipe.adam, batches[0].tokens.size))
    observe, program = update.observation(recipe), update.program(recipe)
    found = []
    for batch in batches:
        state, metrics = program(state, policy, observe(policy, batch))
        found.append(metrics)
        jax.block_until_ready(
            found[-2:][0]
        )  # the features of two batches exist at once, and not of more
    found = [{name: float(value) for name, value in one.items()} for one in jax.device_get(found)]
    finite = [one for one in found if math.isfinite(one["loss"])]
    if len(finite) < len(found):
        log.warning(
            "step %d: the drafter's loss is not finite: it learns nothing from that", step + 1
        )
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
