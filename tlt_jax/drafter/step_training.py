"""The drafter's training step before the policy's update, on the packed rows of the RL step.

The rows are on-policy and of every length, and no data group has to be idle. The copies of idle groups were merged
before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.drafter import update
from tlt_jax.drafter.investment import Investment, Worth
from tlt_jax.drafter.recipe import DrafterRecipe, DrafterState, scaled
from tlt_jax.models.architecture import Params

log = logging.getLogger(__name__)


@dataclass
class StepTraining:
    """How many rows of each policy update train the drafter: drafter_training.share.

    `share` of the rows; None: what the Investment pays for. `compile_cost`: expected seconds of compiling this.
    `broadcast`: the number of process 0, on all processes.
    """

    recipe: DrafterRecipe
    share: float | None
    compile_cost: Callable[[StepTraining], float]
    broadcast: Callable[[float], float]
    has_learned: bool = False

    @property
    def relative_seconds(self) -> float:
        """Expected compile seconds over a plain chunk's: those of a micro-step, and a forward pass of the policy."""
        return 2.0 + 0.4 * self.recipe.compile_steps

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
        self, investment: Investment, step: int, has_trained: bool, count: int
    ) -> list[int] | None:
        """Which of the `count` accumulation steps of this RL step train the drafter; None: it does not learn. A collective.

        `has_trained`: idle groups have trained on the sequences of this step; the Investment pays only for other steps.
        """
        if self.share is not None:
            return taken(self.share, step, count)
        most = 0 if has_trained else investment.affords(not self.has_learned)
        most = int(self.broadcast(most))  # seconds differ between processes
        return rotated(0, most, count) if most else None  # the longest answers are packed first

    def after(
        self,
        investment: Investment,
        metrics: Mapping[str, float],
        depths: Sequence[float],
        seconds: float,
    ) -> Investment:
        """The investment after `learn` gave these metrics and acceptance in so many seconds."""
        steps, tokens = int(metrics["drafter/update_steps"]), metrics["drafter/update_tokens"]
        if not steps:
            return investment
        compiles, self.has_learned = not self.has_learned, True
        return investment.measured(depths, tokens).learned(tokens, steps, seconds, compiles)


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
    recipe: DrafterRecipe,
    state: DrafterState,
    policy: Params,
    rows: Sequence[PackedRows],
    step: int,
) -> tuple[DrafterState, dict[str, float], list[float]]:
    """The drafter after an optimizer step on the rows of each accumulation step, metrics, and its acceptance before.

    `policy`: the one that generated the rows, in the "train" layout; a separate program computes its features. The state
    is donated. An update that is not finite changes nothing. Few tokens have a smaller learning rate, see recipe.scaled.
    The acceptance is by depth, each given the depths before; empty without rows.
    """
    if not rows:
        return state, {"drafter/update_steps": 0.0, "drafter/update_tokens": 0.0}, []
    names = ["tokens", "positions", "segments", "is_answer", "experts"]
    names += ["teacher_ids", "teacher_logprobs"] if recipe.teacher_share else []
    batches = [PackedRows(**{name: getattr(one, name) for name in names}) for one in rows]
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
    return state, metrics, update.depths(means)
