"""Which data groups roll out and which train, and how many rows each has; knows no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlt_jax.config import Config
from tlt_jax.data import packing
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

    def training_seconds(
        self, config: Config, table: CostTable, examples: Sequence[int], step: int
    ) -> dict[str, float]:
        """Seconds by part of what follows the rollout of a step, whose update packs examples of these tokens."""
        config = replace(config, mesh=replace(config.mesh, data=self.training))
        tokens = packing.steps(config, examples) * packing.step_tokens(config) / self.training
        parts = ("reward", "update", "save", "other")
        return {
            part: table.seconds(part, tokens if part == "update" else 0.0)
            for part in parts
            if part != "save" or is_saved(config, step)
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
