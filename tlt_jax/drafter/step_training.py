"""The drafter learns from an RL step's own packed rows, on the mesh of the update; knows no rollout.

The rows are fresh, of the policy that wrote them, and of every length, and no data group has to be idle for it. What
idle groups learned of the same step was merged before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np

from tlt_jax.drafter import update
from tlt_jax.drafter.batch import Batch
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

    `policy`: the one that wrote the rows; `step`: RL steps done before; `timed`: makes a context of the seconds that
    it takes. `learned`: None before it was called.
    """

    recipe: Recipe
    share: float
    step: int
    policy: Params
    drafter: DrafterState
    timed: Callable[[], AbstractContextManager[None]]
    learned: Learned | None = None

    def __call__(self, rows: Sequence[Rows]) -> None:
        batches = [Batch(one.tokens, one.positions, one.segments, one.weights > 0) for one in rows]
        with self.timed():
            self.drafter, self.learned = learn(
                self.drafter, self.policy, batches, self.recipe, self.share, self.step
            )


def taken(share: float, step: int, count: int) -> list[int]:
    """Which of the `count` accumulation steps of an RL step are learned from: this share of them, over the steps.

    A function of the step alone, so that a resumed run takes the same ones.
    """
    first = math.floor(share * step * count)
    most = math.floor(share * (step + 1) * count) - first
    return sorted((first + i) % count for i in range(most))


def learn(
    state: DrafterState,
    policy: Params,
    rows: Sequence[Batch],
    recipe: Recipe,
    share: float,
    step: int,
) -> tuple[DrafterState, Learned]:
    """The drafter after an optimizer step on each of the accumulation steps that are `taken`, and what it measured.

    `policy` is the one that wrote the rows, in its "train" layout: its features are computed here. The state is donated.
    An update that is not finite changes nothing. A batch of few tokens has a smaller learning rate, see recipe.scaled.
    """
    chosen = taken(share, step, len(rows))
    if not chosen:
        return state, Learned({"drafter/update_steps": 0.0, "drafter/update_tokens": 0.0}, [])
    program = update.program(replace(recipe, adam=scaled(recipe.adam, rows[0].tokens.size)))
    found = []
    for place in chosen:
        state, metrics = program(state, policy, rows[place])
        found.append(metrics)
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
