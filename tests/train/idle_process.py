"""`python -m tlt_jax.train` whose idle groups train the drafter in every step, whatever time there is."""

from __future__ import annotations

import sys
from functools import partialmethod

import pytest
from jobs import command

LEAST = 3  # micro-steps of every group in a step


def groups_train(patch: pytest.MonkeyPatch, least: int = LEAST) -> None:
    """After the first step every group makes at least `least` micro-steps in each."""
    from tlt_jax.drafter import idle_training
    from tlt_jax.train.adaptive import DrafterLearning

    idle = idle_training.IdleTraining
    end = idle.end

    def ended(self, *given):
        found = end(self, *given)
        self.activate()
        return found

    patch.setattr(idle_training, "LEAST_IDLE_S", 0.0)
    patch.setattr(idle, "end", ended)
    patch.setattr(idle, "keep_alive", partialmethod(idle.keep_alive, least=least))
    patch.setattr(DrafterLearning, "may_pay", lambda *_: True)


if __name__ == "__main__":
    sys.exit(command(lambda: groups_train(pytest.MonkeyPatch())))
