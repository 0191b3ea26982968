"""What teams use instead of drafting, on the same devices: one step off-policy, fully asynchronous, and partial rollouts.

tlt_jax has none of them: they are simulated for comparison, with plain decoding on the real scheduler. Their sources are in
docs/simulate_alternatives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tlt_jax.config import Config
from tlt_jax.errors import ConfigError
from tlt_jax.simulate.continuing import ContinuingSteps
from tlt_jax.simulate.devices import Devices
from tlt_jax.simulate.one_step_off import OneStepOff
from tlt_jax.simulate.world import MakeRun, Step, World

AHEAD = 1.0  # steps' worth of prompts that partial and asynchronous rollouts begin beyond those of the step
PROBE = 8  # most steps that a split of the data groups is tried for: the first ones train on the answers that end first
SPLITS = 16  # a split is found to this part of the data groups

Told = Callable[[int], None]
Simulate = Callable[..., list[Step]]


def simulate(
    config: Config,
    name: str,
    *,
    world: World,
    plain: Simulate,
    make: MakeRun,
    ahead: float = AHEAD,
    told: Told = lambda step: None,
) -> list[Step]:
    """The steps of an arm; those that are no ALTERNATIVES are of `plain` (run.simulate). `told(step)` after each.

    `make`: run.plain_run. Raises ConfigError; see best_split.
    """
    if name not in ALTERNATIVES:
        return plain(config, name, world=world, told=told)
    return ALTERNATIVES[name](config, world, ahead, told, make)


def partial(config: Config, world: World, ahead: float, told: Told, make: MakeRun) -> list[Step]:
    """Partial rollouts that are resumed, on all data groups."""
    devices = Devices(world.groups, world.groups, are_shared=True)
    return ContinuingSteps(config, world, devices, ahead, told, make).run()


def asynchronous(
    config: Config, world: World, ahead: float, told: Told, make: MakeRun
) -> list[Step]:
    """Fully asynchronous rollouts, on the best split found."""

    def steps(rollout: int, given: World, told: Told = lambda step: None) -> list[Step]:
        devices = Devices(rollout, world.groups - rollout)
        return ContinuingSteps(config, given, devices, ahead, told, make).run()

    return steps(best_split("async", world, steps), world, told)


def one_step_off(
    config: Config, world: World, ahead: float, told: Told, make: MakeRun
) -> list[Step]:
    """One step off-policy, on the best split found."""

    def steps(rollout: int, given: World, told: Told = lambda step: None) -> list[Step]:
        return OneStepOff(config, given, Devices(rollout, world.groups - rollout), told, make).run()

    return steps(best_split("one_step_off", world, steps), world, told)


ALTERNATIVES: Mapping[str, Callable[[Config, World, float, Told, MakeRun], list[Step]]] = {
    "one_step_off": one_step_off,
    "async": asynchronous,
    "partial": partial,
}


def best_split(arm: str, world: World, steps: Callable[[int, World], list[Step]]) -> int:
    """The number of data groups for the rollout with the fewest seconds a step, over a few steps.

    With more of them the rollout takes less time and the update more, so that the seconds of a step first fall and then rise.
    Raises ConfigError for a single group.
    """
    if world.groups < 2:
        raise ConfigError(
            f"--arms {arm} gives some data groups to the rollout and others to training, and there is 1: use --groups 2 or more"
        )
    probe = replace(world, steps=min(world.steps, PROBE))
    found: dict[int, float] = {}

    def seconds(rollout: int) -> float:
        if rollout not in found:
            taken = steps(rollout, probe)
            found[rollout] = sum(one.total for one in taken[len(taken) // 2 :])
        return found[rollout]

    splits = list(range(1, world.groups))
    if len(splits) > SPLITS:
        splits = sorted({round(world.groups * part / SPLITS) for part in range(1, SPLITS)})
    low, high = 0, len(splits) - 1
    while high - low > 2:
        at = low + (high - low) // 2
        is_left = seconds(splits[at]) <= seconds(splits[at + 1])
        low, high = (low, at + 1) if is_left else (at + 1, high)
    return min(splits[low : high + 1], key=seconds)
