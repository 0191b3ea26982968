"""`python -m tlt_jax.train`, in a job whose two processes measure different seconds: an RL step takes 4 s and 8 s, compiling
0.01 s and 3 s, the drafter would save 1e9 s and 0 s, and compiling its micro-steps would pay and not."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from jobs import command


def disagree() -> None:
    """By the clocks of the first process, even this short run trains its drafter under drafter_training.share auto."""
    from tlt_jax.drafter import idle_training, investment
    from tlt_jax.rollout import learned_drafter
    from tlt_jax.rollout.executables.compilation import CompileCosts
    from tlt_jax.tuner import cost_model

    index = int(os.environ["JAX_PROCESS_ID"])
    investment.LONG, investment.CHANCE = 0.6, 1e3
    idle_training.COMPILING = 0.0 if index else 1e9
    seconds, compile_cost = 4.0 * (1 + index), 0.01 + 3.0 * index
    worth = 0.0 if index else 1e9
    CompileCosts.of = lambda *_: compile_cost
    cost_model.is_disturbed = lambda costs: False  # by other tests
    learned_drafter.payback = lambda engine, *_: (0.0 if engine.drafter else worth, 0.0)
    investment.Investment.after_step = lambda self, _: replace(self, step_seconds=seconds)


if __name__ == "__main__":
    sys.exit(command(disagree))
