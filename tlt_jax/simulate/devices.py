"""Which data groups roll out and which train, and how many rows each has; knows no scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlt_jax.config import Config
from tlt_jax.simulate.cost_table import CostTable


@dataclass(frozen=True)
class Devices:
    """Numbers of data groups that roll out, and that train. `are_shared`: the same ones do one after the other."""

    rollout: int
    training: int
    are_shared: bool = False

    @property
    def groups(self) -> int:
        """All data groups."""
        return self.rollout if self.are_shared else self.rollout + self.training

    @property
    def split(self) -> str:
        """Groups that roll out + groups that train; "" when they are the same."""
        return "" if self.are_shared else f"{self.rollout}+{self.training}"

    def training_seconds(self, table: CostTable, tokens: float, is_saved: bool) -> dict[str, float]:
        """Seconds by part of what follows the rollout of a step with these tokens: no other update runs meanwhile."""
        parts = ("reward", "update", "save", "other") if is_saved else ("reward", "update", "other")
        return {
            part: table.seconds(part, tokens / self.training if part == "update" else 0.0)
            for part in parts
        }


def with_rows(config: Config, prompts: int, groups: int) -> Config:
    """The configuration with rollout.slots; where it gives none, as many as hold these prompts on these data groups."""
    rollout = config.rollout
    slots = rollout.slots or -(-prompts // groups) * rollout.samples
    slots = min(slots, *rollout.batch_buckets[-1:]) if rollout.batch_buckets else slots
    return replace(config, rollout=replace(rollout, slots=slots))


def is_saved(config: Config, step: int) -> bool:
    """Whether a checkpoint follows this step, counted from 0."""
    return bool(config.checkpoint.every) and (step + 1) % config.checkpoint.every == 0
