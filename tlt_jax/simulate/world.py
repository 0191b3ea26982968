"""What a simulated run needs besides its configuration, and what it says of a step; knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tlt_jax.rollout.recorder import Span
from tlt_jax.simulate.acceptance import Acceptances
from tlt_jax.simulate.cost_table import CostTable
from tlt_jax.simulate.lengths import Lengths
from tlt_jax.simulate.off_policy import OffPolicy


@dataclass(frozen=True)
class World:
    """What a simulated run needs besides its configuration. `steps` of the run, `groups` data groups.

    Without `compiles` every program is there from the start.
    """

    table: CostTable
    lengths: Lengths
    acceptances: Acceptances
    steps: int
    groups: int
    compiles: bool = True


@dataclass
class Step:
    """Seconds of a step by part, and what its rollout was like. `bubble`: idle share of the groups' time in the rollout.

    `strategies`: seconds of decoding by drafter. `error`: mean standard error of the log seconds of a round, over the
    shapes that were decoded. `spans`: the timeline of the rollout. `split`: data groups that roll out + those that train, ""
    where all do both. `recomputing`: seconds in which a group recomputed keys and values of answers that it resumed.
    """

    seconds: dict[str, float]
    tokens: int
    bubble: float
    compiling: float
    accept_length: float
    learned: float
    strategies: dict[str, float]
    error: float
    spans: list[Span] = field(default_factory=list, repr=False)
    off_policy: OffPolicy = OffPolicy()
    split: str = ""
    recomputing: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


MakeRun = Callable[..., Any]  # run.plain_run: configuration, world -> the run of plain decoding
