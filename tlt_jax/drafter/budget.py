"""Whether training the drafter is still worth its time: from its acceptance on held-out windows."""

from __future__ import annotations

from dataclasses import dataclass, replace

GAIN = 0.005  # of acceptance: less is no improvement
PATIENCE = 4  # RL steps with training and without improvement, after which it pauses
FALL = 0.03  # of acceptance below the best, at which it begins again


@dataclass(frozen=True)
class Budget:
    """Pauses training while it does not help, and resumes it when the policy has moved on.

    `best`: highest acceptance so far, since training began last. `stalled`: RL steps in a row that
    trained and did not improve on it.
    """

    best: float = 0.0
    stalled: int = 0
    is_paused: bool = False

    def after(self, acceptance: float, is_trained: bool) -> Budget:
        """The budget after an RL step that ended with this acceptance of the first draft token."""
        if self.is_paused:
            return self if acceptance > self.best - FALL else Budget(best=acceptance)
        if acceptance > self.best + GAIN:
            return Budget(best=acceptance)
        stalled = self.stalled + is_trained
        return replace(self, stalled=stalled, is_paused=stalled >= PATIENCE)
