"""RL steps whose rollout overlaps with the update of the step before, on other data groups, as verl's one-step-off-policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tlt_jax.config import Config
from tlt_jax.simulate.devices import Devices, with_rows
from tlt_jax.simulate.off_policy import OffPolicy
from tlt_jax.simulate.world import MakeRun, Step, World


class OneStepOff:
    """The RL steps of plain decoding on these devices; `told(step)` after each.

    The trainer takes the answers of a step, publishes its weights, starts the next rollout with them, and updates on the
    answers: all but the first step train on tokens of the policy one update before. `rollout` of a step's seconds is the time
    that the trainer waits for answers, publishing is waited for by both.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        devices: Devices,
        told: Callable[[int], None],
        make: MakeRun,
    ):
        config = with_rows(config, config.rollout.prompts, devices.rollout)
        self.world, self.devices, self.told = world, devices, told
        self.one = make(config, replace(world, groups=devices.rollout))

    def run(self) -> list[Step]:
        """All steps."""
        publish = self.world.table.seconds("publish")
        steps, wait = [], 0.0
        for number in range(self.world.steps):
            rollout = self.one.roll_out_alone()
            wait = max(rollout.total - wait, 0.0)
            examples = self.one.examples(self.one.answers)
            training = self.devices.training_seconds(
                self.one.config, self.world.table, examples, number
            )
            parts = {"publish": publish, "rollout": wait, **training}
            if steps:
                steps[-1].spans = []
            steps.append(self.combined(rollout, parts, number))
            wait = (
                sum(parts.values()) - publish - parts["rollout"]
            )  # of the next rollout, which it overlaps
            self.told(number + 1)
        return steps

    def combined(self, rollout: Step, seconds: dict[str, float], number: int) -> Step:
        """The step: `bubble` is the idle share of all groups' time in it."""
        whole = sum(seconds.values())
        training = self.devices.training * (whole - seconds["rollout"])
        decoding = self.devices.rollout * (
            rollout.total * (1 - rollout.bubble) + seconds["publish"]
        )
        bubble = max(1 - (training + decoding) / (self.devices.groups * whole), 0.0)
        age = OffPolicy(1.0, 1, 1.0) if number else OffPolicy()
        return replace(
            rollout, seconds=seconds, bubble=bubble, off_policy=age, split=self.devices.split
        )
