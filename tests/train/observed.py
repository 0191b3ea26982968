"""Runs of the RL loop with recorded rollouts and updates; checks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from training_runs import SIZES, TASK, built

from tlt_jax import cli
from tlt_jax.config import Config
from tlt_jax.data.packing import PackedRows
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.train import loop, policy_update
from tlt_jax.train.policy_update import PolicyState

TINY = {
    "model.init": SIZES,
    "data.task_args": TASK,
    "data.max_prompt_tokens": 8,
    "speculation.drafter": "none",
    "checkpoint.every": 0,
    "checkpoint.export": False,
    "sft.cache": "off",
}  # fmt: skip


@dataclass(frozen=True)
class Rolled:
    """Input and result of a rollout."""

    request: RolloutRequest
    result: RolloutResult

    @property
    def texts(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and answer of every completion, by uid."""
        answers = self.result.completions
        return [(self.request.prompts[one.prompt].tolist(), one.tokens.tolist()) for one in answers]


@dataclass(frozen=True)
class Updated:
    """An optimizer step: the state before and after it, its batch and metrics, and its program.

    The arrays of `batch` have the accumulation steps [A] as their first axis.
    """

    before: PolicyState
    batch: PackedRows
    after: PolicyState
    metrics: dict[str, float]
    jaxpr: Any


@dataclass(frozen=True)
class Run:
    """The rollouts (including evaluations) and the updates of a finished run, in order."""

    config: Config
    rollouts: list[Rolled] = field(default_factory=list)
    updates: list[Updated] = field(default_factory=list)

    @property
    def trainings(self) -> list[Rolled]:
        """The rollouts of the steps: all but the first and the last, which are evaluations."""
        return self.rollouts[1:-1]

    @property
    def evaluations(self) -> list[Rolled]:
        """The rollouts of the two evaluations."""
        return [self.rollouts[0], self.rollouts[-1]]


def configure(run: Path, knobs: dict[str, Any]) -> Config:
    """The configuration of a tiny run with these knobs."""
    return built(TINY | {"run": run} | knobs)


def copied(tree: Any) -> Any:
    """Copies of the arrays: the update donates the state."""
    return jax.tree.map(np.array, tree)


def watched(config: Config, replies: Sequence[Rolled] = ()) -> Run:
    """The recorded run. `replies`: known answers that replace its rollouts."""
    run, known = Run(config), [one.result for one in replies]
    decode, build = Engine.run, policy_update.update

    def rollout(engine, request, weights, tuner, *, on_finish, **options):
        if known:
            result, learned = known.pop(0), tuner
            for answer in result.completions:
                on_finish(answer)
        else:
            result, learned = decode(
                engine, request, weights, tuner, on_finish=on_finish, **options
            )
        run.rollouts.append(Rolled(request, result))
        return result, learned

    def update(programs, state, batch, step, base):
        before, sums = copied(state), programs.empty.eval_shape(state.params, batch[0])
        program = getattr(programs.accumulate, "program", programs.accumulate)
        jaxpr = program.trace(sums, state.params, batch[0]).jaxpr
        after, metrics = build(programs, state, batch, step, base)
        numbers = {name: float(value) for name, value in metrics.items()}
        rows = jax.tree.map(lambda *steps: np.stack(steps), *batch)
        run.updates.append(Updated(before, rows, copied(after), numbers, jaxpr))
        return after, metrics

    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(Engine, "run", rollout)
        patch.setattr(policy_update, "update", update)
        assert loop.train(config) == cli.DONE
    return run
